"""What goes to disk where the host is small, and the smallest host that a refusal names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mtcompile.execution.placement import host_error
from mtcompile.options import Options
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Updates
from mtcompile.passes.planning.disk.within import within_disk
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem
from tests.helpers.tracing import trace


class Named(nn.Module):
    """An embedding that is larger than all that follows."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.named = nn.Embedding(2048, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.named(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, 8])
def test_what_is_updated_through_more_of_the_host_than_it_takes_there_stays(layers: int) -> None:
    """And a refusal names the smallest host that works."""
    step = trace(Named(layers), {"x": torch.zeros((2, 8), dtype=torch.int64)}).step
    budgets = Budgets(2_000_000, None, updates=Updates(), disk=1 << 30, disk_staging=1 << 15, disk_updates=True)

    def planned(host: int, disk: bool = True) -> Planned:
        limits = replace(budgets, host=host, disk=budgets.disk if disk else None)
        return within_disk(PlanningProblem(step, Machine(), limits), lambda p: (p, make_plan(p, "offload-all")))[1]

    def smallest(disk: bool) -> int:
        with pytest.raises(DoesNotFit) as refused:
            planned(1 << 16, disk)
        assert refused.value.tier == "host"
        with pytest.raises(DoesNotFit):
            planned(refused.value.minimum - 1, disk)
        return refused.value.minimum

    with_disk, without = smallest(True), smallest(False)
    plan = planned(with_disk).plan
    assert plan.params(step.meta["homes"]["named.weight"]) == "host"
    if layers:
        assert with_disk < without and plan.peak_bytes["disk"]
    else:
        assert with_disk == without and not plan.peak_bytes["disk"]


@pytest.mark.parametrize(("updates", "missing"), [(None, 'update="backward"'), (Updates(), "an elementwise optimizer")])
def test_a_refusal_names_what_keeps_weights_off_the_disk(updates: Updates | None, missing: str) -> None:
    step = trace(Named(1), {"x": torch.zeros((2, 8), dtype=torch.int64)}).step
    limits = Budgets(2_000_000, 1 << 16, updates=updates, disk=1 << 30, disk_staging=1 << 15)
    with pytest.raises(DoesNotFit) as refused:
        within_disk(PlanningProblem(step, Machine(), limits), lambda p: (p, make_plan(p, "offload-all")))
    texts = [what for what, _ in refused.value.causes]
    assert any(f"(with {missing}" in what for what in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize("updates", [None, Updates()])
def test_the_largest_parts_of_the_smallest_host_are_parts_of_it(updates: Updates | None) -> None:
    """And it works. Some of what trains is on the device."""
    step = trace(Named(4), {"x": torch.zeros((64, 16), dtype=torch.int64)}).step
    budgets = Budgets(2_200_000, None, updates=updates, disk=1 << 30, disk_staging=1 << 15, disk_updates=updates is not None)

    def planned(host: int) -> Planned:
        problem = PlanningProblem(step, Machine(), replace(budgets, host=host))
        return within_disk(problem, lambda p: (p, make_plan(p, "offload-all")))[1]

    with pytest.raises(DoesNotFit) as refused:
        planned(1 << 14)
    assert refused.value.tier == "host" and refused.value.causes
    assert sum(nbytes for _, nbytes in refused.value.causes) <= refused.value.minimum
    assert planned(refused.value.minimum).plan.peak_bytes["host"] <= refused.value.minimum


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_nobody_is_advised_to_take_the_optimizer_that_is_used(optimizer: str) -> None:
    error = host_error(DoesNotFit("host", 10, ()), Options(host=5), 0, 0, 7, optimizer)
    assert ("such as torch.optim.Adafactor" in str(error)) == (optimizer == "AdamW") and "LoRA" in str(error)
