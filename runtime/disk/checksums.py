"""Checksums of what a disk was given, piece by piece, to compare with what it gives back."""

from __future__ import annotations

import ctypes

from mtcompile.runtime.disk.errors import DiskCorrupt


class Checksums:
    """XXH3-64 of each piece that was written, by its place in the file."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}

    def note(self, at: int, address: int, nbytes: int) -> None:
        """Takes the checksum of a piece from memory."""
        self._sums[at] = nbytes, _sum(address, nbytes)

    def forget(self, at: int, nbytes: int) -> None:
        """Forgets the pieces that start within a part of the file."""
        for start in [start for start in self._sums if at <= start < at + nbytes]:
            del self._sums[start]

    def compare(self, at: int, address: int, nbytes: int, name: str) -> None:
        """Compares a piece in memory with what was written there. Raises DiskCorrupt."""
        written = self._sums.get(at)
        if written is None or written[0] != nbytes:  # it was written in other pieces, as another value's
            raise DiskCorrupt(f"{name or 'a value'}: expected {nbytes} bytes written at {at} of the file on disk, found none")
        if written[1] != _sum(address, nbytes):
            raise DiskCorrupt(
                f"{name or 'a value'}: its bytes {at} to {at + nbytes} on disk are not those that were written; nothing has "
                "used them. Either the disk is faulty, or something wrote through p.data (write through the parameter "
                "itself, under torch.no_grad()). Load the last checkpoint into the model"
            )


def _sum(address: int, nbytes: int) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))
