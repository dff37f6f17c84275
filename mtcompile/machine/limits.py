"""What this machine lets a training run have, and what would kill it: memory, control groups, ulimits, disks, processors.

The system's own files are read below ``root``, so that tests can bring theirs. What a system does not tell has no row.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from mtcompile import knobs
from mtcompile.machine.device import total_nbytes
from mtcompile.machine.measure import usable_cpus
from mtcompile.runtime.devices.cuda import CudaDevice
from mtcompile.runtime.devices.pinned import NotPinned
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import gib

Level = Literal["ok", "watch", "bad"]
GIB = 2**30
_NO_LIMIT = 2**60  # control groups of version 1 write a number near 2**63 for none
_ADAMW_STATE = 16  # bytes per fp32 parameter: weight, gradient, two moments
_LOOK_S, _BUSY_PERCENT = 0.3, 25  # at what others do with the processors
_PINS = (GIB // 4, GIB, 4 * GIB)  # steps in which pinning is tried


@dataclass(frozen=True, slots=True)
class Limit:
    """``amount``: bytes or a count, None where there is no limit. ``step``: the smallest thing to do where it is not ok."""

    what: str
    found: str
    amount: int | None
    level: Level
    meaning: str
    step: str = ""


def limits(device: Device, root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every limit that the system tells, those of memory first."""
    return tuple(
        [
            *_memory(root),
            *_group_memory(root),
            *_swap(root),
            *_shared_memory(root),
            *_ulimits(root, accelerated=device.where.type != "cpu"),
            *_disks(),
            *_pinning(device, root),
            *_accelerator(device),
            *_processors(root),
        ]
    )


# ------------------------------------------------------------------------------------------------------------ parsers


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def kilobytes(path: Path) -> dict[str, int]:
    """Name -> bytes, of lines such as ``MemAvailable:  1234 kB`` (/proc/meminfo, /proc/self/status)."""
    return {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)}


def process_limits(root: Path) -> dict[str, int | None]:
    """Name -> the limit that holds now, in bytes or as a count, None for no limit (/proc/self/limits)."""
    rows = re.findall(r"^Max (.+?)\s{2,}(\d+|unlimited)\s", _text(root / "proc/self/limits"), re.MULTILINE)
    return {name: None if value == "unlimited" else int(value) for name, value in rows}


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's control group and of those above it, whose limits hold as well."""
    for number, names, path in re.findall(r"^(\d+):([^:]*):(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE):
        if number == "0":
            version, tops = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            version, tops = 1, [f"sys/fs/cgroup/{names}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        relative = Path(path.lstrip("/"))  # in a container this may be the host's path, which is not there: then the top is
        for top in dict.fromkeys(tops):
            for folder in dict.fromkeys([relative, *relative.parents]):
                yield version, root / top / folder


def group_memory(root: Path) -> tuple[int, int] | None:
    """(limit, bytes in use that cannot be given back) of the control group with the least room; None without a limit."""
    found = []
    for version, folder in _groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_text(folder / name).strip() for name in names)
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            kept = int(used) - int(cached.group(1) if cached else 0) if used.isdigit() else 0
            found.append((int(limit), max(kept, 0)))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def group_kills(root: Path) -> int:
    """Processes that the kernel has killed in this control group for its memory."""
    name = {1: "memory.oom_control", 2: "memory.events"}
    texts = [_text(folder / name[version]) for version, folder in _groups(root, "memory")]
    return max((int(count) for text in texts for count in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)), default=0)


def group_cpus(root: Path) -> float | None:
    """Processors' worth of time that the control group grants; None without a quota."""
    found = []
    for version, folder in _groups(root, "cpu"):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        numbers = " ".join(_text(folder / name) for name in names).split()
        if len(numbers) == 2 and all(n.isdigit() and int(n) for n in numbers):  # "max", or -1, is no quota
            found.append(int(numbers[0]) / int(numbers[1]))
    return min(found, default=None)


# ------------------------------------------------------------------------------------------------------------ rows


def _level(amount: int, bad: int, watch: int) -> Level:
    return "bad" if amount < bad else "watch" if amount < watch else "ok"


def _memory(root: Path) -> Iterator[Limit]:
    found = kilobytes(root / "proc/meminfo")
    if "MemAvailable" not in found:
        return
    free, total = found["MemAvailable"], found.get("MemTotal", 0)
    meaning = f"room for {free / _ADAMW_STATE / 1e9:.1f} billion fp32 parameters with gradients and AdamW's state (16 bytes)"
    step = "end other processes, or use a machine with more memory"
    level = _level(free, GIB, 4 * GIB)
    yield Limit("host memory", f"{gib(free)} available of {gib(total)}", free, level, meaning, "" if level == "ok" else step)


def _group_memory(root: Path) -> Iterator[Limit]:
    what, killed = "control group's memory", group_kills(root)
    found = group_memory(root)
    if found is None:
        if killed or any(True for _ in _groups(root, "memory")):
            yield Limit(what, "no limit", None, "ok", "the machine's memory is the limit")
    else:
        limit, used = found
        room, machine = limit - used, kilobytes(root / "proc/meminfo").get("MemAvailable", limit)
        level = _level(room, GIB, machine)
        step = {
            "ok": "",
            "watch": f"state host memory below it: host={room * 9 // 10}",
            "bad": "give the container or job more memory (docker run --memory, Slurm --mem)",
        }[level]
        meaning = "the kernel kills the run there, without a message"
        yield Limit(what, f"{gib(room)} left of {gib(limit)}", room, level, meaning, step)
    if killed:
        meaning, step = "a run that ended without a message may have been one of them", "state a budget for host memory: host="
        yield Limit("killed for memory", f"{killed} processes", killed, "watch", meaning, step)


def _swap(root: Path) -> Iterator[Limit]:
    found = kilobytes(root / "proc/meminfo")
    if "SwapTotal" not in found:
        return
    total, used = found["SwapTotal"], found["SwapTotal"] - found.get("SwapFree", 0)
    if not total:
        yield Limit("swap", "none", 0, "ok", "what is over the memory is killed at once, never slow")
        return
    level: Level = "watch" if used > max(GIB, total // 10) else "ok"
    step = "" if level == "ok" else "end what holds memory: a step that is swapped runs at the disk's speed"
    yield Limit("swap", f"{gib(used)} used of {gib(total)}", total, level, "memory at the disk's speed", step)


def _shared_memory(root: Path) -> Iterator[Limit]:
    folder = root / "dev/shm"
    meaning = "batches of DataLoader workers pass through it; too little ends them with a bus error"
    if folder.is_dir():
        size = shutil.disk_usage(folder)
        level = _level(size.free, 16 * 2**20, GIB)
        step = "" if level == "ok" else "docker run --shm-size=8g (or --ipc=host), or DataLoader(num_workers=0)"
        yield Limit("/dev/shm", f"{gib(size.free)} free of {gib(size.total)}", size.free, level, meaning, step)
    elif (root / "proc").is_dir():
        yield Limit("/dev/shm", "not there", 0, "watch", meaning, "mount a tmpfs there, or DataLoader(num_workers=0)")


def _ulimits(root: Path, accelerated: bool) -> Iterator[Limit]:
    found, held = process_limits(root), kilobytes(root / "proc/self/status")

    def row(name: str, flag: str, bad: int, watch: int, meaning: str, step: str, taken: int = 0) -> Iterator[Limit]:
        if name not in found:
            return
        limit = found[name]
        level = "ok" if limit is None else _level(limit - taken, bad, watch)
        counts = name == "open files"
        text = "no limit" if limit is None else str(limit) if counts else gib(limit)
        if limit is not None and taken:
            text = f"{gib(max(limit - taken, 0))} left of {text}"
        yield Limit(f"ulimit {flag} ({name})", text, limit, level, meaning, step if level != "ok" else "")

    total = kilobytes(root / "proc/meminfo").get("MemTotal", 0)
    locked = total if accelerated else 0
    meaning = "how much host memory may be pinned, where the driver asks" if accelerated else "nothing is pinned without a GPU"
    yield from row("locked memory", "-l", 0, locked, meaning, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    meaning = "addresses, of which torch and CUDA reserve far more than they use: allocations fail at the limit"
    address = held.get("VmSize", 0)
    yield from row("address space", "-v", GIB, 2**62, meaning, "ulimit -v unlimited", address)
    meaning = "private memory: allocations fail at the limit"
    yield from row("data size", "-d", GIB, 2**62, meaning, "ulimit -d unlimited", held.get("VmData", 0))
    meaning = "shards, caches and data-loading workers keep hundreds of files open"
    yield from row("open files", "-n", 256, 1024, meaning, "ulimit -n 65536")
    meaning = "the compiler walks deep graphs by recursion"
    yield from row("stack size", "-s", 2**20, 8 * 2**20, meaning, "ulimit -s 8192")


def _disks() -> Iterator[Limit]:
    seen: dict[str, Path] = {"current folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if knobs.cache():
        seen["mtcompile's cache"] = Path(knobs.cache())
    meanings = {
        "current folder": "checkpoints: 14 GB for the weights of a 7B model, 84 GB with fp32 masters and AdamW's state",
        "temporary files": "compiled kernels and their sources pass through it",
        "mtcompile's cache": "plans, traced graphs and this machine's speeds: some MB",
    }
    for what, folder in seen.items():
        there = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
        if there is None:
            continue
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        level = _level(free, GIB // 4, 20 * GIB if what == "current folder" else GIB)
        step = "" if level == "ok" else f"free disk space at {folder}"
        if not writable:
            level, step = "watch", f"make {folder} writable" + (" or set MT_CACHE" if "cache" in what else "")
        found = f"{gib(free)} free" + ("" if writable else ", not writable")
        yield Limit(f"disk: {what}", found, free, level, meanings[what], step)


def _pinning(device: Device, root: Path) -> Iterator[Limit]:
    """Tried in steps on an accelerator, up to a quarter of what is available."""
    wsl = "microsoft" in _text(root / "proc/version").lower()
    if wsl and not isinstance(device, CudaDevice):
        meaning = "WSL grants about 1 GiB of pinned memory: with a GPU, copies of the rest go through a small ring"
        yield Limit("pinned memory", "WSL", None, "ok", meaning)
    if not isinstance(device, CudaDevice):
        return
    room = kilobytes(root / "proc/meminfo").get("MemAvailable", 0) // 4
    most, refused = 0, 0
    for nbytes in _PINS:
        if nbytes > room and most:
            break
        try:
            device.api.pin(nbytes)
            most = nbytes
        except NotPinned:
            refused = nbytes
            break
    if not refused:
        yield Limit("pinned memory", f"{gib(most)} granted", most, "ok", "copies run at the link's full speed")
        return
    meaning = "weights that cannot be pinned pass through a small ring, at a part of the link's speed"
    step = "WSL caps it: run on Linux itself" if wsl else "ulimit -l unlimited (docker run --ulimit memlock=-1)"
    yield Limit("pinned memory", f"{gib(most)} granted, {gib(refused)} refused", most, "watch", meaning, step)


def _accelerator(device: Device) -> Iterator[Limit]:
    total = total_nbytes(device)
    if total is None:
        return
    free = int(torch.get_device_module(device.where).mem_get_info(device.where)[0])
    level = _level(free, GIB, total // 2)
    meaning = "what memory= can be, less what CUDA and the allocator take"
    step = "" if level == "ok" else "end the processes that hold the rest (nvidia-smi)"
    yield Limit("device memory", f"{gib(free)} free of {gib(total)}", free, level, meaning, step)


def _processors(root: Path) -> Iterator[Limit]:
    usable, quota, threads = usable_cpus(), group_cpus(root), torch.get_num_threads()
    granted = usable if quota is None else min(usable, quota)
    found = f"{usable} of {os.cpu_count()}" + (f", a quota of {quota:g}" if quota is not None else "")
    over = threads > granted + 0.5
    meaning = "the host's update and what feeds the device run on them"
    step = f"OMP_NUM_THREADS={max(1, int(granted))}: torch has {threads} threads, which take turns" if over else ""
    yield Limit("processors", found, usable, "watch" if over else "ok", meaning, step)
    busy = psutil.cpu_percent(_LOOK_S)
    level: Level = "watch" if busy > _BUSY_PERCENT else "ok"
    meaning = "what others take is missing from the speeds that are measured"
    step = "" if level == "ok" else "measure again when the machine is idle"
    yield Limit("processors in use", f"{busy:.0f}%", round(busy), level, meaning, step)
