"""Numbers of a captured forward that depend on how many rows the batch has, such as 4 in x.sum() / len(x)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_FACTORIES = (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.rand.default)
_FACTORIES += (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.randn.default)
_FILLED = (aten.full.default, aten.new_full.default, aten.scalar_tensor.default, aten.full_like.default)


class DependsOnRows(NotImplementedError):
    """Raised for a forward that does another thing for other numbers of rows. ``node``: the operation, as it was captured."""

    def __init__(self, what: str, node: fx.Node) -> None:
        super().__init__(
            f"a forward that {what}, so that micro-batches would not add up to the whole batch",
            "compute that outside of the model, or for each row alike",
        )
        self.node = node


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that a forward of one micro-batch computes with, and those that one of the whole batch has in their place:
    number -> kind of operation -> number, by the text of the place in the user's code. ``dims``: the dimension that has the
    batch in what is filled or drawn at a place. ``changing``: the places, and operations, with a number that differs;
    ``outputs``: the dimensions in which outputs are longer. ``known``: whether a forward of the whole batch was seen."""

    by_place: dict[str, dict[float, dict[str, float]]] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    changing: dict[str, fx.Node] = field(default_factory=dict)
    outputs: list[int | None] = field(default_factory=list)
    known: bool = False

    def of_whole(self) -> Numbers:
        """Returns the same of a forward of the whole batch, with those of a micro-batch in their place."""
        swapped = replace(self, by_place={})
        for place, numbers in self.by_place.items():
            for one, wholes in numbers.items():
                for kind, whole in wholes.items():
                    swapped.note(place, kind, whole, one)
        return swapped

    def note(self, place: str, operation: str, number: float, whole: float) -> None:
        """Notes a number of an operation, by the name of that. One that differs is not forgotten for another."""
        wholes, kind = self.by_place.setdefault(place, {}).setdefault(number, {}), _kind(operation)
        if wholes.get(kind, number) == number:
            wholes[kind] = whole

    def check_seen(self, joint: fx.GraphModule) -> None:
        """Raises DependsOnRows if the forward computes with a number that depends on how many rows there are, and no operation
        of ``joint`` does."""
        seen = {_place(node) for node in joint.graph.nodes if self.depend(node, joint.meta["constants"])}
        for place, node in self.changing.items():
            if place not in seen:
                raise DependsOnRows("computes with the number of rows", node)

    def ratio(self, node: fx.Node, number: float) -> float | None:
        """How many times as large a number of ``node`` is for the whole batch; None where that is not known."""
        wholes, kind = self.by_place.get(_place(node), {}).get(float(number), {}), _kind(str(node.target))
        if not wholes:
            return None
        whole = wholes[kind] if kind and kind in wholes else next((each for each in wholes.values() if each != number), number)
        return 1.0 if whole == number else whole / number if number else math.inf

    def depend(self, node: fx.Node, constants: Mapping[str, torch.Tensor]) -> bool:
        """Says whether an operation computes with, or makes a value of, a number that depends on how many rows there are."""
        return any(self.ratio(node, number) not in (None, 1.0) for number in _of(node, constants))

    def batch_dim(self, node: fx.Node) -> int | None:
        """The dimension of zeros(batch, n), and other values that are the same or drawn for each row, that has the batch."""
        return self.dims.get(_place(node)) if node.target in _FACTORIES else None


def _kind(name: str) -> str:
    """The kind of an operation by its name, in the user's code or in the graph; "" for others than these."""
    return next((kind for kind in ("pow", "mul", "div", "add", "sub", "clamp") if kind in name), "")


def _place(node: fx.Node) -> str:
    return str(node.meta.get("stack_trace"))


def _of(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> list[float]:
    target: Any = node.target
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return [float(given) for given in node.args if isinstance(given, (int, float)) and not isinstance(given, bool)]
    if target in _FILLED:
        given: Any = node.args[0 if target is aten.scalar_tensor.default else 1]
        return [float(given)] if isinstance(given, (int, float)) else []
    held = [constants[operand.name] for operand in node.all_input_nodes if operand.name in constants]
    return [float(value) for value in held if value.numel() == 1 and not value.is_complex()]
