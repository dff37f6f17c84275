"""Training with weights on disk: bits of plain PyTorch, bytes per tier, faults, and what else touches parameters."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.checkpoint import load, save
from mtcompile.errors import BudgetError, CaptureError
from mtcompile.runtime.disk.errors import DiskCorrupt, DiskError, DiskFull
from mtcompile.runtime.schedule import gib
from tests.helpers.stacks import WIDTH, Adapted, Residual, on_disk, same_weights, step

LAYERS = 5


class Model(Residual):
    def __init__(self) -> None:
        super().__init__(Adapted, LAYERS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(3)
    torch.compiler.reset()
    yield


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def compiled(folder: Path, plain: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    options = {"memory": "1MiB", "host": "2MB", "disk": f"{folder}:16MiB", "policy": "megatrain", **options}
    return mtcompile.compile(model, optimizer=optimizer, **options), optimizer


def same_training(model: Any, optimizer: torch.optim.Optimizer, plain: nn.Module, steps: int = 3) -> None:
    other = torch.optim.AdamW(trained(plain), lr=1e-2)
    for _ in range(steps):
        x = torch.randn(16, WIDTH)
        assert torch.equal(step(model, optimizer, x), step(plain, other, x))
    same_weights(model, plain)


def test_frozen_weights_on_disk_train_with_the_bits_of_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)
    same_training(model, optimizer, plain)
    assert len(on_disk(model)) >= 2
    with torch.no_grad():
        x = torch.randn(16, WIDTH)
        assert torch.equal(model(x), plain(x))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("memory", "host"),
    [
        ("2MiB", "1.6MB"),
        *(pytest.param(*split, marks=pytest.mark.long) for split in (("8MiB", "8MB"), ("1MiB", "3MB"), ("1MiB", "2MB"))),
        *(pytest.param(*split, marks=pytest.mark.long) for split in (("600KiB", "2.4MB"), ("3MiB", "1.8MB"))),
    ],
)
def test_one_ledger_at_six_splits(memory: str, host: str, tmp_path: Path) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path, plain, memory=memory, host=host, policy="fastest")
    same_training(model, optimizer, plain)
    report, budgets = model.memory_report(), model.plan.budget_bytes
    counters = 64 * len(list(model.parameters()))  # the plan rounds step counters up
    for tier in ("device", "host", "disk"):
        measured, planned = report[f"peak_{tier}_bytes"], report[f"planned_peak_{tier}_bytes"]
        assert planned - (counters if tier == "host" else 256) <= measured <= planned <= budgets[tier], tier
    assert report["peak_disk_bytes"] == report["planned_peak_disk_bytes"]


@pytest.mark.long
def test_what_fits_the_host_does_not_move(tmp_path: Path) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path / "disk", plain, host="16MB")
    same_training(model, optimizer, plain)
    assert not on_disk(model) and not (tmp_path / "disk").exists()


@pytest.mark.slow
def test_the_plan_says_what_is_on_disk_and_what_a_step_moves(tmp_path: Path) -> None:
    model, optimizer = compiled(tmp_path, Model())
    step(model, optimizer, torch.randn(16, WIDTH))
    text, schedule = str(model.plan), model.schedule
    read = sum(i.nbytes for i in schedule.instructions if i.queue == "disk_read")
    assert read == model.plan.disk_read_bytes > 0 == model.plan.disk_write_bytes
    assert f"disk: peak {gib(schedule.peak_nbytes['disk'])} of 16.00 MiB" in text
    assert "written a step; reads are" in text and "disk [" in text
    assert "disk" in str(model.explain("layers.0")) or "disk" in str(model.explain("layers.2"))


@pytest.mark.long
def test_a_user_reads_and_writes_weights_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_CHECK", "1")
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)
    same_training(model, optimizer, plain, 1)
    with torch.no_grad():
        for one in (model, plain):
            for layer in one.layers:
                layer.up.weight.mul_(0.5)
                layer.down.bias.copy_(torch.arange(float(WIDTH)))
    x = torch.randn(16, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    state = Model().state_dict()
    model.load_state_dict(state)
    plain.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    for one in (model, plain):
        for layer in one.layers:
            layer.up.weight.data = layer.up.weight.data * 2
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.long
def test_a_plan_for_forwards_that_wait_together_leaves_room_for_them(tmp_path: Path) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)
    model._mt_model.session.frames.expected = 2  # as after a step that found two waiting
    other = torch.optim.AdamW(trained(plain), lr=1e-2)
    data = torch.randn(2, 16, WIDTH)
    for _ in range(2):
        for one, its_optimizer in ((model, optimizer), (plain, other)):
            (one(data[0]) + one(data[1])).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    same_weights(model, plain)
    report = model.memory_report()
    alone, its_optimizer = compiled(tmp_path, plain)
    step(alone, its_optimizer, data[0])
    of_one = alone.memory_report()
    assert of_one["planned_peak_host_bytes"] + alone.schedule.arena_nbytes["host"] > of_one["budget_host_bytes"]
    assert (
        report["planned_peak_host_bytes"] <= report["budget_host_bytes"] and report["peak_disk_bytes"] > 0
    )  # of both forwards


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_forwards_that_turn_out_to_wait_together_send_more_to_disk(shared: bool, tmp_path: Path) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path, plain, host="1.9MB" if shared else "2MB")
    other = torch.optim.AdamW(trained(plain), lr=1e-2)
    data = torch.randn(2, 16, WIDTH)
    same_weights(model, plain)
    assert torch.equal(step(model, optimizer, data[0]), step(plain, other, data[0]))
    before = on_disk(model)
    held = {name: p.data for name, p in model.named_parameters() if not p.requires_grad} if shared else {}
    for _ in range(2):
        for one, its_optimizer in ((model, optimizer), (plain, other)):
            if shared:  # whoever sees the memory goes on seeing it
                with pytest.raises(BudgetError, match="no plan fits host") if one is model else nullcontext():
                    (one(data[0]) + one(data[1])).backward()
                continue
            (one(data[0]) + one(data[1])).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    if shared:
        assert on_disk(model) == before and all(torch.equal(held[n], p) for n, p in plain.named_parameters() if n in held)
        return
    same_weights(model, plain)
    assert set(before) < set(on_disk(model))
    report = model.memory_report()
    assert report["planned_peak_host_bytes"] <= report["budget_host_bytes"]  # of all forwards that wait


@pytest.mark.long
@pytest.mark.parametrize("nth", [1, 3])
def test_a_move_to_disk_that_fails_in_the_middle_of_a_training_leaves_the_values(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)
    other = torch.optim.AdamW(trained(plain), lr=1e-2)
    data = torch.randn(2, 16, WIDTH)
    assert torch.equal(step(model, optimizer, data[0]), step(plain, other, data[0]))
    real, calls = os.pwritev, 0

    def failing(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls >= nth:  # to whatever file
            raise OSError(errno.EIO, "Input/output error")
        return int(real(*args))

    first = model(data[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(DiskError, match="failed: Input/output error"):
            model(data[1])
    del first
    same_weights(model, plain)
    for one, its_optimizer in ((model, optimizer), (plain, other)):
        (one(data[0]) + one(data[1])).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    same_weights(model, plain)
    assert model.memory_report()["peak_host_bytes"] <= model.memory_report()["budget_host_bytes"]


@pytest.mark.long
def test_a_checkpoint_is_saved_and_loaded(tmp_path: Path) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path / "one", plain)
    same_training(model, optimizer, plain)
    save(tmp_path / "saved", model, optimizer, step=3)
    again, its_optimizer = compiled(tmp_path / "two", Model())
    step(again, its_optimizer, torch.randn(16, WIDTH))
    load(tmp_path / "saved", again, its_optimizer)
    same_weights(again, plain)
    x = torch.randn(16, WIDTH)
    assert torch.equal(step(model, optimizer, x), step(again, its_optimizer, x))
    same_weights(again, model)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_disk_that_fails_leaves_the_model_before_the_step(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)
    other = torch.optim.AdamW(trained(plain), lr=1e-2)
    x = torch.randn(16, WIDTH)
    assert torch.equal(step(model, optimizer, x), step(plain, other, x))

    def refused(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    loss = model(x) if phase == "backward" else None
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        with pytest.raises(DiskError, match=r"read of .*layers.* failed: Input/output error"):
            loss.backward() if loss is not None else model(x)
    del loss
    assert all(p.grad is None for p in model.parameters())
    same_weights(model, plain)
    for _ in range(2):
        assert torch.equal(step(model, optimizer, x), step(plain, other, x))
    same_weights(model, plain)


def test_a_flipped_bit_on_disk_is_named_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_CHECK", "1")
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)
    same_training(model, optimizer, plain, 1)
    parameters = model._mt_model.door.parameters
    name, place = next((n, p) for n, p in parameters.places.items() if parameters.disk.place_of(p.pointer) is not None)
    at, file = parameters.disk.place_of(place.pointer), parameters.disk.file.cached
    byte = os.pread(file, 1, at + 11)[0]
    os.pwrite(file, bytes([byte ^ 1]), at + 11)
    with pytest.raises(DiskCorrupt):
        model(torch.randn(16, WIDTH))
    os.pwrite(file, bytes([byte]), at + 11)
    same_training(model, torch.optim.AdamW(trained(model), lr=1e-2), plain, 1)
    assert name.startswith("layers.")


@pytest.mark.slow
def test_a_full_disk_is_said_before_anything_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFull, match=f"disk={tmp_path}: expected room for"):
            model(torch.randn(16, WIDTH))
    same_weights(model, plain)
    same_training(model, optimizer, plain, 1)


@pytest.mark.slow
def test_refusals_say_what_would_work(tmp_path: Path) -> None:
    for disk, message in [
        ("/tmp", "expected disk to be a folder and a size"),
        (":3GiB", "expected disk to be a folder and a size"),
        ("/tmp:much", "expected a size such as"),
    ]:
        with pytest.raises(ValueError, match=message):
            mtcompile.compile(Model(), disk=disk, host="1GiB")
    with pytest.raises(ValueError, match="expected host= too"):
        mtcompile.compile(Model(), disk=f"{tmp_path}:1GiB")
    few = Residual(Adapted, 2)
    model, _ = compiled(tmp_path, few, host="925KB", disk=f"{tmp_path}:100KB", fragments=None)
    with pytest.raises(BudgetError, match=r"no plan fits disk=.*the smallest disk that works is"):
        model(torch.randn(16, WIDTH))
    model, _ = compiled(tmp_path, few, host="400KB", fragments=None)
    with pytest.raises(BudgetError, match=r"no plan fits host=.*\n.*weights that train, with gradients and optimizer state"):
        model(torch.randn(16, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [pytest.param("600KB", marks=pytest.mark.long), "1MiB"])
def test_the_smallest_host_that_a_refusal_names_trains(memory: str, tmp_path: Path) -> None:
    plain = Model()
    model, _ = compiled(tmp_path, plain, memory=memory, host="100KB")
    with pytest.raises(BudgetError, match="no plan fits host=") as refused:
        model(torch.randn(16, WIDTH))
    host = refused.value.minimum_bytes
    model, optimizer = compiled(tmp_path, plain, memory=memory, host=host)
    same_training(model, optimizer, plain, 2)
    assert model.memory_report()["peak_host_bytes"] <= host


@pytest.mark.slow
def test_a_disk_without_room_or_sense_is_refused_before_anything_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path / "disk", plain)
    with monkeypatch.context() as patch:
        patch.setattr("mtcompile.execution.memory.disk_room.free_nbytes", lambda folder: 100_000)
        with pytest.raises(BudgetError, match=r"expected room for \d+ bytes .*, found 100000 bytes free .*, of the 16777216"):
            model(torch.randn(16, WIDTH))
        patch.undo()
        patch.setenv("MT_DISK_SLOWDOWN", "1.001")
        with pytest.raises(BudgetError, match=r"makes no sense for this step: a step would take(.|\n)*try host memory of"):
            model(torch.randn(16, WIDTH))
    assert not (tmp_path / "disk").exists()
    same_training(model, optimizer, plain, 1)
    assert on_disk(model)


@pytest.mark.slow
def test_a_weight_on_disk_that_is_to_train_is_refused(tmp_path: Path) -> None:
    plain = Model()
    model, optimizer = compiled(tmp_path, plain)
    same_training(model, optimizer, plain, 1)
    model.requires_grad_(True)
    with pytest.raises(CaptureError, match="is on disk, where only frozen weights"):
        model(torch.randn(16, WIDTH))


@pytest.mark.slow
def test_the_process_holds_about_what_its_report_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(1408, 1408) for _ in range(16)))  # of 8 MiB each, which the C library would keep
    optimizer = torch.optim.AdamW(plain.parameters())
    options: dict[str, Any] = {"memory": "40MiB", "host": "100MiB", "disk": f"{tmp_path}:1GiB", "update": "backward"}
    model = mtcompile.compile(plain, optimizer=optimizer, **options)
    for _ in range(3):
        model(torch.randn(4, 1408)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = model.memory_report()
    assert 0 < report["process_bytes"] <= report["planned_process_bytes"] + (30 << 20)
    model.close()
