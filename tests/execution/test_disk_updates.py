"""Weights that train on disk, with their optimizer state: bits, bytes, faults, and processes that are killed."""

from __future__ import annotations

import copy
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtcompile.checkpoint import load, save
from mtcompile.errors import BudgetError, StepError
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.requests import Requests
from mtcompile.runtime.schedule import BLOCK, SECTOR, Schedule, used_by_disk
from mtcompile.runtime.verify import ScheduleError, verify
from tests.helpers.disk.training import Model, adamw, compiled, on_disk, same, step
from tests.helpers.stacks import WIDTH


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(5)
    torch.compiler.reset()
    yield


OPTIMIZERS = {
    "AdamW": adamw,
    "amsgrad": lambda m: torch.optim.Adam((p for p in m.parameters() if p.requires_grad), lr=1e-2, amsgrad=True),
    "momentum": lambda m: torch.optim.SGD((p for p in m.parameters() if p.requires_grad), lr=1e-2, momentum=0.9),
    "RMSprop": lambda m: torch.optim.RMSprop((p for p in m.parameters() if p.requires_grad), lr=1e-3),
}
HOSTS = {"momentum": "1.9MB", "RMSprop": "1.9MB"}  # for those that keep one state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", *(pytest.param(n, marks=pytest.mark.long) for n in OPTIMIZERS if n != "AdamW")])
def test_weights_and_state_on_disk_train_with_the_bits_of_plain_pytorch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = Model()
    model, optimizer = on_disk(tmp_path, plain, OPTIMIZERS[name], host=HOSTS.get(name, "2.6MB"))
    other = OPTIMIZERS[name](plain)
    for _ in range(3):
        assert torch.equal(step(model, optimizer), step(plain, other))
    same(model, optimizer, plain, other)
    disk = model._mt_model.door.disk
    assert model.plan.disk_write_bytes > 0 and disk.nbytes > 0
    assert all(disk.holds(home) for home in disk._homes.values())
    assert "GB written a step; how much the drive is rated for is not known" in str(model.plan)
    report = model.memory_report()
    for tier in ("device", "host", "disk"):
        assert 0 < report[f"peak_{tier}_bytes"] <= report[f"planned_peak_{tier}_bytes"] <= model.plan.budget_bytes[tier], tier
    arena, slots = model._mt_model.session.arenas._arenas["host"], used_by_disk(model.schedule.instructions)
    assert slots and all((arena.data_ptr() + model.schedule.buffers[name].offset) % SECTOR == 0 for name in slots)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-master32"},
        pytest.param({"run_ahead": True}, marks=pytest.mark.long),
        pytest.param({"max_grad_norm": 0.1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_other_ways_to_update_give_the_bits_of_a_resident_run(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtcompile.optim.disk_state.PIECE", 8192)  # elements, so that parameters are updated in pieces
    monkeypatch.setenv("MT_DISK_CHECK", "1")
    plain = Model()
    small = {"memory": "800KB", "host": "1.9MB"} if "precision" in options else {"host": "2.9MB"}
    model, optimizer = on_disk(tmp_path, plain, **options, **small)
    other, its_optimizer = compiled(plain, memory="64MiB", **options)
    for _ in range(3):
        assert torch.equal(step(model, optimizer), step(other, its_optimizer))
    same(model, optimizer, other, its_optimizer)
    assert model.plan.disk_write_bytes > 0 == other.plan.disk_write_bytes


@pytest.mark.long
@pytest.mark.parametrize(("memory", "host"), [("1.5MB", "2MB"), ("1.5MB", "2.2MB"), ("2MB", "2.4MB"), ("1.5MB", "2.6MB")])
def test_the_ledger_holds_with_state_on_disk(memory: str, host: str, tmp_path: Path) -> None:
    model, optimizer = on_disk(tmp_path, Model(), memory=memory, host=host)
    for _ in range(3):
        step(model, optimizer)
    report, plan = model.memory_report(), model.plan
    counters = 64 * len(list(model.parameters()))
    for tier in ("device", "host", "disk"):
        measured, planned = report[f"peak_{tier}_bytes"], report[f"planned_peak_{tier}_bytes"]
        assert measured <= planned <= plan.budget_bytes[tier]
    assert report["peak_host_bytes"] >= report["planned_peak_host_bytes"] - counters
    assert report["peak_disk_bytes"] == report["planned_peak_disk_bytes"] > 0
    store = model._mt_model.door.parameters.disk
    before = store.written_nbytes
    step(model, optimizer)
    assert store.written_nbytes - before <= plan.disk_write_bytes


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("model", marks=pytest.mark.long), "bf16-master32"])
def test_a_frozen_weight_on_disk_that_is_trained_after_all_gets_its_state_there(precision: str, tmp_path: Path) -> None:
    plain = Model()
    plain.layers[1].to(torch.bfloat16).to(torch.float32)  # as exact in bf16
    if precision != "model":
        plain.layers[1].to(torch.bfloat16)
    every = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)  # noqa: E731
    host = {"model": "2.4MB", "bf16-master32": "1.7MB"}[precision]
    model, optimizer = on_disk(tmp_path, plain, every, precision=precision, host=host)
    other, its_optimizer = compiled(plain, every, memory="64MiB", precision=precision)
    assert torch.equal(step(model, optimizer), step(other, its_optimizer))
    disk, weight = model._mt_model.door.disk, model.layers[1].up.weight
    assert disk.holds(weight) and not optimizer.state.get(weight)
    for one in (model, other):
        one.layers[1].requires_grad_(True)
    for _ in range(3):
        assert torch.equal(step(model, optimizer), step(other, its_optimizer))
    same(model, optimizer, other, its_optimizer)
    assert all(disk.holds(v) for v in optimizer.state[weight].values() if v.dim())
    report = model.memory_report()
    assert report["peak_disk_bytes"] <= report["planned_peak_disk_bytes"]
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"] <= model.plan.budget_bytes["host"]


@pytest.mark.long
def test_frozen_weights_go_first(tmp_path: Path) -> None:
    for host in ("3MB", "2.4MB", "2MB"):
        model, optimizer = on_disk(tmp_path, Model(), host=host)
        step(model, optimizer)
        homes = model._mt_model.door.parameters.tiers
        frozen = {tier for home, tier in homes.items() if home.endswith(".frozen")}
        trained = {tier for home, tier in homes.items() if not home.endswith(".frozen")}
        assert frozen == {"disk"} or "disk" not in trained, homes
    assert "disk" in trained


@pytest.mark.long
def test_a_batch_that_needs_more_host_memory_sends_state_to_disk_in_the_middle_of_a_training(tmp_path: Path) -> None:
    plain, sizes = Model(), (16, 280, 16)
    model, optimizer = on_disk(tmp_path, plain, host="2.9MB", memory="1.75MB", policy="fastest")
    other, moved = adamw(plain), []
    for rows in sizes:
        x, losses = torch.randn(rows, WIDTH), []
        for one, its_optimizer in ((model, optimizer), (plain, other)):
            losses.append(one(x))
            losses[-1].backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
        assert torch.equal(*losses)
        moved.append([home for home, tier in model._mt_model.door.parameters.tiers.items() if tier == "disk"])
    same(model, optimizer, plain, other)
    assert not moved[0] and moved[1] and moved[1] == moved[2]
    report = model.memory_report()
    assert report["peak_host_bytes"] <= report["budget_host_bytes"]
    assert report["peak_disk_bytes"] <= report["planned_peak_disk_bytes"] == model.plan.peak_bytes["disk"]


def failing(name: str, nth: int, lasting: bool = False) -> Any:
    real, count = getattr(os, name), 0

    def call(*args: Any) -> int:
        nonlocal count
        count += 1
        if count == nth or (lasting and count > nth):
            raise OSError(errno.EIO, "Input/output error")
        return int(real(*args))

    return call


def test_a_write_that_fails_leaves_a_model_that_says_so_until_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Model()
    model, optimizer = on_disk(tmp_path / "disk", plain)
    other = adamw(plain)
    assert torch.equal(step(model, optimizer), step(plain, other))
    save(tmp_path / "saved", model, optimizer, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing("pwritev", 4, lasting=True))
        with pytest.raises(DiskError, match=r"write of .* failed: Input/output error"):
            step(model, optimizer)
    with pytest.raises(StepError, match="failed among its updates"):
        step(model, optimizer)
    load(tmp_path / "saved", model, optimizer)
    for _ in range(2):
        assert torch.equal(step(model, optimizer), step(plain, other))
    same(model, optimizer, plain, other)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_disk_that_fails_from_the_first_update_on_leaves_the_model_as_before_the_step(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once where there is no optimizer state yet, and once where there is."""
    plain, read = Model(), Requests.read
    model, optimizer = on_disk(tmp_path, plain)
    other = adamw(plain)

    def read_fails(requests: Requests, *about: Any) -> None:
        if threading.current_thread().name.startswith("mtcompile-disk-in"):  # the thread that reads for updates
            raise DiskError(errno.EIO, "read failed: Input/output error")
        read(requests, *about)

    def write_fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):
        loss = model(torch.randn(16, WIDTH))
        before = copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(*((Requests, "read", read_fails) if verb == "read" else (os, "pwritev", write_fails)))
            with pytest.raises(DiskError, match=r"Input/output error|No space left"):
                loss.backward()
        del loss
        assert str(optimizer.state_dict()) == str(before)
        assert torch.equal(step(model, optimizer), step(plain, other))
    same(model, optimizer, plain, other)


def test_requests_that_carry_fewer_bytes_than_asked_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, lengths = Model(), list[int]()
    model, optimizer = on_disk(tmp_path, plain)
    other = adamw(plain)

    def short(carry: Any) -> Any:
        def call(file: int, buffers: Any, at: int) -> int:
            (whole,) = buffers
            lengths.append(len(whole))
            return int(carry(file, [memoryview(whole)[:BLOCK]], at))

        return call

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, short(getattr(os, name)))
    for _ in range(2):
        assert torch.equal(step(model, optimizer), step(plain, other))
    same(model, optimizer, plain, other)
    assert max(lengths) > BLOCK


@pytest.mark.long
def test_reads_that_fail_in_updates_end_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = on_disk(tmp_path, Model())
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for nth in (1, 9, 20):  # after the load, a backward reads only weights
        loss = model(torch.randn(16, WIDTH))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing("preadv", nth))
            with pytest.raises(DiskError, match=r"read of .* failed: Input/output error"):
                loss.backward()
        del loss
        model.load_state_dict(Model().state_dict())
        optimizer.load_state_dict(saved)
    step(model, optimizer)


def test_an_optimizer_that_is_not_elementwise_keeps_its_weights_off_the_disk(tmp_path: Path) -> None:
    model, _ = on_disk(
        tmp_path, Model(), lambda m: torch.optim.Adafactor([p for p in m.parameters() if p.requires_grad]), host="1.2MB"
    )
    with pytest.raises(BudgetError, match=r"no plan fits host=.*\n.*with an elementwise optimizer, such as AdamW"):
        model(torch.randn(16, WIDTH))


TRAINING = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.helpers.disk.training import Model, on_disk, step
model, optimizer = on_disk(Path(sys.argv[1]), Model())
step(model, optimizer)
print("ready", flush=True)
while True:
    step(model, optimizer)
"""


def killed(folder: Path, times: int) -> None:
    """Kills a training at random moments. Nothing may be left in its folder when the next one has started."""
    wait = random.Random(7)
    root = str(Path(__file__).parents[2])
    for _ in range(times):
        command = [sys.executable, "-c", TRAINING, str(folder), root]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            assert list(folder.iterdir()) == []
            time.sleep(wait.random() * 0.2)
            process.send_signal(signal.SIGKILL)
        assert list(folder.iterdir()) == []


@pytest.mark.long
def test_trainings_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    killed(tmp_path, 20)


@pytest.mark.slow
def test_the_proof_rejects_schedules_that_misuse_the_disk(tmp_path: Path) -> None:
    model, optimizer = on_disk(tmp_path, Model())
    step(model, optimizer)
    schedule: Schedule = model.schedule
    verify(schedule)
    rows = schedule.instructions
    reads = [i for i, row in enumerate(rows) if row.queue == "disk_read" and row.op == "copy"]
    fetches = [i for i, row in enumerate(rows) if row.queue == "h2d" and row.op == "copy" and any(d in reads for d in row.deps)]
    slots = [i for i, row in enumerate(rows) if row.queue == "disk_read" and row.op == "alloc" and row.deps]
    assert reads and fetches and slots
    for index in (*fetches, *slots):  # a fetch waits for its read, a read for its slot
        with pytest.raises(ScheduleError):
            verify(replaced(schedule, index, deps=()))
    with pytest.raises(ScheduleError, match="I1"):
        verify(replaced(schedule, reads[0], queue="h2d"))
    updates = [i for i, row in enumerate(rows) if row.work == "update" and schedule.buffers[row.reads[0]].tier == "disk"]
    home = rows[updates[0]].reads[0]
    other = next(i for i, row in enumerate(rows) if row.work == "update" and home not in row.reads)
    with pytest.raises(ScheduleError, match="I1"):  # only what it updates may a kernel of the host find on disk
        verify(replaced(schedule, other, reads=(*rows[other].reads, home)))
    over = {**schedule.peak_nbytes, "disk": schedule.peak_nbytes["disk"] - 1}
    with pytest.raises(ScheduleError, match="I3"):
        verify(replace(schedule, peak_nbytes=over))


def replaced(schedule: Schedule, index: int, **fields: Any) -> Schedule:
    rows = list(schedule.instructions)
    rows[index] = replace(rows[index], **fields)
    return replace(schedule, instructions=tuple(rows))
