"""Arenas: one allocation per tier, and tensors that are views into it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtcompile.runtime.pages import pages
from mtcompile.runtime.schedule import ALIGNMENT

_HUGE_NBYTES = 4 << 20  # of host memory that may be in huge pages, of 2 MiB each


@dataclass(frozen=True, slots=True)
class Layout:
    """The dtype, size and strides that place a value's elements in its bytes."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def same_strides(size: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Tells whether two strides place every element of ``size`` alike. The stride of a dimension of one element does not
    count, nor any where there are no elements: torch's kernels and its shape propagation do not always agree on these."""
    return 0 in size or all(n == 1 or a == b for n, a, b in zip(size, one, other, strict=True))


def arena(nbytes: int, device: torch.device | None = None, alignment: int = ALIGNMENT) -> torch.Tensor:
    """Allocates ``nbytes``, aligned to ALIGNMENT as torch's own tensors are, or as asked for; on the host unless ``device`` is
    given."""
    if device is None and nbytes >= _HUGE_NBYTES:  # what a step allocates is counted by torch's own allocator
        with contextlib.suppress(OSError):  # torch says in its words that there is no memory
            return torch.frombuffer(pages(nbytes, forked=True), dtype=torch.uint8)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device or "cpu")
    if nbytes and memory.data_ptr() % alignment:
        memory = torch.empty(nbytes + alignment, dtype=torch.uint8, device=memory.device)
        skip = -memory.data_ptr() % alignment
        memory = memory[skip : skip + nbytes]
    return memory


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros with the strides of a tensor, which is dense: on the host in memory as of ``arena``."""
    if tensor.device.type != "cpu":
        return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
    stride = torch.empty_like(tensor, dtype=dtype, device="meta").stride()
    return view(arena(tensor.numel() * dtype.itemsize), 0, Layout(dtype, tuple(tensor.shape), stride)).zero_()


def view(memory: torch.Tensor, offset: int, layout: Layout) -> torch.Tensor:
    """Returns the tensor of that layout, ``offset`` bytes into ``memory``."""
    start = memory.storage_offset() + offset
    return torch.empty(0, dtype=layout.dtype, device=memory.device).set_(
        memory.untyped_storage(), start // layout.dtype.itemsize, layout.size, layout.stride
    )


def part(memory: torch.Tensor, offset: int, layout: Layout) -> torch.Tensor:
    """Returns what ``view`` does, of host memory, in a storage of only those bytes: saving a tensor saves its storage."""
    like = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
    own = torch.from_numpy(memory[offset : offset + span_nbytes(like)].numpy())  # holds the memory
    return view(own, 0, layout)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same elements, in the same memory, seen as a storage that begins and ends with them."""
    if fills_storage(tensor) or tensor.is_conj() or tensor.is_neg():
        return tensor
    storage, nbytes = tensor.untyped_storage(), span_nbytes(tensor)
    start = tensor.storage_offset() * tensor.element_size()
    own = torch.UntypedStorage(0, device=tensor.device) if nbytes == 0 else storage[start : start + nbytes]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(own, 0, tensor.shape, tensor.stride())


def overlaps(tensor: torch.Tensor) -> bool:
    """Tells whether several elements of a tensor are one place in memory, as after ``expand``."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return tensor.numel() > 0
        extent = max(extent, stride * (size - 1) + extent)
    return False


def fills_storage(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor's elements begin and end where its storage does."""
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == span_nbytes(tensor))


def span_nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes from the first to the last element: what a copy that keeps its strides moves."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
