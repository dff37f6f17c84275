"""Reads from a store's file straight into a device's memory, past the host's: by kvikio, or as the emulated device does it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.requests import Transfer
from mtcompile.runtime.disk.store import DiskStore
from mtcompile.runtime.schedule import BLOCK


class Arrival(NamedTuple):
    """``target``: a tensor of bytes on the device, which are filled from ``home``, an address within a mapping of the store.
    ``name``: for errors."""

    target: Any
    home: int
    name: str = ""


class DirectReader(Protocol):
    """Reads one store's file into the device."""

    def read(self, arrivals: Iterable[Arrival], verify: bool) -> None:
        """Fill the targets, and return when they are filled. Raises DiskError; with ``verify``, DiskCorrupt. No request is in
        flight then."""


class Reading(Protocol):
    """Makes direct readers, as a device does."""

    def direct(self, store: DiskStore) -> DirectReader: ...


class StoreReader:
    """Reads as the emulated device does, whose memory is the host's: by the store's own requests."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store

    def read(self, arrivals: Iterable[Arrival], verify: bool) -> None:
        self._store.read([(a.target.data_ptr(), a.home, a.target.numel(), a.name) for a in arrivals], verify)


class KvikioReader:
    """Reads by kvikio: with GPUDirect Storage where the system has it, else through buffers of kvikio's own.

    ``to_host``: returns a copy in host memory of bytes on the device, once they are there; ``block``: BLOCK bytes on the
    device, for a first read. What is verified is what arrived on the device. Not yet measured on a GPU.
    """

    def __init__(self, store: DiskStore, to_host: Callable[[Any], Any], block: Any) -> None:
        self._store, self._to_host = store, to_host
        self._file = _opened(store)
        weakref.finalize(self, _close, self._file)
        self._try(block)

    def read(self, arrivals: Iterable[Arrival], verify: bool) -> None:
        begun: list[tuple[Transfer, Any, Any]] = []  # what is read, where to, and kvikio's request
        failed: list[DiskError] = []
        try:
            for target, home, name in arrivals:
                transfer = self._store.transfer((target.data_ptr(), home, target.numel(), name))
                if self._store.spares.holds(transfer):  # the file that kvikio has open does not have it
                    here = self._to_host(target)
                    self._store.read([(here.data_ptr(), home, here.numel(), name)], verify)
                    target.copy_(here)
                    continue
                begun.append((transfer, target, self._begin(transfer, target)))
        except DiskError as error:
            failed.append(error)
        finally:  # nothing may write to the device when this returns
            failed += self._ended(begun)
        if failed:
            raise failed[0]
        self._store.read_nbytes += sum(transfer.nbytes for transfer, _, _ in begun)
        for transfer, target, _ in begun if verify else ():
            self._store.compare(transfer, partial(self._part, target))

    def _part(self, target: Any, start: int, end: int) -> Any:
        return self._to_host(target[start:end])

    def _try(self, block: Any) -> None:
        """Reads the first block of the file. Raises DiskError unless its bytes are those that other readers see."""
        transfer = Transfer(0, block.data_ptr(), BLOCK, "the first block")
        if failed := self._ended([(transfer, block, self._begin(transfer, block))]):
            raise failed[0]
        if self._to_host(block).numpy().tobytes() != os.pread(self._store.file.cached, BLOCK, 0):
            raise self._error(transfer, "expected what other readers see, found other bytes")

    def _begin(self, transfer: Transfer, target: Any) -> Any:
        try:
            return self._file.pread(target, transfer.nbytes, transfer.at)
        except (OSError, RuntimeError) as error:
            raise self._error(transfer, error) from error

    def _ended(self, begun: Sequence[tuple[Transfer, Any, Any]]) -> list[DiskError]:
        """Waits for all requests. Returns what went wrong."""
        failed = []
        for transfer, _, request in begun:
            try:
                count = request.get()
            except (OSError, RuntimeError) as error:
                failed.append(self._error(transfer, error))
                continue
            if count != transfer.nbytes:
                failed.append(self._error(transfer, f"expected all of them, found {count}"))
        return failed

    def _error(self, transfer: Transfer, why: object) -> DiskError:
        what = f"kvikio's read of {transfer.name or 'a value'}, {transfer.nbytes} bytes at {transfer.at}"
        error = DiskError(f"disk={self._store.folder}: {what}, failed: {why}; MT_DISK_DIRECT=0 reads through the host")
        if isinstance(why, BaseException):
            error.__cause__ = why
        return error


def works(folder: Path, device: Reading) -> bool:
    """Tries whether a device reads files of a folder straight, past the page cache."""
    try:
        store = DiskStore(folder, chunk=BLOCK, depth=1)
        return store.file.is_direct and device.direct(store) is not None
    except DiskError:
        return False


def _opened(store: DiskStore) -> Any:
    """Opens the store's file, which has no name, once more by kvikio. Raises DiskError."""
    try:
        import kvikio  # type: ignore[import-not-found, unused-ignore]

        return kvikio.CuFile(f"/proc/self/fd/{store.file.cached}", "r")
    except (ImportError, OSError, RuntimeError) as error:
        raise DiskError(
            f"disk={store.folder}: expected kvikio to open the file, found {error}; install mtcompile[kvikio], or set "
            "MT_DISK_DIRECT=0"
        ) from error


def _close(file: Any) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        file.close()
