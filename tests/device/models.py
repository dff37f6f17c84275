"""Small models for these tests: nothing in them asks whether it is being compiled, so that a plain run does the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.decoder import build
from mtcompile.models.shapes import Shape
from tests.helpers.models import make as make_other


class Dropping(nn.Module):
    """Random numbers in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(F.dropout(x, 0.1, self.training))
        return x.square().mean()


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model on the host and its inputs."""
    torch.manual_seed(0)
    if name == "decoder":
        model = build(Shape(32, 64, 2, 4, 2, 128, head_dim=8, dtype=torch.float32), torch.device("cpu"))
        tokens = torch.randint(0, 128, (2, 2, 16))
        return model, {"tokens": tokens[0], "targets": tokens[1]}
    if name == "dropping":
        return Dropping().train(), {"x": torch.randn(8, 32)}
    return make_other(name)
