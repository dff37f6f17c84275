"""Machines come from presets and from files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtcompile.machine import presets
from mtcompile.machine.measure import MeasuredMachine
from mtcompile.machine.presets import PRESETS, named
from mtcompile.machine.system_files import host_nbytes
from mtcompile.passes.analysis.cost import Machine


def test_machines_come_from_presets_and_files(tmp_path: Path) -> None:
    assert named("gh200") == PRESETS["gh200"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"h2d_gbps": 12, "device_nbytes": 8 * 10**9}))
    mine = named(str(path))
    assert (mine.name, mine.h2d_gbps, mine.device_nbytes) == ("mine", 12, 8 * 10**9)
    wrongs = ['{"speed": 1}', '{"h2d_gbps": 0}', '{"h2d_gbps": "fast"}', '{"device_nbytes": 1.5}', '{"fuses": 1}', "[]", "{"]
    for wrong in wrongs:
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"machine file .*mine\.json"):
            named(str(path))
    with pytest.raises(ValueError, match="expected machine to be one of h200-sxm") as refused:
        named("abacus")
    (example,) = re.findall(r"\{.*\}", str(refused.value))  # how to describe another card
    path.write_text(example)
    told = json.loads(example)
    assert named(str(path)) == replace(PRESETS[told.pop("like")], name="mine", **told)
    for like in ("rtx4080", ["rtx4090"], 3):
        path.write_text(json.dumps({"like": like}))
        with pytest.raises(ValueError, match=r"mine\.json: like: expected one of h200-sxm, .* found"):
            named(str(path))


def test_the_host_has_the_memory_of_the_machine_or_of_the_control_group(tmp_path: Path) -> None:
    assert host_nbytes(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4096 kB\n")
    assert host_nbytes(tmp_path) == 4 * 2**20
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2**20}\n")
    assert host_nbytes(tmp_path) == 2**20


def card(name: str, units: int = 132, clock: int = 1980, gigabytes: int = 80) -> Any:
    return SimpleNamespace(name=name, multi_processor_count=units, clock_rate=clock * 1000, total_memory=gigabytes * 10**9)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Machine]:
    """Plans for a card of these properties; ``measured`` notes each that is measured."""
    measured: list[str] = []

    def planned(properties: Any, measurable: bool = True) -> Machine:
        def measure(*_: Any) -> MeasuredMachine:
            measured.append(properties.name)
            if not measurable:
                raise torch.OutOfMemoryError("no room")
            return MeasuredMachine(Machine(properties.name, 1e14, 1000.0, 20.0, 20.0), ())

        module = SimpleNamespace(get_device_properties=lambda where: properties)
        monkeypatch.setattr(torch, "get_device_module", lambda where: module)
        monkeypatch.setattr(presets, "choose", lambda where: None)
        monkeypatch.setattr(presets, "measure", measure)
        return presets.machine_of(torch.device("cuda", 1), fuses=False, staged=False)

    def adamw_gbps(effort: Any) -> float:
        hosts.append(effort)
        return 119.0 if len(hosts) == 1 else 84.0  # alone, and while copies run

    @contextlib.contextmanager
    def copying(device: Any, effort: Any) -> Iterator[None]:
        before = len(hosts)
        yield
        assert before == 1 and len(hosts) == 2  # it was measured before, and meanwhile

    hosts: list[Any] = []
    monkeypatch.setattr(presets.bandwidth, "copying", copying)
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    monkeypatch.setattr(presets.bandwidth, "adamw_gbps", adamw_gbps)
    presets._host_gbps.cache_clear()
    planned.measured, planned.hosts = measured, hosts  # type: ignore[attr-defined]
    return planned


@pytest.mark.parametrize(
    "properties",
    [
        card("NVIDIA H100 PCIe", 114, 1755),
        card("NVIDIA H100 NVL", 132, 1785, 94),
        card("NVIDIA H200 NVL", 132, 1785, 141),
        card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 1980, 10),
        card("NVIDIA A100-SXM4-80GB", 108, 1410),
        card("NVIDIA A100-PCIE-40GB", 108, 1410, 40),
        card("NVIDIA H100 80GB HBM3", 132, 1200),
    ],
    ids=lambda properties: properties.name,
)
def test_another_card_than_the_presets_is_measured_once(properties: Any, accelerator: Any) -> None:
    assert accelerator(properties).flops == 1e14
    again = accelerator(properties)
    assert again.flops == 1e14 and accelerator.measured == [properties.name]


@pytest.mark.parametrize(
    ("properties", "preset"),
    [
        (card("NVIDIA H100 80GB HBM3", 132, 1980, 85), "h100-sxm"),
        (card("NVIDIA H200", 132, 1980, 150), "h200-sxm"),
        (card("NVIDIA GH200 480GB", 132, 1980, 102), "gh200"),
        (card("NVIDIA A100-PCIE-80GB", 108, 1410, 85), "a100-pcie"),
        (card("NVIDIA GeForce RTX 4090", 128, 2520, 25), "rtx4090"),
    ],
)
def test_the_card_of_a_preset_is_planned_by_it(properties: Any, preset: str, accelerator: Any) -> None:
    assert accelerator(properties) is not None and accelerator.measured == []
    assert accelerator(properties).flops == PRESETS[preset].flops


def test_the_hosts_memory_is_measured_once(accelerator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cards are alike, hosts are not."""
    h200, preset = card("NVIDIA H200", 132, 1980, 150), PRESETS["h200-sxm"]
    first = accelerator(h200)
    presets._host_gbps.cache_clear()  # as in another process
    assert accelerator(h200) == first == replace(preset, name="h200-sxm, host memory measured", host_gbps=100.0)
    assert len(accelerator.hosts) == 2
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert accelerator(h200) == preset
    monkeypatch.undo()
    monkeypatch.setenv("MT_MEASURED", "0")
    assert accelerator(h200) == preset and len(accelerator.hosts) == 2


def test_products_of_fp32_run_as_torch_is_set() -> None:
    products, convolutions = torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv")  # noqa: B009 - torch has no type
    before = products.fp32_precision, convolutions.fp32_precision
    assert not named("h100-sxm").tf32_products and named("h100-sxm").tf32_convolutions
    try:
        products.fp32_precision, convolutions.fp32_precision = "tf32", "ieee"
        assert named("h100-sxm").tf32_products and not named("h100-sxm").tf32_convolutions
        assert named(PRESETS["h100-sxm"]) is PRESETS["h100-sxm"]
    finally:
        products.fp32_precision, convolutions.fp32_precision = before


def test_a_card_that_cannot_be_measured_has_its_share_of_the_preset(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slice_ = card("NVIDIA H100 80GB HBM3 MIG 2g.20gb", 33, 1980, 20)
    machine = accelerator(slice_, measurable=False)
    assert machine.flops == PRESETS["h100-sxm"].flops / 4 and "h100-sxm at 25%" in machine.name
    assert machine.device_nbytes == 20 * 10**9
    monkeypatch.setenv("MT_MEASURED", "0")
    assert accelerator(slice_).flops == machine.flops and len(accelerator.measured) == 1
