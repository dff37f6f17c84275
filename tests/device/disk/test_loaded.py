"""Weights that the host has no room for, on a device with memory of its own: on disk from loading on, also for evaluation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mtcompile
from mtcompile.optim.own_files import is_in_own_file
from tests.helpers.stacks import WIDTH, Residual

pytestmark = pytest.mark.slow


def losses(model: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.bind(optimizer)
    x = torch.linspace(-1, 1, 16 * WIDTH, dtype=next(model.parameters()).dtype).view(16, -1)
    with torch.no_grad():
        values = [model(x).cpu()]
    for _ in range(2):
        values.append(model(x))
        values[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    model.synchronize()
    return [value.detach().cpu() for value in values]


def test_loaded_weights_are_evaluated_and_train_with_the_bits_of_a_run_in_memory(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = Residual()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    nbytes = sum(parameter.nbytes for parameter in plain.parameters())
    options: dict[str, Any] = {"memory": "1500KB", "policy": "megatrain", "update": "backward", "device": device}
    with torch.device("meta"):
        empty = Residual()
    model = mtcompile.from_pretrained(tmp_path, copy.deepcopy(empty), host=nbytes, disk=f"{tmp_path}/disk:32MB", **options)
    assert all(map(is_in_own_file, (p for p in model.parameters() if p.dim() > 1)))
    wanted = losses(mtcompile.from_pretrained(tmp_path, empty, **options))
    assert all(map(torch.equal, losses(model), wanted))
    assert not any(map(is_in_own_file, model.parameters()))
