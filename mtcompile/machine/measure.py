"""This machine as plans assume it, measured in a few seconds: copies, memories, disk, AdamW on the host, and products.

Each figure is the median of short repetitions of what a training step does.
"""

from __future__ import annotations

import contextlib
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from mtcompile.machine import bandwidth, compute
from mtcompile.machine.bandwidth import usable_cpus
from mtcompile.machine.device import total_nbytes
from mtcompile.machine.disk import disk
from mtcompile.machine.system_files import host_nbytes
from mtcompile.machine.timing import Effort, Measurement
from mtcompile.passes.analysis.cost import Machine
from mtcompile.runtime.devices.protocol import Device


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A machine with the measurements that it comes from."""

    machine: Machine
    measurements: tuple[Measurement, ...]


def name_of(where: torch.device) -> str:
    """Returns the device's name; for the emulated device, the processor's."""
    if where.type != "cpu":
        return str(torch.get_device_module(where).get_device_properties(where).name)
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def identity(where: torch.device) -> str:
    """Returns the text that a measured machine depends on: device, processor, processors and threads in use, torch."""
    names = (name_of(where), name_of(torch.device("cpu")), usable_cpus(), torch.get_num_threads(), torch.__version__)
    return " | ".join(map(str, names))


def measure(device: Device, effort: Effort, folder: Path) -> MeasuredMachine:
    """Measures the machine. ``folder``: where a temporary file measures the disk. Raises RuntimeError if memory is short."""
    where = device.where
    link, copies = bandwidth.copies(device, effort)
    memory, streams = bandwidth.host_memory(effort)
    update, adamw = bandwidth.host_adamw(device, effort)
    rates, product = compute.matmul(where, effort)
    issue, tiny = compute.issue(where, effort)
    drive = disk(folder, effort)
    rows = [*copies, streams, adamw, drive, product, compute.attention(where, effort, rates), tiny]
    strided = Machine().strided_gops
    if where.type != "cpu":
        memory, row = bandwidth.device_memory(where, effort)
        rows.insert(len(copies), row)
        strided, row = compute.strided(where, effort)
        rows.append(row)
    threads = torch.get_num_threads()
    name = name_of(where) if where.type != "cpu" else f"{name_of(where)}, {threads} threads (emulated device)"
    name += ", host memory not pinned" if device.staging else ""
    machine = Machine(
        name=name,
        flops=_rounded(rates["flops"]),
        memory_gbps=_rounded(memory),
        h2d_gbps=_rounded(link["h2d"]),
        d2h_gbps=_rounded(link["d2h"]),
        issue_us=_rounded(issue),
        host_gbps=_rounded(update),
        device_nbytes=total_nbytes(device) or 0,
        disk_read_gbps=_rounded(drive.values.get("read", Machine().disk_read_gbps)),
        disk_write_gbps=_rounded(drive.values.get("write", Machine().disk_write_gbps)),
        disk_nbytes=_free_nbytes(folder),
        strided_gops=_rounded(strided),
        fp32_flops=_rounded(rates["fp32_flops"]),
        tf32_flops=_rounded(rates.get("tf32_flops", 0.0)),
        fp64_flops=_rounded(rates.get("fp64_flops", 0.0)),
        host_nbytes=host_nbytes(),
    )
    return MeasuredMachine(machine, tuple(rows))


def _free_nbytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
