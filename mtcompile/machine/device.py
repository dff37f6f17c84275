"""The device that a model computes on: choosing it, its memory, and the peak of a piece of work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from mtcompile import knobs, torch_private
from mtcompile.errors import BudgetError
from mtcompile.machine.system_files import memory_rooms, smallest_room
from mtcompile.runtime.devices.cpu import CpuDevice
from mtcompile.runtime.devices.cuda import CudaDevice
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import gib
from mtcompile.torch_private import AllocatorPeak, cpu_allocator_peak

HOST_RESERVE = 0.05  # share of the host's available memory left to others, so that the kernel need not end this process
_LIBRARIES = 0.02  # share of an accelerator's free memory that libraries take for themselves, such as cuBLAS; an estimate
_LEFT_FREE = 0.1  # share of an accelerator's free memory left out of a default budget, for rounding and libraries


def choose(device: str | torch.device | None, memory: int | None = None) -> Device:
    """Returns the device of that name; for None, the GPU if there is one, else the emulated device. Raises ValueError, also for
    a budget of more ``memory`` than it has."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
        if where.type == "cpu":
            return CpuDevice()
        module = torch.get_device_module(where)
        available = module.is_available()
    except RuntimeError:  # torch has no such name, or no module for it
        available = False
    if not available:
        raise ValueError(f'expected device to be one that torch sees here, found {str(device)!r}; device="cpu" emulates one')
    if where.type == "cuda":
        _set_up_allocator()
    where = where if where.index is not None else torch.device(where.type, module.current_device())
    chosen = CudaDevice(where, ranges=knobs.nvtx(), check_host=check_allocation)
    if memory is not None and (total := total_nbytes(chosen)) is not None and memory > total:
        raise ValueError(f"expected memory of at most the {total} bytes ({gib(total)}) of {where}, found {memory}")
    return chosen


def _set_up_allocator() -> None:
    """Switches on expandable segments unless the user has set the allocator. Raises ValueError for an allocator that cannot say
    what was requested from it."""
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise ValueError(
            f"expected torch's own allocator, found {backend} (PYTORCH_CUDA_ALLOC_CONF): it does not say what kernels take, "
            "which a budget needs; leave backend: out of that variable"
        )
    if not knobs.allocator_is_the_users():
        torch_private.expand_segments()


def process_nbytes() -> int:
    """Returns the bytes that this process has in RAM, libraries and all."""
    return int(psutil.Process().memory_info().rss)


def host_room(root: Path = Path("/")) -> tuple[str, int] | None:
    """Returns what limits the host memory that this process may still take, a control group or the machine, and how many bytes
    that is, less a reserve; None where the system does not say."""
    smallest = smallest_room(memory_rooms(root))
    return None if smallest is None else (smallest[0], max(0, int(smallest[1] * (1 - HOST_RESERVE))))


def check_room(nbytes: int, what: str, way: str, refused: bool = False) -> None:
    """Raises BudgetError if the host has no room for ``nbytes`` more, or if the system has refused them (``refused``).

    ``what``: they are for; ``way``: the smallest thing to do."""
    limit, room = (host_room() if knobs.host_check() else None) or ("available", nbytes)
    if refused or nbytes > room:
        there = f"found {gib(room)} ({limit}, less a reserve)" if nbytes > room else "the system refused them"
        raise BudgetError(
            f"expected {gib(nbytes)} of host memory for {what}, {there}; nothing was changed\n"
            f"  free memory, or {way}. mtcompile doctor lists the limits. MT_HOST_CHECK=0 does not look",
            nbytes,
        )


def check_allocation(nbytes: int, refused: bool) -> None:
    """Raises BudgetError as ``check_room`` does, for one allocation of a device's."""
    check_room(nbytes, "one allocation", 'pass a smaller host=, with disk="/path:SIZE" for what it has no room for', refused)


def free_nbytes(device: Device) -> int:
    """Returns the default budget: half of the host's free memory, or nine tenths of an accelerator's."""
    if device.where.type == "cpu":
        return int(psutil.virtual_memory().available) // 2
    return int(_free_nbytes(device) * (1 - _LEFT_FREE))


def reservable_nbytes(device: Device) -> int | None:
    """Returns what an accelerator's allocator may reserve, less what libraries take; None for the emulated device."""
    return None if device.where.type == "cpu" else int(_free_nbytes(device) * (1 - _LIBRARIES))


def _free_nbytes(device: Device) -> int:
    module = torch.get_device_module(device.where)
    free, _ = module.mem_get_info(device.where)
    return int(free + module.memory_reserved(device.where) - module.memory_allocated(device.where))  # torch can reuse these


def peak_reserved_nbytes(device: Device) -> int:
    """Returns the most bytes that an accelerator's allocator has reserved in this process; 0 for the emulated device."""
    if device.where.type == "cpu":
        return 0
    stats = torch.get_device_module(device.where).memory_stats(device.where)
    return int(stats.get("reserved_bytes.all.peak", 0))


def total_nbytes(device: Device) -> int | None:
    """Returns all the memory of an accelerator; None for the emulated device, which has what it is given."""
    if device.where.type == "cpu":
        return None
    return int(torch.get_device_module(device.where).mem_get_info(device.where)[1])


def allocator_peak(where: torch.device) -> contextlib.AbstractContextManager[AllocatorPeak]:
    """Returns a context that measures what is allocated on a device while it lasts."""
    return cpu_allocator_peak() if where.type == "cpu" else _accelerator_peak(where)


@contextlib.contextmanager
def _accelerator_peak(where: torch.device) -> Iterator[AllocatorPeak]:
    """Measures the bytes requested from an accelerator's allocator. What operations ran is not seen."""
    module = torch.get_device_module(where)

    def requested(statistic: str) -> int:
        return int(module.memory_stats(where).get(f"requested_bytes.all.{statistic}", 0))

    # Libraries allocate a lasting workspace at the first product of each thread, which should not be measured.
    one = torch.zeros(8, 8, device=where)
    torch.addmm(one[0], one @ one, one)
    del one
    module.reset_peak_memory_stats(where)
    before, peak = requested("current"), AllocatorPeak()
    try:
        yield peak
    finally:
        peak.nbytes, peak.kept = requested("peak") - before, requested("current") - before
