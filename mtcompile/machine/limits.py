"""Limits of this machine, and what would kill a training run here: memory, control groups, ulimits, disks, processors.

What a system does not report has no row.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from ctypes import addressof, c_char
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
import torch

from mtcompile import knobs
from mtcompile.machine.bandwidth import usable_cpus
from mtcompile.machine.device import total_nbytes
from mtcompile.machine.system_files import (
    control_groups,
    group_cpus,
    group_kills,
    group_memory,
    kilobytes,
    process_limits,
    text_of,
)
from mtcompile.machine.timing import MIB
from mtcompile.runtime.devices.cuda import CudaDevice
from mtcompile.runtime.devices.host_pages import ANYWHERE, huge_nbytes, huge_pages, prepare
from mtcompile.runtime.devices.pinned import NotPinned
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.optim.host_kernels import library
from mtcompile.runtime.pages import pages
from mtcompile.runtime.schedule import gib

Level = Literal["ok", "watch", "bad"]
GIB = 2**30
_ADAMW_STATE = 16  # bytes per fp32 parameter: weight, gradient, two moments
_SAMPLE_S, _BUSY_PERCENT = 0.3, 25  # of the processors' use by other programs
_TRIED_NBYTES = 16 * MIB  # to see whether huge pages are granted
_PINS = (GIB // 4, GIB, 4 * GIB)  # sizes at which pinning is tried


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit. ``amount``: bytes or a count, None if there is none; ``step``: the smallest thing to do if it is not ok."""

    what: str
    found: str
    amount: int | None
    level: Level
    meaning: str
    step: str = ""


def limits(device: Device, root: Path = Path("/")) -> tuple[Limit, ...]:
    """Returns every limit that the system reports, those of memory first."""
    of_memory = _memory(root), _group_memory(root), _swap(root), _shared_memory(root)
    of_devices = _disks(), _pinning(device, root), _pages(device, root), _accelerator(device), _processors(root)
    ulimits = _ulimits(root, accelerated=device.where.type != "cpu")
    rows = itertools.chain(*of_memory, ulimits, *of_devices)
    return tuple(replace(row, step="") if row.level == "ok" else row for row in rows)


def _level(amount: int, bad: int, watch: int) -> Level:
    return "bad" if amount < bad else "watch" if amount < watch else "ok"


def _memory(root: Path) -> Iterator[Limit]:
    memory = kilobytes(root / "proc/meminfo")
    if "MemAvailable" not in memory:
        return
    free, total = memory["MemAvailable"], memory.get("MemTotal", 0)
    meaning = f"room for {free / _ADAMW_STATE / 1e9:.1f} billion fp32 parameters with gradients and AdamW's state (16 bytes)"
    step = "end other processes, or use a machine with more memory"
    level = _level(free, GIB, 4 * GIB)
    yield Limit("host memory", f"{gib(free)} available of {gib(total)}", free, level, meaning, step)


def _group_memory(root: Path) -> Iterator[Limit]:
    what, killed = "control group's memory", group_kills(root)
    group = group_memory(root)
    if group is None:
        if killed or any(True for _ in control_groups(root, "memory")):
            yield Limit(what, "no limit", None, "ok", "the machine's memory is the limit")
    else:
        limit, used = group
        room, machine = limit - used, kilobytes(root / "proc/meminfo").get("MemAvailable", limit)
        level = _level(room, GIB, machine)
        step = {
            "watch": f"set a budget for host memory below it: host={room * 9 // 10}",
            "bad": "give the container or job more memory (docker run --memory, Slurm --mem)",
        }.get(level, "")
        meaning = "the kernel kills a run that exceeds it, without a message"
        yield Limit(what, f"{gib(room)} left of {gib(limit)}", room, level, meaning, step)
    if killed:
        meaning, step = "a run that ended without a message may have been one of them", "set a budget for host memory: host="
        yield Limit("killed for memory", f"{killed} processes", killed, "watch", meaning, step)


def _swap(root: Path) -> Iterator[Limit]:
    memory = kilobytes(root / "proc/meminfo")
    if "SwapTotal" not in memory:
        return
    total, used = memory["SwapTotal"], memory["SwapTotal"] - memory.get("SwapFree", 0)
    if not total:
        yield Limit("swap", "none", 0, "ok", "a run that needs more than the memory is killed at once instead of slowing down")
        return
    level: Level = "watch" if used > max(GIB, total // 10) else "ok"
    step = "end other programs that hold memory: a step that is swapped runs at the disk's speed"
    yield Limit("swap", f"{gib(used)} used of {gib(total)}", total, level, "memory at the disk's speed", step)


def _shared_memory(root: Path) -> Iterator[Limit]:
    folder = root / "dev/shm"
    meaning = "batches of DataLoader workers pass through it; if it is too small, they end with a bus error"
    if folder.is_dir():
        size = shutil.disk_usage(folder)
        level = _level(size.free, 16 * 2**20, GIB)
        step = "docker run --shm-size=8g (or --ipc=host), or DataLoader(num_workers=0)"
        yield Limit("/dev/shm", f"{gib(size.free)} free of {gib(size.total)}", size.free, level, meaning, step)
    elif (root / "proc").is_dir():
        yield Limit("/dev/shm", "missing", 0, "watch", meaning, "mount a tmpfs there, or DataLoader(num_workers=0)")


def _ulimits(root: Path, accelerated: bool) -> Iterator[Limit]:
    ulimits, status = process_limits(root), kilobytes(root / "proc/self/status")

    def row(name: str, flag: str, bad: int, watch: int, meaning: str, step: str, used: int = 0) -> Iterator[Limit]:
        if name not in ulimits:
            return
        limit = ulimits[name]
        level = "ok" if limit is None else _level(limit - used, bad, watch)
        counts = name == "open files"
        text = "no limit" if limit is None else str(limit) if counts else gib(limit)
        if limit is not None and used:
            text = f"{gib(max(limit - used, 0))} left of {text}"
        yield Limit(f"ulimit {flag} ({name})", text, limit, level, meaning, step)

    total = kilobytes(root / "proc/meminfo").get("MemTotal", 0)
    locked = total if accelerated else 0
    meaning = (
        "how much host memory may be pinned, if the driver respects it" if accelerated else "nothing is pinned without a GPU"
    )
    yield from row("locked memory", "-l", 0, locked, meaning, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    meaning = "torch and CUDA reserve far more addresses than they use: allocations fail at the limit"
    address = status.get("VmSize", 0)
    yield from row("address space", "-v", GIB, 2**62, meaning, "ulimit -v unlimited", address)
    meaning = "private memory: allocations fail at the limit"
    yield from row("data size", "-d", GIB, 2**62, meaning, "ulimit -d unlimited", status.get("VmData", 0))
    meaning = "shards, caches and data-loading workers keep hundreds of files open"
    yield from row("open files", "-n", 256, 1024, meaning, "ulimit -n 65536")
    meaning = "the compiler walks deep graphs by recursion"
    yield from row("stack size", "-s", 2**20, 8 * 2**20, meaning, "ulimit -s 8192")


def _disks() -> Iterator[Limit]:
    folders: dict[str, Path] = {"current folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if knobs.cache():
        folders["mtcompile's cache"] = Path(knobs.cache())
    meanings = {
        "current folder": "checkpoints: 14 GB for the weights of a 7B model, 84 GB with fp32 masters and AdamW's state",
        "temporary files": "compiled kernels and their sources are written there",
        "mtcompile's cache": "plans, traced graphs and this machine's speeds: some MB",
    }
    for what, folder in folders.items():
        existing = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
        if existing is None:
            continue
        free = shutil.disk_usage(existing).free
        writable = os.access(existing, os.W_OK)
        level = _level(free, GIB // 4, 20 * GIB if what == "current folder" else GIB)
        step = f"free disk space at {folder}"
        if not writable:
            level, step = "watch", f"make {folder} writable" + (" or set MT_CACHE" if "cache" in what else "")
        text = f"{gib(free)} free" + ("" if writable else ", not writable")
        yield Limit(f"disk: {what}", text, free, level, meanings[what], step)


def _pinning(device: Device, root: Path) -> Iterator[Limit]:
    """Tries to pin host memory for an accelerator, in steps, up to a quarter of what is available."""
    wsl = "microsoft" in text_of(root / "proc/version").lower()
    if wsl and not isinstance(device, CudaDevice):
        meaning = "WSL grants about 1 GiB of pinned memory: with a GPU, copies of the rest go through a small ring"
        yield Limit("pinned memory", "WSL", None, "ok", meaning)
    if not isinstance(device, CudaDevice):
        return
    room = kilobytes(root / "proc/meminfo").get("MemAvailable", 0) // 4
    granted, refused = 0, 0
    for nbytes in _PINS:
        if nbytes > room and granted:
            break
        try:
            device.api.pin(nbytes)
            granted = nbytes
        except NotPinned:
            refused = nbytes
            break
    if not refused:
        yield Limit("pinned memory", f"{gib(granted)} granted", granted, "ok", "copies run at the link's full speed")
        return
    meaning = "weights that cannot be pinned pass through a small ring, at a fraction of the link's speed"
    step = "WSL caps it: run on Linux itself" if wsl else "ulimit -l unlimited (docker run --ulimit memlock=-1)"
    yield Limit("pinned memory", f"{gib(granted)} granted, {gib(refused)} refused", granted, "watch", meaning, step)


def _pages(device: Device, root: Path) -> Iterator[Limit]:
    """Says where the pages of pinned memory come from, and how large the pages of host memory are."""
    where = device.api.placing(root) if isinstance(device, CudaDevice) else ANYWHERE
    memory = pages(_TRIED_NBYTES)
    address = addressof(c_char.from_buffer(memory))
    refused, huge = prepare(memory, address, where, library(), 1), huge_pages(root)
    if isinstance(device, CudaDevice):
        step = "docker run --cap-add SYS_NICE" if "mbind" in refused else "install again with a C compiler"
        text = str(where) + (f", but {refused}" if refused else "")
        yield Limit("memory nodes", text, None, "watch" if refused else "ok", where.why, step)
    if huge:
        granted = huge_nbytes(address)
        text = huge + (f", {gib(granted)} of {gib(_TRIED_NBYTES)} granted" if granted is not None else "")
        meaning = "with them, copies and updates of host memory look fewer addresses up"
        step = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Limit("huge pages", text, granted, "ok" if granted and huge != "never" else "watch", meaning, step)


def _accelerator(device: Device) -> Iterator[Limit]:
    total = total_nbytes(device)
    if total is None:
        return
    free = int(torch.get_device_module(device.where).mem_get_info(device.where)[0])
    level = _level(free, GIB, total // 2)
    meaning = "the most that memory= can be, less what CUDA and the allocator take"
    step = "end the processes that hold the rest (nvidia-smi)"
    yield Limit("device memory", f"{gib(free)} free of {gib(total)}", free, level, meaning, step)


def _processors(root: Path) -> Iterator[Limit]:
    usable, quota, threads = usable_cpus(), group_cpus(root), torch.get_num_threads()
    granted = usable if quota is None else min(usable, quota)
    text = f"{usable} of {os.cpu_count()}" + (f", a quota of {quota:g}" if quota is not None else "")
    too_many = threads > granted + 0.5
    meaning = "updates on the host and everything that feeds the device run on them"
    step = f"OMP_NUM_THREADS={max(1, int(granted))}: torch has {threads} threads, which take turns"
    yield Limit("processors", text, usable, "watch" if too_many else "ok", meaning, step)
    busy = psutil.cpu_percent(_SAMPLE_S)
    level: Level = "watch" if busy > _BUSY_PERCENT else "ok"
    meaning = "other programs make the measured speeds lower"
    yield Limit("processors in use", f"{busy:.0f}%", round(busy), level, meaning, "measure again when the machine is idle")
