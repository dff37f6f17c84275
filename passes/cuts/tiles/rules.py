"""Reads from an operation which dimensions of its operands and results are independent: row i of the result needs row i only.

A value is in rows if the product of its leading dimensions is the number of rows: [tokens, width], or [batch, tokens, width].
An operation is described by how it uses each operand (in ``rows``, or as a ``whole``) and by what it makes: ``rows``, a value
``turned`` (rows are columns), or a ``sum`` over all rows. Operations that are not listed here are not cut.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from mtcompile.passes.step_graph import is_random

aten = torch.ops.aten
Layout = Literal["rows", "whole", "turned", "sum", "several"]


@dataclass(frozen=True, slots=True)
class Use:
    """An operation's use of rows. ``makes``: the layout of its result; ``several``: those of its items are their own.
    ``takes``: the layout of each operand."""

    makes: Layout
    takes: Mapping[fx.Node, Layout]


def leading(shape: Sequence[int], rows: int) -> int:
    """How many leading dimensions make up the rows; 0 where none do."""
    return next((count for count in range(1, len(shape) + 1) if prod(shape[:count]) == rows), 0)


def use_of_rows(node: fx.Node, rows: int) -> Use | None:
    """How an operation works on ``rows`` rows; None where its rows depend on each other, or where that is not known."""
    if node.op != "call_function" or is_random(node):
        return None
    rule = _RULES.get(node.target)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    operands = all(isinstance(operand.meta.get("val"), torch.Tensor) for operand in node.all_input_nodes)
    if rule is None or not (operands or node.target is operator.getitem):
        return None
    use = rule(node, rows)
    if use is None or not all(_one_behind_the_other(each, rows) for each, layout in use.takes.items() if layout == "rows"):
        return None
    return use


def _one_behind_the_other(operand: fx.Node, rows: int) -> bool:
    """Says whether the rows of an operand are at one distance in memory, so that some of them are a view."""
    val = operand.meta["val"]
    outer = [(size, stride) for size, stride in zip(val.shape, val.stride(), strict=True) if size > 1]
    outer = outer[: leading([size for size, _ in outer], rows)]
    return all(before[1] == after[0] * after[1] for before, after in itertools.pairwise(outer))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _in_rows(node: fx.Node) -> Use:
    return Use("rows", dict.fromkeys(node.all_input_nodes, "rows"))


def _pointwise(node: fx.Node, rows: int) -> Use | None:
    """Operands have the leading dimensions of the result, or are the same for all rows."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not (count := leading(val.shape, rows)):
        return None
    takes: dict[fx.Node, Layout] = {}
    for operand in node.all_input_nodes:
        shape = _shape(operand)
        aligned = (1,) * (val.dim() - len(shape)) + shape
        if len(shape) == val.dim() and shape[:count] == tuple(val.shape[:count]):
            takes[operand] = "rows"
        elif all(size == 1 for size in aligned[:count]):
            takes[operand] = "whole"
        else:
            return None
    return Use("rows", takes) if "rows" in takes.values() else None


def _reduction(node: fx.Node, rows: int) -> Use | None:
    """A reduction over inner dimensions, or a sum over exactly the rows."""
    args: Any = node.args
    shape, dims = _shape(args[0]), args[1] if len(args) > 1 else None
    if not (count := leading(shape, rows)) or not dims or node.kwargs:
        return None
    reduced = sorted(dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims))
    if reduced[0] >= count:
        return _in_rows(node)
    is_sum = node.target is aten.sum.dim_IntList and reduced == list(range(count))
    return Use("sum", {args[0]: "rows"}) if is_sum else None


def _same_dims(node: fx.Node, rows: int) -> Use | None:
    """A result with the leading dimensions of the operand: a cast, a copy, what is expanded behind the rows."""
    shape, out = _shape(node.args[0]), _shape(node)
    count = leading(shape, rows)
    alike = (
        count and len(shape) == len(out) and shape[:count] == out[:count] and set(node.kwargs) <= {"dtype", "layout", "device"}
    )
    return _in_rows(node) if alike else None


def _view(node: fx.Node, rows: int) -> Use | None:
    """Another shape of the same elements, in row-major order: rows stay rows where both shapes have leading dimensions."""
    return _in_rows(node) if leading(_shape(node.args[0]), rows) and leading(_shape(node), rows) else None


def _along(node: fx.Node, rows: int) -> Use | None:
    """An operation along one inner dimension, its second argument."""
    shape: tuple[int, ...] = _shape(node.args[0])
    count, dim = leading(shape, rows), node.args[1]
    return _in_rows(node) if count and isinstance(dim, int) and dim % len(shape) >= count else None


def _turn(node: fx.Node, rows: int) -> Use | None:
    """A transposed matrix, where all that reads it are products that sum over its rows."""
    if _shape(node.args[0])[:1] != (rows,) or not node.users or not all(_sums(user, node, rows) for user in node.users):
        return None
    return Use("turned", _in_rows(node).takes)


def _sums(product: fx.Node, turned: fx.Node, rows: int) -> bool:
    return (
        product.target is aten.mm.default
        and product.args[0] is turned
        and product.args[1] is not turned
        and _shape(product.args[1])[:1] == (rows,)
    )


def _product(node: fx.Node, rows: int) -> Use | None:
    """x @ weight, rows by a whole; or g.t() @ x, a sum over all rows."""
    one, other = node.args
    assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
    if one.target is aten.t.default and _sums(node, one, rows) and _turn(one, rows) is not None:
        return Use("sum", {one: "turned", other: "rows"})
    return Use("rows", {one: "rows", other: "whole"}) if _shape(one)[0] == rows and one is not other else None


def _product_and_bias(node: fx.Node, rows: int) -> Use | None:
    args: Any = node.args
    bias, one, other = args
    alike = len(_shape(bias)) == 1 and _shape(one)[0] == rows and one is not other and not node.kwargs
    return Use("rows", {bias: "whole", one: "rows", other: "whole"}) if alike else None


def _norm(node: fx.Node, rows: int) -> Use | None:
    """native_layer_norm(x, shape, weight, bias, eps): three results, all in rows."""
    args: Any = node.args
    x, shape, *scales = args[:4]
    count = leading(_shape(x), rows)
    if not count or len(_shape(x)) - len(shape) < count:
        return None
    takes: dict[fx.Node, Layout] = {each: "whole" for each in scales if isinstance(each, fx.Node)}
    return Use("several", takes | {x: "rows"})


def _norm_backward(node: fx.Node, rows: int) -> Use | None:
    """native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, mask): dx in rows, and two sums."""
    args: Any = node.args
    dy, x, shape, mean, rstd, *scales = args[:7]
    count = leading(_shape(x), rows)
    if not count or len(_shape(x)) - len(shape) < count:
        return None
    takes: dict[fx.Node, Layout] = {each: "whole" for each in scales if isinstance(each, fx.Node)}
    return Use("several", takes | {each: "rows" for each in (dy, x, mean, rstd)})


def _item(node: fx.Node, rows: int) -> Use | None:
    call: Any = node.args[0]
    if call.target not in (aten.native_layer_norm.default, aten.native_layer_norm_backward.default):
        return None
    if use_of_rows(call, rows) is None:
        return None
    summed = call.target is aten.native_layer_norm_backward.default and node.args[1] != 0
    return Use("sum" if summed else "rows", {call: "several"})


_RULES: dict[Any, Callable[[fx.Node, int], Use | None]] = {
    aten.mean.dim: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.amax.default: _reduction,
    aten._to_copy.default: _same_dims,
    aten.expand.default: _same_dims,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten._softmax.default: _along,
    aten.t.default: _turn,
    aten.mm.default: _product,
    aten.addmm.default: _product_and_bias,
    aten.native_layer_norm.default: _norm,
    aten.native_layer_norm_backward.default: _norm_backward,
    operator.getitem: _item,
}
SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)  # their second argument
