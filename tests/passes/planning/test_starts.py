"""Plans that searches begin at."""

from __future__ import annotations

import pytest

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.evaluate import identity
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.starts import least_plan, plans_to_start_from
from tests.passes.planning.drawn_plans import SLOW, crossing, skips


def of(step: object, host: bool = True) -> tuple[Candidates, list[Plan]]:
    budgets = Budgets(updates=Updates(run_ahead=True), host_activations=host)
    candidates = Candidates(PlanningProblem(step, SLOW, budgets))  # type: ignore[arg-type]
    return candidates, list(plans_to_start_from(candidates.problem, candidates.base, candidates.blocks, candidates.open_params))


def test_they_are_of_many_kinds() -> None:
    candidates, plans = of(crossing())
    step, base, homes = candidates.problem.step, candidates.base, candidates.open_params
    decided = {identity(plan) for plan in plans}
    for name, policy in POLICIES.items():  # a search begins at the other one itself
        assert name == "resident" or identity(policy(step, base, homes)) in decided
    kept = {block.name: tuple(block.saved[i].name for i in block.variants[-1].positions) for block in candidates.blocks}

    def keeps_all_at_home(plan: Plan) -> bool:
        values = [(block, value) for block, values in kept.items() for value in values]
        return all(plan.keeps(block, value) and plan.activation(value) == "host" for block, value in values)

    whole = [plan for plan in plans if keeps_all_at_home(plan)]
    assert any(plan.lookahead and all(map(plan.returns_late, homes)) for plan in whole)
    assert any(plan.lookahead and not any(map(plan.returns_late, homes)) for plan in whole)


def test_the_least_needs_fewest_bytes_and_near_it_are_faster_ones_that_wait() -> None:
    for step in (crossing(), skips()):
        candidates, plans = of(step)
        least = candidates.evaluate(least_plan(candidates.base, candidates.blocks)).plan
        figures = [candidates.evaluate(plan).plan for plan in plans]
        floor = min(plan.peak_bytes["device"] for plan in figures)
        assert candidates.floor == floor <= least.peak_bytes["device"] < 1.01 * floor
        near = [plan.total_us for plan in figures if plan.peak_bytes["device"] < 1.5 * least.peak_bytes["device"]]
        assert min(near) < least.total_us


@pytest.mark.parametrize("homes", [{}, "host", "device"])
def test_nothing_goes_home_where_nothing_may_and_homes_stay_where_they_are_fixed(homes: str) -> None:
    """Runs of blocks are recomputed then, also recursively."""
    step = skips()
    fixed = dict.fromkeys(step.meta["homes"].values(), homes) if homes else {}
    problem = PlanningProblem(step, Machine(), Budgets(host_activations=False), fixed_homes=fixed)
    candidates = Candidates(problem)
    plans = list(plans_to_start_from(problem, candidates.base, candidates.blocks, candidates.open_params))
    values = [value.name for block in candidates.blocks for value in (*block.saved, *block.crossing, *block.others)]
    assert all(plan.activation(value) != "host" for plan in plans for value in values)
    assert {plan.span for plan in plans} > {0, 1, 2}
    assert all(plan.params(home) == tier for plan in plans for home, tier in fixed.items())
