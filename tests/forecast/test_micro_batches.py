"""``mtcompile.plan(accumulate="auto")``: the forecast of the number of micro-batches that is fastest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mtcompile


class Layers(nn.Module):
    """Two layers of few weights that no tiles can cut, so that smaller micro-batches need less memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.Tanh(), nn.Conv1d(16, 4, 1)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def layers(batch: int, seq: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Layers(), {"x": torch.zeros(batch, 4, 16)}


@pytest.mark.slow
def test_auto_is_the_fastest_number_or_needs_the_least() -> None:
    def planned(memory: int, count: int | str) -> Any:
        return mtcompile.plan(layers, batch=126, memory=memory, machine="rtx4090", accumulate=count)

    least = {count: planned(1, count).minimum_device_bytes for count in (1, 2)}
    assert least[2] < least[1]
    short = planned(1, "auto")
    assert not short.feasible and short.minimum_device_bytes == min(least.values())
    for memory in (least[1] - 1, 2 * least[1]):
        auto = planned(memory, "auto")
        fixed = [planned(memory, count) for count in (1, 2)]
        fastest = min((each for each in fixed if each.feasible), key=lambda each: each.step_time_us)
        assert (auto.feasible, auto.accumulate, auto.step_time_us) == (True, fastest.accumulate, fastest.step_time_us)
        assert auto.tokens == fastest.tokens


def test_auto_expects_a_size_to_cut() -> None:
    with pytest.raises(ValueError, match="pass a number"):
        mtcompile.plan(Layers(), {"x": torch.zeros(8, 4, 16)}, accumulate="auto")
    with pytest.raises(ValueError, match="or \"auto\", found 'most'"):
        mtcompile.plan(layers, batch=8, accumulate="most")
