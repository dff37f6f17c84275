"""A model of residual blocks, of which tests of the disk send some there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Residual(nn.Module):
    """``layers`` blocks that ``make`` makes, and a loss."""

    def __init__(self, make: Callable[[], nn.Module] = Block, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
