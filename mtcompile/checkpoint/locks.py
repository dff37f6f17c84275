"""The lock of a folder of checkpoints: one process at a time saves into it, and one training holds it from begin to end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mtcompile.errors import CheckpointError
from mtcompile.runtime.interrupts import interrupts_later

_MOST_NBYTES = 20  # of a number in the lock's file
_PAUSE_S = 0.05


class _Lock:
    """A locked file. The system gives the lock of a process that has ended to the next one."""

    number = -1

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise
        _locks.add(self)

    def is_at(self, path: Path) -> bool:
        """Tells whether the file is still there: somebody may have deleted its folder."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.number), os.stat(path))
        return False

    def close(self) -> None:
        """Closes the file; if that was forked away with its process, the other one keeps the lock."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def release(self) -> None:
        if self.number >= 0:
            fcntl.flock(self.number, fcntl.LOCK_UN)  # also for what was forked in other ways than Python's
        self.close()

    def __del__(self) -> None:  # an interrupt has come between
        self.close()


@dataclass(eq=False, slots=True)
class _Held:
    """A lock that a training holds. ``writing``: of the thread that writes there."""

    lock: _Lock
    writing: threading.Lock = field(default_factory=threading.Lock)


_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()
_held: dict[Path, _Held] = {}  # by this process


def _forked() -> None:
    """Leaves the locks to the process that was forked: workers that read data would keep them after its end."""
    for lock in tuple(_locks):
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def locked(folder: Path, patience_s: float = 0) -> Iterator[None]:
    """Holds the folder's lock. Raises CheckpointError if another process saves into the folder, and OSError if the lock cannot
    be had for another reason. Where a training of this process holds it, waits for the thread that writes."""
    held = _held.get(folder.resolve())
    if held is None:
        with _acquired(folder, patience_s):
            yield
        return
    with held.writing:
        if not held.lock.is_at(folder / ".lock"):
            held.lock = _lock(folder, patience_s)
        yield


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder's lock for a training, whose saves need no other. Raises as ``locked`` does."""
    key = folder.resolve()
    with _acquired(folder, 0) as lock:
        own = _Held(lock)
        try:
            _held[key] = own
            yield
        finally:
            with own.writing:  # a save in the background may not have come to its end
                if _held.get(key) is own:
                    del _held[key]
                own.lock.release()


@contextlib.contextmanager
def folder_itself_locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder itself, which the system frees when the process ends. Raises OSError if another one has it."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


@contextlib.contextmanager
def _acquired(folder: Path, patience_s: float) -> Iterator[_Lock]:
    with interrupts_later():
        lock = _lock(folder, patience_s)
    try:
        yield lock
    finally:
        with interrupts_later():
            lock.release()


def _lock(folder: Path, patience_s: float) -> _Lock:
    path, until = folder / ".lock", time.monotonic() + patience_s
    try:
        while True:
            try:
                lock = _Lock(path)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise _in_use(folder, path) from None
                time.sleep(_PAUSE_S)
                continue
            if lock.is_at(path):
                break
        with contextlib.suppress(OSError):  # only a message says it
            os.ftruncate(lock.number, 0)
            os.pwrite(lock.number, str(os.getpid()).encode(), 0)
        return lock
    except OSError as error:
        raise OSError(
            f"expected to lock {path}, found: {error.strerror or error}. No other process is known to save there: delete the "
            "file, or save into a folder of your own on a disk with file locks"
        ) from error


def _in_use(folder: Path, path: Path) -> CheckpointError:
    found = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        found = file.read(_MOST_NBYTES)
    number = found.decode() if found.isdigit() else ""
    if number == str(os.getpid()):
        return CheckpointError(f"this process already saves checkpoints into {folder}; give each training a folder of its own")
    who = f"another process, {number}," if number else "another process"
    return CheckpointError(
        f"{who} saves checkpoints into {folder}; wait for its end, or give each training a folder of its own"
    )
