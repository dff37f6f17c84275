"""Forecasts with a disk: what goes there, in bytes that add up, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from benchmarks import disk_steps
from benchmarks.disk_steps import MACHINES, TOKENS, Stack
from mtcompile.forecast.result import Forecast
from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.cost import Machine
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us
from mtcompile.runtime.usage import most_in_slots
from tests.helpers.stacks import WIDTH, Residual


def forecast(machine: Any = "rtx4090", **options: Any) -> Forecast:
    return mtcompile.plan(lambda: (Residual(), {"x": torch.randn(16, WIDTH)}), machine=machine, **options)


@pytest.mark.slow
def test_a_forecast_with_a_disk_has_parts_that_add_up() -> None:
    planned = forecast(precision="bf16-master32", update="backward", memory="800KB", host="2.3MB", disk="1GB")
    assert planned.feasible and planned.ledger is not None and planned.peak_bytes["host"] <= 2.3e6
    for tier, parts in planned.ledger.items():
        assert sum(parts.values()) == planned.peak_bytes[tier] and all(nbytes >= 0 for nbytes in parts.values()), tier
    there = planned.ledger["disk"]
    assert there["master"] == there["weights"] > 0 and there["optimizer"] == 4 * there["weights"] and not there["gradients"]
    assert planned.disk_read_bytes > planned.disk_write_bytes > 0 and planned.disk_days


@pytest.mark.slow
def test_what_goes_straight_to_the_device_needs_no_slots_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"memory": "800KB", "host": "2.3MB", "disk": "1GB"}
    for way in ("0", "1"):
        monkeypatch.setenv("MT_DISK_DIRECT", way)
        planned = forecast(precision="bf16-master32", update="backward", **sizes)
        assert planned.feasible and planned.ledger is not None and planned.disk_direct == (way == "1")
        assert ("weights go straight to the device" in str(planned)) == planned.disk_direct
        assert sum(planned.ledger["host"].values()) == planned.peak_bytes["host"]
        assert planned.planned is not None and planned.planned.plan.certificate is not None
        assert (most_in_slots(planned.planned.schedule, "host", "param") == 0) == planned.disk_direct
        assert planned.planned.plan.certificate.bound_us <= planned.step_time_us


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "host"), [(433_843, 1_089_792), (289_228, 1_089_792), (361_536, 1_387_008)])
def test_a_step_that_fits_without_a_disk_in_some_form_is_as_fast_with_one(memory: int, host: int) -> None:
    """Also where whole weights would need the disk."""
    limits = {"memory": memory, "host": host, "update": "backward", "machine": "h100-sxm"}
    data = {"x": torch.zeros(64, 128)}
    without, with_disk = (mtcompile.plan(lambda: (Layers(), data), disk=disk, **limits) for disk in (None, 2_972_160))
    assert without.feasible and with_disk.feasible and with_disk.step_time_us <= without.step_time_us
    assert with_disk.certificate is not None and with_disk.certificate.bound_us <= with_disk.step_time_us
    assert with_disk.planned is not None and with_disk.planned.schedule.peak_nbytes["host"] <= host


def test_a_host_without_room_for_what_cannot_go_to_disk_is_refused() -> None:
    refused = forecast(memory="800KB", host="1MB", disk="1GB")  # optimizer.step() needs all weights and gradients at home
    assert not refused.feasible and 'with update="backward", they may go to disk' in str(refused)


@pytest.mark.slow
def test_a_bound_counts_the_disk() -> None:
    planned = forecast(precision="bf16-master32", update="backward", memory="800KB", host="1.9MB", disk="1GB").planned
    assert planned is not None and planned.plan.certificate is not None
    plan = planned.plan
    assert plan.peak_bytes["disk"]
    drive_us = PRESETS["rtx4090"].drive_us(plan.disk_read_bytes, plan.disk_write_bytes)
    assert plan.total_us >= drive_us  # it reads or writes
    assert plan.certificate.bound_us <= plan.total_us and plan.certificate.gains_us["disk"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("apart", [400_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_more_host_memory_is_never_slower_with_a_disk(apart: int) -> None:
    """Beyond luck."""
    options: dict[str, Any] = {"precision": "bf16-master32", "update": "backward", "memory": "800KB", "disk": "1GB"}
    steps = [forecast(**options, host=host) for host in range(1_600_000, 3_600_000, apart)]
    assert all(step.feasible for step in steps)
    fastest = inf
    for step in steps:
        assert step.step_time_us <= 1.01 * fastest
        fastest = min(fastest, step.step_time_us)


class Tied(torch.nn.Module):
    """A large embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(2048, 64), torch.nn.Linear(64, 2048, bias=False)
        self.head.weight = self.embedding.weight
        blocks = [[torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)] for _ in range(2)]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*layers) for layers in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


@pytest.mark.slow
def test_a_device_that_is_too_small_even_with_a_disk_is_refused() -> None:
    example = {"x": torch.randint(0, 2048, (4, 32))}
    options: dict[str, Any] = {"machine": "rtx4090", "memory": "600KB", "host": 50_000, "disk": "1GB", "update": "backward"}
    refused = mtcompile.plan(lambda: (Tied(), example), **options)
    assert not refused.feasible
    assert any(way.startswith("device memory of") for way in refused.ways_out)


@pytest.mark.long
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bound", MACHINES)
def test_steps_with_weights_on_disk_are_near_their_busiest_resource(bound: str, trained: bool) -> None:
    options: dict[str, Any] = {"host": "120MiB", "update": "backward"} if trained else {"host": "24MiB"}
    machine, example = MACHINES[bound], {"x": torch.ones(TOKENS, disk_steps.WIDTH)}
    planned = mtcompile.plan(lambda: (Stack(trained), example), machine=machine, memory="8MiB", disk="1GiB", **options).planned
    assert planned is not None and planned.plan.peak_bytes["disk"] > 20 * 2**20
    plan, busy = planned.plan, busy_us(simulate(planned.schedule))
    # With more weights there, a step that waits for the disk would be nearer to that, and slower.
    assert plan.total_us <= 1.11 * max(*busy.values(), machine.drive_us(plan.disk_read_bytes, plan.disk_write_bytes))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (
            "llama-70b",
            {"machine": "rtx4090", "host": "64GB", "disk": "2TB", "precision": "bf16-master32", "update": "backward"},
        ),
        ("qwen2.5-7b", {"machine": "gh200", "seq": 524_288}),
    ],
)
def test_large_steps_are_planned_near_their_bound_with_figures_that_sum(model: str, options: dict[str, Any]) -> None:
    planned = mtcompile.plan(model, **options)
    assert planned.feasible and planned.planned is not None and planned.ledger is not None
    plan, machine = planned.planned.plan, PRESETS[options["machine"]]
    for tier, parts in planned.ledger.items():
        assert sum(parts.values()) == planned.peak_bytes[tier] and all(nbytes >= 0 for nbytes in parts.values()), tier
        assert plan.budget_bytes.get(tier) is None or planned.peak_bytes[tier] <= plan.budget_bytes[tier], tier
    assert plan.certificate is not None and plan.certificate.gap(plan.total_us) < 0.1
    if "disk" in options:
        there = planned.ledger["disk"]
        trained = there["weights"] + there["master"] + there["optimizer"]
        assert trained == planned.peak_bytes["disk"] and there["optimizer"] == 4 * there["weights"]
        assert 0.99 * plan.disk_write_bytes < trained <= plan.disk_write_bytes * 1.01  # each step writes all of it
        assert plan.disk_write_bytes + 2 * there["weights"] >= 0.99 * plan.disk_read_bytes > plan.disk_write_bytes
        assert plan.disk_days is not None and plan.total_us >= machine.drive_us(plan.disk_read_bytes, plan.disk_write_bytes)
        per_day = plan.disk_write_bytes * 86_400e6 / plan.total_us
        assert plan.disk_days == pytest.approx(machine.disk_rated_nbytes / per_day)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_frozen_weights_of_lora_are_on_disk_without_state(optimizer: str) -> None:
    options = {"lora": 8, "precision": "bf16", "memory": "300KB", "host": "500KB", "optimizer": optimizer}
    assert not forecast(**options).feasible
    planned = forecast(**options, disk="1GB")
    assert planned.feasible and planned.disk_write_bytes < planned.disk_read_bytes and planned.ledger is not None
    there = planned.ledger["disk"]
    assert there["weights"] > 0 and there["weights"] + there["activations"] == planned.peak_bytes["disk"]
    assert bool(planned.disk_write_bytes) == bool(there["activations"])  # only activations are written


@pytest.mark.long
def test_what_is_not_updated_element_by_element_is_not_forecast_to_train_from_disk() -> None:
    options = {"update": "backward", "memory": "1250KB", "disk": "1GB"}
    trained = forecast(**options, optimizer="rmsprop", host="1.6MB")
    assert trained.feasible and trained.disk_write_bytes
    assert not forecast(**{**options, "disk": None}, optimizer="rmsprop", host="1.6MB").feasible
    refused = forecast(**options, optimizer="adafactor", host="700KB")
    assert not refused.feasible and not forecast(**{**options, "disk": None}, optimizer="adafactor", host="700KB").feasible
    assert any(way.startswith("an elementwise optimizer") for way in refused.ways_out)


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "memory", "host"),
    [("sgd", "1.9MB", "800KB"), ("adafactor", "1.9MB", "900KB"), ("adamw", "1250KB", "3.9MB")],  # the first with homes there
)
def test_what_fits_the_host_without_a_disk_fits_it_with_one_and_nothing_moves(optimizer: str, memory: str, host: str) -> None:
    options = {"update": "backward", "memory": memory, "host": host, "optimizer": optimizer}
    assert forecast(**options).feasible
    there = forecast(**options, disk="1GB")
    assert there.feasible and not there.disk_write_bytes and not there.peak_bytes["disk"]


def test_a_disk_needs_a_host_and_single_sizes() -> None:
    with pytest.raises(ValueError, match="expected host= too, found none"):
        forecast(Machine(), disk="1GB")
    with pytest.raises(ValueError, match="expects no disk="):
        forecast(disk="1GB", host="1GB", solve="memory")


SMALL = {"precision": "bf16-master32", "update": "backward", "memory": "800KB", "host": "2.3MB", "disk": "1GB"}
SLOW = replace(PRESETS["rtx4090"], disk_read_gbps=0.1, disk_write_gbps=0.05)


@pytest.mark.slow
def test_a_disk_that_is_too_slow_is_refused_with_figures() -> None:
    refused = forecast(SLOW, **SMALL)
    assert not refused.feasible and refused.planned is None
    assert re.search(r"makes no sense: a step would take .* times the .* expected at most 10 times", str(refused))
    assert re.search(r"A step reads 0\.00\d+ GB at 0\.1 GB/s and writes 0\.00\d+ GB at 0\.05 GB/s", refused.refusal)


def test_a_form_that_only_lacks_a_faster_disk_is_refused_before_one_that_lacks_device_memory() -> None:
    """As ``compile`` does: the whole layer does not fit the device, its fragments fit everything."""
    layer, x = torch.nn.Linear(64, 4096, bias=False), torch.randn(8, 64)
    slow = replace(SLOW, disk_read_gbps=0.02)
    refused = mtcompile.plan(layer, {"input": x}, machine=slow, update="backward", memory="600KiB", host="1MiB", disk="1GiB")
    assert not refused.feasible
    assert "makes no sense: a step would take" in str(refused), refused


@pytest.mark.long
def test_what_a_refusal_of_a_slow_disk_advises_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    host, speed, _ = forecast(SLOW, **SMALL).ways_out
    nbytes = re.search(r"host memory of .* \((\d+) bytes\), with which nothing goes to disk", host)
    factor = re.search(r"a disk ([\d.]+) times as fast", speed)
    assert nbytes is not None and factor is not None
    there = forecast(SLOW, **{**SMALL, "host": int(nbytes[1])})
    assert there.feasible and not there.disk_read_bytes
    faster = 1.1 * float(factor[1])
    assert forecast(replace(SLOW, disk_read_gbps=0.1 * faster, disk_write_gbps=0.05 * faster), **SMALL).feasible
    assert forecast(SLOW, **SMALL, force=True).feasible
    monkeypatch.setenv("MT_DISK_SLOWDOWN", "0")
    assert forecast(SLOW, **SMALL).feasible


@pytest.mark.long
def test_a_drive_that_would_be_worn_out_soon_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PRESETS["rtx4090"], disk_rated_nbytes=10**11)
    refused = forecast(small, **SMALL)
    assert not refused.feasible and "written as often as it is rated for, 0.1 TB; expected at least 1 days" in refused.refusal
    monkeypatch.setenv("MT_DISK_DAYS", "0")
    worn = forecast(small, **SMALL)
    assert worn.disk_days == pytest.approx(1e11 / worn.disk_write_bytes * worn.step_time_us / 86_400e6)
