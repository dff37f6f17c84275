"""Larger budgets are never slower, on either tier, and the cache changes no plan."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs.casts import with_casts
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, PlanningProblem
from mtcompile.runtime.schedule import Schedule
from tests.helpers.tracing import trace, traced_case

pytestmark = pytest.mark.slow  # it searches for plans
COUNTS = [4, pytest.param(20, marks=pytest.mark.long)]  # of budgets
_NOTHING = Schedule((), {}, {}, {}, {})
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
    least = candidates.least().plan.peak_bytes["device"]
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
def test_more_device_memory_is_never_slower(name: str, host_share: float | None, count: int) -> None:
    candidates, least, most = searched(name)
    host = None
    if host_share is not None:
        host = int(candidates.best(least + (most - least) // 3, None).plan.peak_bytes["host"] * host_share)
    predicted = times(candidates, [(least + (most - least) * i // (count - 1), host) for i in range(count)])
    assert len(predicted) > count // 3 and predicted == sorted(predicted, reverse=True)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["decoder", pytest.param("experts", marks=pytest.mark.long)])
def test_more_host_memory_is_never_slower(name: str, count: int) -> None:
    candidates, least, most = searched(name)
    device = int(least + (most - least) * SHARES[name])
    fewest = candidates.needs("host", {"device": device})
    assert fewest is not None
    budgets: list[int | None] = [fewest + fewest // 2 * i // (count - 2) for i in range(count - 1)]
    predicted = times(candidates, [(device, nbytes) for nbytes in [*budgets, None]])
    assert len(predicted) == count and predicted == sorted(predicted, reverse=True)


def test_casts_are_tried_with_the_plans_of_less_host_memory() -> None:
    """With 5 bytes of the host, the plan that takes 3 of them is the fastest: casts shorten it more than that which takes 5."""

    def candidate(us: float, nbytes: int, narrow: bool = False) -> Candidate:
        plan = Plan(step_time_us=us, lookahead=nbytes, narrow=narrow, peak_bytes={"device": 0, "host": nbytes})
        return Candidate(plan, lambda: _NOTHING)

    by_host = {None: candidate(100.0, 9), 5: candidate(150.0, 5), 4: candidate(160.0, 3), 2: candidate(170.0, 2)}
    cast_us = {9: 95.0, 5: 149.0, 3: 140.0, 2: 169.0}

    def evaluated(plan: Plan) -> Candidate:
        nbytes = plan.lookahead
        return candidate(cast_us[nbytes] if plan.narrow else plan.step_time_us, nbytes, plan.narrow)

    def fastest(host: int | None) -> float:
        budgets, uncast = Budgets(0, host), lambda asked: by_host.get(asked)
        return with_casts(traced_case("gpt2").step, by_host[host], (), evaluated, budgets, uncast).plan.total_us

    assert [fastest(host) for host in (2, 4, 5, None)] == [169.0, 140.0, 140.0, 95.0]


class Memory:
    """Stores a search in this process."""

    def __init__(self) -> None:
        self.text: str | None = None

    def read(self) -> str | None:
        return self.text

    def write(self, text: str) -> None:
        self.text = text


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in ("decoder", "experts")])
def test_a_cold_and_a_warm_cache_give_the_same_plan(name: str) -> None:
    """A search of its own, one that was stored for other budgets, and the plan that was found for these."""
    candidates, least, most = searched(name)
    host = candidates.best(least + (most - least) // 3, None).plan.peak_bytes["host"]
    for device, limit in ((least + (most - least) // 4, None), (least + (most - least) // 2, int(host * 0.95))):
        store = Memory()
        cold = Candidates(problem(name), store=store).best(device, limit)
        assert store.text is not None
        warm = Candidates(problem(name), store=store).best(device, limit)
        known = Candidates(problem(name)).best(device, limit, cold.plan)
        served = candidates.best(device, limit)
        for other in (warm, known, served):
            assert (other.plan, other.schedule) == (cold.plan, cold.schedule)
