"""Stacks of equal blocks: one with all that a plan can do, for tests of how plans are shown, and one for tests of the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import Planned, PlanningProblem

BLOCKS = 6
WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return made


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


def stack(batch: int = 64, seq: int = 1) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Stack().train(), {"x": torch.randn(batch * seq, 32), "y": torch.randint(0, 10, (batch * seq,))}


@cache
def forecast(memory: str = "200KiB", **options: Any) -> mtcompile.Forecast:
    """Planned once for all tests."""
    found = mtcompile.plan(lambda: stack(), memory=memory, machine="rtx4090", **options)
    assert found.feasible
    return found


def source() -> PlanningProblem:
    found = forecast().problem
    assert found is not None
    return found


def candidates() -> Candidates:
    return Candidates(replace(source(), budgets=Budgets()))


def by_policy(policy: str) -> Planned:
    return candidates().by_policy(policy, Budgets())


KINDS = ("searched", "backward", *POLICIES)


def planned(kind: str) -> Planned:
    """By a search, by one with updates in the backward, or by a fixed policy."""
    if kind in POLICIES:
        return by_policy(kind)
    options = {"update": "backward", "run_ahead": True} if kind == "backward" else {}
    found = forecast(**options).planned
    assert found is not None
    return found


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Adapted(ResidualBlock):
    """Frozen weights, and a small adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.adapter(x)


class Residual(nn.Module):
    """``layers`` blocks that ``make`` makes, of which tests send some to the disk, and a loss."""

    def __init__(self, make: Callable[[], nn.Module] = ResidualBlock, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Trains a ``Residual`` by one step, and returns its loss."""
    loss = model(x.to(next(model.parameters()).dtype))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()  # type: ignore[no-any-return]


def same_weights(model: Any, other: Any) -> None:
    for (name, one), (_, two) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(one, two), name


def on_disk(model: Any) -> list[str]:
    """The homes that the plan of a compiled model has on disk."""
    return [d.subject for d in model.plan.decisions if d.kind == "params" and d.choice == "disk"]
