"""The planner's promises: more memory is never slower, the peak grows with the budget and stays within it, and every plan
gives the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from mtcompile.kernels import EagerKernels
from mtcompile.passes.check import check_schedule, same_computation
from mtcompile.passes.cost import Machine
from mtcompile.passes.planner import Budgets, Candidates, DoesNotFit, make_plan
from mtcompile.passes.policies import POLICIES
from mtcompile.passes.recompute import saved_values
from mtcompile.passes.step_graph import regions
from mtcompile.passes.variants import save_all, variants
from mtcompile.runtime.executor import Delays
from mtcompile.runtime.verify import verify
from tests.test_train import CASES, make
from tests.tracing import equal, interpret, run, trace


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "t5"])  # which takes minutes: ten plans of two stacks
def test_ten_budgets_from_floor_to_resident(name: str) -> None:
    traced = trace(*make(name))
    expected = interpret(traced.step, traced.inputs)
    workspaces = EagerKernels(torch.device("cpu")).workspace
    candidates = Candidates(traced.step, Machine(), Budgets(), workspaces)
    with pytest.raises(DoesNotFit) as caught:
        candidates.best(1, None)
    free = candidates.best(None, None).plan
    least, most = caught.value.minimum, free.peak_bytes["device"]
    assert least <= most
    plans = []
    for i in range(10):
        budget = least + (most - least) * i // 9
        planned = candidates.best(budget, None)
        plans.append(planned.plan)
        assert planned.plan.peak_bytes["device"] <= budget
        same_computation(traced.joint, planned.step)
        check_schedule(planned.step, planned.schedule)
        verify(planned.schedule)
        found, measured = run(planned.step, planned.schedule, traced.inputs, 3, Delays(i, 100.0))
        assert equal(found, expected), budget
        resident = planned.schedule.resident_nbytes["device"]
        assert measured + resident <= planned.plan.peak_bytes["device"]
    peaks = [plan.peak_bytes["device"] for plan in plans]
    times = [plan.step_time_us for plan in plans]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert plans[-1].step_time_us == free.step_time_us


def test_variants_trade_bytes_for_time() -> None:
    traced = trace(*make("gpt2"))
    for region in regions(traced.step):
        if region.meta["phase"] != "forward" or not saved_values(region):
            continue
        found = variants(traced.step, region, Machine())
        assert found[-1].time_us == 0.0 and found[-1].nbytes <= save_all(region).nbytes
        for one, other in itertools.pairwise(found):
            assert one.nbytes < other.nbytes and one.time_us > other.time_us


def test_chains_of_blocks_are_recomputed_where_nothing_may_go_home() -> None:
    """Without host memory for activations, the smallest budgets keep only some of the values between blocks."""

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x.square().mean()

    torch.manual_seed(0)
    traced = trace(Deep(), {"x": torch.randn(256, 16)})
    for node in traced.step.graph.find_nodes(op="placeholder"):
        node.meta["tier"] = "device"
    traced.step.meta["homes"] = {}
    with pytest.raises(DoesNotFit) as caught:
        make_plan(traced.step, Machine(), Budgets(1, host_activations=False))
    planned = make_plan(traced.step, Machine(), Budgets(caught.value.minimum, host_activations=False))
    assert all(i.op != "copy" for i in planned.schedule.instructions)
    assert any(i.label.endswith("_again") for i in planned.schedule.instructions)
    found, _ = run(planned.step, planned.schedule, traced.inputs, 3, None)
    assert equal(found, interpret(traced.step, traced.inputs))


@pytest.mark.parametrize("policy", POLICIES)
def test_fixed_policies_are_the_same_step(policy: str) -> None:
    traced = trace(*make("llama"))
    planned = make_plan(traced.step, Machine(), Budgets(), policy=policy)
    same_computation(traced.joint, planned.step)
    check_schedule(planned.step, planned.schedule)
    verify(planned.schedule)
    found, _ = run(planned.step, planned.schedule, traced.inputs, 3, None)
    assert equal(found, interpret(traced.step, traced.inputs))
    with pytest.raises(DoesNotFit) as caught:
        make_plan(traced.step, Machine(), Budgets(planned.plan.peak_bytes["device"] - 1), policy=policy)
    assert caught.value.minimum == planned.plan.peak_bytes["device"]
    searched = make_plan(traced.step, Machine(), Budgets(planned.plan.peak_bytes["device"]))
    assert searched.plan.step_time_us <= planned.plan.step_time_us
    fetched = {i.queue for i in planned.schedule.instructions if i.op == "copy"}
    stays = policy in ("resident", "checkpoint-all")
    assert ("d2h" in fetched) != stays
