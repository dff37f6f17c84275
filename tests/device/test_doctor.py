"""The doctor on a device with memory of its own: streams, pinned memory and the device's own limits."""

from __future__ import annotations

import collections
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mtcompile.machine import bandwidth, doctor
from mtcompile.machine.device import choose
from mtcompile.machine.timing import Effort
from mtcompile.runtime.devices import cuda
from mtcompile.runtime.devices.pinned import NotPinned

MIB = 2**20
TINY = Effort((MIB // 4, MIB), MIB, 8 * MIB, MIB // 4, 64, 64, 0.0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mtcompile.machine.doctor.FULL", TINY)
    monkeypatch.setattr("mtcompile.machine.limits._PINS", (MIB, 2 * MIB))
    monkeypatch.setenv("MT_CACHE", str(tmp_path))


def test_every_figure_is_measured(device: torch.device) -> None:
    report = doctor.examine(choose(device))
    assert report.machine is not None and report.machine.device_nbytes > 0
    numbers = {name: value for name, value in asdict(report.machine).items() if isinstance(value, float)}
    given = {"update_gbps", "watts"}  # host_gbps is that of updates; a device's limit of power is said by whoever owns it
    assert {name for name, value in numbers.items() if not value > 0} == given
    rows = {row.what: row.values for row in report.measurements}
    assert rows["device memory"]
    strided = rows["elementwise product of values of different strides"]["a * b"]
    assert report.machine.strided_gops == pytest.approx(strided, rel=1e-3)
    ways = [list(rows[f"copy to the {end}"].values())[-1] for end in ("device", "host")]
    share = min(1, list(rows["copies both ways at once, each"].values())[-1] / min(ways))
    assert [report.machine.h2d_gbps, report.machine.d2h_gbps] == pytest.approx([rate * share for rate in ways], rel=1e-3)
    alone, copying = (rows["host AdamW"][f"fused=True{when}"] for when in ("", ", while copies run"))
    assert report.machine.host_gbps == pytest.approx(bandwidth.in_a_step(alone, copying), rel=1e-3)
    limits = {limit.what: limit for limit in report.limits}
    assert limits["pinned memory"].level == "ok" and limits["pinned memory"].amount == 2 * MIB
    assert limits["device memory"].amount
    assert all(part.found for part in report.parts if part.name == "accelerator")
    assert json.loads(report.to_json())["machine"] == asdict(report.machine)


def test_copies_run_both_ways_for_as_long_as_asked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each direction in a thread, over and over, and not after."""
    copied, copy_now = collections.Counter[bool](), cuda.Api.copy

    def copy(self: cuda.Api, target: torch.Tensor, source: torch.Tensor) -> None:
        copy_now(self, target, source)
        copied[target.device == device] += 1

    monkeypatch.setattr(cuda.Api, "copy", copy)
    effort = replace(TINY, copies=(MIB,))
    with bandwidth.copying(choose(device), effort):
        until = time.monotonic() + 60
        while min(copied[True], copied[False]) < 3 and time.monotonic() < until:
            time.sleep(0.001)
    after = dict(copied)
    assert min(copied[True], copied[False]) >= 3
    time.sleep(0.05)
    assert dict(copied) == after


def test_copies_go_through_the_ring_where_nothing_is_pinned(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, nbytes: int) -> torch.Tensor:
        raise NotPinned(f"{nbytes} bytes")

    monkeypatch.setattr("mtcompile.runtime.devices.cuda.Api.pin", refuse)
    report = doctor.examine(choose(device))
    assert report.machine is not None and report.machine.h2d_gbps > 0
    assert "ring" in report.measurements[0].meaning
    assert next(limit for limit in report.limits if limit.what == "pinned memory").level == "watch"
