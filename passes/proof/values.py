"""Value numbers, for all proofs: an operation on the same numbers, with the same arguments, has the same number."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

Key = tuple[Any, ...]


class Operand(tuple):  # type: ignore[type-arg]
    """The number of an operand, unlike any argument that is a number."""

    def __new__(cls, number: Any) -> Operand:
        return tuple.__new__(cls, ("operand", number))

    @property
    def number(self) -> Any:
        return self[1]


class Literal(str):
    """Stands for an argument that is neither None nor an integer: 1.0 and True are unlike 1, and 0.0 unlike -0.0."""


def frozen(value: Any, numbers: Mapping[fx.Node, Any] = MappingProxyType({})) -> Any:
    """Returns an argument as a part of a key: equal for equal arguments only. Lists are tuples, and operands their numbers."""
    kind = type(value)
    if kind is fx.Node:
        return Operand(numbers[value])
    if kind is int or value is None or kind is Operand or kind is Literal:
        return value
    return tuple([frozen(each, numbers) for each in value]) if isinstance(value, (list, tuple)) else Literal(repr(value))


def arguments(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the positional and the keyword arguments of an operation, frozen, with numbers for operands."""
    kwargs = node.kwargs
    return frozen(node.args, numbers), frozen(sorted(kwargs.items()), numbers) if kwargs else ()


def phase_of(node: fx.Node) -> str:
    """Returns the phase of an operation of a joint graph."""
    return str(node.meta["region"][0] if "region" in node.meta else node.meta["phase"])


class ValueNumbers:
    """Value numbers that several graphs share. ``keys``: what each is; ``stream``: how many random operations the current graph
    has run."""

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}
        self.keys: list[Key] = []
        self.stream = 0

    def number(self, key: Key) -> int:
        number = self.known.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def draw(self, node: fx.Node) -> Any:
        """Returns which random numbers an operation draws: by their place in the generator's stream."""
        self.stream += 1
        return self.stream
