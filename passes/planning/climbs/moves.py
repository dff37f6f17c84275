"""The moves of climbs: each is another decision about equal homes or equal blocks.

Which of equal ones changes matters by its place in the step. Of equal homes only the first and the last are tried, and of equal
blocks the last that keeps less, the first that keeps more, and all of them at once: a model of many blocks has few moves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType

from torch import fx

from mtcompile.passes.plan import Choice, Kind, Plan
from mtcompile.passes.planning.blocks import Block, about_homes, blocks_alike, differ, keeping, kept_positions, placing
from mtcompile.passes.planning.climbs.move import FIRST, LAST, THEN, Move, Moved
from mtcompile.passes.planning.climbs.waits import loads_late, waits, waits_together
from mtcompile.passes.planning.disk.spacing import spaced
from mtcompile.passes.planning.variants import Variant


def moves(
    blocks: Sequence[Block], sizes: Mapping[str, int], host: bool, streamable: Mapping[str, int] = MappingProxyType({})
) -> list[Move]:
    """Returns the moves of a step. ``sizes``: bytes of the homes whose tier is open; ``host``: whether activations may go
    home; ``streamable``: bytes of the homes that the device may update though they are on the host."""
    by_size: dict[int, list[str]] = {}
    for home, nbytes in sizes.items():
        by_size.setdefault(nbytes, []).append(home)
    homes = [_of_homes(each, sizes) for each in by_size.values()]
    loads = [loads_late(blocks)] if host else []
    homes += [partial(_streams, streamable)] if streamable else []
    of_blocks = [_of_blocks(each, host, host and differ(blocks)) for each in blocks_alike(blocks)]
    if differ(blocks):  # so that those of single blocks, which are many, do not come before all others
        return [waits_together(sizes), *loads, _ahead, *homes, *of_blocks, waits(by_size, sizes)]
    return [*homes, _ahead, *of_blocks, waits(by_size, sizes), *loads]


def _of_homes(homes: Sequence[str], sizes: Mapping[str, int]) -> Move:
    """Exchanges equal homes between the device and the host, moves one, and lets one stay from the forward to the backward."""

    def set_to(plan: Plan, kind: Kind, tiers: Mapping[str, Choice], name: str, turn: int) -> Moved:
        return Moved(name, turn, lambda: plan.with_decisions(about_homes(kind, tiers, sizes)))

    def neighbours(plan: Plan) -> Iterator[Moved]:
        tiers = plan.tiers(homes)
        here = [home for home, tier in zip(homes, tiers, strict=True) if tier == "device"]
        away = [home for home, tier in zip(homes, tiers, strict=True) if tier == "host"]
        for one, other in dict.fromkeys(((here[-1], away[0]), (here[0], away[-1]))) if here and away else ():
            name = "last for first" if (one, other) == (here[-1], away[0]) else "first for last"
            yield set_to(plan, "params", {one: "host", other: "device"}, name, FIRST)
        for home in dict.fromkeys((*away[:1], *away[-1:])):
            yield set_to(plan, "params", {home: "device"}, "first here" if home == away[0] else "last here", FIRST)
        fetched = [home for home, tier in zip(homes, tiers, strict=True) if tier != "device"]  # from the host or from disk
        fetches = plan.choices("fetch", fetched)
        staying = [home for home, fetch in zip(fetched, fetches, strict=True) if fetch == "keep"]
        again = [home for home, fetch in zip(fetched, fetches, strict=True) if fetch != "keep"]
        if staying and again and homes.index(staying[0]) < homes.index(again[-1]):
            yield set_to(plan, "fetch", {staying[0]: "again", again[-1]: "keep"}, "another stays", LAST)
        for home in again[-1:]:
            yield set_to(plan, "fetch", {home: "keep"}, "last stays", THEN)
        for home in staying[:1]:
            yield set_to(plan, "fetch", {home: "again"}, "first again", LAST)
        for home in here[-1:]:
            yield set_to(plan, "params", {home: "host"}, "last away", LAST)

    return neighbours


def _streams(sizes: Mapping[str, int], plan: Plan) -> Iterator[Moved]:
    """Lets the device update more or fewer of the homes on the host, spread evenly over the step, or another one of them. Most
    plans begin at what the linear program streams; but it hardly knows what waits for the norm of all gradients."""
    away = [home for home, tier in zip(sizes, plan.tiers(sizes), strict=True) if tier == "host"]
    count = sum(map(plan.streams, away))
    if not count and (plan.updates is None or not plan.updates.held):
        return

    def with_streamed(chosen: Sequence[str]) -> Plan:
        choices: dict[str, Choice] = {home: "device" if home in chosen else "host" for home in away}
        return plan.with_decisions(about_homes("update", choices, sizes))

    for name, turn, more in (("more", FIRST, count + 1), ("fewer", THEN, count - 1)):
        if 0 <= more <= len(away):
            yield Moved(name, turn, partial(with_streamed, spaced(away, more, 0)))
    for name, home in (("first", away[:1]), ("last", away[-1:])):
        streamed = [each for each in away if plan.streams(each) != (each in home)]
        yield Moved(name, THEN, partial(with_streamed, streamed))


def _ahead(plan: Plan) -> Iterator[Moved]:
    """Fetches more or fewer regions ahead, and from the allocator or into slots."""
    for name, turn, ahead in (("more", FIRST, plan.lookahead + 1), ("fewer", LAST, plan.lookahead - 1)):
        if ahead >= 0:
            yield Moved(name, turn, partial(plan.changed, lookahead=ahead))
    yield Moved("pooled", FIRST, partial(plan.changed, pooled=not plan.pooled))


def _of_blocks(blocks: Sequence[Block], host: bool, at_once: bool) -> Move:
    """Lets one of equal blocks keep what a variant keeps: the last one that keeps less, or the first one that keeps more. Sends
    values home, or keeps them. ``at_once``: also keeps more at home: where blocks differ, a few moves cannot bring there what
    all of them keep."""
    variants, nbytes = blocks[0].variants, [value.meta["nbytes"] for value in blocks[0].saved]
    places = {variant.positions: place for place, variant in enumerate(variants)}

    def place_of(positions: tuple[int, ...]) -> float:
        """Returns the place among the variants of what a block keeps; half a place between two if no variant keeps the same."""
        if (place := places.get(positions)) is not None:
            return place
        return bisect_left(variants, sum(nbytes[i] for i in positions), key=lambda variant: variant.nbytes) - 0.5

    def neighbours(plan: Plan) -> Iterator[Moved]:
        saved_now = [kept_positions(plan, block) for block in blocks]
        now = list(zip(map(place_of, saved_now), blocks, strict=True))
        for more, order in ((True, now[::-1]), (False, now)):
            for number, variant in enumerate(variants):
                others = (pair for pair in order if pair[0] != number and (pair[0] < number) == more)
                if (other := next(others, None)) is not None:
                    turn = THEN if abs(other[0] - number) <= 1 else LAST
                    yield Moved((number, more), turn, partial(kept, plan, [other[1]], variant, "device"))
        for which, groups in (
            ("saved", [[b.saved[i] for i in positions] for b, positions in zip(blocks, saved_now, strict=True)]),
            ("crossing", [[*b.crossing, *b.others] for b in blocks]),
        ):
            at_home = [values for values in groups if any(plan.activation(v.name) == "host" for v in values)]
            here = [values for values in groups if any(plan.activation(v.name) == "device" for v in values)]
            for values in at_home[-1:]:
                yield Moved((which, "last"), THEN, partial(placed, plan, values, "device"))
            for values in here[:1] if host else ():
                yield Moved((which, "first"), LAST, partial(placed, plan, values, "host"))
        for variant, tier in product(variants, ("host", "device") if host else ("device",)) if len(blocks) > 1 else ():
            if variant.positions or tier == "device":
                yield Moved((variant.positions, tier, "all"), THEN, partial(kept, plan, blocks, variant, tier))
        last = next((block for place, block in reversed(now) if place < len(variants) - 1), blocks[0])
        for block in dict.fromkeys((last, blocks[0])) if at_once else ():
            for number, variant in enumerate(variants):
                if variant.positions:
                    yield Moved((number, block is last, "at home"), THEN, partial(kept, plan, [block], variant, "host"))

    return neighbours


def kept(plan: Plan, blocks: Sequence[Block], variant: Variant, tier: Choice) -> Plan:
    """Returns the plan in which blocks keep what a variant does, on one tier."""
    return plan.with_decisions(keeping(blocks, variant, tier))


def placed(plan: Plan, values: Sequence[fx.Node], tier: Choice) -> Plan:
    """Returns the plan in which values wait on a tier, or are made again."""
    return plan.with_decisions(placing(values, tier))
