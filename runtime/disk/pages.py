"""Memory that disks read and write without a copy."""

from __future__ import annotations

import contextlib
import mmap


def pages(nbytes: int) -> mmap.mmap:
    """Returns page-aligned memory of this process alone, in huge pages where the system grants them: to hold single pages is
    much of what a request costs. A process that is forked does not have it: of private pages that two processes share, the
    system may give a copy to the one that reads from the disk, after its request has begun."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_DONTFORK)
    except OSError:  # shared pages stay where they are
        return mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
