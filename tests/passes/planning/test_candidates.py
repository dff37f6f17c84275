"""Candidates that serve several budgets give each the plan of its own search."""

from __future__ import annotations

import pytest

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from tests.helpers.models import make
from tests.helpers.tracing import trace


@pytest.mark.long
def test_candidates_give_every_budget_what_a_search_of_its_own_would() -> None:
    traced = trace(*make("gpt2"))
    most = make_plan(PlanningProblem(traced.step, Machine(), Budgets())).plan.peak_bytes["device"]
    candidates = Candidates(PlanningProblem(traced.step, Machine(), Budgets()))
    with pytest.raises(DoesNotFit) as caught:
        candidates.best(1, None)
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = int(caught.value.minimum + share * (most - caught.value.minimum))
        one, other = candidates.best(budget, None), make_plan(PlanningProblem(traced.step, Machine(), Budgets(budget)))
        assert one.plan.decisions == other.plan.decisions and one.schedule == other.schedule
