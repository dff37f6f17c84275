"""Training data: text as bytes, or files of tokens, read as one stream and cut into windows."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtcompile.errors import nearest_file

BYTES = 256  # the vocabulary of text
_STDLIB_BYTES = 16 * 2**20  # length of the default text
_HELD_OUT = 0.05  # share of the windows, at the end of the stream


def read_tokens(paths: Sequence[Path], vocabulary: int | None) -> tuple[Any, int]:
    """Reads files and folders into one array of tokens; without paths, the sources of Python's standard library. Returns it and
    the size of its vocabulary, which must be given for .bin and .npy files. Raises ValueError and OSError."""
    if not paths:
        return _standard_library(), BYTES
    files = [file for path in paths for file in _files(path)]
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
    text = b"".join(_text(file, strict=file in paths) for file in files)
    return np.frombuffer(text, np.uint8), BYTES


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"expected --data to name files or folders, found no such path: {path}{nearest_file(path)}")
    if not path.is_dir():
        return [path]
    inside = (file for file in path.rglob("*") if file.is_file())
    files = sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not files:
        raise ValueError(f"expected files in the folder {path}, found none")
    return files


def _text(file: Path, strict: bool) -> bytes:
    """Reads a text file. Returns nothing for a file that is not text, unless ``strict``: then raises ValueError."""
    data = file.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if strict:
            raise ValueError(f"expected UTF-8 text, found something else in {file} at byte {error.start}") from None
        return b""
    return b"" if b"\0" in data and not strict else data


def _numbers(file: Path, vocabulary: int) -> Any:
    """Maps a file of tokens. A .bin file holds 16-bit numbers, or 32-bit ones if the vocabulary needs them."""
    if file.suffix == ".bin":
        dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        if file.stat().st_size % dtype.itemsize or not file.stat().st_size:
            raise ValueError(f"expected tokens of {dtype.itemsize} bytes in {file}, found {file.stat().st_size} bytes")
        array: Any = np.memmap(file, dtype, "r")
    else:
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"expected an array of numbers in {file}: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"expected one row of whole numbers in {file}, found {array.dtype} of shape {array.shape}")
    if len(array) and (int(array.max()) >= vocabulary or int(array.min()) < 0):
        raise ValueError(
            f"expected tokens from 0 to {vocabulary - 1} in {file}, found {int(array.min())} to {int(array.max())}"
        )
    return array


def _standard_library() -> Any:
    root, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            text += path.read_bytes()
        if len(text) >= _STDLIB_BYTES:
            break
    return np.frombuffer(bytes(text[:_STDLIB_BYTES]), np.uint8)


@dataclass(slots=True)
class Windows:
    """A stream cut into windows of ``seq`` tokens and the token that follows: each token but the first is a target once. The
    first ``trained`` windows are trained on, the other ``held_out`` are not. ``order``: the last epoch and its order."""

    stream: Any
    seq: int
    trained: int
    held_out: int
    order: tuple[int, Tensor] | None = None

    @staticmethod
    def cut(stream: Any, seq: int, batch: int) -> Windows:
        """Cuts a stream. Raises ValueError if there are too few tokens."""
        count = max(0, len(stream) - 1) // seq
        held_out = max(1, int(count * _HELD_OUT))
        if count - held_out < batch:
            raise ValueError(
                f"expected at least {(batch + 1) * seq + 1} tokens for a batch of {batch} and one window of {seq} held out, "
                f"found {len(stream)}: give more --data, or a smaller --batch or --seq"
            )
        return Windows(stream, seq, count - held_out, held_out)

    def batch(self, step: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns (tokens, the tokens that follow) of a step, counted from 1. Each epoch has an order of its own."""
        first = (step - 1) * batch
        chosen = []
        for sample in range(first, first + batch):
            epoch, index = divmod(sample, self.trained)
            if self.order is None or self.order[0] != epoch:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
                self.order = epoch, torch.randperm(self.trained, generator=generator)
            chosen.append(int(self.order[1][index]))
        return self._stacked(chosen)

    def evaluation(self, batch: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields at most ``most`` batches of held-out windows, in order."""
        for start in range(0, self.held_out - batch + 1 if self.held_out >= batch else 1, batch):
            if start // batch == most:
                return
            stop = min(start + batch, self.held_out)
            yield self._stacked([self.trained + index for index in range(start, stop)])

    def _stacked(self, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = [self.stream[n * self.seq : n * self.seq + self.seq + 1].astype(np.int64) for n in windows]
        tokens = torch.from_numpy(np.stack(rows))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
