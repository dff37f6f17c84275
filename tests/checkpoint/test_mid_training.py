"""Checkpoints of trainings that are not between two like steps: parameters without steps, and accumulations that go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint

pytestmark = pytest.mark.slow  # it compiles models


class Branches(nn.Module):
    """One branch is trained, the other has no steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.trained(x)
        return y


def masters() -> tuple[Any, torch.optim.Optimizer]:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mtcompile.compile(model, memory="1MiB", optimizer=optimizer, precision="bf16-master32"), optimizer


def batch(seed: int) -> Tensor:
    return torch.rand(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()


def backward(model: Any, seed: int) -> Tensor:
    loss: Tensor = model(batch(seed)).square().mean()
    loss.backward()
    return loss.detach()


def trained(model: Any, optimizer: torch.optim.Optimizer, seeds: range) -> list[Tensor]:
    losses = []
    for seed in seeds:
        losses.append(backward(model, seed))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same_masters(one: Any, other: Any) -> bool:
    values, others = mtcompile.master_parameters(one), mtcompile.master_parameters(other)
    return values.keys() == others.keys() and all(torch.equal(values[name], others[name]) for name in values)


@pytest.mark.parametrize("steps", [0, 2])
def test_masters_of_parameters_without_steps(steps: int, tmp_path: Path) -> None:
    """A state that held nothing but a master could not be loaded: torch looked for its step."""
    model, optimizer = masters()
    trained(model, optimizer, range(steps))
    checkpoint.save(tmp_path, model, optimizer, step=steps)
    state = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in mtcompile.master_parameters(model).items()}
    expected = trained(model, optimizer, range(steps, steps + 2))
    other, its_optimizer = masters()
    trained(other, its_optimizer, range(1))
    checkpoint.load(tmp_path, other, its_optimizer)
    assert all(torch.equal(weights[name], value) for name, value in mtcompile.master_parameters(other).items())
    assert all(map(torch.equal, expected, trained(other, its_optimizer, range(steps, steps + 2))))
    assert same_masters(model, other)
    its_optimizer.load_state_dict(state)
    assert all(torch.equal(weights[name], value) for name, value in mtcompile.master_parameters(other).items())
    assert not its_optimizer.state[other.unused.weight]
