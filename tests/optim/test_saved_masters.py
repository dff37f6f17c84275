"""Checkpoints of trainings with masters: parameters without steps, and accumulations that go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.errors import CheckpointError

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


@pytest.mark.parametrize("backwards", [1, 2])
def test_an_accumulation_with_masters_goes_on(backwards: int, tmp_path: Path) -> None:
    """Sums of two gradients and more are fp32, and the parameters bf16."""
    model, optimizer = masters()
    for seed in range(backwards):
        backward(model, seed)
    assert model.trained.weight.grad.dtype == (torch.bfloat16 if backwards == 1 else torch.float32)
    checkpoint.save(tmp_path, model, optimizer, step=0)
    expected = trained(model, optimizer, range(5, 7))
    for steps in (0, 1):
        other, its_optimizer = masters()
        trained(other, its_optimizer, range(steps))
        checkpoint.load(tmp_path, other, its_optimizer)
        assert all(map(torch.equal, expected, trained(other, its_optimizer, range(5, 7))))
        assert same_masters(model, other)


def test_gradients_of_another_dtype_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = None
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    checkpoint.save(tmp_path, model, step=0)
    other = nn.Linear(2, 2).bfloat16()
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"expected a gradient of torch.bfloat16 for weight, found torch.float32"):
        checkpoint.load(tmp_path, other)
    assert torch.equal(before, other.weight) and other.weight.grad is None
    checkpoint.load(tmp_path, model)
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
