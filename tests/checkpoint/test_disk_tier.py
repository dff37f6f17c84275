"""A training whose state is partly on disk goes on from a checkpoint, and neither save nor load takes memory for that state."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint
from tests.helpers.disk.training import step
from tests.helpers.stacks import Residual

pytestmark = pytest.mark.slow  # it compiles models
SMALL = {"memory": "1500KB", "host": "2200KB", "policy": "megatrain", "update": "backward"}  # a fixed policy plans faster


def training(plain: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mtcompile.compile(model, optimizer=optimizer, **options), optimizer


def mapped_from(tensor: Tensor) -> str:
    """The file that a tensor's memory is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= tensor.data_ptr() < int(end, 16):
            return line.split()[-1]
    return ""


@pytest.mark.parametrize("precision", ["model", pytest.param("bf16-master32", marks=pytest.mark.long)])
def test_state_that_is_on_disk_is_loaded_from_where_it_lies(precision: str, tmp_path: Path) -> None:
    plain = Residual()
    model, optimizer = training(plain, precision=precision, disk=f"{tmp_path / 'one'}:16MiB", **SMALL)
    for _ in range(2):
        step(model, optimizer)
    checkpoint.save(tmp_path / "saved", model, optimizer, step=2)
    again, its_optimizer = training(plain, precision=precision, disk=f"{tmp_path / 'two'}:16MiB", **SMALL)
    elsewhere, that_optimizer = training(plain, precision=precision, memory="64MiB", update="backward")
    for loading in ((again, its_optimizer), (elsewhere, that_optimizer)):
        checkpoint.load(tmp_path / "saved", *loading)
    entry = next(iter(its_optimizer.state.values()))
    assert mapped_from(entry["exp_avg"]).endswith("/state.safetensors")
    shutil.rmtree(tmp_path / "saved")  # as a later save may do
    for _ in range(2):
        expected = step(model, optimizer)
        assert torch.equal(expected, step(again, its_optimizer)) and torch.equal(expected, step(elsewhere, that_optimizer))
    for one, other, third in zip(model.parameters(), again.parameters(), elsewhere.parameters(), strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
