"""A small model that trains with weights and optimizer state on disk, and comparisons with one that does without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mtcompile
from tests.helpers.stacks import WIDTH, Residual

SMALL = {"memory": "1500KB", "host": "2MB", "policy": "megatrain"}  # a fixed policy plans faster


class Model(Residual):
    """Whose second block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def compiled(plain: nn.Module, make: Any = adamw, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = copy.deepcopy(plain)
    optimizer = make(model)
    return mtcompile.compile(model, optimizer=optimizer, update="backward", **options), optimizer


def on_disk(folder: Path, plain: nn.Module, make: Any = adamw, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    return compiled(plain, make, **{**SMALL, "disk": f"{folder}:16MiB", **options})


def step(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = model(x.to(next(model.parameters()).dtype))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()  # type: ignore[no-any-return]


def same(model: Any, optimizer: torch.optim.Optimizer, other: Any, its_optimizer: torch.optim.Optimizer) -> None:
    for (name, one), (_, two) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(one, two), name
    states = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for index, entry in states[0].items():
        for key, value in entry.items():
            assert value is states[1][index][key] is None or torch.equal(value, states[1][index][key]), key
