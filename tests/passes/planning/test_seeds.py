"""Tests of the plans that linear programs seed."""

from __future__ import annotations

import itertools

import pytest

from mtcompile.passes.analysis.state import Budgets, held_nbytes
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.limits import Limits
from mtcompile.passes.planning.linear.relaxation import Bounds
from mtcompile.passes.planning.linear.seeds import Rounding, Within
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.starts import least_plan
from tests.passes.planning.drawn_plans import MACHINES, WAYS, crossing


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_seeds_are_near_their_limits_and_some_are_within(share: float) -> None:
    """Those that fetch as far ahead are made within fewer and fewer bytes, until one is within the limits."""
    problem = PlanningProblem(crossing(), MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    candidates = Candidates(problem)
    low, resident = candidates.floor, candidates.resident.plan
    least = least_plan(candidates.base, candidates.blocks)
    limits = Limits(int(low + share * (resident.peak_bytes["device"] - low)))
    bounds = Bounds(problem, candidates.blocks)
    rounding, held = Rounding(candidates.blocks, candidates.sizes), held_nbytes(problem.step, problem.budgets, "host")
    seeds = Within(bounds.solve, least, rounding, held)
    plans = list(seeds.plans(limits._asdict(), lambda plan: candidates.evaluate(plan).plan))
    by_ahead = [list(alike) for _, alike in itertools.groupby(plans, lambda plan: plan.lookahead)]
    assert [alike[0].lookahead for alike in by_ahead] == [1, 2, 3]
    for alike in by_ahead:
        peaks = [plan.peak_bytes["device"] for plan in alike]
        assert peaks == sorted(peaks, reverse=True) and len(peaks) <= 3 and peaks[0] < 1.2 * (limits.device or 0)
        assert all(map(limits.missing, alike[:-1]))
    assert any(not limits.missing(plan) for plan in plans)
    again = Within(bounds.solve, least, rounding, held).plans(limits._asdict(), lambda plan: candidates.evaluate(plan).plan)
    assert list(again) == plans


@pytest.mark.long
def test_certificates_are_the_same_whatever_was_asked_before() -> None:
    problem = PlanningProblem(crossing(), MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    first = Candidates(problem)
    low, high = first.floor, first.resident.plan.peak_bytes["device"]
    budgets = [low + (high - low) * part // 8 for part in (1, 3, 5, 7)]
    rising = [first.certificate(budget, None) for budget in budgets]
    falling = Candidates(problem)
    assert [falling.certificate(budget, None) for budget in budgets[::-1]] == rising[::-1]
    assert all(one is not None for one in rising)
