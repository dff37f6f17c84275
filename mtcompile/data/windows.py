"""Text as bytes, or files of tokens, read as one stream and cut into windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtcompile.capture.refusals import first_line
from mtcompile.data.batch import HELD_OUT, Batch, Order, in_batches
from mtcompile.data.files import files_of, standard_library, text_of
from mtcompile.reading import regular_nbytes

BYTES = 256  # the vocabulary of text
_PIECE = 1 << 22  # tokens that are in memory at a time


def read_tokens(paths: Sequence[Path], vocabulary: int | None) -> tuple[Any, int]:
    """Reads files and folders into one array of tokens; without paths, the sources of Python's standard library. Returns it and
    the size of its vocabulary, which must be given for .bin and .npy files. Raises ValueError and OSError."""
    if not paths:
        return np.frombuffer(standard_library(), np.uint8), BYTES
    files = files_of(paths)
    kinds = {file.suffix in (".bin", ".npy") for file in files}
    if kinds == {True, False}:
        raise ValueError("expected either text or files of tokens (.bin, .npy), found both")
    if kinds == {True}:
        if vocabulary is None:
            raise ValueError("expected --vocab, the size of the vocabulary, with files of tokens (.bin, .npy)")
        arrays = [_numbers(file, vocabulary) for file in files]
        return (arrays[0] if len(arrays) == 1 else np.concatenate(arrays)), vocabulary
    if vocabulary not in (None, BYTES):
        raise ValueError(f"expected no vocab with text, whose tokens are its {BYTES} bytes, found {vocabulary}")
    text = b"".join(text_of(file, strict=file in paths) for file in files)
    return np.frombuffer(text, np.uint8), BYTES


def _numbers(file: Path, vocabulary: int) -> Any:
    """Maps a file of tokens. A .bin file holds 16-bit numbers, or 32-bit ones if the vocabulary needs them."""
    nbytes = regular_nbytes(file)
    if file.suffix == ".bin":
        dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        if nbytes % dtype.itemsize or not nbytes:
            raise ValueError(f"expected tokens of {dtype.itemsize} bytes in {file}, found {nbytes} bytes")
        array: Any = np.memmap(file, dtype, "r")
    else:
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy reads the header as Python's own text, with errors of Python's tokenizer
            raise ValueError(f"expected an array of numbers in {file}: {first_line(error)}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"expected one row of whole numbers in {file}, found {array.dtype} of shape {array.shape}")
    if len(array) and (int(array.max()) >= vocabulary or int(array.min()) < 0):
        raise ValueError(
            f"expected tokens from 0 to {vocabulary - 1} in {file}, found {int(array.min())} to {int(array.max())}"
        )
    return array


@dataclass(frozen=True, slots=True)
class Windows:
    """A stream cut into windows of ``seq`` tokens and the token that follows: each token but the first is a target once. The
    first windows are trained on, the other ``held_out`` are not."""

    stream: Any
    seq: int
    trained: Order
    held_out: int

    @staticmethod
    def cut(stream: Any, seq: int, batch: int) -> Windows:
        """Cuts a stream. Raises ValueError if there are too few tokens."""
        count = max(0, len(stream) - 1) // seq
        held_out = max(1, int(count * HELD_OUT))
        if count - held_out < batch:
            raise ValueError(
                f"expected at least {(batch + 1) * seq + 1} tokens for a batch of {batch} and one window of {seq} held out, "
                f"found {len(stream)}: give more --data, or a smaller --batch or --seq"
            )
        return Windows(stream, seq, Order(count - held_out), held_out)

    @property
    def digest(self) -> str:
        """Returns a checksum of the windows: it tells whether a training goes on with the same data."""
        import xxhash

        whole = xxhash.xxh3_128(f"{self.seq} {self.trained.count} {self.stream.dtype}".encode())
        for start in range(0, len(self.stream), _PIECE):
            whole.update(np.ascontiguousarray(self.stream[start : start + _PIECE]).data)
        return str(whole.hexdigest())

    def batch(self, step: int, batch: int, seed: int) -> Batch:
        """Returns tokens and the tokens that follow, as ``Source`` says."""
        return self._batch(self.trained.rows(step, batch, seed))

    def evaluation(self, batch: int, most: int) -> Iterator[Batch]:
        yield from (
            self._batch([self.trained.count + n for n in windows]) for windows in in_batches(self.held_out, batch, most)
        )

    def _batch(self, windows: Sequence[int]) -> Batch:
        rows = [self.stream[n * self.seq : n * self.seq + self.seq + 1].astype(np.int64) for n in windows]
        tokens = torch.from_numpy(np.stack(rows))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return Batch({"tokens": inputs, "targets": targets}, inputs.numel(), targets.numel())
