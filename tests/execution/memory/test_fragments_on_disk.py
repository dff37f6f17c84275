"""A layer larger than the device and the host trains in fragments that are at home on disk: bits, bytes and faults."""

from __future__ import annotations

import copy
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.checkpoint import load, save
from mtcompile.errors import StepError
from mtcompile.execution import session
from mtcompile.passes.cuts.fragments import cut
from mtcompile.passes.step_graph import fragments_of
from mtcompile.runtime.disk.errors import DiskCorrupt, DiskError, DiskFull
from mtcompile.runtime.disk.store import DiskStore

WIDTH, WEIGHT = 64, 1 << 20  # bytes
TIERS = ("device", "host", "disk")
Make = Callable[[Any], torch.optim.Optimizer]


class First(nn.Module):
    """A layer of ``WEIGHT`` bytes whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


class Wide(First):
    """A second layer as large, whose input gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4096, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


class Head(First):
    """A small layer, and a layer of ``WEIGHT`` bytes whose input gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(torch.relu(self.small(x))).square().mean()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MT_CHECK", "1")
    monkeypatch.setattr(cut, "_PARTS", (16,))  # of the ways to cut, one is tried
    torch.manual_seed(5)
    torch.compiler.reset()
    yield


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def on_disk(folder: Path, plain: nn.Module, make: Make = adamw, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A copy of a model that trains from a disk, with less memory on the device and on the host than the weight takes."""
    small = {"memory": WEIGHT // 2, "host": WEIGHT * 15 // 16, "disk": f"{folder}:64MiB"}
    return compiled(plain, make, **{**small, **options})


def compiled(plain: nn.Module, make: Make = adamw, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = copy.deepcopy(plain)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    fixed: dict[str, Any] = {"policy": "offload-all", "update": "backward", "device": "cpu"}  # without a search
    return mtcompile.compile(model, optimizer=optimizer, **{**fixed, **options}), optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    loss: torch.Tensor = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(one: tuple[Any, torch.optim.Optimizer], other: tuple[Any, torch.optim.Optimizer]) -> None:
    """Asserts that two models, each with its optimizer, have the same weights and state."""
    models, optimizers = zip(one, other, strict=True)
    for (name, ours), (_, theirs) in zip(*(model.state_dict().items() for model in models), strict=True):
        assert torch.equal(ours, theirs), name
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert ours.keys() == theirs.keys()
    for index, entry in ours.items():
        assert entry.keys() == theirs[index].keys()
        assert all(torch.equal(value, theirs[index][key]) for key, value in entry.items() if isinstance(value, torch.Tensor))


def assert_within_plan(model: Any) -> None:
    report = model.memory_report()
    for tier in TIERS:
        assert 0 < report[f"peak_{tier}_bytes"] <= report[f"planned_peak_{tier}_bytes"] <= report[f"budget_{tier}_bytes"], tier


def store_of(model: Any) -> DiskStore:
    store = model._mt_model.door.parameters.disk
    assert isinstance(store, DiskStore)
    return store


@pytest.mark.slow
def test_a_layer_larger_than_device_and_host_trains_from_disk_with_the_bits_of_plain_pytorch(tmp_path: Path) -> None:
    plain = First()
    ours, theirs = on_disk(tmp_path, plain), (plain, adamw(plain.parameters()))  # by default: nothing fits without
    for seed in range(3):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)  # the first moments are those of the gradients
    assert_within_plan(ours[0])
    model, disk = ours[0], ours[0]._mt_model.door.disk
    assert max(model.plan.budget_bytes[tier] for tier in ("device", "host")) < WEIGHT
    assert disk.holds(model.first.weight) and all(disk.holds(v) for v in ours[1].state[model.first.weight].values() if v.dim())
    reads = [each.nbytes for each in model.schedule.instructions if each.work == "read"]
    assert len(reads) > 8 and max(reads) <= WEIGHT // 8
    x = torch.randn(3, WIDTH)
    with torch.no_grad():  # a plan of its own
        assert torch.equal(model(x), plain(x))
    report = model.memory_report()
    assert all(report[f"peak_{tier}_bytes"] <= report[f"budget_{tier}_bytes"] for tier in TIERS)


@pytest.mark.parametrize("policy", ["offload-all", pytest.param("fastest", marks=pytest.mark.long)])
def test_a_weight_larger_than_the_host_is_read_in_fragments_for_its_input_s_gradient(policy: str, tmp_path: Path) -> None:
    """And its gradients wait on the host for no others' updates."""
    plain = Head()
    options: dict[str, Any] = {"memory": 4 * WEIGHT, "fragments": "exact", "policy": policy}
    ours, theirs = on_disk(tmp_path, plain, **options), (plain, adamw(plain.parameters()))
    for seed in range(3):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)
    assert_within_plan(ours[0])
    schedule = ours[0].schedule
    moved = [each for _, each in schedule.phase("backward") if each.work == "read"]
    assert sum(each.nbytes for each in moved) == WEIGHT and max(each.nbytes for each in moved) <= WEIGHT // 8
    updates = [place for place, each in schedule.phase("backward") if each.op == "run" and each.queue == "host"]
    assert len(updates) > 8 and updates[0] < max(place for place, each in schedule.phase("backward") if each.work == "read")


@pytest.mark.slow
@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.long), "backward"])
def test_a_flipped_byte_of_a_fragment_on_disk_is_named(phase: str, tmp_path: Path) -> None:
    model, optimizer = on_disk(tmp_path, First())
    step(model, optimizer, 0)
    store, row = store_of(model), 1000
    at = store.place_of(model.first.weight[row].data_ptr())
    assert at is not None
    loss = model(torch.randn(4, WIDTH)) if phase == "backward" else None  # which reads the weight for its update alone
    (byte,) = os.pread(store.file.cached, 1, at)
    os.pwrite(store.file.cached, bytes([byte ^ 4]), at)
    with pytest.raises(DiskCorrupt) as raised:
        model(torch.randn(4, WIDTH)) if loss is None else loss.backward()
    if phase == "forward":
        named = re.search(r"first\.weight\[(\d+):(\d+)\]: its bytes", str(raised.value))
        assert named is not None and int(named[1]) <= row < int(named[2])
    assert "first.weight" in str(raised.value)


@pytest.mark.slow
def test_a_checkpoint_has_whole_weights_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    plain = First()
    ours, theirs = on_disk(tmp_path / "disk", plain), (plain, adamw(plain.parameters()))
    for one in (ours, theirs):
        step(*one, 0)
    save(tmp_path / "saved", *ours, step=1)
    assert_same(ours, theirs)
    step(*ours, 5)
    load(tmp_path / "saved", *ours)
    assert torch.equal(step(*ours, 1), step(*theirs, 1))
    assert_same(ours, theirs)
    state = copy.deepcopy(ours[1].state_dict())  # in memory of its own
    step(*ours, 5)
    ours[0].load_state_dict(plain.state_dict())
    ours[1].load_state_dict(state)
    for seed in (2, 3):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)


@pytest.mark.slow
def test_batches_of_two_sizes_take_turns_without_new_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search begins with a whole weight, for which the host has no room."""
    model, optimizer = on_disk(tmp_path, First(), memory=3 * WEIGHT)
    plan, planned = session.compile_step, list[Any]()
    monkeypatch.setattr(session, "compile_step", lambda *given: planned.append(plan(*given)) or planned[-1])
    for rows in (4, 5, 4, 5, 4):
        model(torch.randn(rows, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(planned) == 2


@pytest.mark.slow
def test_a_forecast_cuts_what_is_to_be_on_disk() -> None:
    options: dict[str, Any] = {"memory": WEIGHT // 2, "host": WEIGHT * 15 // 16, "disk": "64MiB", "update": "backward"}
    data = {"x": torch.randn(4, WIDTH)}
    assert not mtcompile.plan(First(), data, fragments=None, machine="rtx4090", **options).feasible
    forecast = mtcompile.plan(First(), data, machine="rtx4090", force=True, **options)  # however slow the disk makes it
    assert forecast.feasible and forecast.ledger is not None
    for tier, parts in forecast.ledger.items():
        assert sum(parts.values()) == forecast.peak_bytes[tier] <= forecast.budget_bytes[tier], tier
    assert forecast.ledger["disk"]["weights"] == WEIGHT and forecast.ledger["disk"]["optimizer"] == 2 * WEIGHT


WAYS: dict[str, dict[str, Any]] = {
    "momentum": {"make": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)},
    "amsgrad": {"make": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True), "host": 2 * WEIGHT},
    "masters": {"precision": "bf16-master32", "memory": WEIGHT * 3 // 8, "host": WEIGHT * 5 // 4},
    "run ahead": {"run_ahead": True},
    "micro-batches": {"accumulate": 2},
    "searched": {"policy": "fastest"},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(w, marks=() if w == "micro-batches" else pytest.mark.long) for w in WAYS])
def test_other_ways_to_train_have_the_bits_of_a_resident_run(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtcompile.optim.disk_state.PIECE", 8192)  # elements, so that masters are updated in pieces
    options: dict[str, Any] = {"make": adamw, **WAYS[way]}
    plain, resident = First(), {"memory": "64MiB", "host": None, "fragments": None}
    if "precision" in options:
        plain.to(torch.bfloat16)
    ours, theirs = on_disk(tmp_path, plain, **options), compiled(plain, **{**options, **resident})
    for seed in range(3):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)
    assert_within_plan(ours[0])
    assert "first.weight in" in str(ours[0].plan) and ours[0].plan.disk_write_bytes > 0


@pytest.mark.long
def test_fragments_are_read_straight_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_DIRECT", "1")
    plain = First()
    ours, theirs = on_disk(tmp_path, plain), (plain, adamw(plain.parameters()))
    for seed in range(3):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)
    assert ours[0].plan.disk_direct and not any(each.work == "read" for each in ours[0].schedule.instructions)


@pytest.mark.long
def test_split_sums_are_those_without_a_disk(tmp_path: Path) -> None:
    plain = Wide()
    ours = on_disk(tmp_path, plain, fragments="split")
    theirs = compiled(plain, memory=WEIGHT // 2, fragments="split")
    for seed in range(3):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)
    assert_within_plan(ours[0])
    assert ours[0].plan.numerics == theirs[0].plan.numerics and "summed over fragments" in ours[0].plan.numerics


@pytest.mark.long
def test_frozen_weights_on_disk_are_read_in_fragments(tmp_path: Path) -> None:
    plain = Wide()
    plain.first.requires_grad_(False)
    options: dict[str, Any] = {"update": "step", "memory": 4 * WEIGHT, "fragments": "exact"}
    ours = on_disk(tmp_path, plain, host=5 * WEIGHT, **options)
    theirs = plain, adamw([plain.second.weight])
    for seed in range(3):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)
    assert_within_plan(ours[0])
    assert ours[0].plan.disk_read_bytes >= WEIGHT and ours[0].plan.disk_write_bytes == 0


@pytest.mark.slow
def test_a_fragment_is_read_and_updated_while_the_one_before_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = First()
    ours, theirs = on_disk(tmp_path, plain), (plain, adamw(plain.parameters()))
    assert torch.equal(step(*ours, 0), step(*theirs, 0))
    requests, parts = store_of(ours[0])._requests, fragments_of(ours[0]._mt_model.session.last.step)
    read, write, changed = requests.read, requests.write, threading.Condition()
    reads, overlapped = list[str](), list[bool]()

    def reading(transfers: Any, verify: bool) -> None:
        if any("exp_avg of" in each.name for each in transfers):  # for an update
            with changed:
                reads.append(transfers[0].name)
                changed.notify_all()
        read(transfers, verify)

    def writing(transfers: Any, must_end: bool) -> None:
        wanted = min(len(overlapped) + 3, len(parts))  # this one, the one that is updated meanwhile, and the one after it
        with changed:
            overlapped.append(changed.wait_for(lambda: len(reads) >= wanted, timeout=2))
        write(transfers, must_end)

    with monkeypatch.context() as patch:
        patch.setattr(requests, "read", reading)
        patch.setattr(requests, "write", writing)
        assert torch.equal(step(*ours, 1), step(*theirs, 1))
    assert len(overlapped) >= len(parts) > 8 and all(overlapped[: len(parts)])
    assert torch.equal(step(*ours, 2), step(*theirs, 2))
    assert_same(ours, theirs)


@pytest.mark.parametrize("way", ["model", pytest.param("masters", marks=pytest.mark.long)])
def test_a_fragment_that_cannot_be_read_for_the_first_update_leaves_the_model_as_before_the_step(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WAYS.get(way, {})
    plain = First().to(torch.bfloat16 if options else torch.float32)
    plain.first.bias.requires_grad_(False)  # else it is updated first, on the device
    ours = on_disk(tmp_path, plain, **options)
    theirs = compiled(plain, **{**options, "memory": "64MiB", "host": None, "fragments": None})
    assert torch.equal(step(*ours, 0), step(*theirs, 0))
    real = store_of(ours[0])._requests.read

    def failing(transfers: Any, verify: bool) -> None:
        if threading.current_thread().name.startswith("mtcompile-disk-in"):  # the thread that reads for updates
            raise DiskError("read failed")
        real(transfers, verify)

    with monkeypatch.context() as patch:
        patch.setattr(store_of(ours[0])._requests, "read", failing)
        with pytest.raises(DiskError):
            step(*ours, 1)
    for seed in (1, 2):
        assert torch.equal(step(*ours, seed), step(*theirs, seed))
    assert_same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "nth"), [(errno.ENOSPC, 2), pytest.param(errno.EIO, -1, marks=pytest.mark.long)])
def test_a_write_that_fails_behind_is_told_in_its_step(
    number: int, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one, behind one that was carried, and the last one, behind which nothing is updated."""
    plain = First()
    ours, theirs = on_disk(tmp_path / "disk", plain), (plain, adamw(plain.parameters()))
    written = list[int]()
    real = os.pwritev

    def failing(*args: Any) -> int:
        written.append(1)
        if fails and len(written) >= (nth if nth > 0 else count):  # to whatever file
            raise OSError(number, os.strerror(number))
        return real(*args)

    fails = False
    monkeypatch.setattr(os, "pwritev", failing)
    assert torch.equal(step(*ours, 0), step(*theirs, 0))
    save(tmp_path / "saved", *ours, step=1)
    written.clear()
    assert torch.equal(step(*ours, 1), step(*theirs, 1))
    count, fails = len(written), True
    written.clear()
    with pytest.raises(DiskFull if number == errno.ENOSPC else DiskError, match=r"write of .*first\.\w+.* failed"):
        step(*ours, 2)
    with pytest.raises(StepError, match="failed among its updates"):
        step(*ours, 2)
    fails = False
    load(tmp_path / "saved", *ours)
    for seed in (1, 2):
        loss = step(*ours, seed)
        assert seed == 1 or torch.equal(loss, step(*theirs, 2))
    assert_same(ours, theirs)
