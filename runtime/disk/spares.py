"""Spare files: what a disk does not take at its place goes to the same place of another file, so that a step that has begun to
write ends. The last of these files is in memory.

    file    p0 | p1 | p2 | p3
    spare      | p1 |           p1 could not be written to the file: from now on it is read, written and mapped from here
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

from mtcompile.runtime.disk import file as files
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.file import Descriptors
from mtcompile.runtime.disk.requests import Transfer, whole_blocks
from mtcompile.runtime.interrupts import interrupts_later


class Spare:
    """A file in a folder, or in memory (None), opened when it is needed. ``room_nbytes``: tells how many bytes may still be
    taken there. ``taken_nbytes``: of what has gone there."""

    def __init__(self, folder: Path | None, room_nbytes: Callable[[], int]) -> None:
        self.folder, self.taken_nbytes = folder, 0
        self.file: Descriptors | None = None
        self._room_nbytes, self._reserved_nbytes = room_nbytes, 0

    @property
    def where(self) -> str:
        return "memory" if self.folder is None else f"another file, in {self.folder}"

    def reserve(self, nbytes: int) -> None:
        """Takes space for the first bytes of the file now. Raises DiskError, and DiskFull."""
        files.reserve(self.opened(), nbytes)
        self._reserved_nbytes = max(nbytes, self._reserved_nbytes)

    def take(self, at: int, nbytes: int) -> Descriptors:
        """Returns the file, with space there. Raises DiskError."""
        file = self.opened()
        if at + nbytes > self._reserved_nbytes:
            if (room := self._room_nbytes()) < nbytes:
                raise DiskError(f"expected room for {nbytes} more bytes, found {max(0, room)}")
            files.reserve_part(file, at, nbytes)
        return file

    @interrupts_later()
    def opened(self) -> Descriptors:
        if self.file is None:
            self.file = files.in_memory() if self.folder is None else files.opened(self.folder)
        return self.file

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Spares:
    """The spare files of one file, in the order in which they are tried. ``remap``: maps a part of the file from another
    one."""

    def __init__(self, remap: Callable[[int, int, Descriptors], None]) -> None:
        self.files: list[Spare] = []
        self._notices: list[str] = []
        self._remap = remap
        self._moving, self._lock = threading.Lock(), threading.Lock()
        self._starts: list[int] = []  # of the parts that have moved, ascending
        self._parts: list[tuple[int, int, Descriptors]] = []  # start, end, and where it is now

    def cut(self, transfer: Transfer) -> Iterator[Transfer]:
        """Yields the parts of a transfer that lie in one file each."""
        at, end = transfer.at, transfer.at + transfer.nbytes
        while at < end:
            _, until = self._find(at)
            stop = min(end, until)
            yield Transfer(at, transfer.address + at - transfer.at, stop - at, transfer.name)
            at = stop

    def file_of(self, at: int) -> Descriptors | None:
        """Returns the spare file where a place lies now; None for its own."""
        return self._find(at)[0]

    def holds(self, transfer: Transfer) -> bool:
        """Tells whether any of it has moved."""
        return bool(self._parts) and any(self.file_of(part.at) is not None for part in self.cut(transfer))

    @property
    def in_memory_nbytes(self) -> int:
        return sum(spare.taken_nbytes for spare in self.files if spare.folder is None)

    def move(self, piece: Transfer, write: Callable[[Descriptors], None], error: DiskError, must_end: bool) -> None:
        """Writes a piece to the first spare file that takes it, which has it from now on; to memory only if the step
        ``must_end``. ``error``: why; raised, with what else failed, if none does."""
        nbytes, failed = whole_blocks(piece.nbytes), list[str]()
        with self._moving:
            now = self.file_of(piece.at)
            for spare in self.files:
                if (now is not None and spare.file is now) or (spare.folder is None and not must_end):
                    continue
                try:
                    file = spare.take(piece.at, nbytes)
                    write(file)
                    self._remap(piece.at, nbytes, file)
                except OSError as other:
                    failed.append(f"nor {spare.where}: {_why(other)}")
                    continue
                self._note(piece.at, piece.at + nbytes, file)
                spare.taken_nbytes += nbytes
                self._notices.append(f"{_why(error)}; it went to {spare.where}")
                return
        if not failed or error.errno is None:
            raise error
        raise type(error)(error.errno, "; ".join((_why(error), *failed))) from error

    def new_notices(self) -> Iterator[str]:
        """Yields what the user should know of what has moved since the last call."""
        with self._moving:
            notices, self._notices = self._notices, []
        if notices:
            others = f", as did {len(notices) - 1} other requests" if len(notices) > 1 else ""
            yield f"{notices[0]}{others}. Nothing is lost. The drive may be failing: save a checkpoint on another one"

    def _find(self, at: int) -> tuple[Descriptors | None, int]:
        """Returns the spare file of a place, and where what lies in one file with it ends."""
        if not self._parts:
            return None, 1 << 63
        with self._lock:
            index = bisect_right(self._starts, at)
            if index and at < self._parts[index - 1][1]:
                return self._parts[index - 1][2], self._parts[index - 1][1]
            return None, self._starts[index] if index < len(self._starts) else 1 << 63

    def _note(self, start: int, end: int, file: Descriptors) -> None:
        """Notes that a part lies in another file now, whatever was noted of it."""
        with self._lock:
            first, last = bisect_right(self._starts, start), bisect_right(self._starts, end)
            first -= bool(first and self._parts[first - 1][1] >= start)
            parts, whole = list[tuple[int, int, Descriptors]](), (start, end, file)
            for begun, ended, other in self._parts[first:last]:  # which touch it
                if other is file:
                    whole = min(whole[0], begun), max(whole[1], ended), file
                else:
                    parts += [(begun, min(ended, start), other), (max(begun, end), ended, other)]
            remaining = [part for part in (*parts, whole) if part[0] < part[1]]
            self._parts[first:last] = remaining = sorted(remaining, key=lambda part: part[0])
            self._starts[first:last] = [part[0] for part in remaining]


def _why(error: OSError) -> str:
    return error.strerror or str(error)
