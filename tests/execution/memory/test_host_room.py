"""Host memory is asked for before it is taken: an error in place of a process that the kernel ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.execution.memory import host_room
from mtcompile.machine import device
from mtcompile.machine.system_files import memory_rooms

KB = 1 << 10


def system(root: Path, available: int, group: tuple[str, int, int] | None = None) -> Path:
    """The files of a system with so many bytes available, and a control group: its version, limit, and what it uses."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // KB} kB\n")
    if group is not None:
        version, limit, used = group
        (root / "proc/self/cgroup").write_text("0::/job\n" if version == "v2" else "4:memory:/job\n")
        folder = root / ("sys/fs/cgroup/job" if version == "v2" else "sys/fs/cgroup/memory/job")
        names = ("memory.max", "memory.current") if version == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder.mkdir(parents=True)
        for name, value in zip(names, (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
    return root


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the bytes that the system still has; small allocations are asked for too."""
    monkeypatch.setattr(host_room, "_UNASKED", 0)

    def limit(nbytes: int) -> None:
        monkeypatch.setattr(device, "memory_rooms", lambda root: {"available": nbytes})

    limit(1 << 30)
    return limit


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_control_group_limits_before_the_machine_does(version: str, tmp_path: Path, monkeypatch: Any) -> None:
    root = system(tmp_path, 8 << 30, (version, 2 << 30, 1 << 30))
    monkeypatch.setattr(device, "memory_rooms", lambda _: memory_rooms(root))
    host_room.check_room(900 << 20, "a test", "do without")
    with pytest.raises(
        mtcompile.BudgetError, match=r"expected 1\.50 GiB .* found 972\.80 MiB \(left in the control group"
    ) as raised:
        host_room.check_room(3 << 29, "a test", "do without")
    assert "or do without" in str(raised.value) and "MT_HOST_CHECK=0" in str(raised.value)
    assert raised.value.minimum_bytes == 3 << 29
    monkeypatch.setenv("MT_HOST_CHECK", "0")
    host_room.check_room(3 << 29, "a test", "do without")


def test_memory_that_is_not_available(tmp_path: Path, monkeypatch: Any) -> None:
    root = system(tmp_path, 1 << 30)
    monkeypatch.setattr(device, "memory_rooms", lambda _: memory_rooms(root))
    with pytest.raises(mtcompile.BudgetError, match=r"found 972\.80 MiB \(available"):
        host_room.check_room(2 << 30, "a test", "do without")


def compiled(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mtcompile.compile(model, memory="4MiB", optimizer=optimizer, **options), optimizer


@pytest.mark.slow
def test_a_plan_without_room_on_the_host_is_refused_before_anything_moves(room: Any) -> None:
    model, optimizer = compiled()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    room(100 << 10)
    with pytest.raises(mtcompile.BudgetError, match=r'gradients, optimizer state (.|\n)* pass update="backward"'):
        model(torch.ones(8, 64))
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    room(1 << 30)
    plain = Small()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model(torch.ones(8, 64)).backward()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    room(10 << 10)
    with pytest.raises(mtcompile.BudgetError, match="the optimizer's state"):
        optimizer.step()
    assert all(map(torch.equal, weights, model.parameters())) and not optimizer.state
    room(1 << 30)
    optimizer.step()
    plain(torch.ones(8, 64)).backward()
    other.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    room(10 << 10)
    optimizer.step()  # its state is there


@pytest.mark.slow
def test_a_step_without_room_is_refused_and_the_next_one_runs(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_room, "_EVERY_S", 0.0)
    model, _ = compiled()
    model(torch.ones(8, 64)).backward()
    before = torch.get_rng_state()
    room(0)
    with pytest.raises(mtcompile.BudgetError, match="what a step computes"):
        model(torch.ones(8, 64))
    assert torch.equal(before, torch.get_rng_state())
    room(1 << 30)
    model(torch.ones(8, 64)).backward()


def test_steps_seldom_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, clock = list[int](), [0.0]
    monkeypatch.setattr(device, "memory_rooms", lambda root: looks.append(1) or {})
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watchdog = host_room.Watchdog()
    for _ in range(100):
        clock[0] += 0.1
        watchdog.before_step(1 << 30)
        watchdog.before_step(1 << 20)  # a small step never looks
    assert len(looks) == 2
