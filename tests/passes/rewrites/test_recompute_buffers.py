"""A block that is computed again does not make its buffers' next versions again: they leave the step once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.training import equal_to_plain

pytestmark = pytest.mark.slow  # it compiles many models


class Convolutions(nn.Module):
    """A last block whose backward is cut apart: the statistics of its norm are read in another region than made."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(self.block(8, 8), self.block(8, 8)) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks, nn.Sequential(self.block(8, 64, 1)))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(64, 256, 1), nn.Hardswish(), nn.Flatten(), nn.Linear(256, 4)
        )

    @staticmethod
    def block(channels: int, wide: int, kernel: int = 3) -> nn.Module:
        convolution = nn.Conv2d(channels, wide, kernel, padding=kernel // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(wide), nn.Hardswish(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).pow(2).mean()


@pytest.mark.parametrize("policy", ["checkpoint-all"])
def test_norms_of_a_recomputed_block_keep_their_statistics(policy: str) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(Convolutions(), {"x": torch.randn(2, 8, 4, 4)}, policy=policy)
