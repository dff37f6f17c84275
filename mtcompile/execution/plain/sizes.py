"""The sizes of calls, and the bytes that calls of known sizes took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mtcompile.torch_private import pytree

_GROWTH = 1.25  # of each size, up to which the bytes of a larger call are extrapolated
_MOST = 32  # known calls of each kind
_MOST_KINDS = 256
_DECIDING = (bool, int, str)  # types of attributes: numbers that are no counts are seldom sizes, and change more often
_POWER = 3  # of a size's growth, with which bytes grow at most
_DEPTH = 4  # to which arguments that are objects (caches) are looked into


Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CallSize:
    """``kind``: equal for calls that differ in sizes alone. ``sizes``: the shape of every tensor. ``attributes``: of modules,
    where these count, as ``attributes_of`` returns them."""

    kind: tuple[Any, ...]
    sizes: Sizes
    attributes: int = 0


def size_of_call(model: torch.nn.Module, args: Any, kwargs: Any, where: torch.device) -> CallSize:
    """Returns the size of a call that computes on ``where``. Tensors in objects that are no containers count by their number
    and bytes."""
    kind: list[Any] = [model.training, torch.is_autocast_enabled(where.type), torch.get_autocast_dtype(where.type)]
    sizes: list[tuple[int, ...]] = []
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            kind.append((leaf.dim(), leaf.dtype))
            sizes.append(tuple(leaf.shape))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            kind.append(leaf)
        else:
            inner = list(tensors_in(leaf))
            kind.append((type(leaf), len(inner)))
            sizes.append((sum(tensor.nbytes for tensor in inner),))
    return CallSize((str(spec), *kind), tuple(sizes))


def attributes_of(model: torch.nn.Module) -> int:
    """Returns a hash of what modules have for attributes that may decide how much a forward computes: numbers that count, flags
    and names."""
    states = (vars(module).items() for module in model.modules())
    return hash(tuple([pair for state in states for pair in state if type(pair[1]) in _DECIDING]))


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value: in containers and in attributes of objects, to that ``depth``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, (torch.nn.Module, type)):
        values = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
        for each in values or getattr(value, "__dict__", {}).values():
            yield from tensors_in(each, depth - 1)


@dataclass(slots=True)
class KnownCalls:
    """Bytes that calls took, by their sizes. ``_computed``: those beside parameters."""

    by_kind: dict[Any, list[tuple[Sizes, int]]] = field(default_factory=dict)
    _computed: dict[CallSize, int] = field(default_factory=dict)
    _calls: Counter[CallSize] = field(default_factory=Counter)

    def is_due(self, call: CallSize) -> bool:
        """Counts a call. Tells whether it is the 2nd, 4th, 8th, ... of its size: what it takes may depend on other things."""
        self._calls[call] += 1
        if len(self._calls) > _MOST_KINDS:
            self._calls.clear()
        return self._calls[call].bit_count() == 1 < self._calls[call]

    def has(self, call: CallSize) -> bool:
        """Tells whether a call of just that size is known."""
        return any(sizes == call.sizes for sizes, _ in self._alike(call))

    def _alike(self, call: CallSize) -> list[tuple[Sizes, int]]:
        return self.by_kind.get((call.kind, call.attributes), [])

    def nbytes(self, call: CallSize) -> int | None:
        """Returns the most bytes that a call takes: those of a known call that is as large in each size; or of one whose sizes
        it exceeds by at most a quarter, times the cube of what each size has grown by. Sizes of several tensors that have
        grown alike are taken for one. None for a call like no known one."""
        near = ((sizes, nbytes) for sizes, nbytes in self._alike(call) if _near(call.sizes, sizes))
        return min((_scaled(nbytes, sizes, call.sizes) for sizes, nbytes in near), default=None)

    def most(self, call: CallSize, changed: bool = False) -> int | None:
        """Returns the most bytes beside parameters that a call takes, by those of calls of any sizes: times the cube of what
        each size has grown by. ``changed``: by the largest of those with other attributes. None where none is known."""
        known = ((each, nbytes) for each, nbytes in self._computed.items() if each.kind == call.kind)
        alike = ((each, nbytes) for each, nbytes in known if (each.attributes != call.attributes) == changed)
        return (max if changed else min)((_scaled(nbytes, each.sizes, call.sizes) for each, nbytes in alike), default=None)

    def note(self, call: CallSize, nbytes: int, lent: int = 0) -> None:
        """Remembers what a call took, or another one of its size, if that was more. ``lent``: how much of it was parameters."""
        if len(self._computed) >= _MOST_KINDS:
            self._computed.clear()
        self._computed[call] = max(0, nbytes - lent)
        known = self.by_kind.pop((call.kind, call.attributes), [])
        others = [each for each in known if each[0] != call.sizes]
        nbytes = max([nbytes, *(before for sizes, before in known if sizes == call.sizes)])
        self.by_kind[call.kind, call.attributes] = [*others, (call.sizes, nbytes)][-_MOST:]
        while len(self.by_kind) > _MOST_KINDS:
            del self.by_kind[next(iter(self.by_kind))]


def _near(sizes: Sizes, known: Sizes) -> bool:
    pairs = (pair for shapes in zip(sizes, known, strict=True) for pair in zip(*shapes, strict=True))
    return all(size <= _GROWTH * before for size, before in pairs)


def _scaled(nbytes: int, known: Sizes, sizes: Sizes) -> int:
    growth = Counter[tuple[int, int]]()  # how often a tensor has a size that has grown so
    for shapes in zip(known, sizes, strict=True):
        growth |= Counter((before, size) for before, size in zip(*shapes, strict=True) if size > before)
    for (before, size), count in growth.items():
        nbytes = -(-nbytes * size ** (_POWER * count) // max(1, before) ** (_POWER * count))
    return nbytes
