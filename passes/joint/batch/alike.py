"""Tells whether what all rows share is the same for each where it meets the batch: zeros(batch, n) is, arange(batch) not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch.shapes import args_of, shape_of
from mtcompile.passes.step_graph import is_random

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 20  # of constants, such as arange(batch), whose numbers are looked at
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim)
_VIEWS += (aten.squeeze.default, aten.squeeze.dims)
_SAME = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)


@dataclass(slots=True)
class Alike:
    """Looks at values without the batch, of a micro-batch of so many ``rows``. ``constants``: the tensors that the graph holds,
    by placeholder; ``known``: what has been found so far."""

    rows: int
    constants: Mapping[str, torch.Tensor]
    known: dict[tuple[fx.Node, int, int], bool] = field(default_factory=dict)

    def __call__(self, node: fx.Node, dim: int, outer: int = 1) -> bool:
        """Says whether a value is the same for all rows, of which dimension ``dim`` has ``outer`` times as many, with more
        elements in each. One element is read by each row alike."""
        if shape_of(node)[dim] == 1:
            return True
        key = node, dim, outer
        if key not in self.known:
            self.known[key] = True  # while it is looked at
            self.known[key] = self._looked_at(node, dim, outer)
        return self.known[key]

    def _looked_at(self, node: fx.Node, dim: int, outer: int) -> bool:
        length = shape_of(node)[dim]
        if length % (outer * self.rows):
            return False
        if (numbers := constant(node, self.constants)) is not None:
            rows = numbers.movedim(dim, 0).reshape(outer, self.rows, -1)
            return torch.equal(rows, rows[:, :1].expand_as(rows))
        if node.op != "call_function":
            return False  # a part of a parameter, a buffer or another input for each row
        if is_random(node):
            return True
        return self._made_alike(node, dim, outer, length)

    def _made_alike(self, node: fx.Node, dim: int, outer: int, length: int) -> bool:
        target, shape = node.target, shape_of(node)
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if target in (aten.expand.default, aten.repeat.default):
            at = dim - len(shape) + len(shape_of(source))
            if at < 0 or shape_of(source)[at] == 1:
                return True
            repeated = target is aten.repeat.default and length // shape_of(source)[at]
            return outer == 1 and repeated % self.rows == 0 if repeated and repeated > 1 else self(source, at, outer)
        if target in _VIEWS:
            return self._before_view(source, prod(shape[:dim]) * outer)
        if target in (aten.slice.Tensor, aten.select.int):
            at = args_of(node)[1] % len(shape_of(source))
            if target is aten.select.int:
                return self(source, dim + (at <= dim), outer)
            return (at != dim or shape_of(source) == shape) and self(source, dim, outer)
        if target is aten.embedding.default:
            indices: Any = args_of(node)[1]
            return self(indices, dim, outer)
        pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) or target in _SAME
        for operand in node.all_input_nodes:
            dims = shape_of(operand)
            if pointwise:
                at = dim - len(shape) + len(dims)
                if at >= 0 and not self(operand, at, outer):
                    return False
            elif operand.op == "call_function" and length in dims and not self(operand, dims.index(length), outer):
                return False
        return True

    def _before_view(self, source: fx.Node, before: int) -> bool:
        """Says the same of a view of ``source`` with so many elements before the rows."""
        shape = shape_of(source)
        for dim, length in enumerate(shape):
            outer, rest = divmod(before, prod(shape[:dim]))
            if outer and not rest and length % (outer * self.rows) == 0:
                return self(source, dim, outer)
        return False


def constant(node: fx.Node, constants: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor | None:
    """Returns the value of an operation that reads nothing given to a step; None where it does, or is large or random.
    ``constants``: the tensors that the graph holds, by placeholder."""
    order, todo, values = list[fx.Node](), [node], dict[fx.Node, torch.Tensor]()
    while todo:
        each = todo.pop()
        if each.op == "placeholder" and each.name in (constants or {}):
            assert constants is not None
            values[each] = constants[each.name].cpu()
            continue
        val = each.meta.get("val")
        known = each.op == "call_function" and isinstance(val, torch.Tensor) and not is_random(each)
        if not known or val.numel() > _MOST_ELEMENTS:
            return None
        order.append(each)
        todo += each.all_input_nodes
    for each in reversed(order):
        args, kwargs = fx.node.map_arg((each.args, each.kwargs), values.__getitem__)
        run: Any = each.target
        values[each] = run(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})
    return values[node]
