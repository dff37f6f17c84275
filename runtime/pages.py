"""Pages of host memory: huge ones where the system grants them, and those that nobody uses any more."""

from __future__ import annotations

import contextlib
import ctypes
import mmap


def pages(nbytes: int, forked: bool = False) -> mmap.mmap:
    """Returns page-aligned memory of this process, in huge pages where the system grants them: a device or a drive that holds
    single pages takes longer for a request, and the processor looks more addresses up.

    ``forked``: whether processes forked later have it too. Memory that devices or drives write must not: of private pages that
    two processes share, the system may give a copy to the one that waits for the bytes, after its request has begun.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        if not forked:
            memory.madvise(mmap.MADV_DONTFORK)
    except OSError:  # shared pages stay where they are
        return mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give_back() -> None:
    """Gives the system the pages that the C library keeps for later. Of tensors below 32 MiB it would keep them all."""
    with contextlib.suppress(OSError, AttributeError):  # of another library, or of macOS
        ctypes.CDLL(None).malloc_trim(0)
