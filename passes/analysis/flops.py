"""FLOPs of operations. Those of matrix products and attention follow from shapes; for others, torch's formulas are used.

Importing torch's table of formulas also imports Triton, which takes longer than to plan for one more budget. So the table is
imported only for operations that may be in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.passes.generators import replay

aten = torch.ops.aten
_FIRST_MATRIX = {aten.mm: "self", aten.addmm: "mat1", aten.bmm: "self", aten.baddbmm: "batch1"}
# How many products have the queries' width, and how many the values'. Forward: the scores, then the result. The backward
# computes the scores again.
_FORWARD, _BACKWARD = (1, 1), (3, 2)
_ATTENTION = {
    aten._scaled_dot_product_flash_attention: _FORWARD,
    aten._scaled_dot_product_flash_attention_backward: _BACKWARD,
    aten._scaled_dot_product_efficient_attention: _FORWARD,
    aten._scaled_dot_product_efficient_attention_backward: _BACKWARD,
    aten._scaled_dot_product_cudnn_attention: _FORWARD,
    aten._scaled_dot_product_cudnn_attention_backward: _BACKWARD,
    aten._scaled_dot_product_flash_attention_for_cpu: _FORWARD,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _BACKWARD,
}
_TABLE = "torch.utils.flop_counter"
_WITH_FORMULA = {"mm", "convolution", "conv2d", "attention"}  # words in the names of torch's operations that have one


def node_flops(node: fx.Node) -> int:
    """FLOPs of one operation; 0 where torch has no formula. Causal attention counts half: it looks at no later position."""
    target, args = (node.args[2], node.args[3:]) if node.target is replay else (node.target, node.args)
    operation = getattr(target, "overloadpacket", None)
    is_computed = operation in _FIRST_MATRIX or operation in _ATTENTION
    formula = None if operation is None or is_computed else _formula(operation, target.namespace)
    if "val" not in node.meta or not (is_computed or formula):
        return 0
    operands, kwargs = fx.node.map_arg((args, node.kwargs), lambda operand: operand.meta["val"])
    named = by_name(target, operands, kwargs)
    if formula:
        flops = int(formula(*operands, **kwargs, out_val=node.meta["val"]))
    elif operation in _ATTENTION:
        flops = int(_attention_flops(named["query"].shape, named["value"].shape, *_ATTENTION[operation]))
    else:
        flops = 2 * int(node.meta["val"].numel()) * int(named[_FIRST_MATRIX[operation]].shape[-1])
    return flops // (2 if named.get("is_causal") is True else 1)


def _attention_flops(query: Sequence[int], value: Sequence[int], of_queries: int, of_values: int) -> int:
    """FLOPs of attention. ``of_queries``, ``of_values``: how many products have the width of the queries and of the values.
    Shapes are (batch, heads, tokens, width). Every head of the queries costs the same, even if keys and values have fewer."""
    (batch, heads, queries, width), (keys, width_of_values) = query, value[-2:]
    return 2 * batch * heads * queries * keys * (of_queries * width + of_values * width_of_values)


def _formula(operation: Any, namespace: str) -> Any:
    """Returns torch's formula of an operation, if it has one. Users can add formulas only once the table is loaded."""
    if namespace == "aten" and may_have_formula(str(operation)):
        from torch.utils.flop_counter import flop_registry

        return flop_registry.get(operation)
    table = sys.modules.get(_TABLE)
    return None if table is None else table.flop_registry.get(operation)


def may_have_formula(name: str) -> bool:
    """Says whether an operation of this name, such as ``aten._scaled_mm``, may be in torch's table."""
    return not _WITH_FORMULA.isdisjoint(name.replace(".", "_").split("_"))


def by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an operation is given, by their names; without a schema, only the keyword arguments."""
    names = [argument.name for argument in target._schema.arguments] if hasattr(target, "_schema") else []
    return dict(zip(names, args, strict=False), **kwargs)
