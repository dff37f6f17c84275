"""Candidate plans over (peak, time): which are worth their bytes, what to vary next, and what a budget takes."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan, plan_from_json
from mtcompile.passes.planning.ladders import Ladder

# Between what fits and the frontier's next point: rounds, ladders that cross the gap, plans of each.
_ROUNDS, _MOST_CROSSING, _POINTS_BETWEEN = 3, 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A candidate that was evaluated: ``plan``, with its peaks and times, is the ``position``-th of a ladder."""

    plan: Plan
    ladder: Ladder
    position: int

    @property
    def peak(self) -> int:
        return self.plan.peak_bytes["device"]

    @property
    def time_us(self) -> float:
        return self.plan.total_us


def fits(plan: Plan, budgets: Budgets) -> bool:
    return all(n is None or plan.peak_bytes[tier] <= n for tier, n in budgets.limits.items())


def pareto(points: Iterable[Point]) -> list[Point]:
    """By rising peak, each faster than all before it."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.time_us)):
        if not kept or point.time_us < kept[-1].time_us:
            kept.append(point)
    return kept


def most_promising(points: list[Point], unvaried: list[Point]) -> Point:
    """Of the frontier's points that were not varied yet, the one with most between it and its neighbours; when there is none,
    the point that comes nearest to the frontier in time."""
    frontier = pareto(points)
    waiting = {id(point) for point in unvaried}
    gaps = [(a.time_us - b.time_us) * (b.peak - a.peak) for a, b in itertools.pairwise(frontier)]
    beside = zip([inf, *gaps], [*gaps, inf], frontier, strict=True)  # its ends come first
    on_it = [(max(before, after), point) for before, after, point in beside if id(point) in waiting]
    if on_it:
        return max(on_it, key=lambda pair: pair[0])[1]
    peaks = [point.peak for point in frontier]
    return min(unvaried, key=lambda point: point.time_us / frontier[bisect_right(peaks, point.peak) - 1].time_us)


def choose(frontier: list[Point], points: list[Point], evaluate: Callable[[Plan], Plan], budgets: Budgets) -> Point:
    """The last point that fits, and what lies between it and the next: on the ladders that cross the gap, points between those
    that were evaluated are tried, round after round in the gap that is left. A round depends on the ends of its gap alone, and
    only points that lie between these in peak and in time count, so that what a budget gets still grows with it.
    ``evaluate``: gives a plan its peaks and times."""
    known = list(points)
    for _ in range(_ROUNDS):
        one = [p for p in frontier if fits(p.plan, budgets)][-1]
        other = next((p for p in frontier if p.peak > one.peak), None)
        if other is None:
            break
        made = []
        for low, high in _crossing(known, one, other):
            gap = high.position - low.position
            count = min(gap - 1, _POINTS_BETWEEN)
            for position in sorted({low.position + round(i * gap / (count + 1)) for i in range(1, count + 1)}):
                made.append(Point(evaluate(low.ladder[position]), low.ladder, position))
        if not made:
            break
        known += made
        inside = [p for p in made if one.peak < p.peak < other.peak and other.time_us <= p.time_us <= one.time_us]
        host = budgets.host
        frontier = pareto([one, other, *(p for p in inside if host is None or p.plan.peak_bytes["host"] <= host)])
    return [p for p in frontier if fits(p.plan, budgets)][-1]


def _crossing(points: list[Point], one: Point, other: Point) -> list[tuple[Point, Point]]:
    """Neighbours on one ladder, not next to each other, between which it may pass between the two; the fastest few."""
    by_ladder: dict[int, list[Point]] = {}
    for point in points:
        by_ladder.setdefault(id(point.ladder), []).append(point)
    found = []
    for row in by_ladder.values():
        for low, high in itertools.pairwise(sorted(row, key=lambda point: point.position)):
            crosses = low.peak < other.peak and high.peak > one.peak and high.time_us < one.time_us
            if crosses and high.position - low.position > 1:
                found.append((low, high))
    return sorted(found, key=lambda pair: pair[0].time_us + pair[1].time_us)[:_MOST_CROSSING]


def points_to_json(points: Sequence[Point], ladders: Sequence[Ladder]) -> str:
    """Of points on ``ladders``, which plan of which it is; of others, the plan."""
    index = {id(ladder): position for position, ladder in enumerate(ladders)}
    rows = []
    for point in points:
        found = [dict(point.plan.peak_bytes), point.plan.step_time_us, point.plan.update_us]
        number = index.get(id(point.ladder))
        where = point.plan.to_json() if number is None else [number, point.position]
        rows.append([where, *found])
    return json.dumps(rows)


def points_from_json(text: str, ladders: Sequence[Ladder]) -> list[Point]:
    """Raises ValueError, TypeError, KeyError or IndexError for what ``points_to_json`` did not write for these ladders."""
    points = []
    for where, peaks, step_time_us, update_us in json.loads(text):
        ladder = (plan_from_json(where),) if isinstance(where, str) else ladders[where[0]]
        position = 0 if isinstance(where, str) else where[1]
        plan = replace(ladder[position], peak_bytes=peaks, step_time_us=step_time_us, update_us=update_us)
        points.append(Point(plan, ladder, position))
    return points
