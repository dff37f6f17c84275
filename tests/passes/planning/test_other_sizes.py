"""The plan of a step serves the same step at other sizes, where it is shown to fit and to be as near its bound."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx

from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.joint.build import build
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.planner import plan_like, structure
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.passes.proof.same_computation import same_computation
from mtcompile.passes.proof.schedule import Given, check_schedule
from mtcompile.runtime.verify import verify
from tests.helpers.stacks import Residual
from tests.helpers.tracing import Traced, trace

MACHINE = PRESETS["rtx4090"]


@functools.cache
def traced(rows: int, layers: int = 3) -> Traced:
    torch.manual_seed(0)
    return trace(Residual(layers=layers), {"x": torch.randn(rows, 128)})


def step_of(rows: int) -> fx.GraphModule:
    return build(traced(rows).joint, like=traced(256).joint)


def problem(rows: int, budget: int) -> PlanningProblem:
    return PlanningProblem(step_of(rows), MACHINE, Budgets(device=budget))


@functools.cache
def searched() -> tuple[Planned, int]:
    """A plan for 256 rows, midway between the least and the most that plans take, and that budget."""
    candidates = Candidates(problem(256, 0))
    least, most = candidates.least().plan.peak_bytes["device"], candidates.best(None, None).plan.peak_bytes["device"]
    budget = (least + most) // 2
    return candidates.best(budget, None), budget


@pytest.mark.slow
def test_a_smaller_step_takes_the_plan_and_it_is_proven() -> None:
    known, budget = searched()
    assert not known.plan.all_resident
    for rows in (248, 192):
        smaller = problem(rows, budget)
        planned = plan_like(smaller, known.plan)
        assert planned is not None and structure(traced(rows).joint) == structure(traced(256).joint)
        plan = planned.plan
        same_computation(traced(rows).joint, planned.step)
        check_schedule(planned.step, planned.schedule, Given(plan, smaller.budgets))
        verify(planned.schedule)
        choices = {(d.kind, d.subject): (d.choice, d.values) for d in plan.decisions}
        assert choices == {(d.kind, d.subject): (d.choice, d.values) for d in known.plan.decisions}
        sizes = {node.name: node.meta["nbytes"] for node in smaller.step.graph.nodes if "nbytes" in node.meta}
        assert all(d.nbytes == sizes[d.subject] for d in plan.decisions if d.kind == "activation" and d.subject != "*")
        assert plan.minimum_device_bytes <= plan.peak_bytes["device"] <= budget
        assert plan.certificate is not None and known.plan.certificate is not None
        nearness = 1 + plan.certificate.gap(plan.total_us), 1 + known.plan.certificate.gap(known.plan.total_us)
        assert nearness[0] <= 1.05 * nearness[1]


@pytest.mark.slow
def test_a_search_is_left_to_steps_that_it_may_serve_better() -> None:
    known, budget = searched()
    assert plan_like(problem(512, budget), known.plan) is None  # it does not fit
    assert plan_like(problem(8, 2 * budget), known.plan) is None  # everything fits
    assert structure(traced(256, layers=4).joint) != structure(traced(256).joint)
