"""A store: the bytes of one model on disk. Parts of its file are mapped into memory, so that whatever lives there has an
address like everything else, and can be read and written by anybody; the runtime itself reads and writes past the mapping."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from mtcompile.runtime.disk import file as files
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.mappings import Mappings
from mtcompile.runtime.disk.requests import Requests, Transfer, whole_blocks
from mtcompile.runtime.disk.spares import Spare, Spares
from mtcompile.runtime.interrupts import interrupts_later
from mtcompile.runtime.schedule import BLOCK

Move = tuple[int, int, int, str]  # address in memory, address within a mapping, bytes, name for errors
DEPTH = 8  # pieces in flight
_SMALLEST, _LARGEST = 16 << 10, 1 << 20  # bytes of a piece


def piece_nbytes(model_nbytes: int) -> int:
    """The bytes of one piece of a request, for a model of that size: a power of two, so small that buffers are a small part."""
    chunk = _LARGEST
    while chunk > _SMALLEST and chunk * DEPTH * 32 > model_nbytes:
        chunk //= 2
    return chunk


def staging_nbytes(model_nbytes: int) -> int:
    """The bytes that requests go through, for a model of that size."""
    return DEPTH * piece_nbytes(model_nbytes)


class DiskStore:
    """The bytes of one model in one file. ``used_nbytes``: of the file that mappings take. Closed when nothing holds it.
    ``summed``: whether what is written has checksums, which take a tenth of its time. ``beside``: the model's first store,
    through whose buffers requests to this one go too. That one counts both: ``peak_nbytes`` is the most that their mappings
    took together."""

    @interrupts_later()
    def __init__(
        self, folder: Path, chunk: int = _LARGEST, depth: int = DEPTH, summed: bool = True, beside: DiskStore | None = None
    ) -> None:
        self.folder = folder
        self.file = files.opened(folder)
        try:
            first = None if beside is None else beside._requests
            self._mappings = Mappings()
            self.spares = Spares(self._mappings.remap)
            self._requests: Requests = Requests(self.file, chunk, depth, summed, first, self.spares)
        except BaseException:
            self.file.close()
            raise
        weakref.finalize(self, _close, self._requests, self.file, self.spares)
        self.used_nbytes = self.reserved_nbytes = self.peak_nbytes = 0
        self._first, self._others = beside, weakref.WeakSet[DiskStore]()
        if beside is not None:
            beside._others.add(self)
        self.read_nbytes = self.written_nbytes = 0
        self._lock = threading.Lock()
        self._behind: dict[Future[None], list[tuple[int, int]]] = {}  # the parts of the file that writes under way change

    @property
    def staging_nbytes(self) -> int:
        """The host memory that requests go through."""
        return self._requests.staging_nbytes

    @property
    def piece_nbytes(self) -> int:
        """The bytes of a piece of a request, from the start of a value on: each has a checksum."""
        return self._requests.chunk

    @property
    def all_reserved_nbytes(self) -> int:
        """The space on the disk of this store, of those beside it, and of what lies in another file of the folder."""
        return self.reserved_nbytes + sum(other.reserved_nbytes for other in self._others) + self.moved_nbytes

    @property
    def moved_nbytes(self) -> int:
        """The bytes of the folder for what could not be written at its place."""
        return sum(spare.taken_nbytes for spare in self.spares.files if spare.folder == self.folder)

    def spare_here(self, most_nbytes: int) -> None:
        """Lets what cannot be written at its place go to another file of the folder, which may hold ``most_nbytes`` in all; and
        to one more, if that has a bad place too."""
        mine = weakref.ref(self)

        def room() -> int:
            store = mine()
            return 0 if store is None else most_nbytes - store.all_reserved_nbytes

        self.spares.files += [Spare(self.folder, room) for _ in range(2)]

    def reserve(self, nbytes: int) -> None:
        """Reserves space on the disk, for all mappings together. Raises DiskFull before anything is written."""
        nbytes = max(whole_blocks(nbytes), self.reserved_nbytes)
        files.reserve(self.file, nbytes)
        self.reserved_nbytes = nbytes

    def map(self, nbytes: int) -> mmap.mmap:
        """Maps a new part of the file, of at least one block. Raises DiskFull."""
        with self._lock:
            return self._map(max(BLOCK, whole_blocks(nbytes)))

    def _map(self, size: int) -> mmap.mmap:
        at = self.used_nbytes
        self.reserve(at + size)
        mapping = self._mappings.add(self.file, at, size)
        self.used_nbytes = at + size
        first = self._first or self
        first.peak_nbytes = max(first.peak_nbytes, first.used_nbytes + sum(other.used_nbytes for other in first._others))
        return mapping

    def place_of(self, address: int) -> int | None:
        """Returns the place in the file of an address within a mapping; None for any other address."""
        return self._mappings.place_of(address)

    def read(self, moves: Iterable[Move], verify: bool = False) -> None:
        """Reads from the disk into memory. Raises DiskError; with ``verify``, DiskCorrupt before anything uses the bytes."""
        transfers = [self.transfer(move) for move in moves]
        self._requests.read(transfers, verify)
        self.read_nbytes += sum(transfer.nbytes for transfer in transfers)

    def write(self, moves: Iterable[Move], must_end: bool = False) -> None:
        """Writes memory to the disk. ``must_end``: these are updates of a step. Raises DiskError."""
        transfers = [self.transfer(move) for move in moves]
        self._requests.write(transfers, must_end)
        self.written_nbytes += sum(transfer.nbytes for transfer in transfers)

    @property
    def carried_nbytes(self) -> int:
        """Changes whenever bytes of this file have been written, also by a request that failed."""
        return self._requests.carried_nbytes

    def write_behind(
        self, moves: Iterable[Move], submit: Callable[[Callable[[], None]], Future[None]], ended: Callable[[], None]
    ) -> None:
        """Writes updates of a step to the disk in another thread, as ``submit`` does, and calls ``ended`` there. Until then,
        whoever reads or writes these parts of the file through this store waits. Raises DiskError; the future has that of the
        write."""
        transfers = [self.transfer(move) for move in moves]

        def write() -> None:
            self._requests.write(transfers, must_end=True)
            self.written_nbytes += sum(transfer.nbytes for transfer in transfers)
            ended()

        with self._lock:
            future = submit(write)
            self._behind[future] = [(transfer.at, transfer.at + transfer.nbytes) for transfer in transfers]
        future.add_done_callback(self._forget_written)

    def _forget_written(self, future: Future[None]) -> None:
        with self._lock:
            self._behind.pop(future, None)

    def _await_writes(self, at: int, nbytes: int) -> None:
        with self._lock:
            of_these = [f for f, parts in self._behind.items() if any(a < at + nbytes and at < b for a, b in parts)]
        wait(of_these)

    def note(self, address: int, nbytes: int, name: str = "") -> None:
        """Takes the checksums of bytes that were written through their mapping."""
        self._requests.note(self.transfer((address, address, nbytes, name)))

    def forget(self, address: int, nbytes: int) -> None:
        """Takes what a mapping holds there as gone: reading it with ``verify`` raises DiskCorrupt until it is written again."""
        if (at := self.place_of(address)) is not None:
            self._requests.checksums.forget(at, nbytes)

    def compare(self, transfer: Transfer, part: Callable[[int, int], Any]) -> None:
        """Compares bytes that were read in another way with their checksums (see ``Requests.compare``). Raises DiskCorrupt."""
        self._requests.compare(transfer, part)

    def transfer(self, move: Move) -> Transfer:
        """Returns the request of a move, when nothing writes to that part any more. Raises DiskError if its home does not start
        at a block of the file."""
        address, home, nbytes, name = move
        at = self.place_of(home)
        if at is None or at % BLOCK:
            raise DiskError(f"{name}: expected a home on disk that starts at a block, found {at}")
        if self._behind:
            self._await_writes(at, nbytes)
        return Transfer(at, address, nbytes, name)


@interrupts_later()  # Python drops an interrupt that comes in a finalizer, and what was not closed then would stay open
def _close(requests: Requests, file: files.Descriptors, spares: Spares) -> None:
    requests.close()
    file.close()
    for spare in spares.files:
        spare.close()
