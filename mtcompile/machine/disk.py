"""The disk's bandwidth in GB/s (1e9 bytes), of one file that is written and read."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

from mtcompile.machine.timing import MIB, WEIGHTS_GB, Effort, Measurement, median_s

_BLOCK = 8 * MIB  # of one transfer


def disk(folder: Path, effort: Effort) -> Measurement:
    """Measures one file, past the page cache if the file system allows it. The row has no values if ``folder`` cannot be
    written."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            return _disk_row(Path(temporary, "blocks"), effort)
    except OSError as error:
        return Measurement("disk", "GB/s", {}, f"not measured: {folder}: {error.strerror or error}")


def _open(path: Path, block: mmap.mmap) -> tuple[int, bool]:
    """Opens a file. Returns its descriptor, and whether it goes past the page cache, which not every file system allows."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            try:
                os.pwritev(file, [block], 0)
                return file, True
            except OSError:
                os.close(file)
    return os.open(path, os.O_RDWR | os.O_CREAT), False


def _disk_row(path: Path, effort: Effort) -> Measurement:
    block = mmap.mmap(-1, _BLOCK)  # page-aligned, as O_DIRECT wants it
    block.write(os.urandom(MIB) * (_BLOCK // MIB))  # a disk that compresses gains nothing within a block of 1 MiB
    count = effort.disk // _BLOCK
    file, direct = _open(path, block)

    def write() -> None:
        for i in range(count):
            os.pwritev(file, [block], i * _BLOCK)
        os.fsync(file)

    def read() -> None:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        for i in range(count):
            os.preadv(file, [block], i * _BLOCK)

    try:
        times = {"write": median_s(write, effort.seconds), "read": median_s(read, effort.seconds)}
    finally:
        os.close(file)
    rates = {what: effort.disk / seconds / 1e9 for what, seconds in times.items()}
    how = "" if direct else "; the file system refuses O_DIRECT, so its cache may flatter this"
    save, load = (WEIGHTS_GB / rate for rate in rates.values())
    meaning = f"weights of a 7B model (14 GB) are saved in {save:.0f} s, read in {load:.0f} s{how}"
    return Measurement("disk", "GB/s", rates, meaning)
