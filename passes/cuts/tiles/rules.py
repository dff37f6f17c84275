"""Reads from an operation which dimensions of its operands and results are independent: row i of the result needs row i only.

An operation is described by how it uses each operand (in ``rows``, or as a ``whole``) and by what it makes: ``rows``, a value
``turned`` (rows are columns), or a ``sum`` over all rows. Which dimensions are the rows of a value is read from its shape
(``layouts``); every rule compares those of its operands and result, so a shape that may be read in two ways is cut in none.
Operations that are not listed here are not cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from mtcompile.passes.cuts.tiles.layouts import Layout, Tiling, cut, dims_of_rows, in_tile, leading
from mtcompile.passes.step_graph import is_random

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Use:
    """An operation's use of rows. ``makes``: the layout of its result; ``several``: those of its items are their own.
    ``takes``: the layout of each operand; ``length``: of the sequence, where one is ``repeated`` for each."""

    makes: Layout
    takes: Mapping[fx.Node, Layout]
    length: int = 0


def use_of_rows(node: fx.Node, tiling: Tiling) -> Use | None:
    """How an operation works on rows; None where its rows depend on each other, or where that is not known."""
    if node.op != "call_function" or is_random(node):
        return None
    rule = _RULES.get(node.target)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    operands = all(isinstance(operand.meta.get("val"), torch.Tensor) for operand in node.all_input_nodes)
    if rule is None or not (operands or node.target is operator.getitem):
        return None
    use = rule(node, tiling.rows)
    if use is None or not all(_can_cut(each, layout, use, tiling) for each, layout in use.takes.items()):
        return None
    return use


def _can_cut(operand: fx.Node, layout: Layout, use: Use, tiling: Tiling) -> bool:
    val = operand.meta.get("val")
    return not isinstance(val, torch.Tensor) or cut(val, layout, tiling, use.length) is not None


def args_in_tile(node: fx.Node, args: tuple[Any, ...], tiling: Tiling, size: int) -> tuple[Any, ...]:
    """The arguments of an operation in a tile of ``size`` rows: a shape among them is that of the tile."""
    place = _SIZED.get(node.target)
    if place is None:
        return args
    return (*args[:place], list(in_tile(_shape(node), tiling, size)), *args[place + 1 :])


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _dims(node: Any, rows: int) -> tuple[int, ...]:
    return dims_of_rows(_shape(node), rows)


def _in_rows(node: fx.Node) -> Use:
    return Use("rows", dict.fromkeys(node.all_input_nodes, "rows"))


def _pointwise(node: fx.Node, rows: int) -> Use | None:
    """Operands have the rows of the result, are the same for all rows, or the same for each sequence."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not (dims := _dims(node, rows)):
        return None
    takes: dict[fx.Node, Layout] = {}
    length = val.shape[dims[-1]]
    for operand in node.all_input_nodes:
        shape = _shape(operand)
        before = val.dim() - len(shape)
        aligned = (1,) * before + shape
        if all(aligned[dim] == val.shape[dim] for dim in dims):
            if tuple(dim + before for dim in dims_of_rows(shape, rows)) != dims:
                return None
            takes[operand] = "rows"
        elif all(aligned[dim] == 1 for dim in dims):
            takes[operand] = "whole"
        elif len(dims) == 2 and aligned[dims[0]] == 1 and shape.index(length) + before == dims[-1]:
            takes[operand] = "repeated"
        else:
            return None
    return Use("rows", takes, length) if "rows" in takes.values() else None


def _reduction(node: fx.Node, rows: int) -> Use | None:
    """A reduction over other dimensions, or a sum over all rows."""
    args: Any = node.args
    shape, dims = _shape(args[0]), args[1] if len(args) > 1 else None
    own = _dims(args[0], rows)
    if not own or not dims or node.kwargs:
        return None
    reduced = sorted(dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims))
    if not set(reduced) & set(own):
        keeps = len(_shape(node)) == len(shape)
        moved = tuple(dim if keeps else dim - sum(each < dim for each in reduced) for dim in own)
        return _in_rows(node) if _dims(node, rows) == moved else None
    is_sum = node.target is aten.sum.dim_IntList and set(own) <= set(reduced)
    return Use("sum", {args[0]: "rows"}) if is_sum else None


def _same_dims(node: fx.Node, rows: int) -> Use | None:
    """A result with the rows of the operand: a cast, a copy, what is expanded in other dimensions."""
    shape, out = _shape(node.args[0]), _shape(node)
    dims = dims_of_rows(shape, rows)
    alike = dims and len(shape) == len(out) and dims == dims_of_rows(out, rows) and {*node.kwargs} <= _LAYOUT_ONLY
    return _in_rows(node) if alike else None


def _view(node: fx.Node, rows: int) -> Use | None:
    """Another shape of the same elements, in row-major order: rows stay rows where both shapes have leading dimensions, or
    where as many elements as before are before, and between, the dimensions of rows."""
    shape, out = _shape(node.args[0]), _shape(node)
    if leading(shape, rows) and leading(out, rows):
        return _in_rows(node)
    places = [[(each[dim], prod(each[:dim])) for dim in dims_of_rows(each, rows)] for each in (shape, out)]
    return _in_rows(node) if places[0] and places[0] == places[1] else None


def _squeezed(node: fx.Node, rows: int) -> Use | None:
    """A dimension of one element less: a dimension of rows, which has one in a tile, stays."""
    return _view(node, rows) if len(_shape(node)) < len(_shape(node.args[0])) else None


def _along(node: fx.Node, rows: int) -> Use | None:
    """An operation along a dimension other than those of rows, its second argument; the result has the rows where they were."""
    first: Any = node.args[0]
    operands: list[fx.Node] = [first] if isinstance(first, fx.Node) else list(first)
    shapes = [_shape(operand) for operand in operands]
    dim = node.args[1] if len(node.args) > 1 else 0
    dims = dims_of_rows(shapes[0], rows)
    alike = all(len(shape) == len(shapes[0]) and dims_of_rows(shape, rows) == dims for shape in (*shapes, _shape(node)))
    return _in_rows(node) if dims and alike and isinstance(dim, int) and dim % len(shapes[0]) not in dims else None


def _split(node: fx.Node, rows: int) -> Use | None:
    """split(x, sizes, dim), along a dimension other than those of rows: items in rows."""
    args: Any = node.args
    dims, dim = _dims(args[0], rows), args[2] if len(args) > 2 else 0
    return Use("several", {args[0]: "rows"}) if dims and dim % len(_shape(args[0])) not in dims else None


def _padded(node: fx.Node, rows: int) -> Use | None:
    """slice_backward(x, sizes, dim, start, end, step), along a dimension other than those of rows: zeros around x."""
    args: Any = node.args
    dims = _dims(node, rows)
    return _in_rows(node) if dims and dims == _dims(args[0], rows) and args[2] % len(_shape(node)) not in dims else None


def _moved(node: fx.Node, rows: int) -> Use | None:
    """transpose(x, i, j) or permute(x, dims): the dimensions of rows are the moved ones."""
    args: Any = node.args
    order = list(range(len(_shape(args[0]))))
    if node.target is aten.transpose.int:
        one, other = (dim % len(order) for dim in args[1:])
        order[one], order[other] = other, one
    else:
        order = [dim % len(order) for dim in args[1]]
    dims = _dims(args[0], rows)
    return _in_rows(node) if dims and tuple(order[dim] for dim in _dims(node, rows)) == dims else None


def _filled(node: fx.Node, rows: int) -> Use | None:
    """The same number everywhere."""
    return Use("rows", {}) if _dims(node, rows) and {*node.kwargs} <= _LAYOUT_ONLY | {"pin_memory"} else None


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
    if not _is_inside(x, shape, rows):
        return None
    takes: dict[fx.Node, Layout] = {each: "whole" for each in scales if isinstance(each, fx.Node)}
    return Use("several", takes | {x: "rows"})


def _norm_backward(node: fx.Node, rows: int) -> Use | None:
    """native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, mask): dx in rows, and two sums."""
    args: Any = node.args
    dy, x, shape, mean, rstd, *scales = args[:7]
    if not _is_inside(x, shape, rows):
        return None
    takes: dict[fx.Node, Layout] = {each: "whole" for each in scales if isinstance(each, fx.Node)}
    return Use("several", takes | {each: "rows" for each in (dy, x, mean, rstd)})


def _is_inside(x: fx.Node, shape: Sequence[int], rows: int) -> bool:
    """Says whether a norm over the last dimensions, of that shape, is one of each row."""
    count = leading(_shape(x), rows)
    return count > 0 and len(_shape(x)) - len(shape) >= count


def _item(node: fx.Node, rows: int) -> Use | None:
    call: Any = node.args[0]
    rule = _RULES.get(call.target) if call.target in _SEVERAL else None
    if rule is None or rule(call, rows) is None:
        return None
    summed = call.target is aten.native_layer_norm_backward.default and node.args[1] != 0
    if not summed and not _dims(node, rows):
        return None
    return Use("sum" if summed else "rows", {call: "several"})


_LAYOUT_ONLY = {"dtype", "layout", "device", "memory_format"}
_SEVERAL = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten.split.Tensor)
_SEVERAL += (aten.split_with_sizes.default,)
_RULES: dict[Any, Callable[[fx.Node, int], Use | None]] = {
    aten.mean.dim: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.amax.default: _reduction,
    aten._to_copy.default: _same_dims,
    aten.clone.default: _same_dims,
    aten.expand.default: _same_dims,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.dim: _squeezed,
    aten._softmax.default: _along,
    aten.slice.Tensor: _along,
    aten.slice_backward.default: _padded,
    aten.cat.default: _along,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.transpose.int: _moved,
    aten.permute.default: _moved,
    aten.zeros.default: _filled,
    aten.full.default: _filled,
    aten.t.default: _turn,
    aten.mm.default: _product,
    aten.addmm.default: _product_and_bias,
    aten.native_layer_norm.default: _norm,
    aten.native_layer_norm_backward.default: _norm_backward,
    operator.getitem: _item,
}
_SIZED = {  # operations with a shape among their arguments, and its place there
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default), 1),
    aten.slice_backward.default: 1,
    **dict.fromkeys((aten.zeros.default, aten.full.default), 0),
}
