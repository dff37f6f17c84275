"""Joins copies of neighbours into one: values that lie in the same order, at the same distances, on both sides of a link.

Each parameter at home has a storage of its own, since saving a tensor saves its storage. What lies beside it is known from its
slab alone (``Slabs``)."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

import torch

from mtcompile.runtime.devices.arena import span_nbytes
from mtcompile.runtime.schedule import Copied, joined


class Slabs:
    """The memory of homes, by address. ``memories``: tensors of bytes that do not overlap."""

    def __init__(self, memories: Iterable[torch.Tensor] = ()) -> None:
        self._memories = sorted((memory for memory in memories if memory.numel()), key=torch.Tensor.data_ptr)
        self._starts = [memory.data_ptr() for memory in self._memories]

    def of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """Returns the slab that a tensor is in and the byte there at which it begins; None for one of other memory."""
        pointer = tensor.data_ptr()
        position = bisect.bisect_right(self._starts, pointer) - 1
        if position < 0 or pointer - self._starts[position] >= self._memories[position].numel():
            return None
        return self._memories[position], pointer - self._starts[position]


NO_SLABS = Slabs()


def bytes_of(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Returns ``nbytes`` bytes of a tensor's storage, from ``start`` bytes after its first element on."""
    at = tensor.storage_offset() * tensor.element_size() + start
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), at, (nbytes,), (1,))


def runs_of_bytes(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], slabs: Slabs = NO_SLABS
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Joins (target, source) tensors into the fewest (target, source) copies of bytes, each with the padding between its
    values. So one copy moves neighbouring parameters. ``slabs``: of the homes."""
    listed = list(pairs)
    for first, nbytes in joined(
        Copied(_memory_of(target, slabs), target.data_ptr(), _memory_of(source, slabs), source.data_ptr(), span_nbytes(source))
        for target, source in listed
    ):
        target, source = listed[first]
        yield _part(target, nbytes, slabs), _part(source, nbytes, slabs)


def _memory_of(tensor: torch.Tensor, slabs: Slabs) -> int:
    """Returns the address of what may be read or written beside a tensor: its slab or its storage."""
    slab = slabs.of(tensor)
    return tensor.untyped_storage().data_ptr() if slab is None else slab[0].data_ptr()


def _part(tensor: torch.Tensor, nbytes: int, slabs: Slabs) -> torch.Tensor:
    slab = slabs.of(tensor)
    return bytes_of(tensor, 0, nbytes) if slab is None else slab[0][slab[1] : slab[1] + nbytes]
