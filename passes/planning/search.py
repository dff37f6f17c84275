"""The search: a few plans are climbed from by moves, for as long as that may be worth its time.

    starts, the fastest within the limits first ──► climbs, each as far ──► the better half, farther ──► ... ──► one

A plan above the limits begins by making room. All is counted in evaluations, so that the same input gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.climbs.climb import Climb, Evaluate, Ways
from mtcompile.passes.planning.evaluate import identity
from mtcompile.passes.planning.limits import Limits, order


class Effort(NamedTuple):
    """The costs that a search may have. ``starts``: plans from which it climbs; ``evaluations``: plans that climbs evaluate,
    about, and fewer of a large step (see ``most_evaluations``). ``bounded``: whether linear programs give a bound, and more
    plans to begin at. ``steps``: of training, in which what a search or another form of the step gains must be more than what
    it costs; ``gain``: the share of a step that it must gain."""

    starts: int
    evaluations: int
    bounded: bool
    steps: float
    gain: float


EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(2, 60, False, 100, 0.01),
    "normal": Effort(16, 3000, True, 1000, 0.01),
    "thorough": Effort(32, 20_000, True, 10_000, 0.001),
}
_LARGE = 64  # regions of a step: of a larger one, so many fewer plans are evaluated, in the same time
_EVALUATION_US = 10.0  # what an evaluation costs for each region of a step, on a slow core


def searched(
    starts: Iterable[Plan],
    limits: Limits,
    ways: Ways,
    evaluate: Evaluate,
    effort: Effort,
    regions: int,
    bound_us: Callable[[], float],
) -> list[Plan]:
    """Returns the plans at which climbs end, the best first: within the limits and fast, or, where none is, above them by few
    bytes. ``starts``: with their figures; ``evaluate``: gives a plan its figures; ``regions``: of the step; ``bound_us``: no
    plan within the limits is faster. A round evaluates no more plans than what may still be gained is worth."""
    climbs = _begun(list(starts), limits, ways, evaluate, effort)
    rounds, ended = len(climbs).bit_length(), list[Plan]()
    each_round = most_evaluations(effort, regions) / max(1, rounds)
    for _ in range(rounds):
        best, most = min((climb.best for climb in climbs), key=lambda plan: order(plan, limits)), each_round
        if not limits.missing(best):
            most = min(most, _worth_us(effort, best.total_us, best.total_us - bound_us()) / cost_of(1, regions))
        if most < len(climbs):
            break
        for climb in climbs:
            climb.go_on(most / len(climbs))
        climbs.sort(key=lambda climb: order(climb.best, limits))
        kept = max(1, len(climbs) // 2)
        ended, climbs = [climb.best for climb in climbs[kept:]] + ended, climbs[:kept]
    return [climb.best for climb in climbs] + ended


def most_evaluations(effort: Effort, regions: int) -> float:
    """Returns about how many plans of a step the climbs of a search evaluate at most."""
    return effort.evaluations * _LARGE / max(_LARGE, regions)


def cost_of(evaluations: float, regions: int) -> float:
    """Returns the µs that so many evaluations of plans of a step take, about."""
    return evaluations * regions * _EVALUATION_US


def is_worth(effort: Effort, cost_us: float, us: float, gain_us: float) -> bool:
    """Tells whether what a plan may gain over one that takes ``us`` is worth what it costs to look for it."""
    return _worth_us(effort, us, gain_us) > cost_us


def _worth_us(effort: Effort, us: float, gain_us: float) -> float:
    """Returns the µs that may be spent to gain so much over a plan that takes ``us``."""
    return effort.steps * gain_us if gain_us > effort.gain * us else 0.0


def _begun(starts: Sequence[Plan], limits: Limits, ways: Ways, evaluate: Evaluate, effort: Effort) -> list[Climb]:
    """Returns climbs from the best of the starts. Room is made first for those that are fast but a little above the limits."""
    within = [plan for plan in starts if not limits.missing(plan)]
    fastest_us = min((plan.total_us for plan in within), default=inf)
    above = [plan for plan in starts if limits.missing(plan) and plan.total_us < fastest_us]
    above.sort(key=lambda plan: (_lacking(plan, limits), order(plan, limits)))
    made = [Climb(limits, ways, evaluate, plan) for plan in above[: effort.starts]]
    for climb in made:
        climb.make_room()
    best_first = sorted((*within, *(climb.best for climb in made)), key=lambda plan: order(plan, limits))
    distinct = {identity(plan): plan for plan in reversed(best_first)}
    return [Climb(limits, ways, evaluate, plan) for plan in list(distinct.values())[::-1][: effort.starts]]


def _lacking(plan: Plan, limits: Limits) -> int:
    """Returns the bytes that a plan is above the limits on all tiers together: what has no room on one may go to another."""
    return max(0, sum(plan.peak_bytes.get(tier, 0) - most for tier, most in limits.nbytes.items() if most is not None))
