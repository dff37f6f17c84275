"""Frozen parameters have no fp32 masters, and get exact ones when they are trained after all, or refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles models


class Model(nn.Module):
    def __init__(self, frozen_dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(16, 16).to(frozen_dtype).requires_grad_(False)
        self.trained = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(x.to(self.frozen.weight.dtype)))
        return self.trained(hidden.to(self.trained.weight.dtype)).float().square().mean()


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 16)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_frozen_parameter_gets_its_master_when_it_is_trained(update: str) -> None:
    model = Model(torch.bfloat16)
    values = model.frozen.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = mtcompile.compile(model, memory="1MiB", optimizer=optimizer, precision="bf16-master32", update=update)
    step(compiled, optimizer)
    assert set(mtcompile.master_parameters(compiled)) == {"trained.weight", "trained.bias"}
    assert torch.equal(compiled.frozen.weight, values)
    compiled.frozen.requires_grad_(True)
    for _ in range(2):
        step(compiled, optimizer)
    master = mtcompile.master_parameters(compiled)["frozen.weight"]
    changed = (master - values.float()).abs().max().item()
    assert 0 < changed < 1e-2 and not torch.equal(master, master.bfloat16().float())  # finer than bf16


def test_one_whose_master_would_not_be_exact_is_refused() -> None:
    model = Model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = mtcompile.compile(model, memory="1MiB", optimizer=optimizer, precision="bf16-master32")
    step(compiled, optimizer)
    compiled.frozen.requires_grad_(True)
    before = compiled.trained.weight.detach().clone()
    with pytest.raises(mtcompile.StepError, match=r"frozen\.weight was frozen when the model was compiled"):
        step(compiled, optimizer)
    assert torch.equal(compiled.trained.weight, before)
