"""The doctor on a device with memory of its own: streams, pinned memory and the device's own limits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from mtcompile.machine import doctor
from mtcompile.machine.device import choose
from mtcompile.machine.timing import Effort
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
    assert all(value > 0 for value in asdict(report.machine).values() if isinstance(value, float))
    assert "device memory" in {row.what for row in report.measurements}
    limits = {limit.what: limit for limit in report.limits}
    assert limits["pinned memory"].level == "ok" and limits["pinned memory"].amount == 2 * MIB
    assert limits["device memory"].amount
    assert all(part.found for part in report.parts if part.name == "accelerator")
    assert json.loads(report.to_json())["machine"] == asdict(report.machine)


def test_copies_go_through_the_ring_where_nothing_is_pinned(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, nbytes: int) -> torch.Tensor:
        raise NotPinned(f"{nbytes} bytes")

    monkeypatch.setattr("mtcompile.runtime.devices.cuda.Api.pin", refuse)
    report = doctor.examine(choose(device))
    assert report.machine is not None and report.machine.h2d_gbps > 0
    assert "ring" in report.measurements[0].meaning
    assert next(limit for limit in report.limits if limit.what == "pinned memory").level == "watch"
