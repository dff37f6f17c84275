"""The file behind a disk tier. It has a name only while it is being opened: when the process ends, however it ends, the system
takes its space back, and no other process can come to it.

What a process left that was killed in between, an empty file, goes when the next one opens a file in the same folder.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtcompile.runtime.disk.errors import DiskError, DiskFull
from mtcompile.runtime.interrupts import interrupts_later
from mtcompile.runtime.schedule import BLOCK

_IN_MEMORY = ("tmpfs", "ramfs")
_PREFIX, _SUFFIX = ".mtcompile-disk-", ".opening"


@dataclass(frozen=True, slots=True)
class Descriptors:
    """An open file. ``cached``: goes through the page cache, which mappings share. ``direct``: goes past it; the same
    descriptor where the file system refuses that (``is_direct`` is False)."""

    folder: Path
    cached: int
    direct: int

    @property
    def is_direct(self) -> bool:
        return self.direct != self.cached

    def close(self) -> None:
        for number in {self.cached, self.direct}:
            with contextlib.suppress(OSError):
                os.close(number)


def opened(folder: Path) -> Descriptors:
    """Opens a new file in ``folder``, which is made if it is not there; ready for requests past the page cache if mappings see
    these. Raises DiskError, also if there is no folder to make it in, such as that of a drive, misspelled."""
    file = None
    try:
        with interrupts_later():
            file = _opened(folder)
        return file
    except BaseException:
        if file is not None:
            file.close()
        raise


def _opened(folder: Path) -> Descriptors:
    if not hasattr(os, "posix_fallocate") or not hasattr(os, "preadv"):
        raise DiskError(f"disk={folder}: expected a system with posix_fallocate and preadv, such as Linux, found neither")
    try:
        folder.mkdir(exist_ok=True)
        _check_drive(folder)
        with _alone(folder):
            _delete_left(folder)
            cached, name = tempfile.mkstemp(suffix=_SUFFIX, prefix=_PREFIX, dir=folder)
            try:
                direct = _past_the_cache(name)
            finally:
                os.unlink(name)
    except OSError as error:
        raise DiskError(f"disk={folder}: expected a folder that can be written, found {error.strerror or error}") from error
    file = Descriptors(folder, cached, cached if direct is None else direct)
    try:
        return _coherent(file)
    except BaseException:
        file.close()
        raise


def in_memory() -> Descriptors:
    """Opens a new file in memory. Raises OSError."""
    number = os.memfd_create("mtcompile-disk", os.MFD_CLOEXEC)
    return Descriptors(Path("memory"), number, number)


def _check_drive(folder: Path) -> None:
    """Warns of a folder whose files are in memory."""
    if (kind := file_system(folder)) in _IN_MEMORY:
        warnings.warn(
            f"disk={folder} is in memory ({kind}): what goes there takes memory that plans do not count; name a folder on a "
            "drive",
            stacklevel=2,
        )


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Returns the kind of the file system that holds a folder; "" if the system does not tell."""
    device = os.stat(folder).st_dev
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in mounts.read_text().splitlines():
            about, _, kind = line.partition(" - ")
            if about.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return kind.split()[0]
    return ""


def _past_the_cache(name: str) -> int | None:
    if not hasattr(os, "O_DIRECT"):
        return None
    with contextlib.suppress(OSError):
        return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    return None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder itself, so that nothing is left of it. Network file systems may have none; there, two
    processes that open files at one time may hinder each other, which raises."""
    import fcntl

    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _delete_left(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if not path.is_symlink() and path.stat().st_uid == os.getuid():
                path.unlink()


def free_nbytes(folder: Path) -> int:
    """Returns the bytes that are free where ``folder`` is, or will be made."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    return shutil.disk_usage(existing).free


def reserve(file: Descriptors, nbytes: int) -> None:
    """Makes the file at least ``nbytes`` large, all of it with space on the disk. Raises DiskFull; the file is as it was
    then."""
    before = os.fstat(file.cached).st_size
    if nbytes <= before:
        return
    try:
        os.posix_fallocate(file.cached, before, nbytes - before)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(file.cached, before)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskError(f"disk={file.folder}: {nbytes} bytes could not be reserved: {error.strerror}") from error
        free = shutil.disk_usage(file.folder).free
        raise DiskFull(
            f"disk={file.folder}: expected room for {nbytes - before} more bytes, found {free} bytes free ({error.strerror}); "
            "free space there, name another folder, or give mtcompile more host memory"
        ) from error


def reserve_part(file: Descriptors, at: int, nbytes: int) -> None:
    """Gives a part of the file space on the disk; what is before it may have none. Raises DiskError."""
    try:
        os.posix_fallocate(file.cached, at, nbytes)
    except OSError as error:
        raise DiskError(error.errno, f"disk={file.folder}: {nbytes} bytes could not be reserved: {error.strerror}") from error


def _coherent(file: Descriptors) -> Descriptors:
    """Tries whether requests past the page cache see what a mapping wrote, and the other way round; where they do not, or are
    refused, returns the file with all requests through the cache."""
    reserve(file, BLOCK)
    if not file.is_direct:
        return file
    with mmap.mmap(file.cached, BLOCK) as mapping, mmap.mmap(-1, BLOCK) as buffer:
        try:
            coherent = True
            for round in (b"\x01", b"\x02"):
                mapping[:] = round * BLOCK
                os.preadv(file.direct, [buffer], 0)
                coherent = coherent and buffer[:] == mapping[:]
                buffer[:] = round * (BLOCK - 1) + b"\x03"
                os.pwritev(file.direct, [buffer], 0)
                coherent = coherent and mapping[:] == buffer[:]
        except OSError:
            coherent = False
    if coherent:
        return file
    os.close(file.direct)
    return Descriptors(file.folder, file.cached, file.cached)
