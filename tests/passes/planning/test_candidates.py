"""Candidates that serve several budgets give each the plan of its own search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Decision, Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.pace import impatient, paced
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from tests.helpers.models import make
from tests.helpers.tracing import trace, traced_case


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


SLOW = replace(PRESETS["rtx4090"], host_gbps=2.0, h2d_gbps=1.0, d2h_gbps=1.0)
WAYS = {
    "after the backward": None,
    "as gradients arrive": Updates(),
    "held": Updates(held=True),
    "behind the forward": Updates(run_ahead=True),
}


def varied(candidates: Candidates, rnd: random.Random) -> Plan:
    """A plan with many decisions made at random."""
    plan = replace(candidates.least().plan, lookahead=rnd.choice([0, 1, 2, 3]))
    for home, nbytes in candidates.sizes.items():
        plan = plan.with_decision(Decision("params", home, rnd.choice(["device", "host"]), nbytes, ""))
    for block in candidates.blocks:
        variant = rnd.choice(block.variants)
        names = tuple(block.saved[position].name for position in variant.positions)
        plan = plan.with_decision(Decision("variant", block.name, "keep" if names else "recompute", variant.nbytes, "", names))
        for value in (*block.saved, *block.crossing):
            tier = rnd.choice(["device", "device", "host"])
            plan = plan.with_decision(Decision("activation", value.name, tier, value.meta["nbytes"], ""))
    return plan


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "plans"), [("tied", 8), *(pytest.param(case, 25, marks=pytest.mark.long) for case in ("tied", "cnn"))]
)
def test_the_bound_is_never_above_a_plan(case: str, plans: int, way: str) -> None:
    candidates = Candidates(PlanningProblem(traced_case(case).step, SLOW, Budgets(updates=WAYS[way])))
    rnd = random.Random(case + way)
    for _ in range(plans):
        plan = paced(varied(candidates, rnd), candidates.evaluate).plan
        certificate = candidates.certificate(plan.peak_bytes["device"], plan.peak_bytes["host"])
        assert certificate is not None and certificate.bound_us <= plan.total_us * (1 + 1e-9)


def test_a_slow_host_updates_first_what_is_due_first() -> None:
    machine = replace(SLOW, host_gbps=0.05)
    candidates = Candidates(PlanningProblem(traced_case("chain").step, machine, Budgets(updates=Updates(run_ahead=True))))
    plan = candidates.least().plan
    assert plan.updates is not None
    patient = replace(plan, updates=replace(plan.updates, patient=True, order=()))
    ordered, taking_turns = paced(patient, candidates.evaluate).plan, impatient(patient)
    assert taking_turns is not None and ordered.updates is not None and ordered.updates.order
    assert ordered.total_us <= min(candidates.evaluate(other).plan.total_us for other in (patient, taking_turns))
    updated = [i for i in candidates.evaluate(ordered).schedule.instructions if i.work == "update"]
    first = [candidates.evaluate(ordered).schedule.buffers[i.writes[0]].version_of for i in updated if i.queue == "host"]
    assert tuple(first) == ordered.updates.order
