"""Forecasts with a disk: what goes there, in bytes that add up, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.forecast.result import Forecast

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def forecast(**options: Any) -> Forecast:
    return mtcompile.plan(lambda: (Model(), {"x": torch.randn(16, WIDTH)}), machine="rtx4090", **options)


@pytest.mark.slow
def test_a_forecast_with_a_disk_has_parts_that_add_up() -> None:
    planned = forecast(precision="bf16-master32", update="backward", memory="800KB", host="2.3MB", disk="1GB")
    assert planned.feasible and planned.ledger is not None and planned.peak_bytes["host"] <= 2.3e6
    for tier, parts in planned.ledger.items():
        assert sum(parts.values()) == planned.peak_bytes[tier] and all(nbytes >= 0 for nbytes in parts.values()), tier
    there = planned.ledger["disk"]
    assert there["master"] == there["weights"] > 0 and there["optimizer"] == 4 * there["weights"] and not there["gradients"]
    assert planned.disk_read_bytes > planned.disk_write_bytes > 0 and planned.disk_days


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_frozen_weights_of_lora_are_weights_alone_on_disk(optimizer: str) -> None:
    options = {"lora": 8, "precision": "bf16", "memory": "300KB", "host": "500KB", "optimizer": optimizer}
    assert not forecast(**options).feasible
    planned = forecast(**options, disk="1GB")
    assert planned.feasible and planned.disk_write_bytes == 0 < planned.disk_read_bytes and planned.disk_days is None
    assert planned.ledger is not None and planned.ledger["disk"]["weights"] == planned.peak_bytes["disk"] > 0


@pytest.mark.long
def test_what_is_not_updated_element_by_element_is_not_forecast_to_train_from_disk() -> None:
    options = {"update": "backward", "memory": "1500KB", "host": "1.6MB", "disk": "1GB"}
    assert forecast(**options, optimizer="rmsprop").feasible
    assert not forecast(**options, optimizer="adafactor").feasible


def test_a_disk_needs_a_host_and_single_sizes() -> None:
    with pytest.raises(ValueError, match="expected host= too, found none"):
        forecast(disk="1GB")
    with pytest.raises(ValueError, match="expects no disk="):
        forecast(disk="1GB", host="1GB", solve="memory")
