"""Writes safetensors files piece by piece, with their checksum in the same pass: a tensor is never copied as a whole."""

from __future__ import annotations

import json
import os
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtcompile.checkpoint.encoding import Storable
from mtcompile.checkpoint.files import FileEntry
from mtcompile.checkpoint.shards import DTYPES
from mtcompile.runtime.interrupts import interrupts_later

_PIECE_NBYTES = 1 << 23
_DIGESTED_LATER = 2  # pieces that may be on the disk before their checksum
_HEADER_ALIGNMENT = 8
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def write_shard(path: Path, tensors: Mapping[str, Storable]) -> FileEntry:
    """Writes a new file of dense tensors to the disk. Needs host memory for three pieces of 8 MiB, if they come from another
    device, and for a whole tensor if its elements are not in row-major order. Raises OSError."""
    nbytes = 0
    with interrupts_later() as let_interrupts_through:  # else one could come before the file or the thread has an owner
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with _Digest() as digest:
                for piece in _pieces(tensors):
                    let_interrupts_through()
                    digest.add(piece)
                    done = 0
                    while done < len(piece):
                        done += os.pwrite(number, piece[done:], nbytes + done)
                    nbytes += len(piece)
            os.fsync(number)
        finally:
            os.close(number)
    return FileEntry(nbytes, digest.hexdigest)


class _Digest:
    """The XXH3-128 of pieces, taken in a thread while they are written. The thread ends with this object, however it ends."""

    def __init__(self) -> None:
        import xxhash

        self._digest = xxhash.xxh3_128()
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(_DIGESTED_LATER)
        taken = self._pieces, self._digest  # the thread does not hold this object
        self._thread = threading.Thread(target=_take, args=taken, name="mtcompile digests", daemon=True)
        self._end = weakref.finalize(self, self._pieces.put, None)

    def add(self, piece: memoryview) -> None:
        """Adds a piece. Waits if too many are still to be taken."""
        self._pieces.put(piece)

    @property
    def hexdigest(self) -> str:
        return str(self._digest.hexdigest())

    def __enter__(self) -> _Digest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._thread.join()


def _take(pieces: queue.Queue[memoryview | None], digest: Any) -> None:
    while (piece := pieces.get()) is not None:
        digest.update(piece)


def _pieces(tensors: Mapping[str, Storable]) -> Iterator[memoryview]:
    """Yields the header, then the bytes of each tensor. Wider dtypes come first, so that elements are aligned in the file."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAME_OF[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        yield from _bytes_of(tensor)


def _bytes_of(tensor: Storable) -> Iterator[memoryview]:
    if not isinstance(tensor, Tensor):
        for values in tensor.pieces(_PIECE_NBYTES // tensor.dtype.itemsize):
            yield from _bytes_of(values)
        return
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    for piece in plain.view(-1).view(torch.uint8).split(_PIECE_NBYTES) if plain.numel() else ():
        yield memoryview(piece.cpu().numpy())
