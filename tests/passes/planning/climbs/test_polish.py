"""Polishing: plans far above their bound are improved in single places, within their limits, the same way every time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mtcompile.passes.analysis.state import Budgets, held_nbytes
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.climbs.polish import Draws, is_worth_polishing, polish_of
from mtcompile.passes.planning.climbs.room import filling, rooms
from mtcompile.passes.planning.climbs.single import Climb, Ways
from mtcompile.passes.planning.evaluate import evaluate, identity
from mtcompile.passes.planning.ladders import waiting_less
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import regions
from tests.helpers.tracing import traced_case
from tests.passes.planning.drawn_plans import MACHINES, WAYS, crossing


def gpt2() -> Any:
    return traced_case("gpt2").step


def candidates_of(step: Any) -> Candidates:
    return Candidates(PlanningProblem(step, MACHINES[1], Budgets(updates=WAYS["behind the forward"])))


def start(candidates: Candidates, share: float) -> Climb:
    """A climb that begins at a lean plan, up to a share of the way to what everything on the device takes."""
    problem, blocks = candidates.problem, candidates.blocks
    first = candidates.evaluate(waiting_less(candidates._by_density[0][0], candidates.open_params)[0]).plan
    low, high = first.peak_bytes["device"], candidates.resident.plan.peak_bytes["device"]
    homes = candidates.open_params, held_nbytes(problem.step, problem.budgets)
    ways = Ways([], rooms(blocks, *homes, True), filling(*homes))
    return Climb(Limits(int(low + share * (high - low))), ways, lambda plan: candidates.evaluate(plan).plan, first)


@pytest.mark.parametrize("step", [gpt2, crossing])
def test_draws_are_plans_and_the_same_every_time(step: Callable[[], Any]) -> None:
    candidates = candidates_of(step())
    about = candidates.blocks, candidates.open_params, True
    plan = candidates._by_density[0][0]

    def drawn() -> list[Plan]:
        draws, plans = Draws(*about), [plan]
        while len(plans) < 60:
            if (other := draws(plans[-1])) is not None:
                plans.append(other)
        return plans

    once, again = drawn(), drawn()
    assert list(map(identity, once)) == list(map(identity, again))
    assert sum(identity(a) != identity(b) for a, b in itertools.pairwise(once)) > 30
    for other in once[::6]:  # their figures are those of their schedules
        figures = candidates.evaluate(other).plan
        lowered = evaluate(candidates.problem, other).plan
        assert (figures.peak_bytes, figures.total_us) == (lowered.peak_bytes, lowered.total_us)


@pytest.mark.parametrize("step", [gpt2, crossing])
def test_polished_plans_are_faster_and_within_their_limits(step: Callable[[], Any]) -> None:
    candidates = candidates_of(step())
    polish = polish_of(candidates.blocks, candidates.open_params, True, len(regions(candidates.problem.step)))
    assert polish is not None
    best = []
    for _ in range(2):
        climb = start(candidates, 0.5)
        before = climb.best.total_us
        polish(climb, before / 1.3)
        assert climb.best.total_us < before and not climb.limits.missing(climb.best)
        best.append(identity(climb.best))
    assert best[0] == best[1]


def test_only_plans_that_are_far_from_the_bound_but_not_hopeless_are_polished() -> None:
    plan = candidates_of(gpt2()).resident.plan
    shares = {share: is_worth_polishing(plan, plan.total_us / share) for share in (1.04, 1.1, 1.3, 1.5)}
    assert shares == {1.04: False, 1.1: True, 1.3: True, 1.5: False}
    assert polish_of([], {}, True, 1000) is None  # each plan would take too long


def test_polish_stops_near_the_bound() -> None:
    candidates = candidates_of(gpt2())
    climb, polish = start(candidates, 0.5), polish_of(candidates.blocks, candidates.open_params, True, 60)
    first = climb.best
    assert polish is not None
    polish(climb, first.total_us / 1.01)
    assert climb.best is first and climb.remaining > 0
