"""Notices changes through ``tensor.data``, which raise no version counter. Such a change begins with reading the attribute: the
checksum of a watched tensor is taken just before, and compared when a backward asks."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from mtcompile.torch_private.tracing import plainly

_watching: weakref.WeakSet[DataWrites] = weakref.WeakSet()


class DataWrites:
    """Watches tensors, which somebody else holds, from now on."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._watched = set(map(id, tensors))
        self._before: dict[int, tuple[int, int]] = {}  # where the values were, and their sum
        _see_accesses()
        _watching.add(self)

    def opens(self, tensor: torch.Tensor) -> None:
        """Called before the ``.data`` of a tensor is read or replaced."""
        if id(tensor) in self._watched and id(tensor) not in self._before and tensor.layout == torch.strided:
            self._before[id(tensor)] = tensor.data_ptr(), _sum_of(tensor)

    def change_of(self, tensor: torch.Tensor) -> str:
        """Says whether the values of a watched tensor have changed since its ``.data`` was first read: "" for no, "replaced" if
        the tensor has other memory, else "written"."""
        pointer, values = self._before.get(id(tensor), (0, None))
        if values is None or values == _sum_of(tensor):
            return ""
        return "written" if tensor.data_ptr() == pointer else "replaced"


def _sum_of(tensor: torch.Tensor) -> int:
    with plainly():
        content = torch.Tensor.detach(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(content.cpu().numpy().data)


@functools.cache
def _see_accesses() -> None:
    """Replaces the property ``.data``, once, by one that tells all watchers before it is read or replaced."""
    plain: Any = torch.Tensor.data

    def tell(tensor: torch.Tensor) -> None:
        if _watching:
            for watching in tuple(_watching):
                watching.opens(tensor)

    def get(tensor: torch.Tensor) -> torch.Tensor:
        tell(tensor)
        return plain.__get__(tensor)  # type: ignore[no-any-return]

    def replace(tensor: torch.Tensor, values: torch.Tensor) -> None:
        tell(tensor)
        plain.__set__(tensor, values)

    torch.Tensor.data = property(get, replace, doc=plain.__doc__)  # type: ignore[assignment]
