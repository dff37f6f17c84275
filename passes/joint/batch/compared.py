"""Compares a forward captured for a micro-batch with the same captured for the whole batch: which of its numbers differ?

Python computes with sizes while a forward is captured, so ``x.sum() / len(x)`` is a division by 4 in the graph, as by any other
4. In the graph of the whole batch it is a division by 8: what differs depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from math import prod
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch
from torch import fx

from mtcompile.passes.joint.batch.numbers import DependsOnRows, Numbers

_VIEWS = ("view", "reshape", "expand", "repeat", "tile", "unflatten", "flatten", "broadcast_to", "repeat_interleave")
_SHAPED = ("view", "reshape", "unflatten", "flatten")
_PICKS = ("getitem", "narrow", "select", "split", "chunk", "tensor_split")
_PARTS = (
    *_PICKS, "unbind", "diagonal", "as_strided", "take", "index_select", "unsafe_chunk", "unsafe_split", "split_with_sizes",
    "hsplit", "vsplit", "dsplit",
)  # fmt: skip
_FILLED = ("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty")
_NUMBERED = ("arange", "eye", "linspace")
_SIZES = (*_VIEWS, *_PICKS, *_FILLED, *_NUMBERED)
_ARITHMETIC = (
    "mul", "multiply", "imul", "mul_", "div", "divide", "truediv", "true_divide", "itruediv", "div_", "floordiv",
    "floor_divide", "add", "iadd", "add_", "sub", "isub", "sub_", "rsub", "pow", "mod", "remainder", "fmod", "eq", "ne",
    "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max", "tensor", "scalar_tensor", "as_tensor", "full_like",
)  # fmt: skip


class Rows(NamedTuple):
    """The ``number`` of rows of a micro-batch, and the ``count`` of micro-batches."""

    number: int
    count: int


def compared(micro: fx.GraphModule, whole: fx.GraphModule, rows: Rows) -> Numbers:
    """Returns the numbers that Dynamo's graphs of a micro-batch and of the whole batch compute with. Raises DependsOnRows where
    they differ in anything else than sizes and such numbers."""
    numbers = Numbers(known=True)
    _compare(micro, whole, numbers, rows)
    results = zip(*(graph.graph.output_node().all_input_nodes for graph in (micro, whole)), strict=False)
    numbers.outputs.extend(_grown(one, other) for one, other in results)
    return numbers


def _compare(micro: fx.GraphModule, whole: fx.GraphModule, numbers: Numbers, rows: Rows) -> None:
    same: dict[fx.Node, fx.Node] = {}
    used = _used(micro.graph)
    for one, other in zip_longest(micro.graph.nodes, whole.graph.nodes):
        if one is None or other is None or one.op != other.op or (one.op.startswith("call") and one.target != other.target):
            raise DependsOnRows("runs other operations for the whole batch", one or next(iter(micro.graph.nodes)))
        same[one] = other
        if one.op == "get_attr":
            _compare_held(micro, whole, one, other, numbers, rows)
        elif one.op.startswith("call") and (one in used or not isinstance(one.meta.get("example_value"), torch.Tensor)):
            _compare_call(one, other, same, numbers)
            if one in used:
                _compare_rows(one, other, same, rows)


def _used(graph: fx.Graph) -> set[fx.Node]:
    """Returns what results are made of, and what may change something in place. Of what is computed to ask for its value, as
    whether a mask is empty, only the operations are compared."""
    used, todo = set[fx.Node](), [node for node in graph.nodes if node.op == "output" or _changes(node)]
    while todo:
        node = todo.pop()
        if node not in used:
            used.add(node)
            todo += node.all_input_nodes
    return used


def _changes(node: fx.Node) -> bool:
    name = _name(node)
    return node.op.startswith("call") and (name == "setitem" or (name.endswith("_") and not name.endswith("__")))


def _name(call: fx.Node) -> str:
    """The name of the function or method that is called."""
    return call.target if isinstance(call.target, str) else getattr(call.target, "__name__", str(call.target))


def _compare_held(
    micro: fx.GraphModule, whole: fx.GraphModule, one: fx.Node, other: fx.Node, numbers: Numbers, rows: Rows
) -> None:
    held, beside = (attrgetter(str(node.target))(module) for module, node in ((micro, one), (whole, other)))
    if isinstance(held, fx.GraphModule) and isinstance(beside, fx.GraphModule):
        _compare(held, beside, numbers, rows)
    elif isinstance(held, torch.Tensor) and (held.shape != beside.shape or not torch.equal(held, beside)):
        raise DependsOnRows("holds a tensor that depends on the number of rows", one)


def _compare_call(one: fx.Node, other: fx.Node, same: dict[fx.Node, fx.Node], numbers: Numbers) -> None:
    name, place, grown = _name(one), str(one.meta.get("stack_trace")), _grown(one, other)
    if name in _FILLED and grown is not None:
        numbers.dims[place] = grown
    for given, beside in _pairs((one.args, one.kwargs), (other.args, other.kwargs)):
        if isinstance(given, fx.Node):
            if same.get(given) is not beside:
                raise DependsOnRows("runs other operations for the whole batch", one)
            continue
        filled = name in _FILLED and given is not _fill(name, one)
        number = (
            not filled and isinstance(given, (int, float)) and isinstance(beside, (int, float)) and not isinstance(given, bool)
        )
        if number and name not in _VIEWS + _PICKS + _NUMBERED:
            numbers.note(place, name, float(given), float(beside))
        if given == beside:
            continue
        if number and name in _ARITHMETIC + _FILLED:
            numbers.changing[place] = one
        if not (name in _SIZES or (number and name in _ARITHMETIC)) or (name in ("tensor", "as_tensor") and _numel(one) != 1):
            raise DependsOnRows(f"calls {name} with {given} for a micro-batch and {beside} for the whole batch", one)
        if name in _NUMBERED and _shape(one)[:1] == (1,) and not _only_picks(one):
            raise DependsOnRows(f"numbers the rows ({name})", one)  # a single number is read by each row alike


def _compare_rows(one: fx.Node, other: fx.Node, same: dict[fx.Node, fx.Node], rows: Rows) -> None:
    """Raises DependsOnRows where a result has another number of rows than all, and where some are picked, which shows in no
    graph of a micro-batch that has no others."""
    name, shapes, longer = _name(one), _shapes(one), _shapes(other)
    of = next((each for each in one.all_input_nodes[:1] if each in same and _grown(each, same[each]) is not None), None)
    if name in _PARTS and of is not None:
        all_of_micro = len(shapes) != len(longer) or (_shape(of) in shapes and _shape(same[of]) not in longer)
        if all_of_micro or (rows.number == 1 and any(map(eq, shapes, longer))):
            raise DependsOnRows(f"picks some of the rows ({name})", one)
    if name in _SHAPED and of is not None and (dim := _grown(one, other)) is not None:
        if prod(_shape(of)[: (_grown(of, same[of]) or 0) + 1]) % prod(_shape(one)[:dim]):  # more is in front of them than was
            raise DependsOnRows(f"spreads rows over another dimension ({name})", one)
    for shape, of_whole in zip(shapes, longer, strict=False):
        dims = zip(shape, of_whole, strict=True) if len(shape) == len(of_whole) else ()
        if any(length not in (size, size * rows.count) for size, length in dims):
            does = "picks some of" if name in _PARTS else "does not keep the number of"
            raise DependsOnRows(f"{does} the rows ({name})", one)


def _fill(name: str, node: fx.Node) -> object:
    """The number that a tensor is filled with."""
    position = {"full": 1, "new_full": 2}.get(name, 99)
    return node.args[position] if position < len(node.args) else node.kwargs.get("fill_value")


def _only_picks(node: fx.Node) -> bool:
    """Says whether numbers of rows are only used to pick, or to put, what is of the same row."""
    for user in node.users:
        name = _name(user)
        if user.args and user.args[0] is node:
            if name not in (*_VIEWS, "getitem", "unsqueeze", "squeeze", "to", "long") or not _only_picks(user):
                return False
        elif name not in ("getitem", "setitem", "index_put", "index_put_"):
            return False
    return True


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what two arguments hold at the same places."""
    if isinstance(one, slice) and isinstance(other, slice):
        one, other = (one.start, one.stop, one.step), (other.start, other.stop, other.step)
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        one, other = tuple(one.values()), tuple(other.values())
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
        for each, beside in zip(one, other, strict=True):
            yield from _pairs(each, beside)
    else:
        yield one, other


def _grown(one: fx.Node, other: fx.Node) -> int | None:
    """The dimension in which a value of the whole batch is longer; None for none."""
    shapes = zip(_shape(one), _shape(other), strict=False)
    return next((dim for dim, (length, longer) in enumerate(shapes) if length != longer), None)


def _shape(node: fx.Node) -> tuple[int, ...]:
    val = node.meta.get("example_value")
    return tuple(val.shape) if isinstance(val, torch.Tensor) else ()


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """The shapes of an operation's results, one or several."""
    val = node.meta.get("example_value")
    return [tuple(each.shape) for each in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(each, torch.Tensor)]


def _numel(node: fx.Node) -> int:
    val = node.meta.get("example_value")
    return val.numel() if isinstance(val, torch.Tensor) else 0
