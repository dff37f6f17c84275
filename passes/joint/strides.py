"""Corrects traced strides to those that the kernels make, where they differ.

Both agree on operands in row-major order. On others, as a gradient that comes in columns, the shape functions of some
operations (dropout's, layer norm's and the losses' backward, ``where`` and products of expanded values, ...) do not do what
the kernels of the CPU do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.storages import reads_by_place
from mtcompile.passes.insert import add_restride
from mtcompile.passes.step_graph import is_random, is_view, iter_tensors
from mtcompile.runtime.devices.arena import same_strides

# The strides of every result of an operation (None for one that is no tensor), or None where it could not be run.
Observe = Callable[[fx.Node], Sequence[tuple[int, ...] | None] | None]

aten = torch.ops.aten
_ROW_MAJOR = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)  # whatever they are given


def correct_strides(graph: fx.Graph, observe: Observe) -> None:
    """Puts right ``meta['val']`` of every operation with operands in another than row-major order.

    What follows a corrected value is traced again with its true strides, for they decide the order in which later operations
    add. An operation that cannot take them, such as a view, and the graph's outputs take a copy, strided as they were traced
    for: there, ordinary PyTorch copies too.
    """
    traced: dict[fx.Node, torch.Tensor] = {}  # of values whose strides are others: what they were traced as
    for node in list(graph.nodes):
        changed = [operand for operand in node.all_input_nodes if operand in traced]
        before = node.meta.get("val")
        if before is None and node.op == "call_function":  # not made, as the gradient that nobody asked for
            continue
        val = _traced_again(node) if changed else before
        if val is None:
            for operand in changed:
                _take_a_copy(graph, node, operand, traced[operand])
            val = before
        if may_differ(node):
            val = with_strides(val, observe(node))
        if val is before:
            continue
        node.meta = {**node.meta, "val": val}
        if not isinstance(val, torch.Tensor) or not _alike(val, before.stride()):  # several: each where it is taken out
            traced[node] = before


def _alike(val: torch.Tensor, strides: Sequence[int]) -> bool:
    return same_strides(val.shape, val.stride(), strides)


def may_differ(node: fx.Node) -> bool:
    """Tells whether the strides of a node's results may be others than traced."""
    if not hasattr(node.target, "_schema") or node.target in _ROW_MAJOR or is_view(node) or is_random(node):
        return False
    return any(not val.is_contiguous() for operand in node.all_input_nodes for val in iter_tensors(operand))


def as_viewed(value: torch.Tensor, operand: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """``value``, traced as a view of ``operand``, with the strides of a plain run. Those of dimensions of one element may be
    others, and decide whether operations on images take them for channels-last."""
    stride = torch.empty_strided(operand.shape, operand.stride(), device="meta").view(size).stride()
    return value if stride == value.stride() else value.as_strided(value.shape, stride)


def with_strides(value: Any, strides: Sequence[tuple[int, ...] | None] | None) -> Any:
    """``value``, its tensors strided as observed; the same object where they are already."""
    if strides is None or not isinstance(value, (torch.Tensor, tuple, list)):
        return value
    if isinstance(value, torch.Tensor):
        stride = strides[0]
        return value if stride is None or _alike(value, stride) else value.new_empty_strided(value.shape, stride)
    items = [with_strides(item, strides[i : i + 1]) for i, item in enumerate(value)]
    return value if all(new is old for new, old in zip(items, value, strict=True)) else tuple(items)


@torch.no_grad()
def _traced_again(node: fx.Node) -> Any:
    """The node's value for its operands as they are traced now; None where it cannot take them."""
    if node.op != "call_function" or reads_by_place(node) or not callable(node.target):
        return None
    operands: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        value = node.target(*operands[0], **operands[1])
    except (RuntimeError, ValueError):
        return None
    return as_viewed(value, *operands[0]) if node.target is aten.view.default else value


def _take_a_copy(graph: fx.Graph, node: fx.Node, operand: fx.Node, like: torch.Tensor) -> None:
    """Lets ``node`` read a copy of ``operand`` that is strided as ``like``."""
    with graph.inserting_before(node):
        copy = add_restride(graph, operand, like)
    copy.meta = {**operand.meta, **copy.meta}
    node.replace_input_with(operand, copy)
