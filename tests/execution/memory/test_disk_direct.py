"""Weights on disk that go straight to the device: bits of plain PyTorch, bytes per tier, the proof, and faults of the disk."""

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
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.proof.schedule import Given, check_schedule
from mtcompile.runtime.disk.errors import DiskCorrupt, DiskError
from mtcompile.runtime.schedule import Schedule, is_direct
from mtcompile.runtime.verify import ScheduleError, verify
from tests.helpers.stacks import WIDTH, Adapted, Residual, on_disk, same_weights, step

pytestmark = pytest.mark.slow  # it compiles models
SPLITS: dict[str, dict[str, Any]] = {  # budgets with which some weights are on disk
    "frozen": {"memory": "1MiB", "host": "2MB"},
    "trained": {"memory": "1500KB", "host": "2.6MB", "update": "backward"},
}


def plain_model(kind: str = "frozen") -> Residual:
    """Frozen blocks with adapters, or blocks that train but for the second one."""
    model = Residual(Adapted, 5) if kind == "frozen" else Residual()
    if kind == "trained":
        model.layers[1].requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def compiled(folder: Path, plain: nn.Module, kind: str = "frozen", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = copy.deepcopy(plain)
    optimizer = adamw(model)
    options = {"disk": f"{folder}:16MiB", "policy": "megatrain", **SPLITS[kind], **options}
    return mtcompile.compile(model, optimizer=optimizer, **options), optimizer


def same_training(model: Any, optimizer: torch.optim.Optimizer, plain: nn.Module, steps: int = 3) -> None:
    other = adamw(plain)
    for _ in range(steps):
        x = torch.randn(16, WIDTH)
        assert torch.equal(step(model, optimizer, x), step(plain, other, x))
    same_weights(model, plain)


@pytest.fixture(autouse=True)
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_DIRECT", "1")
    torch.manual_seed(3)
    torch.compiler.reset()


def reads(model: Any) -> list[int]:
    """The instructions that read weights straight to the device."""
    schedule: Schedule = model.schedule
    return [i for i, each in enumerate(schedule.instructions) if is_direct(each, schedule.buffers)]


def reads_to_host(model: Any) -> list[str]:
    """The weights that are read from disk to the host. Activations are read there too."""
    schedule: Schedule = model.schedule
    reads = (i for i in schedule.instructions if i.work == "read")
    return [name for each in reads for name in each.reads if schedule.buffers[name].role == "param"]


def check_ledger(model: Any) -> None:
    report, counters = model.memory_report(), 64 * len(list(model.parameters()))  # the plan rounds step counters up
    for tier in ("device", "host", "disk"):
        measured, planned = report[f"peak_{tier}_bytes"], report[f"planned_peak_{tier}_bytes"]
        assert 0 < measured <= planned <= report[f"budget_{tier}_bytes"], tier
        if tier != "disk":  # where the state of masters is rounded up
            assert planned - (counters if tier == "host" else 256) <= measured, tier
    store = model._mt_model.session.parameters.disk
    assert store.read_nbytes > 0


@pytest.mark.parametrize(
    ("memory", "host", "policy"),
    [
        ("1MiB", "2MB", "megatrain"),
        pytest.param("1MiB", "1.5MB", "fastest", marks=pytest.mark.long),
        pytest.param("600KiB", "2.4MB", "fastest", marks=pytest.mark.long),
        ("600KiB", "1.6MB", "fastest"),  # too little of the host for any other way
    ],
)
def test_frozen_weights_train_with_the_bits_of_plain_pytorch(
    memory: str, host: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = plain_model()
    model, optimizer = compiled(tmp_path, plain, memory=memory, host=host, policy=policy)
    same_training(model, optimizer, plain)
    with torch.no_grad():
        x = torch.randn(16, WIDTH)
        assert torch.equal(model(x), plain(x))
    check_ledger(model)
    assert on_disk(model) and reads(model) and not reads_to_host(model)


@pytest.mark.parametrize(
    ("memory", "host", "options"),
    [
        ("1500KB", "2.6MB", {}),
        pytest.param("1500KB", "2.2MB", {}, marks=pytest.mark.long),
        pytest.param("2MB", "2.6MB", {"run_ahead": True}, marks=pytest.mark.long),
        pytest.param("1500KB", "2.6MB", {"max_grad_norm": 0.1}, marks=pytest.mark.long),
        pytest.param("900KB", "2.6MB", {"precision": "bf16-master32"}, marks=pytest.mark.long),
    ],
)
def test_weights_that_train_have_the_bits_of_a_resident_run(
    memory: str, host: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = plain_model("trained")
    if "precision" in options:
        plain.bfloat16()
    model, optimizer = compiled(tmp_path, plain, "trained", memory=memory, host=host, **options)
    resident, its_optimizer = compiled(tmp_path, plain, "trained", memory="64MiB", host=None, disk=None, **options)
    for _ in range(3):
        x = torch.randn(16, WIDTH)
        assert torch.equal(step(model, optimizer, x), step(resident, its_optimizer, x))
    same_weights(model, resident)
    states = [one.state_dict()["state"] for one in (optimizer, its_optimizer)]
    for index, entry in states[0].items():
        assert all(
            value is states[1][index][key] is None or torch.equal(value, states[1][index][key]) for key, value in entry.items()
        )
    check_ledger(model)
    assert reads(model) and not reads_to_host(model) and any(i.work == "update" for i in model.schedule.instructions)


def least_host(folder: Path, kind: str) -> int:
    """The smallest host budget that works, as a refusal says it."""
    torch.compiler.reset()
    plain = Residual(Adapted, 2) if kind == "frozen" else plain_model(kind)
    model, _ = compiled(folder, plain, kind, host="200KB", fragments=None)
    with pytest.raises(BudgetError) as refusal:
        model(torch.randn(16, WIDTH))
    assert refusal.value.tier == "host"
    return refusal.value.minimum_bytes


@pytest.mark.parametrize("kind", ["frozen", pytest.param("trained", marks=pytest.mark.long)])
def test_less_of_the_host_is_needed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = least_host(tmp_path, kind)
    monkeypatch.setenv("MT_DISK_DIRECT", "0")
    assert straight < least_host(tmp_path, kind)


def test_a_plan_says_where_weights_go_and_what_a_step_reads(tmp_path: Path) -> None:
    model, optimizer = compiled(tmp_path, plain_model())
    step(model, optimizer, torch.randn(16, WIDTH))
    schedule, plan = model.schedule, model.plan
    straight = [schedule.instructions[i] for i in reads(model)]
    assert plan.disk_direct and sum(i.nbytes for i in straight) == plan.disk_read_bytes > 0 == plan.disk_write_bytes
    machine = model._mt_model.session.last.problem.machine
    for each in straight:
        assert each.time_us == machine.copy_us(each.nbytes, "direct")
    assert "read and 0 GB written a step; weights go straight to the device" in str(plan)
    assert "fetched straight" in str(plan) and "straight from disk" in str(schedule)
    assert '"disk_direct": true' in plan.to_json()


def test_the_emulated_device_goes_through_the_host_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_DIRECT", "auto")
    model, optimizer = compiled(tmp_path, plain_model())
    step(model, optimizer, torch.randn(16, WIDTH))
    assert on_disk(model) and not reads(model) and not model.plan.disk_direct


def test_the_proof_refuses_a_use_before_the_read_and_what_was_not_asked_for(tmp_path: Path) -> None:
    model, optimizer = compiled(tmp_path, plain_model())
    step(model, optimizer, torch.randn(16, WIDTH))
    schedule: Schedule = model.schedule
    verify(schedule)
    rows, straight = schedule.instructions, reads(model)
    arrived = {name for i in straight for name in rows[i].writes}
    users = [i for i, row in enumerate(rows) if row.op == "run" and arrived & {*row.reads}]
    slots = [i for i, row in enumerate(rows) if row.op == "alloc" and row.deps and arrived & {*row.writes}]
    assert users and slots
    for index in (*users, *slots):  # a kernel waits for the read, a read for its slot
        with pytest.raises(ScheduleError):
            verify(replaced(schedule, index, deps=()))
    for queue in ("disk_read", "d2h", "compute"):
        with pytest.raises(ScheduleError, match="I1"):
            verify(replaced(schedule, straight[0], queue=queue))
    compiled_step = model._mt_model.session.last
    problem, graph = compiled_step.problem, compiled_step.step
    given = Given(model.plan, problem.budgets, problem.workspace)
    check_schedule(graph, schedule, given)
    for plan, direct, message in [
        (replace(model.plan, disk_direct=False), True, "to take what was read from disk, found that it reads there itself"),
        (model.plan, False, "through the host, found a plan that reads straight to the device"),
    ]:
        with pytest.raises(SameComputationError, match=message):
            check_schedule(graph, schedule, replace(given, plan=plan, budgets=replace(problem.budgets, disk_direct=direct)))


def replaced(schedule: Schedule, index: int, **fields: Any) -> Schedule:
    rows = list(schedule.instructions)
    rows[index] = replace(rows[index], **fields)
    return replace(schedule, instructions=tuple(rows))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fault", ["fails", "ends early"])
def test_a_read_that_fails_leaves_the_model_before_the_step(
    phase: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_model()
    model, optimizer = compiled(tmp_path, plain)
    other = adamw(plain)
    x = torch.randn(16, WIDTH)
    assert torch.equal(step(model, optimizer, x), step(plain, other, x))

    def refused(*args: Any) -> int:
        if fault == "ends early":
            return 0
        raise OSError(errno.EIO, "Input/output error")

    loss = model(x) if phase == "backward" else None
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        with pytest.raises(DiskError, match=r"read of .*layers.* (failed: Input/output error|expected all of them, found 0)"):
            loss.backward() if loss is not None else model(x)
    del loss
    assert all(p.grad is None for p in model.parameters())
    same_weights(model, plain)
    assert torch.equal(step(model, optimizer, x), step(plain, other, x))
    same_weights(model, plain)


def test_a_flipped_bit_is_named_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_CHECK", "1")
    plain = plain_model()
    model, optimizer = compiled(tmp_path, plain)
    same_training(model, optimizer, plain, 1)
    parameters = model._mt_model.door.parameters
    place = next(p for p in parameters.places.values() if parameters.disk.place_of(p.pointer) is not None)
    at, file = parameters.disk.place_of(place.pointer), parameters.disk.file.cached
    byte = os.pread(file, 1, at + 11)[0]
    os.pwrite(file, bytes([byte ^ 1]), at + 11)
    with pytest.raises(DiskCorrupt, match=place.name):
        model(torch.randn(16, WIDTH))
    os.pwrite(file, bytes([byte]), at + 11)
    same_weights(model, plain)


def test_a_weight_that_the_user_has_given_memory_of_its_own_is_fetched_from_there(tmp_path: Path) -> None:
    plain = plain_model()
    model, optimizer = compiled(tmp_path, plain)
    same_training(model, optimizer, plain, 1)
    kept = []
    for one in (model, plain):
        for layer in one.layers:
            layer.up.weight.data = layer.up.weight.data * 2
            kept.append(layer.up.weight.data)  # somebody else holds it
    with torch.no_grad():
        x = torch.randn(16, WIDTH)
        assert torch.equal(model(x), plain(x))
    assert reads(model) and len(kept) == 2 * len(plain.layers)


def test_a_wrong_value_of_the_variable_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_DIRECT", "yes")
    with pytest.raises(ValueError, match="expected MT_DISK_DIRECT to be 0, 1 or auto, found 'yes'"):
        compiled(tmp_path, plain_model())


def test_calibrate_learns_the_speed_of_straight_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "cache"))
    model, optimizer = compiled(tmp_path, plain_model())
    for _ in range(3):
        step(model, optimizer, torch.randn(16, WIDTH))
    before = model._mt_model.session.last.problem.machine
    assert before.copy_us(1 << 20, "direct") == max(before.copy_us(1 << 20, queue) for queue in ("disk_read", "h2d"))
    calibration = model.calibrate()
    learnt = calibration.scale["direct"]
    assert learnt > 0 and "disk_read" not in calibration.scale
    torch.compiler.reset()
    again, optimizer = compiled(tmp_path, plain_model())
    step(again, optimizer, torch.randn(16, WIDTH))
    after = again._mt_model.session.last.problem.machine
    assert after.copy_us(1 << 20, "direct") == learnt * before.copy_us(1 << 20, "direct")
