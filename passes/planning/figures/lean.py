"""Plans that need little of the host: of a few ways to compute a step, with more and more homes on the device."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.frontier import Point
from mtcompile.passes.planning.pace import with_pace

FEW_HOMES = 5  # of which every choice is tried
_SOME_HOMES = 12  # of which every count is tried; of more, a few counts, beginning with few plans
_COUNTS, _STARTS = 6, 4


def lean_starts(base: Plan, ladders: Sequence[Sequence[Plan]]) -> list[Plan]:
    """Returns ways to compute the step that need little memory. ``ladders``: the first plan of each needs least."""
    starts = [base, *(ladder[0] for ladder in ladders)]
    return [*starts, *(one.with_decision(Decision("activation", "*", "device", 0)) for one in starts[:2])]


def lean_plans(starts: Sequence[Plan], sizes: Mapping[str, int]) -> Iterator[Plan]:
    """Yields plans whose gradients do not wait on the host. ``starts``: ways to compute the step; ``sizes``: bytes of the homes
    whose tier is open."""
    homes = list(sizes)
    chosen = subsets(homes) if len(homes) <= FEW_HOMES else _prefixes(homes, sizes)
    for start in starts if len(homes) <= _SOME_HOMES else starts[:_STARTS]:
        lean = replace(leanest(start), disk_lookahead=start.disk_lookahead)
        for on_device in chosen:
            yield _with_on_device(lean, on_device, sizes)


def leanest_within(
    device: int | None, starts: Sequence[Plan], sizes: Mapping[str, int], evaluate: Callable[[Plan], Plan]
) -> Iterator[Plan]:
    """Yields such plans, with their figures, with as many homes on the device as ``device`` bytes have room for, in a few
    orders. ``evaluate``: gives a plan its figures."""
    for start in starts:
        lean = replace(leanest(start), disk_lookahead=start.disk_lookahead)
        for order in orders_to_device(list(sizes), sizes):

            def filled(count: int, lean: Plan = lean, order: Sequence[str] = order) -> Plan:
                return evaluate(_with_on_device(lean, order[:count], sizes))

            none, every = filled(0), filled(len(order))
            if device is None or every.peak_bytes["device"] <= device:
                yield every
            elif none.peak_bytes["device"] <= device:
                held = [0, *itertools.accumulate(sizes[home] for home in order)]
                yield _fullest(device, none, every, held, filled)


def _fullest(device: int, none: Plan, every: Plan, held: Sequence[int], filled: Callable[[int], Plan]) -> Plan:
    """Returns the plan with as many homes on the device as its bytes have room for. ``none``, ``every``: those with none and
    with all of them; ``filled``: gives that with so many; ``held``: the bytes of so many, with which peaks grow."""
    low, high, within, above = 0, len(held) - 1, none, every
    while high - low > 1:
        room, more = device - within.peak_bytes["device"], above.peak_bytes["device"] - within.peak_bytes["device"]
        near = bisect_right(held, held[low] + (held[high] - held[low]) * room / more) - 1
        apart = max(1, (high - low) // 8)  # as far from both ends, should peaks grow otherwise
        count = min(max(near, low + apart), high - apart)
        if (plan := filled(count)).peak_bytes["device"] <= device:
            low, within = count, plan
        else:
            high, above = count, plan
    return within


def _with_on_device(plan: Plan, homes: Collection[str], sizes: Mapping[str, int]) -> Plan:
    """Returns the plan with some homes on the device, beside those that are there."""
    decisions = tuple(Decision("params", home, "device", sizes[home]) for home in homes)
    others = tuple(d for d in plan.decisions if d.kind != "params" or d.subject not in homes)
    return replace(plan, decisions=(*others, *decisions))


def leanest(plan: Plan) -> Plan:
    """Returns the plan without anything that waits ahead of its time."""
    return replace(with_pace(plan, False, ()), lookahead=0, pooled=True, disk_lookahead=0)


def slower_than_some(plans: Sequence[Plan], points: Sequence[Point]) -> list[Point]:
    """Returns those plans as points than which some of ``points`` is as fast with no higher peak on the device: then a plan
    within a larger budget of the host is never slower."""

    def slower(plan: Plan) -> bool:
        peak, us = plan.peak_bytes["device"], plan.total_us
        return any(point.peak <= peak and point.time_us <= us for point in points)

    return [Point(plan, (plan,), 0) for plan in plans if slower(plan)]


def subsets(homes: Sequence[str]) -> list[frozenset[str]]:
    """Returns every choice of homes."""
    every = (itertools.combinations(homes, count) for count in range(len(homes) + 1))
    return [frozenset(chosen) for chosen in itertools.chain.from_iterable(every)]


def orders_to_device(homes: Sequence[str], sizes: Mapping[str, int]) -> tuple[Sequence[str], ...]:
    """Returns orders in which homes may go to the device: that of the step, backward, the smallest or the largest first; of
    many homes, fewer."""
    by_size = sorted(homes, key=lambda home: sizes[home])
    return (homes, homes[::-1], by_size, by_size[::-1]) if len(homes) <= _SOME_HOMES else (homes, by_size[::-1])


def _prefixes(homes: Sequence[str], sizes: Mapping[str, int]) -> list[frozenset[str]]:
    """The first few of the homes and so on to all, in a few orders."""
    orders = orders_to_device(homes, sizes)
    count = len(homes) + 1 if len(homes) <= _SOME_HOMES else _COUNTS
    counts = [round(len(homes) * i / (count - 1)) for i in range(count)]
    return list(dict.fromkeys(frozenset(order[:count]) for order in orders for count in counts))
