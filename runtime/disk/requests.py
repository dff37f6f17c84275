"""Requests to one file: cut into pieces, several in flight, each through an aligned buffer unless memory is aligned itself.

Past the page cache, a disk takes multiples of ``BLOCK`` from and to aligned memory only. A piece whose memory is not aligned
goes through a buffer of its own; so does its last part of a block. What is aligned needs no buffer, so its pieces are larger:
each costs the system and its threads the same, however large it is.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

from mtcompile.runtime.disk.checksums import Checksums
from mtcompile.runtime.disk.errors import DiskError, DiskFull
from mtcompile.runtime.disk.file import Descriptors
from mtcompile.runtime.pages import pages
from mtcompile.runtime.schedule import BLOCK, SECTOR

_DIRECT = 8 << 20  # bytes of a piece whose memory is aligned: the system splits it into as many requests as keep a disk busy
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # of a file system, before a drive is asked


class Transfer(NamedTuple):
    """``nbytes`` bytes between ``address`` in memory and ``at`` in the file, a multiple of BLOCK. ``name``: for errors."""

    at: int
    address: int
    nbytes: int
    name: str = ""


class Elsewhere(Protocol):
    """Other files, for what could not be written to a file: at the same places there."""

    def cut(self, transfer: Transfer) -> Iterator[Transfer]:
        """Yields the parts of a transfer that lie in one file each."""

    def file_of(self, at: int) -> Descriptors | None:
        """Returns where a place lies now; None for the file itself."""

    def move(self, piece: Transfer, write: Callable[[Descriptors], None], error: DiskError, must_end: bool) -> None:
        """Writes a piece to the first that takes it, or, if the step ``must_end``, to memory. Raises ``error`` if none does."""


def whole_blocks(nbytes: int) -> int:
    """Rounds up to what a value takes on disk."""
    return -(-nbytes // BLOCK) * BLOCK


class Requests:
    """Carries requests to a file. ``chunk``: bytes of a buffer, a multiple of BLOCK, of which each has a checksum. ``depth``:
    pieces in flight. ``summed``: whether what is written has checksums, to compare with when it is read. ``beside``: the
    requests to another file, with which these share buffers, and so ``chunk``, ``depth`` and ``summed``. ``elsewhere``: where
    what fails to be written goes."""

    def __init__(
        self,
        file: Descriptors,
        chunk: int,
        depth: int,
        summed: bool = True,
        beside: Requests | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.file, self.checksums, self._elsewhere = file, Checksums(), elsewhere
        self.carried_nbytes = 0  # by writes, also those that failed; threads may each count too few, never none
        self.summed: bool = summed if beside is None else beside.summed
        self.chunk: int = chunk if beside is None else beside.chunk
        self.depth: int = depth if beside is None else beside.depth
        self._memory: mmap.mmap = pages(chunk * depth) if beside is None else beside._memory
        self._buffers: queue.SimpleQueue[int] = queue.SimpleQueue() if beside is None else beside._buffers
        for index in range(depth) if beside is None else ():
            self._buffers.put(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + index * chunk)
        self._pool = ThreadPoolExecutor(self.depth, thread_name_prefix="mtcompile-disk")

    @property
    def staging_nbytes(self) -> int:
        """The host memory of the buffers."""
        return self.chunk * self.depth

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, transfers: Sequence[Transfer], verify: bool) -> None:
        """Reads into memory; ``verify``: compares with the checksums of what was written, if there are any. Raises DiskError
        and DiskCorrupt."""

        def one(piece: Transfer, buffer: int) -> None:
            self._read(piece, buffer)
            for part in self._chunks(piece) if verify and self.summed else ():
                self.checksums.compare(part.at, part.address, part.nbytes, part.name)

        self._all(one, transfers)

    def write(self, transfers: Sequence[Transfer], must_end: bool = False) -> None:
        """Writes memory to the file. ``must_end``: these are updates of a step. Raises DiskError."""

        def one(piece: Transfer, buffer: int) -> None:
            self._write(piece, buffer, must_end)
            for part in self._chunks(piece) if self.summed else ():
                self.checksums.note(part.at, part.address, part.nbytes)

        self._all(one, transfers)

    def note(self, transfer: Transfer) -> None:
        """Takes the checksums of what memory holds, for bytes that came to the file in another way."""
        for part in self._chunks(transfer) if self.summed else ():
            self.checksums.note(part.at, part.address, part.nbytes)

    def compare(self, transfer: Transfer, part: Callable[[int, int], Any]) -> None:
        """Compares bytes that came from the file in another way. ``part(start, end)``: returns some of them, a tensor in host
        memory. Raises DiskCorrupt."""
        for chunk in self._chunks(transfer) if self.summed else ():
            start = chunk.at - transfer.at
            here = part(start, start + chunk.nbytes)
            self.checksums.compare(chunk.at, here.data_ptr(), chunk.nbytes, chunk.name)

    def _chunks(self, transfer: Transfer) -> Iterator[Transfer]:
        return _parts(transfer, self.chunk)

    def _pieces(self, transfers: Sequence[Transfer]) -> Iterator[Transfer]:
        """Yields what is carried at a time, in whole chunks: aligned memory in as few pieces as keep the disk busy."""
        direct = max(self.chunk, _DIRECT // self.chunk * self.chunk)
        for transfer in transfers:
            for piece in _parts(transfer, direct if transfer.address % SECTOR == 0 else self.chunk):
                yield from (piece,) if self._elsewhere is None else self._elsewhere.cut(piece)

    def _all(self, one: Callable[[Transfer, int], None], transfers: Sequence[Transfer]) -> None:
        """Carries all pieces, and ends when all have ended. Raises the first error."""
        pieces = list(self._pieces(transfers))
        if len(pieces) == 1:
            return self._buffered(one, pieces[0])
        remaining, lock, failed = iter(pieces), threading.Lock(), threading.Event()

        def share() -> None:  # one task for many pieces: handing over each of them would cost a tenth of its time
            while not failed.is_set():
                with lock:
                    piece = next(remaining, None)
                if piece is None:
                    return
                try:
                    self._buffered(one, piece)
                except BaseException:
                    failed.set()
                    raise

        futures: list[Future[None]] = [self._pool.submit(share) for _ in range(min(self.depth, len(pieces)) - 1)]
        try:
            share()  # this thread too: it begins at once
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            failed.set()
            for future in futures:
                future.cancel()
            wait(futures)  # nothing may touch the memory when this returns
        for future in futures:
            if not future.cancelled():
                future.result()

    def _buffered(self, one: Callable[[Transfer, int], None], piece: Transfer) -> None:
        """Carries one piece when a buffer is free for it."""
        buffer = self._buffers.get()
        try:
            one(piece, buffer)
        finally:
            self._buffers.put(buffer)

    def _file_of(self, piece: Transfer) -> Descriptors:
        return (None if self._elsewhere is None else self._elsewhere.file_of(piece.at)) or self.file

    def _read(self, piece: Transfer, buffer: int) -> None:
        file, direct = self._file_of(piece), piece.nbytes // BLOCK * BLOCK if piece.address % SECTOR == 0 else 0
        if direct:
            _whole(os.preadv, file, piece, piece.address, piece.at, direct, "read")
        if rest := piece.nbytes - direct:
            _whole(os.preadv, file, piece, buffer, piece.at + direct, whole_blocks(rest), "read")
            ctypes.memmove(piece.address + direct, buffer, rest)

    def _write(self, piece: Transfer, buffer: int, must_end: bool) -> None:
        try:
            self._write_to(self._file_of(piece), piece, buffer)
        except DiskError as error:
            if self._elsewhere is None:
                raise
            self._elsewhere.move(piece, lambda file: self._write_to(file, piece, buffer), error, must_end)

    def _write_to(self, file: Descriptors, piece: Transfer, buffer: int) -> None:
        def carry(*about: Any) -> int:
            try:
                count = os.pwritev(*about)
            except OSError as error:  # what a drive had done of a request that failed is not known
                self.carried_nbytes += error.errno not in _REFUSALS
                raise
            self.carried_nbytes += count
            return count

        direct = piece.nbytes // BLOCK * BLOCK if piece.address % SECTOR == 0 else 0
        if direct:
            _whole(carry, file, piece, piece.address, piece.at, direct, "write")
        if rest := piece.nbytes - direct:
            ctypes.memmove(buffer, piece.address + direct, rest)
            ctypes.memset(buffer + rest, 0, whole_blocks(rest) - rest)
            _whole(carry, file, piece, buffer, piece.at + direct, whole_blocks(rest), "write")


def _parts(transfer: Transfer, nbytes: int) -> Iterator[Transfer]:
    """Yields the transfer in parts of ``nbytes``, but for the last one."""
    at, address, whole, name = transfer
    for start in range(0, whole, nbytes):
        yield Transfer(at + start, address + start, min(nbytes, whole - start), name)


def _whole(call: Callable[..., int], file: Descriptors, piece: Transfer, address: int, at: int, nbytes: int, verb: str) -> None:
    """Repeats ``call`` until all bytes are there: the system may carry fewer at a time. Raises DiskError."""
    done = 0
    while done < nbytes:
        what = f"disk={file.folder}: {verb} of {piece.name or 'a value'}, {nbytes - done} bytes at {at + done}"
        try:
            count = call(file.direct, [(ctypes.c_char * (nbytes - done)).from_address(address + done)], at + done)
        except OSError as error:
            kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskError
            raise kind(error.errno, f"{what}, failed: {error.strerror}") from error
        if count <= 0 or (count < nbytes - done and (count % BLOCK and file.is_direct)):
            raise DiskError(f"{what}: expected all of them, found {count}: the file is shorter than it was made")
        done += count
