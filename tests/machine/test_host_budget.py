"""The host budget that there is by default, and allocations for which the host has no room."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.execution import door
from mtcompile.machine import device
from mtcompile.machine.device import host_room
from mtcompile.runtime.devices.cuda import CudaDevice
from mtcompile.runtime.devices.pinned import pinned

GIB = 2**30
GROUPS = {
    "version 2": ("0::/job", "sys/fs/cgroup/job", {"memory.max": 4 * GIB, "memory.current": 3 * GIB}),
    "version 1": (
        "7:memory:/job",
        "sys/fs/cgroup/memory/job",
        {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB},
    ),
}


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.mark.parametrize("version", GROUPS)
def test_the_room_is_that_of_the_machine_or_its_control_group(version: str, tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB")
    assert host_room(tmp_path) == ("available", int(8 * GIB * 0.95))
    line, folder, files = GROUPS[version]
    write(tmp_path / "proc/self/cgroup", line)
    for name, value in files.items():
        write(tmp_path / folder / name, value)
    assert host_room(tmp_path) == ("left in the control group", int(GIB * 0.95))


def test_a_system_that_says_nothing_sets_no_budget(tmp_path: Path) -> None:
    assert host_room(tmp_path) is None


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()  # type: ignore[no-any-return]


def train(room: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.setattr(door, "host_room", lambda: ("left in the control group", room))
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = mtcompile.compile(model, memory=200 * 1024, optimizer=optimizer, device="cpu", **options)
    compiled(torch.randn(64, 64)).backward()
    return compiled


@pytest.mark.slow
def test_a_plan_for_more_than_there_is_is_made_again_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    free = train(2**40, monkeypatch).plan.peak_bytes["host"]
    held = sum(p.nbytes for p in Layers().parameters())
    with pytest.warns(UserWarning, match=r"left in the control group, less a reserve, .* Pass host= to choose"):
        within = train(free - held - 1, monkeypatch).plan
    assert within.peak_bytes["host"] < free and within.budget_bytes["host"] == free - 1


def test_too_little_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mtcompile.BudgetError, match="no plan fits host="), pytest.warns(UserWarning):
        train(1, monkeypatch)


def test_a_budget_of_the_users_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(1, monkeypatch, host="1GiB").plan.budget_bytes["host"] == GIB


class Driver:
    """``Api``, as far as a device is made of it. ``error``: what the system says to an allocation."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.pins = error, list[int]()

    def new_stream(self) -> None: ...

    def pin(self, nbytes: int) -> torch.Tensor:
        self.pins.append(nbytes)
        if self.error is not None:
            raise self.error
        return torch.empty(nbytes, dtype=torch.uint8)


def test_more_than_the_host_has_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_rooms", lambda root: {"available": 1000})
    driver: Any = Driver()
    gpu = CudaDevice(torch.device("cpu"), driver, check_host=device.check_allocation)
    assert gpu.arena("host", 950).numel() == 950
    with pytest.raises(mtcompile.BudgetError, match=r"for one allocation, found .* \(available, less a reserve\)") as error:
        gpu.arena("host", 951)
    assert error.value.minimum_bytes == 951 and driver.pins == [950]


def test_memory_that_the_system_refuses_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(device, "memory_rooms", lambda root: {"available": 10**6})
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError) as refused:
        pinned(1000, None, lambda: None)
    driver: Any = Driver(refused.value)
    with pytest.raises(mtcompile.BudgetError, match="the system refused them"):
        CudaDevice(torch.device("cpu"), driver, check_host=device.check_allocation).arena("host", 1000)
