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
_FIRST_MATRIX = {  # each element of the result adds up as many products as its rows are long
    **{aten.mm: "self", aten.addmm: "mat1", aten.bmm: "self", aten.baddbmm: "batch1", aten._int_mm: "self"},
    **{aten.mv: "self", aten.addmv: "mat", aten.dot: "self", aten.vdot: "self"},
}
_GROUPED = {aten._grouped_mm, aten._scaled_grouped_mm}
_RECURRENT = {  # the operands that each row of the input is multiplied with; the backward multiplies twice
    **{aten._cudnn_rnn: ("weight",), aten._cudnn_rnn_backward: ("weight", "weight")},
    aten.mkldnn_rnn_layer: ("weight0", "weight1"),
    aten.mkldnn_rnn_layer_backward: ("weight1", "weight2") * 2,
}
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
# Words in the names of torch's operations that multiply matrices, and in those of the few that do not.
_MULTIPLYING = {
    "mm",
    "addbmm",
    "trilinear",
    "rnn",
    "miopen",
    "cdist",
    "attention",
    "matmul",
    "linalg",
    "cholesky",
    "convolution",
}
_ELEMENTWISE = {"norm", "cross", "diagonal", "powsum", "vecdot"}


def node_flops(node: fx.Node) -> int:
    """FLOPs of one operation; 0 where torch has no formula. Causal attention counts half: it looks at no later position."""
    target, args = (node.args[2], node.args[3:]) if node.target is replay else (node.target, node.args)
    operation = getattr(target, "overloadpacket", None)
    is_computed = any(operation in table for table in (_FIRST_MATRIX, _ATTENTION, _GROUPED, _RECURRENT))
    formula = None if operation is None or is_computed else _formula(operation, target.namespace)
    if "val" not in node.meta or not (is_computed or formula):
        return 0
    operands, kwargs = fx.node.map_arg((args, node.kwargs), lambda operand: operand.meta["val"])
    named = by_name(target, operands, kwargs)
    if formula:
        flops = int(formula(*operands, **kwargs, out_val=node.meta["val"]))
    elif operation in _ATTENTION:
        flops = int(_attention_flops(named["query"].shape, named["value"].shape, *_ATTENTION[operation]))
    elif operation in _GROUPED:
        flops = _grouped_flops(named["self"].shape, named["mat2"].shape)
    elif operation in _RECURRENT:
        flops = _recurrent_flops(named["input"], [named[name] for name in _RECURRENT[operation]])
    else:
        flops = 2 * int(node.meta["val"].numel()) * int(named[_FIRST_MATRIX[operation]].shape[-1])
    return flops // (2 if named.get("is_causal") is True else 1)


def is_uncounted(node: fx.Node) -> bool:
    """Tells whether an operation may multiply matrices, as its name or its being a user's own says, and has no formula: its
    predicted time is that of its memory traffic."""
    target = node.args[2] if node.target is replay else node.target
    operation = getattr(target, "overloadpacket", None)
    if operation is None or node_flops(node) or _formula(operation, target.namespace):
        return False
    words = set(str(target).replace(".", "_").split("_"))
    multiplies = words & _MULTIPLYING and not words & _ELEMENTWISE
    known = target.namespace in ("aten", "prims") or torch.Tag.pointwise in target.tags or "dequantize" in words
    return "val" in node.meta and bool(multiplies or not known)


def _grouped_flops(rows: Sequence[int], columns: Sequence[int]) -> int:
    """FLOPs of the products of groups. Shapes are ([groups,] m, k) and ([groups,] k, n); where one has no groups, they are
    parts of its rows or columns, and where neither has, of k. Parts that no group has are counted too."""
    (*groups, m, k), n = rows, columns[-1]
    return 2 * m * k * n * (groups[0] if groups and len(columns) == 3 else 1)


def _recurrent_flops(rows: torch.Tensor, weights: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> int:
    """FLOPs of recurrent layers: each of the ``rows`` [tokens, batch, width], of whatever order, is multiplied with all that
    ``weights`` hold, also those of layers behind the first."""
    each = [matrix for of in weights for matrix in ([of] if isinstance(of, torch.Tensor) else of)]
    return 2 * (rows.numel() // rows.shape[-1]) * sum(matrix.numel() for matrix in each if matrix.dim() == 2)


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
