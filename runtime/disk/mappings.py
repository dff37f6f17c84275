"""Mappings of a file's parts: which addresses in memory are which places in the file."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from bisect import bisect_right

from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.file import Descriptors

_FIXED = 0x10  # MAP_FIXED of Linux: takes the place of what is mapped there


class Mappings:
    """The mappings of one file. Each part of it is mapped once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []  # addresses of the mappings, ascending
        self._mappings: list[tuple[int, int]] = []  # of each, its place in the file and its bytes
        self._by_place: list[tuple[int, weakref.ref[mmap.mmap]]] = []  # ascending

    def add(self, file: Descriptors, at: int, nbytes: int) -> mmap.mmap:
        """Maps a new part of the file, behind all others."""
        mapping = mmap.mmap(file.cached, nbytes, offset=at)
        start = address_of(mapping)
        with self._lock:
            position = bisect_right(self._starts, start)
            while position < len(self._starts) and self._starts[position] < start + nbytes:  # of a mapping that is gone
                del self._starts[position], self._mappings[position]
            self._starts.insert(position, start)
            self._mappings.insert(position, (at, nbytes))
            self._by_place.append((at, weakref.ref(mapping)))
        return mapping

    def place_of(self, address: int) -> int | None:
        """Returns the place in the file of an address within a mapping; None for any other address."""
        with self._lock:
            position = bisect_right(self._starts, address) - 1
            if position < 0:
                return None
            (at, nbytes), start = self._mappings[position], self._starts[position]
        return at + address - start if address < start + nbytes else None

    def remap(self, at: int, nbytes: int, file: Descriptors) -> None:
        """Lets addresses of a part be those of the same part of another file, from now on. Raises DiskError."""
        with self._lock:
            start, alive = self._by_place[bisect_right(self._by_place, at, key=lambda each: each[0]) - 1]
        mapping = alive()  # which must not end meanwhile: its addresses would be somebody else's
        if mapping is None:
            return
        address = address_of(mapping) + at - start
        call = ctypes.CDLL(None, use_errno=True).mmap
        call.restype = ctypes.c_void_p
        call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
        if call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, file.cached, at) != address:
            number = ctypes.get_errno()
            raise DiskError(number, f"disk={file.folder}: {nbytes} bytes could not be mapped, error {number} of mmap")


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
