"""The minimum that a refusal states works, and 1 % less is refused, without naming fewer bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.helpers.decoder import adamw, batch, small_decoder

pytestmark = pytest.mark.slow  # it compiles many models


class Halved(nn.Module):
    """fp32 weights that are read in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = tokens.reshape(-1).float().repeat(16, 2)[:, :64] / 256
        for layer in self.layers:
            x = x + (x.to(torch.bfloat16) @ layer.weight.to(torch.bfloat16)).float()
        return x.square().mean()


def stepped(model: nn.Module, autocast: bool, **options: Any) -> Any:
    """Trains a compiled copy for a step, and returns it."""
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    compiled = mtcompile.compile(copied, optimizer=optimizer, device="cpu", **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = compiled(**batch(0))
    loss.backward()
    optimizer.step()
    return compiled


def refused(model: nn.Module, autocast: bool, **options: Any) -> mtcompile.BudgetError:
    with pytest.raises(mtcompile.BudgetError) as refusal:
        stepped(model, autocast, **options)
    return refusal.value


CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "autocast": ("decoder", True, {}),
    "casts in the model": ("halved", False, {"update": "backward"}),
    "masters": ("bf16", False, {"precision": "bf16-master32", "update": "backward"}),
    "fragments": ("decoder", False, {"fragments": "split", "update": "backward"}),
    "disk": ("decoder", False, {"disk": True, "update": "backward", "host": "20MiB"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_stated_minimum_is_the_smallest(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these models: of others it is "at most" what is said, as plans are climbed to."""
    monkeypatch.setenv("MT_EFFORT", "normal")
    kind, autocast, options = CASES[name]
    model = Halved() if kind == "halved" else small_decoder()
    model = model.to(torch.bfloat16) if kind == "bf16" else model
    if "disk" in options:
        options = options | {"disk": f"{tmp_path}:64MiB"}
    refusal = refused(model, autocast, memory=1, **options)
    least = refusal.minimum_bytes
    assert stepped(model, autocast, memory=least, **options).memory_report()["peak_device_bytes"] <= least
    assert refused(model, autocast, memory=least * 99 // 100, **options).minimum_bytes >= least
