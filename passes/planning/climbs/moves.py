"""The moves of climbs: each is another decision about equal homes or equal blocks.

Of equal ones only the first and the last are tried: which of them changes matters by its place in the step, and a model of many
blocks has few moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.climbs.kicks import MOST_AHEAD, WHY, Move, Moved, differ, moved
from mtcompile.passes.planning.climbs.waits import loads_late, waits, waits_together
from mtcompile.passes.planning.ladders import Block, activation_decision, blocks_alike, kept_positions, variant_decision
from mtcompile.passes.planning.variants import Variant


def moves(blocks: Sequence[Block], sizes: Mapping[str, int], host: bool) -> list[Move]:
    """Returns the moves of a step. ``sizes``: bytes of the homes whose tier is open; ``host``: whether activations may go
    home."""
    by_size: dict[int, list[str]] = {}
    for home, nbytes in sizes.items():
        by_size.setdefault(nbytes, []).append(home)
    homes = [_of_homes(each, sizes) for each in by_size.values()]
    loads = [loads_late(blocks)] if host else []
    of_blocks = [_of_blocks(each, host, host and differ(blocks)) for each in blocks_alike(blocks)]
    if differ(blocks):  # so that those of single blocks, which are many, do not come before all others
        return [waits_together(sizes), *loads, _ahead, *homes, *of_blocks, waits(by_size, sizes)]
    return [*homes, _ahead, *of_blocks, waits(by_size, sizes), *loads]


def _of_homes(homes: Sequence[str], sizes: Mapping[str, int]) -> Move:
    """Exchanges equal homes between the device and the host, moves one, and lets one stay from the forward to the backward."""

    def set_to(plan: Plan, kind: Any, tiers: Mapping[str, Choice]) -> Moved:
        return moved(plan, [Decision(kind, home, choice, sizes[home], WHY) for home, choice in tiers.items()])

    def neighbours(plan: Plan) -> Iterator[Moved]:
        tiers = plan.tiers(homes)
        here = [home for home, tier in zip(homes, tiers, strict=True) if tier == "device"]
        away = [home for home, tier in zip(homes, tiers, strict=True) if tier == "host"]
        for one, other in dict.fromkeys(((here[-1], away[0]), (here[0], away[-1]))) if here and away else ():
            yield set_to(plan, "params", {one: "host", other: "device"})
        for home in dict.fromkeys((*away[:1], *away[-1:])):
            yield set_to(plan, "params", {home: "device"})
        fetches = plan.choices("fetch", away)
        staying = [home for home, fetch in zip(away, fetches, strict=True) if fetch == "keep"]
        again = [home for home, fetch in zip(away, fetches, strict=True) if fetch != "keep"]
        if staying and again and homes.index(staying[0]) < homes.index(again[-1]):
            yield set_to(plan, "fetch", {staying[0]: "again", again[-1]: "keep"})
        for home in again[-1:]:
            yield set_to(plan, "fetch", {home: "keep"})
        for home in staying[:1]:
            yield set_to(plan, "fetch", {home: "again"})
        for home in here[-1:]:
            yield set_to(plan, "params", {home: "host"})

    return neighbours


def _ahead(plan: Plan) -> Iterator[Moved]:
    """Fetches more or fewer regions ahead, and from the allocator or into slots."""
    for ahead in (plan.lookahead + 1, plan.lookahead - 1):
        if 0 <= ahead <= MOST_AHEAD:
            yield partial(plan.changed, lookahead=ahead)
    yield partial(plan.changed, pooled=not plan.pooled)


def _of_blocks(blocks: Sequence[Block], host: bool, at_once: bool) -> Move:
    """Keeps more of what the last of equal blocks saves, or less of the first; sends values home or keeps them. ``at_once``:
    also keeps more at home: where blocks differ, a few moves cannot bring there what all of them keep."""

    def neighbours(plan: Plan) -> Iterator[Moved]:
        saved_now = {block.index: kept_positions(plan, block) for block in blocks}
        last = _last(blocks, lambda b: len(saved_now[b.index]) < len(b.saved))
        several = [block for block in dict.fromkeys((last, blocks[0])) if block is not None]
        for block in several:
            for variant in block.variants:
                if variant.positions != saved_now[block.index]:
                    yield _keeping(plan, block, variant, "device")
        for groups in (
            [(b, [b.saved[i] for i in saved_now[b.index]]) for b in blocks],
            [(b, [*b.crossing, *b.others]) for b in blocks],
        ):
            at_home = [values for _, values in groups if any(plan.activation(v.name) == "host" for v in values)]
            here = [values for _, values in groups if any(plan.activation(v.name) == "device" for v in values)]
            for values in at_home[-1:]:
                yield _placed(plan, values, "device")
            for values in here[:1] if host else ():
                yield _placed(plan, values, "host")
        for block in several if at_once else ():
            for variant in block.variants:
                if variant.positions:
                    yield _keeping(plan, block, variant, "host")

    return neighbours


def _keeping(plan: Plan, block: Block, variant: Variant, choice: Choice) -> Moved:
    placed = [activation_decision(block.saved[i], choice, WHY) for i in variant.positions]
    return moved(plan, [variant_decision(block.name, block.saved, variant, WHY), *placed])


def _last(blocks: Sequence[Block], wanted: Callable[[Block], bool]) -> Block | None:
    return next((block for block in reversed(blocks) if wanted(block)), None)


def _placed(plan: Plan, values: Sequence[Any], choice: Choice) -> Moved:
    return moved(plan, [activation_decision(value, choice, WHY) for value in values])
