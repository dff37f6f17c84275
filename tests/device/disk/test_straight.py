"""Weights that kvikio reads from disk straight to a device with memory of its own. Without a GPU, kvikio is a stand-in."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile.runtime.disk.errors import DiskCorrupt, DiskError
from mtcompile.runtime.schedule import is_direct
from tests.device.disk import fake_kvikio
from tests.device.second import LateCopies
from tests.helpers.stacks import WIDTH, Residual

REAL = torch.cuda.is_available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REAL and importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed"),
]


class Model(Residual):
    """Whose second and third block are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[2].requires_grad_(False)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_kvikio.Faults | None]:
    monkeypatch.setenv("MT_DISK_DIRECT", "1")
    torch.manual_seed(5)
    torch.compiler.reset()
    yield None if REAL else fake_kvikio.installed(monkeypatch)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def compiled(plain: Model, device: torch.device, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = copy.deepcopy(plain)
    optimizer = adamw(model)
    return mtcompile.compile(model, optimizer=optimizer, update="backward", device=device, **options), optimizer


def on_disk(folder: Path, plain: Model, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    return compiled(plain, device, memory="1500KB", host="2MB", policy="megatrain", disk=f"{folder}:16MiB")


def step(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.linspace(-1, 1, 16 * WIDTH).view(16, -1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().cpu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", ["0", "1"])
def test_training_has_the_bits_of_a_resident_run(
    check: str,
    device: torch.device,
    late: list[LateCopies],
    faults: fake_kvikio.Faults | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MT_CHECK", check)
    plain = Model()
    model, optimizer = on_disk(tmp_path, plain, device)
    resident, its_optimizer = compiled(plain, device)
    for _ in range(3):
        assert torch.equal(step(model, optimizer), step(resident, its_optimizer))
    for one, two in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(one.cpu(), two.cpu())
    schedule, report = model.schedule, model.memory_report()
    straight = [i for i in schedule.instructions if is_direct(i, schedule.buffers)]
    assert straight and not any(i.queue == "disk_read" for i in schedule.instructions)
    assert faults is None or faults.reads >= 3 * len(straight)
    for tier in ("device", "host", "disk"):
        assert report[f"peak_{tier}_bytes"] <= report[f"planned_peak_{tier}_bytes"] <= report[f"budget_{tier}_bytes"], tier


@pytest.mark.skipif(REAL, reason="faults are those of the stand-in")
@pytest.mark.parametrize("fault", ["short", "failing", "refused"])
def test_a_read_that_fails_leaves_the_model_before_the_step(
    fault: str, device: torch.device, faults: fake_kvikio.Faults, tmp_path: Path
) -> None:
    plain = Model()
    model, optimizer = on_disk(tmp_path, plain, device)
    resident, its_optimizer = compiled(plain, device)
    assert torch.equal(step(model, optimizer), step(resident, its_optimizer))
    setattr(faults, fault, (faults.reads + 2,))
    with pytest.raises(DiskError, match=r"kvikio's read of layers.*MT_DISK_DIRECT=0 reads through the host"):
        step(model, optimizer)
    assert faults.in_flight == 0
    for one, two in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(one.cpu(), two.cpu())
    assert torch.equal(step(model, optimizer), step(resident, its_optimizer))


@pytest.mark.skipif(REAL, reason="faults are those of the stand-in")
def test_other_bytes_than_were_written_are_found_on_the_device(
    device: torch.device, faults: fake_kvikio.Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_DISK_CHECK", "1")
    model, optimizer = on_disk(tmp_path, Model(), device)
    step(model, optimizer)
    faults.wrong = True
    with pytest.raises(DiskCorrupt, match="layers"):
        step(model, optimizer)
    faults.wrong = False
    step(model, optimizer)


@pytest.mark.skipif(REAL, reason="the stand-in is told not to open files")
def test_where_kvikio_does_not_open_the_file_nothing_has_moved(
    device: torch.device, faults: fake_kvikio.Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.opens = False
    model, optimizer = on_disk(tmp_path, Model(), device)
    with pytest.raises(DiskError, match=r"expected kvikio to open the file, .*install mtcompile\[kvikio\]"):
        step(model, optimizer)
    assert not model._mt_model.session.parameters.slabs
    monkeypatch.setenv("MT_DISK_DIRECT", "0")
    step(model, optimizer)
    assert not model.plan.disk_direct
