"""Models that look at numbers while they are built, and use such tensors in their forward, are planned without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.torch_private import building_without_memory


class Ramp(nn.Module):
    """Drops more in later layers, and weighs its outputs by numbers of linspace: a buffer, an attribute, and made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 0.5, 3)]
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in self.rates)
        self.register_buffer("ramp", torch.linspace(0, 1, 16))
        self.steps = torch.linspace(0, 1, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer, rate in zip(self.layers, self.rates, strict=True):
            x = nn.functional.dropout(layer(x), rate, True)
        return (x * self.ramp + x * self.steps + torch.linspace(0, 1, 16)).sum()


def _ramp() -> tuple[nn.Module, dict[str, Any]]:
    return Ramp(), {"x": torch.zeros(4, 16)}


def test_numbers_of_linspace_may_be_used_in_forward() -> None:
    plan = mtcompile.plan(_ramp, machine="rtx4090", memory="1GiB")
    assert plan.feasible and plan.parameters == 3 * (16 * 16 + 16)


def test_what_building_changes_in_torch_ends_with_it() -> None:
    plain = nn.Module._apply
    with building_without_memory() as built:
        model = Ramp()
        assert nn.Module._apply is not plain and model.rates == [0.0, 0.25, 0.5]
        built(model)
        assert nn.Module._apply is plain and type(model.steps) is type(model.ramp)
    assert nn.Module._apply is plain
