"""FLOPs of operations: of matrix products and attention by their shapes, of others by torch's own formulas.

torch's table of formulas loads Triton, which takes longer than to plan for one more budget. So only operations that may have a
formula there are looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.passes.generators import replay

aten = torch.ops.aten
_FIRST_MATRIX = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}  # its position among the operands
# Products of the queries' width and of the values' width: scores and results; the backward makes the scores again.
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
_WITH_FORMULA = ("mm", "conv", "attention")  # parts of the names of torch's operations that have one


def node_flops(node: fx.Node) -> int:
    """FLOPs of one operation; 0 where torch has no formula. Causal attention does half of what the formula says."""
    target, args = (node.args[2], node.args[3:]) if node.target is replay else (node.target, node.args)
    operation = getattr(target, "overloadpacket", None)
    if operation is None or "val" not in node.meta:
        return 0
    operands, kwargs = fx.node.map_arg((args, node.kwargs), lambda operand: operand.meta["val"])
    if operation in _FIRST_MATRIX:
        return 2 * int(node.meta["val"].numel()) * int(operands[_FIRST_MATRIX[operation]].shape[-1])
    named = by_name(target, operands, kwargs)
    if operation in _ATTENTION:
        flops = _attention_flops(named["query"].shape, named["value"].shape, *_ATTENTION[operation])
    elif formula := _formula(operation, target.namespace):
        flops = int(formula(*operands, **kwargs, out_val=node.meta["val"]))
    else:
        return 0
    return flops // (2 if named.get("is_causal") is True else 1)  # no later position is looked at


def _attention_flops(query: Sequence[int], value: Sequence[int], of_queries: int, of_values: int) -> int:
    """The FLOPs of attention with so many products of either width, by shapes (batch, heads, tokens, width). Each head of the
    queries costs the same, also where there are fewer heads of keys and values."""
    (batch, heads, queries, width), (keys, width_of_values) = query, value[-2:]
    return 2 * batch * heads * queries * keys * (of_queries * width + of_values * width_of_values)


def _formula(operation: Any, namespace: str) -> Any:
    """Returns torch's formula of an operation, if it has one."""
    if namespace == "aten" and not any(part in str(operation) for part in _WITH_FORMULA):
        table = sys.modules.get(_TABLE)  # where it is loaded, somebody may have added to it
        return None if table is None else table.flop_registry.get(operation)
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(operation)


def by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an operation is given, by their names; without a schema, those given by name."""
    names = [argument.name for argument in target._schema.arguments] if hasattr(target, "_schema") else []
    return dict(zip(names, args, strict=False), **kwargs)
