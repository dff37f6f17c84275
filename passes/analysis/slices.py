"""Finds the operands that a graph reads slice by slice, such as the weights of experts, and where the rows of each slice end.

``_grouped_mm(x, w, ends)`` multiplies rows ``ends[i - 1]`` to ``ends[i]`` of ``x`` [rows, n] with slice ``i`` of ``w``
[slices, n, m]. No result depends on a slice without rows, whatever its bytes are: there is no product of it. So such a slice
need not be on the device. Nothing else is known to leave out slices, not even a product with zeros: NaN times zero is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mtcompile.passes.step_graph import span_nbytes

_GROUPED: Any = torch.ops.aten._grouped_mm.default
_TRANSPOSE = torch.ops.aten.transpose.int


def grouped_operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns ``(w, ends)`` of a product of rows with slices, as above; None for any other operation. The caller knows that
    ``w`` has three dimensions: with two, every product reads a part of it."""
    if node.target is not _GROUPED or len(node.args) < 2 or node.kwargs.get("bias") is not None:
        return None
    ends = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    plain = len(node.args) < 4 or node.args[3] is None
    weight = node.args[1]
    return (weight, ends) if plain and isinstance(ends, fx.Node) and isinstance(weight, fx.Node) else None


def slice_view(node: fx.Node) -> fx.Node | None:
    """Returns what a node views, if each slice of it is a view of the same slice of that (three dimensions); else None."""
    if node.target is not _TRANSPOSE or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0] if {int(dim) % 3 for dim in node.args[1:]} == {1, 2} else None


def is_sliceable(val: torch.Tensor) -> bool:
    """Tells whether a tensor's slices along its first dimension lie one behind the other, each in one piece."""
    return val.dim() == 3 and val.numel() > 0 and val.is_contiguous()


def read_by_slices(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns the placeholders that a graph only reads slice by slice, each with where the rows of its slices end: the same for
    all of its readers."""
    sliced = {}
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and is_sliceable(val):
            ends = {_ends(user, each) for each in _views(node) for user in each.users if slice_view(user) is not each}
            if len(ends) == 1 and (end := ends.pop()) is not None:
                sliced[node] = end
    return sliced


def _views(node: fx.Node) -> list[fx.Node]:
    """Returns a value and its views by slices."""
    views = [node]
    for each in views:
        views.extend(user for user in each.users if slice_view(user) is each)
    return views


def _ends(reader: fx.Node, weight: fx.Node) -> fx.Node | None:
    """Returns where the rows of the slices end in a product that reads ``weight`` as its slices alone; else None."""
    operands = grouped_operands(reader)
    right = operands is not None and operands[0] is weight and reader.args[0] is not weight and operands[1] is not weight
    return operands[1] if right and operands is not None else None


def rows_of(ends: fx.Node) -> int:
    """Returns the most rows of any product whose rows end at ``ends``."""
    vals: list[torch.Tensor] = [
        node.args[0].meta["val"]
        for node in ends.users
        if (operands := grouped_operands(node)) is not None and operands[1] is ends and operands[0].meta["val"].dim() == 3
    ]
    return max((val.shape[0] for val in vals), default=0)


def slice_nbytes(val: torch.Tensor) -> int:
    """Returns the bytes of one slice along the first dimension."""
    return span_nbytes(val) // val.shape[0]
