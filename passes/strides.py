"""Strides as the CPU's kernels make them, where torch's traced shapes say otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mtcompile.passes.step_graph import restride

_DROPOUT_BACKWARD = torch.ops.aten.native_dropout_backward.default
# What these make of an operand depends on where its elements lie.
_OF_STORAGE = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)


def correct_strides(graph: fx.Graph) -> None:
    """On the CPU, dropout's backward is strided as the product of its arguments; traced, as on CUDA, it has the gradient's
    memory format.

    What follows is traced again with the true strides, for they decide the order in which later operations add. An
    operation that cannot take them, such as a view, and the graph's outputs take a copy strided as they were traced for.
    """
    traced: dict[fx.Node, torch.Tensor] = {}  # of values whose strides are others: what they were traced as
    for node in list(graph.nodes):
        changed = [operand for operand in node.all_input_nodes if operand in traced]
        if not changed and node.target is not _DROPOUT_BACKWARD:
            continue
        if node.op == "call_function" and node.meta["val"] is None:  # not made, as the gradient that nobody asked for
            continue
        made = _made(node)
        if made is None:
            for operand in changed:
                _take_a_copy(graph, node, operand, traced[operand])
            continue
        found = node.meta["val"]
        node.meta = {**node.meta, "val": made}
        if not isinstance(made, torch.Tensor) or made.stride() != found.stride():  # several: each where it is taken out
            traced[node] = found


@torch.no_grad()
def _made(node: fx.Node) -> Any:
    """What the node makes of its operands as they are traced now; None where it cannot take them."""
    if node.op != "call_function" or node.target in _OF_STORAGE or not callable(node.target):
        return None
    operands: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = operands
    if node.target is _DROPOUT_BACKWARD and args[0].device.type == "cpu":
        return args[0] * args[1].type_as(args[0])
    try:
        return node.target(*args, **kwargs)
    except (RuntimeError, ValueError):
        return None


def _take_a_copy(graph: fx.Graph, node: fx.Node, operand: fx.Node, like: torch.Tensor) -> None:
    with graph.inserting_before(node):
        copy = graph.call_function(restride, (operand, tuple(like.shape), tuple(like.stride())))
    copy.meta = {**operand.meta, "val": like}
    node.replace_input_with(operand, copy)
