"""The pages behind pinned host memory: huge where the system grants them, on the memory nodes that use them, and there before
the driver asks for each.

Updates run on all processors that the process may use, and their speed is that of the memory. So memory is interleaved over the
nodes of these processors; where they are all of one node, it is on the GPU's. Pages are touched by all threads at once: the
driver would touch them one by one. Everything here is a wish: where the system refuses one, the memory works all the same.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Policy = Literal["left to the system", "interleaved", "preferred"]
_MODES: dict[Policy, int] = {"preferred": 1, "interleaved": 3}  # of mbind(2)
_MOST_NODES = 64
_NODES = Path("sys/devices/system/node")
_HUGE = Path("sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Placing:
    """The memory nodes that pages come from. ``why``: for a reader."""

    policy: Policy
    nodes: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        nodes = f" node{'s' * (len(self.nodes) > 1)} {', '.join(map(str, self.nodes))}" if self.nodes else ""
        over = {"interleaved": " over", "preferred": " on"}.get(self.policy, "")
        return f"{self.policy}{over}{nodes}"


ANYWHERE = Placing("left to the system", (), "")


def placing(cpus: Collection[int], device_address: str = "", root: Path = Path("/")) -> Placing:
    """Returns where pages should be for updates on these processors and a device at a PCI address (``0000:17:00.0``)."""
    nodes = _numbers(root / _NODES / "has_memory")
    if len(nodes) < 2:
        return Placing("left to the system", (), "there is one memory node" if nodes else "the system reports no memory nodes")
    if max(nodes) >= _MOST_NODES:
        return Placing("left to the system", (), f"there are more than {_MOST_NODES} memory nodes")
    used = tuple(node for node in nodes if _numbers(root / _NODES / f"node{node}" / "cpulist") & set(cpus))
    if len(used) > 1:
        return Placing("interleaved", used, "updates run on the processors of all of them")
    own = _number(root / "sys/bus/pci/devices" / device_address / "numa_node") if device_address else -1
    if own in nodes:
        return Placing("preferred", (own,), "the GPU is there")
    if used:
        return Placing("preferred", used, "all usable processors are there")
    return Placing("left to the system", (), "the system reports no processors of its memory nodes")


def huge_pages(root: Path = Path("/")) -> str:
    """Returns to what memory the system grants huge pages: ``always``, ``madvise`` (what asks for them, as ours does) or
    ``never``; "" where it does not say."""
    with suppress(OSError, IndexError):
        return (root / _HUGE).read_text().split("[")[1].split("]")[0]
    return ""


def huge_nbytes(address: int) -> int | None:
    """Returns how many bytes of the mapping at an address are in huge pages now; None where the system does not say."""
    with suppress(OSError):
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                begin, end = (int(place, 16) for place in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "AnonHugePages:":
                return int(rest[0]) << 10
    return None


def prepare(memory: mmap.mmap, address: int, where: Placing, library: ctypes.CDLL | None, threads: int) -> str:
    """Asks for pages of new memory and touches them all. ``library``: update.c; without it, the driver touches them. Returns
    what was refused, "" for nothing."""
    refused = ""
    if library is None:
        return "update.c was not built" if where.nodes else ""
    if where.nodes:
        mask = sum(1 << node for node in where.nodes)
        if code := library.mt_place(address, len(memory), _MODES[where.policy], mask):
            refused = f"mbind refused: {os.strerror(code)}"
    library.mt_touch(threads, address, len(memory))
    return refused


def _numbers(file: Path) -> set[int]:
    """Reads a list such as ``0-3,8``; none where there is no such file."""
    numbers: set[int] = set()
    with suppress(OSError, ValueError):
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _number(file: Path) -> int:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return -1
