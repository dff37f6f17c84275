"""Climbs: plans are improved by moves, each another decision about equal homes or equal blocks, as long as they get faster.

Of equal ones only the first and the last are tried: which of them changes matters by its place in the step, and a model of many
blocks has few moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.frontier import Point
from mtcompile.passes.planning.ladders import Block, variant_decision

_WHY = "found by climbing"
_CLIMBS, _SHARES, _MOVES = 16, 25, 60  # peaks up to which plans are improved, of how many; moves tried up to each
_MOST_AHEAD = 4
Move = Callable[[Plan], Iterator[Plan]]


def limits_between(low: int, high: int, device_nbytes: int) -> list[int]:
    """Returns the peaks up to which climbs go: shares of the device's memory, or, where few of these lie between the lowest
    peak and the highest, peaks spread over these."""
    shares = [round(device_nbytes * i / _SHARES) for i in range(1, _SHARES)]
    within = [limit for limit in shares if low <= limit <= high]
    if len(within) >= _CLIMBS // 2:
        return within
    return [round(low * (high / max(1, low)) ** (i / _CLIMBS)) for i in range(1, _CLIMBS + 1)]


def climbs(
    frontier: Sequence[Point], limits: Sequence[int], kinds: Sequence[Move], evaluate: Callable[[Plan, int], Plan | None]
) -> Iterator[Plan]:
    """Yields the best plan with a peak up to each limit, by rising limits: the frontier's or that of the limit before, improved
    by moves. ``evaluate``: gives a plan its figures; None if its peak is above a limit."""
    best: Plan | None = None
    for limit in limits:
        start = next(point.plan for point in reversed(frontier) if point.peak <= limit)
        best = start if best is None or start.total_us <= best.total_us else best
        remaining, before = _MOVES, 0.0
        while remaining > 0 and before != best.total_us:
            before = best.total_us
            for kind in kinds:
                best, remaining = _climbed(best, kind, limit, evaluate, remaining)
        yield best


def _climbed(
    best: Plan, kind: Move, limit: int, evaluate: Callable[[Plan, int], Plan | None], remaining: int
) -> tuple[Plan, int]:
    """Makes moves of one kind as long as plans get faster. Returns the best, and how many of ``remaining`` moves are left."""
    improved = True
    while improved and remaining > 0:
        improved = False
        for plan in kind(best):
            remaining -= 1
            evaluated = evaluate(plan, limit)
            if evaluated is not None and evaluated.total_us < best.total_us:
                best, improved = evaluated, True
                break
    return best, remaining


def moves(blocks: Sequence[Block], sizes: Mapping[str, int], host: bool) -> list[Move]:
    """Returns the moves of a step. ``sizes``: bytes of the homes whose tier is open; ``host``: whether activations may go
    home."""
    by_size: dict[int, list[str]] = {}
    for home, nbytes in sizes.items():
        by_size.setdefault(nbytes, []).append(home)
    alike: dict[int, list[Block]] = {}
    for block in blocks:
        alike.setdefault(id(block.variants), []).append(block)
    homes = [_of_homes(each, sizes) for each in by_size.values()]
    return [*homes, _ahead, *(_of_blocks(each, host) for each in alike.values())]


def _of_homes(homes: Sequence[str], sizes: Mapping[str, int]) -> Move:
    """Exchanges equal homes between the device and the host, moves one, and lets one stay from the forward to the backward."""

    def set_to(plan: Plan, kind: Any, tiers: Mapping[str, Choice]) -> Plan:
        for home, choice in tiers.items():
            plan = plan.with_decision(Decision(kind, home, choice, sizes[home], _WHY))
        return plan

    def neighbours(plan: Plan) -> Iterator[Plan]:
        here = [home for home in homes if plan.params(home) == "device"]
        away = [home for home in homes if plan.params(home) == "host"]
        for one, other in dict.fromkeys(((here[-1], away[0]), (here[0], away[-1]))) if here and away else ():
            yield set_to(plan, "params", {one: "host", other: "device"})
        for home in dict.fromkeys((*away[:1], *away[-1:])):
            yield set_to(plan, "params", {home: "device"})
        staying = [home for home in away if plan.stays(home)]
        again = [home for home in away if not plan.stays(home)]
        if staying and again and homes.index(staying[0]) < homes.index(again[-1]):
            yield set_to(plan, "fetch", {staying[0]: "again", again[-1]: "keep"})
        for home in again[-1:]:
            yield set_to(plan, "fetch", {home: "keep"})
        for home in staying[:1]:
            yield set_to(plan, "fetch", {home: "again"})
        for home in here[-1:]:
            yield set_to(plan, "params", {home: "host"})

    return neighbours


def _ahead(plan: Plan) -> Iterator[Plan]:
    """Fetches more or fewer regions ahead, and from the allocator or into slots."""
    for ahead in (plan.lookahead + 1, plan.lookahead - 1):
        if 0 <= ahead <= _MOST_AHEAD:
            yield replace(plan, lookahead=ahead)
    yield replace(plan, pooled=not plan.pooled)


def _of_blocks(blocks: Sequence[Block], host: bool) -> Move:
    """Keeps more of what the last of equal blocks saves, or less of the first; sends values home or keeps them."""

    def positions(plan: Plan, block: Block) -> tuple[int, ...]:
        return tuple(i for i, value in enumerate(block.saved) if plan.keeps(block.name, value.name))

    def neighbours(plan: Plan) -> Iterator[Plan]:
        saved_now = {block.index: positions(plan, block) for block in blocks}
        for block in dict.fromkeys((_last(blocks, lambda b: len(saved_now[b.index]) < len(b.saved)), blocks[0])):
            for variant in block.variants if block is not None else ():
                if block is not None and variant.positions != saved_now[block.index]:
                    varied = plan.with_decision(variant_decision(block.name, block.saved, variant, _WHY))
                    yield _placed(varied, [block.saved[i] for i in variant.positions], "device")
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

    return neighbours


def _last(blocks: Sequence[Block], wanted: Callable[[Block], bool]) -> Block | None:
    return next((block for block in reversed(blocks) if wanted(block)), None)


def _placed(plan: Plan, values: Sequence[Any], choice: Choice) -> Plan:
    for value in values:
        plan = plan.with_decision(Decision("activation", value.name, choice, value.meta["nbytes"], _WHY))
    return plan
