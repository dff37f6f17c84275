"""Memory that the ranks of one host share. It has no name, so nothing is left of it once all of them have ended."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

import torch

from mtcompile.errors import MtcompileError

_MAP_FIXED = 0x10
_ONES_NBYTES = 16 * 2**20  # of ones, which are mapped as often as needed


def shared_memory(nbytes: int, first: bool, gather: Callable[[int], Sequence[int]]) -> torch.Tensor:
    """Returns ``nbytes`` of memory that all ranks of a host see, zeros at first, as a tensor of bytes.

    Called by all of them. ``first``: True on the one that makes it. ``gather``: returns the number that each of them passed to
    it, the first one's first. Raises MtcompileError on all of them where one cannot open it.
    """
    return _mapped(_new_file(nbytes) if first else -1, nbytes, mmap.MAP_SHARED, gather)


def common_memory(
    nbytes: int,
    first: bool,
    gather: Callable[[int], Sequence[int]],
    fill: Callable[[torch.Tensor], None],
    together: bool = False,
    elsewhere: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Returns memory with what ``fill`` writes to it on the first rank, which all ranks of a host have in common: ``together``,
    whatever a rank writes; else as long as nobody writes to it, for a rank that does gets pages of its own. Otherwise as
    ``shared_memory``. ``elsewhere``: the bytes, from one place to another, that are other hosts': see ``hide``. Raises
    MtcompileError on all of them where they ask for different sizes."""
    if len(sizes := set(gather(nbytes))) > 1:
        raise MtcompileError(f"expected the ranks of a host to share the same weights, found sizes of {sorted(sizes)} bytes")
    descriptor = _new_file(nbytes) if first else -1
    if first:
        fill(memory := torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8))
        for start, end in elsewhere:
            free_pages(memory.data_ptr() + start, memory.data_ptr() + end)
    memory = _mapped(descriptor, nbytes, mmap.MAP_SHARED if together else mmap.MAP_PRIVATE, gather)
    hide(memory, elsewhere)
    return memory


def hide(memory: torch.Tensor, elsewhere: Sequence[tuple[int, int]]) -> None:
    """Fills ranges of shared memory with one bits, which are NaN in every floating dtype: whoever reads what is not here
    notices. Their whole pages take nothing, and what this process has written there is forgotten.

    Raises MtcompileError where the system has no more mappings for this process."""
    pages = [(-(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE) for start, end in elsewhere]
    longest = min(_ONES_NBYTES, max((end - start for start, end in pages), default=0))
    descriptor = _new_file(longest) if longest > 0 else -1
    if longest > 0:
        torch.frombuffer(mmap.mmap(descriptor, longest), dtype=torch.uint8).fill_(255)
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    flags, access = mmap.MAP_PRIVATE | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    for (start, end), (first, last) in zip(elsewhere, pages, strict=True):
        if first >= last:
            memory[start:end].fill_(255)
            continue
        memory[start:first].fill_(255)
        memory[last:end].fill_(255)
        for place in range(first, last, longest):
            where, nbytes = memory.data_ptr() + place, min(longest, last - place)
            size, offset = ctypes.c_size_t(nbytes), ctypes.c_long(0)
            if system.mmap(ctypes.c_void_p(where), size, access, flags, descriptor, offset) != where:
                raise MtcompileError(
                    f"expected to map weights of other hosts, found {os.strerror(ctypes.get_errno())}; raise "
                    "vm.max_map_count, or set MT_RANKS_SHARD=state to keep whole weights on each host"
                )
    if descriptor >= 0:
        os.close(descriptor)


def free_pages(start: int, end: int) -> None:
    """Gives back the whole pages of shared memory between two addresses; they read as zeros from then on."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_REMOVE)


def _new_file(nbytes: int) -> int:
    """Returns the descriptor of a file without a name, in memory."""
    descriptor = os.memfd_create("mtcompile", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _mapped(descriptor: int, nbytes: int, flags: int, gather: Callable[[int], Sequence[int]]) -> torch.Tensor:
    """Maps the first rank's file on all ranks. ``descriptor``: there, the file's; -1 on all others."""
    process, theirs = gather(os.getpid())[0], gather(descriptor)[0]
    memory, problem = None, ""
    try:
        if descriptor < 0:
            descriptor = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(descriptor, nbytes, flags)
    except OSError as error:
        problem = str(error)
    failed = sum(gather(int(memory is None)))  # nobody closes it before all have opened it
    if descriptor >= 0:
        os.close(descriptor)
    if memory is None or failed:
        raise MtcompileError(
            f"expected the ranks of this host to share memory, found that {failed} of them cannot open that of process "
            f"{process} {problem}; run all ranks of a host as one user, in one container"
        )
    return torch.frombuffer(memory, dtype=torch.uint8)
