"""Pages of pinned memory: on which nodes, and there before the driver registers them."""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mtcompile.machine.device import allocator_peak
from mtcompile.runtime.devices.arena import arena, zeros_like
from mtcompile.runtime.devices.cuda_driver import pci_address
from mtcompile.runtime.devices.host_pages import ANYWHERE, Placing, huge_nbytes, huge_pages, placing, prepare
from mtcompile.runtime.devices.pinned import pinned
from mtcompile.runtime.optim.host_kernels import library
from mtcompile.runtime.pages import pages
from tests.helpers.updates import needs_c

GPU = "0000:17:00.0"


def machine(root: Path, cpus: dict[int, str], gpu_node: int | None = None) -> Path:
    """The files of a system with these processors by memory node."""
    nodes = root / "sys/devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_memory").write_text(",".join(map(str, cpus)) + "\n")
    for node, listed in cpus.items():
        (nodes / f"node{node}").mkdir()
        (nodes / f"node{node}/cpulist").write_text(listed + "\n")
    if gpu_node is not None:
        card = root / "sys/bus/pci/devices" / GPU
        card.mkdir(parents=True)
        (card / "numa_node").write_text(f"{gpu_node}\n")
    return root


@pytest.mark.parametrize(
    ("cpus", "gpu_node", "usable", "expected"),
    [
        ({0: "0-7"}, 0, range(8), ("left to the system", ())),
        ({}, None, range(8), ("left to the system", ())),
        ({0: "0-3", 1: "4-7"}, 1, range(8), ("interleaved", (0, 1))),
        ({0: "0-3", 1: "4-7"}, 1, range(4), ("preferred", (1,))),
        ({0: "0-3", 1: "4-7"}, -1, range(4), ("preferred", (0,))),
        ({0: "0-3,8-11", 1: "4-7,12-15", 2: ""}, 0, (9, 14), ("interleaved", (0, 1))),  # node 2: memory without processors
        ({0: "0-3", 70: "4-7"}, 0, range(8), ("left to the system", ())),
    ],
)
def test_memory_is_where_those_are_that_use_it(
    tmp_path: Path, cpus: dict[int, str], gpu_node: int | None, usable: Any, expected: tuple[str, tuple[int, ...]]
) -> None:
    where = placing(usable, GPU, machine(tmp_path, cpus, gpu_node))
    assert (where.policy, where.nodes) == expected and where.why


def test_a_system_without_such_files_is_left_alone(tmp_path: Path) -> None:
    where = placing(range(4), GPU, tmp_path)
    assert where.policy == "left to the system" and huge_pages(tmp_path) == ""
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text("always [madvise] never\n")
    assert huge_pages(tmp_path) == "madvise"


def test_the_address_of_a_card_is_the_systems() -> None:
    class Card:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x17, 0

    assert pci_address(Card()) == GPU and pci_address(object()) == ""


def test_pages_are_asked_for_before_they_are_touched() -> None:
    calls: list[tuple[Any, ...]] = []

    class Library:
        def mt_place(self, address: int, nbytes: int, mode: int, mask: int) -> int:
            calls.append(("place", nbytes, mode, mask))
            return 1

        def mt_touch(self, threads: int, address: int, nbytes: int) -> None:
            calls.append(("touch", threads, nbytes))

    fake: Any = Library()
    memory = mmap.mmap(-1, 8192)
    assert prepare(memory, 0, Placing("interleaved", (0, 2), ""), fake, 5) == "mbind refused: Operation not permitted"
    assert calls == [("place", 8192, 3, 0b101), ("touch", 5, 8192)]
    assert prepare(memory, 0, ANYWHERE, fake, 5) == "" and calls[2:] == [("touch", 5, 8192)]
    assert prepare(memory, 0, Placing("preferred", (1,), ""), None, 5) == "update.c was not built"


def resident_nbytes(address: int) -> int:
    """The bytes of the mapping at an address that have pages."""
    text = Path("/proc/self/smaps").read_text()
    for begin, end, rss in re.findall(r"^(\w+)-(\w+) .*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL):
        if int(begin, 16) <= address < int(end, 16):
            return int(rss) * 1024
    return 0


@needs_c
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says which pages there are")
@pytest.mark.parametrize("where", [ANYWHERE, Placing("preferred", (0,), ""), Placing("interleaved", (0,), "")])
def test_all_pages_are_there_when_the_driver_registers_them(where: Placing) -> None:
    nbytes, seen = 6 * 2**20 + 4096, list[int]()

    class Runtime:
        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
            seen.append(resident_nbytes(pointer))
            return 0

        def cudaHostUnregister(self, pointer: int) -> int:
            return 0

    memory = pinned(nbytes, Runtime(), lambda: None, where=where)
    assert seen[0] >= nbytes and not memory.any()
    memory.fill_(7)
    c_library: Any = library()
    c_library.mt_touch(2, memory.data_ptr(), nbytes)
    assert bool((memory == torch.tensor(7, dtype=torch.uint8)).all())


@pytest.mark.skipif(huge_pages() in ("", "never"), reason="the system grants no huge pages")
def test_large_host_memory_is_in_huge_pages_and_what_devices_write_is_not_forked() -> None:
    for memory, forked in ((arena(32 << 20), True), (torch.frombuffer(pages(32 << 20), dtype=torch.uint8), False)):
        memory.fill_(7)
        assert (huge_nbytes(memory.data_ptr()) or 0) >= 16 << 20  # the system may be short of them
        if (child := os.fork()) == 0:
            faulthandler.disable()
            os._exit(int(memory[-1]) - 7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (0 if forked else -signal.SIGSEGV)
        assert bool((memory == 7).all())


def test_state_has_the_strides_of_its_parameter() -> None:
    for like in (torch.ones(1500, 1000).t(), torch.ones(3, 2), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        state = zeros_like(like, torch.int16)
        assert state.shape == like.shape and state.stride() == like.stride() and state.dtype == torch.int16
        assert not state.any() and state.untyped_storage().nbytes() == like.numel() * 2


def test_what_a_step_allocates_is_seen_by_the_allocator() -> None:
    """Else the peak that is measured would not be the peak."""
    with allocator_peak(torch.device("cpu")) as measured:
        memory = arena(8 << 20, torch.device("cpu"))
    assert measured.nbytes == memory.numel()
