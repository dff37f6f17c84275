"""Larger budgets are hardly ever slower, on either tier, and the plan found before serves again."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.limits import Limits
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from tests.helpers.tracing import trace, traced_case
from tests.passes.planning.drawn_plans import are_hardly_slower

pytestmark = pytest.mark.slow  # it searches for plans
COUNTS = [4, pytest.param(20, marks=pytest.mark.long)]  # of budgets
SHARES = {"decoder": 0.1, "experts": 0.8}  # of the device memory, while the host's varies


class Experts(nn.Module):
    """A block of experts, each with a share in every row."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        wide = 2 * width
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        shares = self.router(h).softmax(-1).split(1, dim=1)
        return x + sum(expert(h) * share for expert, share in zip(self.experts, shares, strict=True))


class Mixture(nn.Module):
    """Two blocks with fp32 weights, computed in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(3, 48) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return x.float().square().mean()


@functools.cache
def problem(name: str) -> PlanningProblem:
    """A decoder with a slow link, and a mixture of experts with a slow link and a slow host, which casts."""
    if name == "decoder":
        link = Machine("slow link", 1e12, 100.0, 0.3, 0.3, issue_us=0.2, host_gbps=5.0)
        return PlanningProblem(traced_case("gpt2").step, link, Budgets(updates=Updates()))
    torch.manual_seed(0)
    step = trace(Mixture(), {"x": torch.randn(64, 48)}).step
    slow = replace(PRESETS["rtx4090"], host_gbps=2.0, h2d_gbps=1.0, d2h_gbps=1.0)
    return PlanningProblem(step, slow, Budgets(updates=Updates(run_ahead=True)))


@functools.cache
def searched(name: str) -> tuple[Candidates, int, int]:
    """With the device bytes of the leanest plan and of the fastest."""
    candidates = Candidates(problem(name))
    least = candidates.leanest().peak_bytes["device"]
    return candidates, least, candidates.best(None, None).plan.peak_bytes["device"]


def times(candidates: Candidates, budgets: list[tuple[int | None, int | None]]) -> list[float]:
    """The predicted steps within budgets on the device and the host, from the first that some plan fits."""
    predicted: list[float] = []
    for device, host in budgets:
        try:
            predicted.append(candidates.best(device, host).plan.total_us)
        except DoesNotFit:
            assert not predicted, "expected a larger budget to fit what a smaller one does"
    return predicted


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("host_share", [None, 0.9])
@pytest.mark.parametrize("name", ["decoder", pytest.param("experts", marks=pytest.mark.long)])
def test_more_device_memory_is_hardly_slower(name: str, host_share: float | None, count: int) -> None:
    candidates, least, most = searched(name)
    host = None
    if host_share is not None:
        host = int(candidates.best(least + (most - least) // 3, None).plan.peak_bytes["host"] * host_share)
    predicted = times(candidates, [(least + (most - least) * i // (count - 1), host) for i in range(count)])
    assert len(predicted) > count // 3 and are_hardly_slower(predicted), predicted


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["decoder", pytest.param("experts", marks=pytest.mark.long)])
def test_more_host_memory_is_hardly_slower(name: str, count: int) -> None:
    candidates, least, most = searched(name)
    device = int(least + (most - least) * SHARES[name])
    fewest = candidates.leanest("host", Limits(device)).peak_bytes["host"]
    budgets: list[int | None] = [fewest + fewest // 2 * i // (count - 2) for i in range(count - 1)]
    predicted = times(candidates, [(device, nbytes) for nbytes in [*budgets, None]])
    assert len(predicted) == count and are_hardly_slower(predicted), predicted


@pytest.mark.parametrize("name", ["decoder", pytest.param("experts", marks=pytest.mark.long)])
def test_the_plan_found_before_serves_again_without_a_search(name: str) -> None:
    candidates, least, most = searched(name)
    host = candidates.best(least + (most - least) // 3, None).plan.peak_bytes["host"]
    for device, limit in ((least + (most - least) // 3, None), (least + (most - least) // 3, host)):
        before = candidates.best(device, limit)
        fresh = Candidates(problem(name))
        again = fresh.best(device, limit, before.plan)
        assert (again.plan, again.schedule) == (before.plan, before.schedule) and fresh.evaluations == 1
        other = fresh.best(before.plan.peak_bytes["device"] - 1, None, before.plan).plan  # it fits no longer
        assert fresh.evaluations > 1 and other.peak_bytes["device"] < before.plan.peak_bytes["device"]
