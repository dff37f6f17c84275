"""The frontier of candidate plans over (peak, time): which are worth their bytes, which to vary next, which a budget takes."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, log

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.ladders import Ladder

# Between what fits and the frontier's next point: rounds, ladders tried, plans of each.
ROUNDS, _MOST_CROSSING, _POINTS_BETWEEN = 3, 2, 3
_CLIMBED = 0.7  # of what a point needs of the host: what a plan that climbs make of it needs, at least
_EXACT = 1 - 1e-6  # of a bound: what a solver may be above it
_FRONTIERS = 3  # whose gaps are looked into: of all points, and of those within two limits on the host


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """An evaluated candidate. ``plan``, with its peaks and times, is at ``position`` on ``ladder``."""

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
    """Says whether the plan's peaks are within the budgets."""
    return missing_nbytes(plan, budgets) == 0


def fits_host(point: Point, budgets: Budgets) -> bool:
    """Says whether the plan's peak on the host is within the budget."""
    return budgets.host is None or point.plan.peak_bytes["host"] <= budgets.host


def ample(points: Iterable[Point], budgets: Budgets, bound: Callable[[int | None, int | None], float]) -> bool:
    """Tells whether a budget of the host may have room for the fastest plan within the device's bytes, by the fastest point.
    ``bound``: gives the fewest µs of any plan within bytes of the device and the host."""
    within = (point for point in points if budgets.device is None or point.peak <= budgets.device)
    fastest = min(within, key=lambda point: point.time_us, default=None)
    if budgets.host is None or fastest is None:
        return False
    return may_end_within(fastest.plan, budgets.host, partial(bound, budgets.device, budgets.host))


def may_end_within(plan: Plan, host: int, bound: Callable[[], float]) -> bool:
    """Tells whether climbs from a plan may end at one that needs no more than ``host`` bytes of the host: they only get faster.
    ``bound``: gives the fewest µs of any plan that needs no more."""
    return _CLIMBED * plan.peak_bytes["host"] <= host and plan.total_us >= _EXACT * bound()


def missing_nbytes(plan: Plan, budgets: Budgets) -> int:
    """Returns by how many bytes the plan's peaks are above the budgets, of all tiers together."""
    return sum(max(0, plan.peak_bytes[tier] - n) for tier, n in budgets.nbytes.items() if n is not None)


def pareto(points: Iterable[Point]) -> list[Point]:
    """Returns points by rising peak, each faster than all before it."""
    frontier: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.time_us)):
        if not frontier or point.time_us < frontier[-1].time_us:
            frontier.append(point)
    return frontier


@dataclass(frozen=True, slots=True)
class Frontier:
    """The frontier of the points that need at most ``host`` bytes of the host; None: whatever they need."""

    host: int | None
    points: list[Point]


def frontier_within(points: Iterable[Point], host: int | None) -> Frontier:
    """Returns the frontier of those points that need at most ``host`` bytes of the host."""
    return Frontier(host, pareto(point for point in points if host is None or point.plan.peak_bytes["host"] <= host))


def frontiers(points: Sequence[Point]) -> list[Frontier]:
    """Returns the frontiers whose gaps budgets look into: of all points, and of those that need less of the host than some.
    They are the same for every budget, so that a larger one is never slower."""
    needs = sorted({point.plan.peak_bytes["host"] for point in undominated(points)})
    limits = dict.fromkeys(needs[len(needs) * i // _FRONTIERS] for i in range(1, _FRONTIERS))
    return [frontier_within(points, limit) for limit in (None, *limits)]


def undominated(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other dominates (as fast or faster, with no more bytes on any tier); of equal points, one."""
    rows = {(point.time_us, *sorted(point.plan.peak_bytes.items())): point for point in points}
    best: list[Point] = []
    for point in sorted(rows.values(), key=lambda p: (p.time_us, sum(p.plan.peak_bytes.values()))):
        peaks = point.plan.peak_bytes
        if not any(all(other.plan.peak_bytes[tier] <= nbytes for tier, nbytes in peaks.items()) for other in best):
            best.append(point)
    return best


def most_promising(points: list[Point], unvaried: list[Point]) -> Point:
    """Returns the point to vary next: of the frontier's points that were not varied yet, the one with the largest gap to a
    neighbour; if there is none, the point nearest to the frontier in time."""
    frontier = pareto(points)
    unvaried_ids = {id(point) for point in unvaried}
    gaps = [(a.time_us - b.time_us) * (b.peak - a.peak) for a, b in itertools.pairwise(frontier)]
    neighbouring = zip([inf, *gaps], [*gaps, inf], frontier, strict=True)  # the frontier's ends come first
    by_gap = [(max(before, after), point) for before, after, point in neighbouring if id(point) in unvaried_ids]
    if by_gap:
        return max(by_gap, key=lambda pair: pair[0])[1]
    peaks = [point.peak for point in frontier]
    return min(unvaried, key=lambda point: point.time_us / frontier[bisect_right(peaks, point.peak) - 1].time_us)


def most_promising_gap(points: Sequence[Point]) -> tuple[Point, Point] | None:
    """Returns the two neighbours on a ladder between which a plan promises most; None if no ladder has plans in between. A plan
    in the middle is expected to have the mean of their peaks and of their times; what it promises is how much faster that is
    than the frontier, as a share, times the width of the gap, as a ratio: budgets of any size count alike."""
    frontier = pareto(points)
    peaks = [point.peak for point in frontier]
    best, most = None, 0.0
    for low, high in _neighbours_on_ladders(points):
        fewer, more = sorted((low.peak, high.peak))
        reached = bisect_right(peaks, (fewer + more) // 2)
        if reached and fewer:
            time_us = frontier[reached - 1].time_us
            promise = (1 - (low.time_us + high.time_us) / 2 / time_us) * log(more / fewer)
            if promise > most:
                best, most = (low, high), promise
    return best


def _neighbours_on_ladders(points: Iterable[Point]) -> list[tuple[Point, Point]]:
    """Returns the pairs of evaluated points on one ladder that have plans, but no evaluated ones, between them."""
    by_ladder: dict[int, list[Point]] = {}
    for point in points:
        by_ladder.setdefault(id(point.ladder), []).append(point)
    pairs = []
    for on_ladder in by_ladder.values():
        on_ladder.sort(key=lambda point: point.position)
        pairs += [(low, high) for low, high in itertools.pairwise(on_ladder) if high.position - low.position > 1]
    return pairs


def by_time(point: Point) -> tuple[float, int]:
    """A key by which the fastest point comes first; of equally fast ones, that with the lowest peak."""
    return point.time_us, point.peak


def choose(points: list[Point], within: Frontier, evaluate: Callable[[Plan], Plan], budgets: Budgets, us: float = inf) -> Point:
    """Returns the point that these budgets take: the fastest of ``points`` that fits, or a better one on the way from the last
    of a frontier that fits the device to the next one, as long as that may take less than ``us`` µs.

    Ladders that cross the gap between these two have plans that were not evaluated yet. Each round evaluates some of them and
    narrows the gap. So that a larger budget is never slower, a round depends only on the ends of its gap, and its plans count
    only if they lie between these in peak and in time, and if the upper end fits the host: then larger device budgets have
    that. ``within``: the same for every budget. ``evaluate``: gives a plan its peaks and times."""
    evaluated, fitting = list(points), [point for point in points if fits(point.plan, budgets)]
    frontier = within.points
    for _ in range(ROUNDS):
        reached = sum(budgets.device is None or point.peak <= budgets.device for point in frontier)
        ends = frontier[max(0, reached - 1) : reached + 1]
        if reached == 0 or len(ends) < 2 or not fits_host(ends[1], budgets) or us <= ends[1].time_us:
            break
        tried = []
        for low, high in _crossing(evaluated, *ends):
            gap = high.position - low.position
            count = min(gap - 1, _POINTS_BETWEEN)
            for position in sorted({low.position + round(i * gap / (count + 1)) for i in range(1, count + 1)}):
                tried.append(Point(evaluate(low.ladder[position]), low.ladder, position))
        if not tried:
            break
        evaluated += tried
        low, high = ends
        inside = [p for p in tried if low.peak < p.peak < high.peak and high.time_us <= p.time_us <= low.time_us]
        fitting += [point for point in inside if fits(point.plan, budgets)]
        frontier = frontier_within([*ends, *inside], within.host).points
    return min(fitting, key=by_time)


def _crossing(points: list[Point], fitting: Point, following: Point) -> list[tuple[Point, Point]]:
    """Returns the fastest few pairs of evaluated points on one ladder, such that plans between them may lie between ``fitting``
    and ``following``."""
    pairs = [
        (low, high)
        for low, high in _neighbours_on_ladders(points)
        if low.peak < following.peak and high.peak > fitting.peak and high.time_us < fitting.time_us
    ]
    return sorted(pairs, key=lambda pair: pair[0].time_us + pair[1].time_us)[:_MOST_CROSSING]
