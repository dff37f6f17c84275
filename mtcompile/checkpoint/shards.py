"""Weights of a local folder, one safetensors file or several with an index, read tensor by tensor into memory of their own.

The library reads and checks a file's header. Tensors are then read by their place in the file, so that no part of a shard stays
in memory beside them.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtcompile.capture.refusals import first_line
from mtcompile.checkpoint.files import regular
from mtcompile.errors import CheckpointError
from mtcompile.reading import panics_as_errors
from mtcompile.runtime.interrupts import interrupts_later

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
_NAMES = ("model", "adapter_model", "diffusion_pytorch_model")  # that libraries give weights, the first wins
_MOST_INDEX_NBYTES = 1 << 28
_MOST_HEADER_NBYTES = 100_000_000  # as the library has it
_PIECE_NBYTES = 1 << 22
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. ``offset``: of its first byte in the file."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def nbytes_as(self, dtype: torch.dtype | None) -> int:
        """Returns its bytes with floating-point numbers of ``dtype``; None: as they are stored."""
        return self.numel * self.as_dtype(dtype).itemsize

    def as_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        return dtype if dtype is not None and self.dtype.is_floating_point else self.dtype

    def is_floating_point(self) -> bool:
        """Answers Transformers, as a tensor does."""
        return self.dtype.is_floating_point

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Reads it into new memory, aligned as torch's own; floating-point numbers as ``dtype``, converted piece by piece.
        Raises CheckpointError."""
        wanted = self.as_dtype(dtype)
        tensor = torch.empty(self.shape, dtype=wanted)
        flat, size = tensor.view(-1), self.dtype.itemsize
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                if wanted == self.dtype:
                    self._fill(file, flat)
                    return tensor
                piece = torch.empty(min(len(flat), _PIECE_NBYTES // size), dtype=self.dtype)
                for part in flat.split(max(len(piece), 1)):
                    self._fill(file, piece[: len(part)])
                    part.copy_(piece[: len(part)])
        except OSError as error:
            raise CheckpointError(f"{self.path}: {self.name} could not be read: {error.strerror}") from None
        return tensor

    def _fill(self, file: Any, flat: Tensor) -> None:
        place, done = memoryview(flat.view(torch.uint8).numpy().data), 0
        while done < len(place):
            count = file.readinto(place[done:])
            if not count:
                raise CheckpointError(f"{self.path}: expected {self.nbytes} bytes of {self.name}: the file has become shorter")
            done += count

    # Transformers takes a slice of a file ([...]) and converts it (.to), which here is when it is read.

    def __getitem__(self, index: Any) -> StoredTensor | Tensor:
        return self if index is ... else self.read()[index]

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self.read(dtype).to(device)


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns name -> tensor of a folder's weights, or of one file. Only headers are read. Raises CheckpointError, and
    ValueError if it is neither."""
    given = Path(path)
    if not given.exists():
        raise ValueError(
            f"expected a local folder with weights, found no {str(given)!r}. Nothing is downloaded: if it is a name of the "
            f"Hugging Face hub, fetch it first (hf download {given} --local-dir FOLDER) and pass that folder"
        )
    tensors: dict[str, StoredTensor] = {}
    for file, names in _files(given).items():
        held = _header(file)
        if lacking := sorted(names - held.keys()):
            raise CheckpointError(f"{file}: expected {lacking[0]}, which the index says is there, found no such tensor")
        if twice := sorted(held.keys() & tensors.keys()):
            raise CheckpointError(f"{twice[0]} is in {tensors[twice[0]].path} and in {file}; expected it in one of them")
        tensors |= held
    return tensors


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Returns name -> tensor of one file, which is mapped: a tensor is read when it is used, and writes to it stay in memory.
    The library's own mapping leaves two objects behind for each tensor (safetensors 0.8). Raises CheckpointError."""
    held = _header(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in held.items() if not each.nbytes}
    for name, each in held.items():
        if each.nbytes:  # with a storage of its own: torch's generators do not take a state that begins within another one
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=each.nbytes, offset=each.offset)
            tensors[name] = raw.view(each.dtype).view(each.shape)
    return tensors


def _files(given: Path) -> dict[Path, set[str]]:
    """Returns each file with the names that an index has for it."""
    if given.is_file():
        return _indexed(given) if given.name.endswith(INDEX) else {regular(given, linked=True): set()}
    for stem in _NAMES:
        if (given / (stem + SUFFIX)).exists():
            return {regular(given / (stem + SUFFIX), linked=True): set()}
        if (given / (stem + INDEX)).exists():
            return _indexed(given / (stem + INDEX))
    files = sorted(given.glob("*" + SUFFIX))
    if len(files) == 1:
        return {regular(files[0], linked=True): set()}
    pickled = next((p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in sorted(given.glob(pattern))), None)
    if files:
        raise CheckpointError(f"expected model{SUFFIX} or model{INDEX} in {given}, found {len(files)} other files: pass one")
    if pickled is not None:
        raise CheckpointError(
            f"expected {SUFFIX} files in {given}, found {pickled}, which could run code when it is read. Convert it where you "
            "trust it, for example with save_pretrained"
        )
    raise CheckpointError(f"expected model{SUFFIX}, or model{INDEX} with its shards, in {given}, found none")


def _indexed(index: Path) -> dict[Path, set[str]]:
    try:
        about = json.loads(regular(index, _MOST_INDEX_NBYTES, linked=True).read_text(encoding="utf-8"))
        rows: Mapping[str, str] = about["weight_map"]
        if not rows or not all(isinstance(file, str) for file in rows.values()):
            raise ValueError("expected names of files in its weight_map")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of weights: {first_line(error)}") from None
    files: dict[Path, set[str]] = {}
    for name, file in rows.items():
        if Path(file).name != file or not file.endswith(SUFFIX):
            raise CheckpointError(f"{index} names a file {file!r:.120}; expected a {SUFFIX} file of the index's own folder")
        files.setdefault(index.parent / file, set()).add(name)
    return {regular(file, linked=True): files[file] for file in sorted(files)}


def check_names(path: Path) -> None:
    """Raises CheckpointError if a file's header has a name twice: libraries differ in which of the two tensors they take."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ValueError(f"expected each name once, found {twice!r} twice")
        return fields

    try:
        with path.open("rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            if nbytes > _MOST_HEADER_NBYTES:
                raise ValueError(f"expected a header of at most {_MOST_HEADER_NBYTES:,} bytes, found {nbytes:,}")
            json.loads(file.read(nbytes), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be used: {first_line(error)}") from None


def _header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file. The library raises for a header of more than 100 MB, one that names bytes which the file
    has not, and tensors that overlap or leave gaps: so each begins where the one before it ends, and the last with the file."""
    from safetensors import safe_open

    tensors = {}
    check_names(path)
    try:
        with (
            panics_as_errors("a safetensors file"),
            interrupts_later(),
            safe_open(path, framework="pt", backend="pread") as file,
        ):
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            places = [(name, str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices.items()]
            del slices
    except Exception as error:  # the library has errors of its own
        raise CheckpointError(f"{path} cannot be used: {first_line(error)}") from None
    with path.open("rb") as opened:
        start, end = 8 + int.from_bytes(opened.read(8), "little"), path.stat().st_size
    for name, dtype, shape in reversed(places):
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: expected numbers of a dtype among {', '.join(DTYPES)}, found {dtype} in {name}")
        end -= math.prod(shape) * DTYPES[dtype].itemsize
        tensors[name] = StoredTensor(name, path, DTYPES[dtype], shape, end)
    if end != start:
        raise CheckpointError(f"{path}: expected its first tensor after {start} bytes, found it after {end}")
    return dict(reversed(tensors.items()))
