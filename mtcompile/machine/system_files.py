"""Parsers of Linux's own files on memory, ulimits and control groups, read below ``root`` so that tests can bring their own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_NO_LIMIT = 2**60  # control groups of version 1 write a number near 2**63 if there is no limit


def text_of(path: Path) -> str:
    """Reads a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def kilobytes(path: Path) -> dict[str, int]:
    """Returns name -> bytes from lines such as ``MemAvailable:  1234 kB`` (/proc/meminfo, /proc/self/status)."""
    return {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", text_of(path), re.MULTILINE)}


def process_limits(root: Path) -> dict[str, int | None]:
    """Returns name -> soft limit, in bytes or as a count, None for no limit (/proc/self/limits)."""
    rows = re.findall(r"^Max (.+?)\s{2,}(\d+|unlimited)\s", text_of(root / "proc/self/limits"), re.MULTILINE)
    return {name: None if value == "unlimited" else int(value) for name, value in rows}


def control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields (version, folder) of this process's control group and of those above it, whose limits apply as well."""
    for number, names, path in re.findall(r"^(\d+):([^:]*):(.*)$", text_of(root / "proc/self/cgroup"), re.MULTILINE):
        if number == "0":
            version, tops = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            version, tops = 1, [f"sys/fs/cgroup/{names}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        relative = Path(path.lstrip("/"))  # in a container this may be a path of the host: then only the top exists
        for top in dict.fromkeys(tops):
            for folder in dict.fromkeys([relative, *relative.parents]):
                yield version, root / top / folder


def group_memory(root: Path) -> tuple[int, int] | None:
    """Returns (limit, bytes in use that cannot be reclaimed) of the control group with the least room; None without a limit."""
    rooms = []
    for version, folder in control_groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (text_of(folder / name).strip() for name in names)
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
            in_use = int(used) - int(cached.group(1) if cached else 0) if used.isdigit() else 0
            rooms.append((int(limit), max(in_use, 0)))
    return min(rooms, key=lambda pair: pair[0] - pair[1], default=None)


def memory_rooms(root: Path = Path("/")) -> dict[str, int]:
    """Returns the host memory that this process may still take, in bytes, by what limits it."""
    available = kilobytes(root / "proc/meminfo").get("MemAvailable")
    rooms = {} if available is None else {"available": available}
    if (group := group_memory(root)) is not None:
        rooms["left in the control group"] = group[0] - group[1]
    ulimits, used = process_limits(root), kilobytes(root / "proc/self/status")
    for name, field, flag in (("address space", "VmSize", "-v"), ("data size", "VmData", "-d")):
        if (limit := ulimits.get(name)) is not None:
            rooms[f"left of ulimit {flag} ({name})"] = limit - used.get(field, 0)
    return rooms


def host_nbytes(root: Path = Path("/")) -> int:
    """Returns the host memory that processes here may take together: the machine's or, if that is less, the control group's;
    0 where the system does not say."""
    total, group = kilobytes(root / "proc/meminfo").get("MemTotal", 0), group_memory(root)
    return total if group is None else min(total or group[0], group[0])


def smallest_room(rooms: Mapping[str, int]) -> tuple[str, int] | None:
    """Returns what limits the memory that may still be taken most, and its bytes; None if nothing is known."""
    return min(rooms.items(), key=lambda room: room[1], default=None)


def group_kills(root: Path) -> int:
    """Returns the number of processes that the kernel has killed for memory in this control group."""
    name = {1: "memory.oom_control", 2: "memory.events"}
    texts = [text_of(folder / name[version]) for version, folder in control_groups(root, "memory")]
    return max((int(count) for text in texts for count in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)), default=0)


def group_cpus(root: Path) -> float | None:
    """Returns how many processors' time the control group grants; None without a quota."""
    quotas = []
    for version, folder in control_groups(root, "cpu"):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        numbers = " ".join(text_of(folder / name) for name in names).split()
        if len(numbers) == 2 and all(n.isdigit() and int(n) for n in numbers):  # "max", or -1, is no quota
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def driver_version(root: Path) -> str:
    """Returns the version of the loaded NVIDIA driver; empty without one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return match.group(1) if match else ""
