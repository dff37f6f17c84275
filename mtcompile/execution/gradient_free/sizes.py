"""The sizes of calls, and the bytes that calls of known sizes took."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mtcompile.torch_private import pytree

_GROWTH = 1.25  # of each size, up to which the bytes of a larger call are extrapolated
_MOST = 32  # known calls of each kind
_MOST_KINDS = 256
_DEPTH = 4  # to which arguments that are objects (caches) are looked into


@dataclass(frozen=True, slots=True)
class CallSize:
    """``kind``: equal for calls that differ in sizes alone. ``sizes``: of every dimension of every tensor."""

    kind: tuple[Any, ...]
    sizes: tuple[int, ...]


def size_of_call(model: torch.nn.Module, args: Any, kwargs: Any) -> CallSize:
    """Returns the size of a call. Tensors in objects that are no containers count by their number and bytes."""
    kind: list[Any] = [model.training, torch.is_autocast_enabled(), torch.get_autocast_dtype("cpu")]
    sizes: list[int] = []
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            kind.append((leaf.dim(), leaf.dtype))
            sizes += leaf.shape
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            kind.append(leaf)
        else:
            inner = list(_tensors(leaf, _DEPTH))
            kind.append((type(leaf), len(inner)))
            sizes.append(sum(tensor.nbytes for tensor in inner))
    return CallSize((str(spec), *kind), tuple(sizes))


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, (torch.nn.Module, type)):
        values = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
        for each in values or getattr(value, "__dict__", {}).values():
            yield from _tensors(each, depth - 1)


@dataclass(slots=True)
class KnownCalls:
    """Bytes that calls took, by their sizes."""

    by_kind: dict[tuple[Any, ...], list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)

    def nbytes(self, call: CallSize) -> int | None:
        """Returns the most bytes that a call takes: those of a known call that is as large in each size; or of one that is
        nearly as large, times the square of what each size has grown by. None for a call like no known one."""
        bounds = [
            math.ceil(nbytes * math.prod(growth) ** 2)
            for sizes, nbytes in self.by_kind.get(call.kind, ())
            if (growth := _growth(call.sizes, sizes)) is not None
        ]
        return min(bounds, default=None)

    def note(self, call: CallSize, nbytes: int) -> None:
        """Remembers what a call took."""
        known = self.by_kind.pop(call.kind, [])
        smaller = [(sizes, n) for sizes, n in known if n <= nbytes and all(map(int.__le__, sizes, call.sizes))]
        larger = [each for each in known if each not in smaller]
        self.by_kind[call.kind] = [*larger, (call.sizes, nbytes)][-_MOST:]
        while len(self.by_kind) > _MOST_KINDS:
            del self.by_kind[next(iter(self.by_kind))]


def _growth(sizes: tuple[int, ...], known: tuple[int, ...]) -> list[float] | None:
    """Returns by how much each size exceeds a known one; None if one does by too much."""
    growth = [1.0 if size <= before else size / before if before else math.inf for size, before in zip(sizes, known, strict=True)]
    return growth if max(growth, default=1.0) <= _GROWTH else None
