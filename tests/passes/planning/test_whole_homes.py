"""Steps of a few large homes: bounds hold, and seeds keep whole homes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets, held_nbytes
from mtcompile.passes.plan import Decision, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs.climb import Climb, Ways
from mtcompile.passes.planning.climbs.room import filling
from mtcompile.passes.planning.limits import Limits
from mtcompile.passes.planning.linear.relaxation import Relaxed
from mtcompile.passes.planning.linear.seeds import Rounding
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.starts import least_plan
from tests.helpers.tracing import trace
from tests.passes.planning.drawn_plans import chain

# Updates on the host take as long as copies, and both longer than what the device computes.
_MACHINE = Machine("few", 1e12, 100.0, 1.0, 1.0, issue_us=0.2, host_gbps=4.0, device_nbytes=1 << 20)


class Biased(nn.Module):
    """Layers with biases of a few bytes, computed in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 8), *(nn.Linear(8, 8) for _ in range(6))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x).relu()
        return x.float().square().mean()


def test_a_bound_counts_that_the_host_may_cast_what_takes_no_fewer_bytes_then() -> None:
    """The device launches an operation less."""
    slow_to_launch = replace(_MACHINE, h2d_gbps=10.0, d2h_gbps=10.0, host_gbps=20.0, issue_us=5.0)
    step = trace(Biased(), {"x": torch.randn(4, 64)}).step
    for updates in (None, Updates(run_ahead=True)):
        candidates = Candidates(PlanningProblem(step, slow_to_launch, Budgets(updates=updates)))
        plan = candidates.evaluate(replace(candidates.base, narrow=True)).plan
        certificate = candidates.certificate(plan.peak_bytes["device"], None)
        assert certificate is not None and certificate.bound_us <= plan.total_us < 0.95 * candidates.resident.plan.total_us


@pytest.mark.parametrize("run_ahead", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_bound_is_not_above_the_best_of_all_places(run_ahead: bool) -> None:
    candidates = Candidates(PlanningProblem(chain(4, 64, 8), _MACHINE, Budgets(updates=Updates(run_ahead=run_ahead))))
    plans, homes = [], list(candidates.sizes)
    base = candidates.evaluate(candidates.base).plan
    crossing = [value.name for block in candidates.blocks for value in block.crossing]
    for tiers, ahead, fetch, made in itertools.product(
        itertools.product(("device", "host"), repeat=len(homes)), (0, 1), ("keep", "again"), ("device", "recompute")
    ):
        placed: list[Any] = [("params", home, tier) for home, tier in zip(homes, tiers, strict=True)]
        placed += [("fetch", home, fetch) for home in homes]
        placed += [("activation", value, made) for value in crossing]
        plan = replace(base, lookahead=ahead).with_decisions([Decision(*each, 0, "") for each in placed])
        plan = plan.with_decision(Decision("activation", "*", "device", 0, ""))
        plans.append(candidates._paced(plan).plan)
    faster = 0
    low, high = (pick(plan.peak_bytes["device"] for plan in plans) for pick in (min, max))
    for budget in range(low, high, (high - low) // 6):
        best = min(plan.total_us for plan in plans if plan.peak_bytes["device"] <= budget)
        certificate = candidates.certificate(budget, None)
        assert certificate is not None and certificate.bound_us <= best * (1 + 1e-9)
        faster += candidates.best(budget, None).plan.total_us <= best
    assert faster >= 5


def test_seeds_of_blocks_that_save_nothing_make_values_again_and_keep_to_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls make what single operations give again, in runs that have room; other values wait where the program has them."""
    candidates = Candidates(PlanningProblem(chain(40, 32, 256), _MACHINE, Budgets(updates=Updates(run_ahead=True))))
    assert not any(block.saved for block in candidates.blocks)
    base = replace(least_plan(candidates.base, candidates.blocks), lookahead=2, pooled=True)
    resident = candidates.resident.plan.peak_bytes["device"]

    def rounded(share: float) -> tuple[float, list[bool]]:
        limit = int(share * resident)
        relaxed = candidates._bounds.solve({"device": limit, "host": None}, ahead=2)
        plan = candidates.evaluate(Rounding(candidates.blocks, candidates.sizes)(relaxed, base)).plan
        assert plan.activation("*") == "device"
        return plan.peak_bytes["device"] / limit, made_again(candidates, plan)

    for share in (0.4, 0.5, 0.6, 0.7):
        peak, again = rounded(share)
        assert peak <= 1.06 and sum(again) >= 20
        # What is kept is as far apart as it can be, so that little is made again at once.
        assert max(len(list(run)) for made, run in itertools.groupby(again) if made) <= 3
    monkeypatch.setattr(Relaxed, "again", lambda relaxed, block: 0.0)
    assert rounded(0.5)[0] > 1.15


def made_again(candidates: Candidates, plan: Any) -> list[bool]:
    """Whether each value between blocks is made again, in the order of the step."""
    values = (value.name for block in candidates.blocks for value in block.crossing)
    return [plan.activation(name) == "recompute" for name in values]


@pytest.mark.slow
@pytest.mark.parametrize("gbps", [0.25, 1.0])
def test_where_calls_make_values_again_no_plan_is_below_the_bound(gbps: float) -> None:
    machine = replace(_MACHINE, h2d_gbps=gbps, d2h_gbps=gbps)
    problem = PlanningProblem(chain(12, 64, 64), machine, Budgets(updates=Updates(run_ahead=True)))
    candidates = Candidates(problem)
    low, high = candidates.floor, candidates.resident.plan.peak_bytes["device"]
    limits = [int(low + (high - low) * share) for share in (0.02, 0.05, 0.1)]
    for limit in limits:
        candidates.best(limit, None)
    for limit in limits:
        bound = candidates.bound_us(limit, None)
        within = [plan.total_us for plan in candidates.others(Budgets(limit), 10)[:-1]]
        assert within and bound <= min(within) * (1 + 1e-9)


def test_climbs_fill_the_room_that_is_left_with_homes() -> None:
    candidates = Candidates(PlanningProblem(chain(12, 64, 8), _MACHINE, Budgets(updates=Updates(run_ahead=True))))
    homes = candidates.open_params, held_nbytes(candidates.problem.step, candidates.problem.budgets, "device")
    first = candidates.evaluate(least_plan(candidates.base, candidates.blocks)).plan
    room = 5 * max(homes[1].values()) + 1
    climb = Climb(
        Limits(first.peak_bytes["device"] + room),
        Ways([], {"device": []}, filling(*homes)),
        lambda p, us=0.0: candidates._paced(p).plan,
        first,
    )
    climb.go_on(10)
    on_device = climb.best.tiers(homes[0]).count("device")
    assert climb.best.total_us < first.total_us and on_device == 5
    assert not list(filling(*homes)(climb.best, 0))


@pytest.mark.slow
def test_a_plan_far_above_its_bound_says_what_the_device_waits_for() -> None:
    problem = PlanningProblem(chain(4, 64, 8), _MACHINE, Budgets(updates=Updates(run_ahead=True)))
    candidates = Candidates(problem)
    told = []
    for budget in range(candidates.floor, candidates.resident.plan.peak_bytes["device"], 20000):
        plan = candidates.best(budget, None).plan
        notes = [note for note in plan.notes if "above its bound" in note]
        assert len(notes) == (plan.gap > 0.1)
        told += [f"the step is {plan.gap:.0%} above its bound" in note and "for copies to it" in note for note in notes]
    assert told and all(told)
