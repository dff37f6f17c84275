"""Activations that wait on disk: bits of plain PyTorch, bytes per tier, the proof, and faults of the disk."""

from __future__ import annotations

import copy
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.errors import BudgetError
from mtcompile.runtime.disk.errors import DiskCorrupt, DiskError, DiskFull
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.verify import ScheduleError, verify
from tests.helpers.stacks import WIDTH, Residual, ResidualBlock

pytestmark = pytest.mark.slow  # it compiles models
BATCH = 1024
SMALL = {"memory": "9MiB", "host": "8MiB", "policy": "offload-all"}  # a fixed policy plans faster


class Dropping(ResidualBlock):
    """With dropout, whose random numbers must be those of the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


def model(block: type[ResidualBlock] = ResidualBlock) -> nn.Module:
    torch.manual_seed(3)
    return Residual(block, 6)


def compiled(folder: Path, plain: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    ours = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-2, momentum=options.pop("momentum", 0.0))
    return mtcompile.compile(ours, optimizer=optimizer, **{**SMALL, "disk": f"{folder}:64MiB", **options}), optimizer


def step(one: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    loss = one(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()  # type: ignore[no-any-return]


def same_training(ours: Any, optimizer: torch.optim.Optimizer, plain: nn.Module, steps: int = 2, batch: int = BATCH) -> None:
    other = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for _ in range(steps):
        x = torch.randn(batch, WIDTH)
        assert torch.equal(step(ours, optimizer, x), step(plain, other, x))
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


def on_disk(ours: Any) -> list[str]:
    return [d.subject for d in ours.plan.decisions if d.kind == "activation" and d.choice == "disk"]


def check_ledger(ours: Any) -> None:
    report = ours.memory_report()
    counters = 64 * len(list(ours.parameters()))  # the plan rounds step counters up
    for tier in ("device", "host", "disk"):
        measured, planned = report[f"peak_{tier}_bytes"], report[f"planned_peak_{tier}_bytes"]
        assert planned - (counters if tier == "host" else 256) <= measured <= planned <= report[f"budget_{tier}_bytes"], tier
    assert report["peak_disk_bytes"] == report["planned_peak_disk_bytes"] > 0


def test_a_model_trains_that_exceeds_device_and_host_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = model()
    ours, optimizer = compiled(tmp_path, plain)
    same_training(ours, optimizer, plain)
    check_ledger(ours)
    report, queues = ours.memory_report(), {i.queue for i in ours.schedule.instructions}
    assert sum(report[f"peak_{tier}_bytes"] for tier in ("device", "host", "disk")) > 17 << 20  # memory= and host=
    assert on_disk(ours) and {"disk_read", "disk_write"} <= queues
    assert (
        ours.plan.disk_write_bytes
        == ours.plan.disk_read_bytes
        == sum(i.nbytes for i in ours.schedule.instructions if i.queue == "disk_write")
    )
    assert list(tmp_path.iterdir()) == []
    assert "from #" in (text := str(ours.explain("layers.0"))) and "on the disk" in text and "waiting on the host" in text
    with pytest.raises(BudgetError, match=r"no plan fits host=(.|\n)*activations go there"):
        compiled(tmp_path, plain, disk=None)[0](torch.randn(BATCH, WIDTH))


def test_a_disk_that_fails_leaves_the_model_before_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_CHECK", "1")
    plain = model()
    ours, optimizer = compiled(tmp_path, plain)
    x = torch.randn(BATCH, WIDTH)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFull, match=r"expected room for \d+ more bytes"):
            ours(x)
    same_training(ours, optimizer, plain, 1)

    def refused(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for call, error, message in (
        ("pwritev", refused, r"write of \w+, \d+ bytes at \d+, failed: Input/output error"),
        ("preadv", refused, r"read of \w+, \d+ bytes at \d+, failed: Input/output error"),
        ("pwritev", lambda *args: 0, r"expected all of them, found 0"),
        ("preadv", lambda *args: 0, r"expected all of them, found 0"),
    ):
        before = [p.detach().clone() for p in ours.parameters()]
        loss = ours(x) if call == "preadv" else None
        with monkeypatch.context() as patch:
            patch.setattr(os, call, error)
            with pytest.raises(DiskError, match=message):
                loss.backward() if loss is not None else ours(x)
        assert all(p.grad is None for p in ours.parameters())
        assert all(map(torch.equal, before, ours.parameters()))
    del loss
    same_training(ours, optimizer, plain, 1)

    loss = ours(x)
    file = ours._mt_model.session.arenas._scratch[1].file.cached
    byte = os.pread(file, 1, 11)[0]
    os.pwrite(file, bytes([byte ^ 1]), 11)
    with pytest.raises(DiskCorrupt, match="are not those that were written; nothing has used them"):
        loss.backward()
    del loss
    same_training(ours, optimizer, plain, 1)


def replaced(schedule: Schedule, index: int, **fields: Any) -> Schedule:
    rows = list(schedule.instructions)
    rows[index] = replace(rows[index], **fields)
    return replace(schedule, instructions=tuple(rows))


def test_the_proof_rejects_schedules_that_misuse_the_slots_of_the_disk(tmp_path: Path) -> None:
    ours, _ = compiled(tmp_path, model())
    ours(torch.randn(BATCH, WIDTH))
    schedule: Schedule = ours.schedule
    verify(schedule)
    rows, buffers = schedule.instructions, schedule.buffers
    at = {work: [i for i, row in enumerate(rows) if row.work == work] for work in ("offload", "write", "read", "prefetch")}
    spilled = [i for i in at["offload"] if any(row.work == "write" and row.reads == rows[i].writes for row in rows)]
    slots = [i for i, row in enumerate(rows) if row.op == "alloc" and row.queue == "d2h" and row.deps]
    assert at["write"] and at["read"] and spilled and slots
    for index in at["write"]:  # a write waits for its copy to the host
        assert rows[index].deps
        with pytest.raises(ScheduleError):
            verify(replaced(schedule, index, deps=()))
    for index in slots:  # nothing takes a slot on the host before what was there is on disk
        with pytest.raises(ScheduleError):
            verify(replaced(schedule, index, deps=()))
    with pytest.raises(ScheduleError, match="I1"):
        verify(replaced(schedule, at["read"][0], queue="disk_write"))
    first, second = [b for b in buffers.values() if b.tier == "disk" and b.kind == "placed"][:2]
    for offset in (first.offset, (second.offset or 0) + 256):  # on another one's bytes; between blocks
        moved = {**buffers, second.name: replace(second, offset=offset)}
        with pytest.raises(ScheduleError):
            verify(replace(schedule, buffers=moved))
    for table in ("arena_nbytes", "peak_nbytes"):
        less = {**getattr(schedule, table), "disk": getattr(schedule, table)["disk"] - 4096}
        with pytest.raises(ScheduleError, match="I3"):
            verify(replace(schedule, **{table: less}))


@pytest.mark.long
def test_forwards_that_wait_together_have_files_of_their_own(tmp_path: Path) -> None:
    plain = model()
    ours, optimizer = compiled(tmp_path, plain, memory="24MiB", host="11MiB")
    other = torch.optim.SGD(plain.parameters(), lr=1e-2)
    same_training(ours, optimizer, plain, 1)
    data = torch.randn(2, BATCH, WIDTH)
    for _ in range(3):
        for one, its_optimizer in ((ours, optimizer), (plain, other)):
            (one(data[0]) + one(data[1])).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    report = ours.memory_report()
    assert report["peak_host_bytes"] <= report["budget_host_bytes"]
    assert 0 < report["peak_disk_bytes"] <= report["budget_disk_bytes"]


@pytest.mark.long
def test_larger_and_smaller_batches_take_the_same_space_in_turn(tmp_path: Path) -> None:
    plain = model()
    ours, optimizer = compiled(tmp_path, plain, memory="12MiB")
    peaks = []
    for batch in (BATCH, BATCH + 256, BATCH):
        same_training(ours, optimizer, plain, batch=batch)
        peaks.append(ours.memory_report()["planned_peak_disk_bytes"])
    assert peaks[0] < peaks[1] == peaks[2] == ours.memory_report()["peak_disk_bytes"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "fastest", "memory": "6MiB", "host": "3800KB"},
        {"policy": "fastest", "memory": "5MiB", "host": "3.2MB", "update": "backward", "momentum": 0.9},
        {"policy": "fastest", "memory": "5MiB", "host": "3.2MB", "update": "backward", "momentum": 0.9, "run_ahead": True},
        {"accumulate": 2},
    ],
    ids=["searched", "updates", "ahead", "accumulated"],
)
def test_every_way_of_training_has_the_bits_of_plain_pytorch(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = model()
    ours, optimizer = compiled(tmp_path, plain, **options)
    resident, its_optimizer = compiled(tmp_path, plain, **{**options, "memory": "1GiB", "host": "1GiB", "policy": "fastest"})
    for _ in range(3):
        x = torch.randn(BATCH, WIDTH)
        assert torch.equal(step(ours, optimizer, x), step(resident, its_optimizer, x))
    for one, two in zip(ours.parameters(), resident.parameters(), strict=True):
        assert torch.equal(one, two)
    assert on_disk(ours)
    assert ("update" in options) == any(d.kind == "params" and d.choice == "disk" for d in ours.plan.decisions)
    report = ours.memory_report()
    for tier in ("device", "host", "disk"):
        assert report[f"peak_{tier}_bytes"] <= report[f"planned_peak_{tier}_bytes"] <= report[f"budget_{tier}_bytes"], tier


@pytest.mark.long
def test_dropout_draws_the_numbers_of_the_forward(tmp_path: Path) -> None:
    plain = model(Dropping)
    ours, optimizer = compiled(tmp_path, plain, memory="16MiB", host="8MiB")
    same_training(ours, optimizer, plain)
    assert on_disk(ours)
