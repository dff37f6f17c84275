"""Finds the dimension along which an output of a captured micro-batch has the batch, so that those of all can be put together.

The batch is followed from the inputs that are cut through every operation that an output is made of:

    x [4, 8]  --t-->  [8, 4]  --view-->  [2, 4, 4]  --sum over 0-->  [4, 4]
    dim 0             dim 1              dim 1                       dim 0

Operations on shapes that are given as numbers are followed by arithmetic. Of all others, the shape function is asked what a
micro-batch of twice as many rows would give: the dimension that is twice as long then is the batch's. Where none is, the value
is a reduction over the batch; where several are, or rows trade places (a sort, a sum so far), it is not known to be per row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch.alike import Alike, constant
from mtcompile.passes.joint.batch.by_place import by_place, embedding, in_dims, padded
from mtcompile.passes.joint.batch.numbers import Numbers
from mtcompile.passes.joint.batch.shapes import (
    ATTENTIONS,
    REDUCED,
    SHARED,
    SIZED,
    UNKNOWN,
    Along,
    Place,
    Places,
    args_of,
    of_twice_as_many,
    shape_of,
)
from mtcompile.passes.step_graph import iter_tensors, restride

aten = torch.ops.aten


class Batch:
    """Tells where values of a captured micro-batch have the batch. ``split``: the inputs that have it in front, in ``rows``;
    ``count``: how many micro-batches; ``constants``: the tensors that the graph holds, by placeholder; ``numbers``: those that
    depend on how many rows there are; ``trained``: the inputs that a gradient arrives at."""

    def __init__(
        self,
        split: Collection[fx.Node],
        rows: int,
        count: float,
        constants: Mapping[str, torch.Tensor],
        numbers: Numbers,
        trained: Collection[fx.Node] = (),
    ) -> None:
        self.trained = frozenset(trained)
        self.rows, self.count, self.constants, self.numbers = rows, count, constants, numbers
        self._following = _Following(split, rows, Alike(rows, constants), numbers)

    def number(self, value: Any) -> float | None:
        """Returns a number, also one that the graph holds or makes of nothing; None for anything else."""
        if isinstance(value, fx.Node) and value.meta["val"].numel() == 1:
            number = constant(value, self.constants)
            return None if number is None else float(number)
        return float(value) if isinstance(value, (int, float)) else None

    def depends(self, node: fx.Node) -> bool:
        """Says whether an operation computes with a number that depends on how many rows there are."""
        return self.numbers.depend(node, self.constants)

    def is_unknown(self, value: fx.Node) -> bool:
        """Says whether it is not known how a value is made of the rows."""
        return is_unknown(self.place(value))

    def sources(self, value: fx.Node) -> set[fx.Node]:
        """Returns the inputs that a value is made of without a whole number or truth value in between, so that a gradient may
        arrive at them."""
        seen, todo = {value}, [value]
        while todo:
            each = todo.pop()
            operands = {operand for operand in each.all_input_nodes if _has_floats(operand)} - seen
            seen |= operands
            todo += operands
        return {node for node in seen if node.op == "placeholder"}

    def place(self, value: fx.Node) -> Places:
        """Returns where a value has the batch."""
        return self._following.of(value)

    def mixing(self, value: fx.Node) -> fx.Node:
        """Returns the first operation, of those that make ``value``, whose result is not known to be of each row, nor known to
        be reduced over all of them; ``value`` itself if there is none."""
        while value.op == "call_function":
            unknown = [operand for operand in value.all_input_nodes if is_unknown(self.place(operand))]
            if not unknown:
                break
            value = unknown[0]
        return value

    def dim(self, value: fx.Node) -> int | None:
        """Returns the dimension along which the batch's parts of a value are put together; None where it is no such value, or
        not known to be one."""
        place = self._following.of(value)
        return place.dim if isinstance(place, Along) and place.outer == 1 and not place.routed else None

    def is_reduced(self, value: fx.Node) -> bool:
        """Says whether a value has the same shape however many rows there are, and is made of all of them."""
        return self._following.of(value) == REDUCED


def _has_floats(node: fx.Node) -> bool:
    return any(val.is_floating_point() for val in iter_tensors(node))


def is_unknown(place: Places) -> bool:
    return place == UNKNOWN or (isinstance(place, tuple) and UNKNOWN in place)


class _Following:
    """Follows the batch from operation to operation. ``places``: what is known of each value so far."""

    def __init__(self, split: Collection[fx.Node], rows: int, alike: Alike, numbers: Numbers) -> None:
        self.split, self.rows, self.alike, self.numbers = frozenset(split), rows, alike, numbers
        self.places: dict[fx.Node, Places] = {}

    def of(self, value: fx.Node) -> Places:
        todo = [value]
        while todo:  # no recursion: a graph is thousands of operations deep
            node = todo[-1]
            missing = [operand for operand in node.all_input_nodes if operand not in self.places]
            if missing:
                todo += missing
                continue
            todo.pop()
            if node not in self.places:
                self.places[node] = self._made(node)
        return self.places[value]

    def _made(self, node: fx.Node) -> Places:
        if node.op != "call_function":
            return Along(0) if node in self.split else SHARED
        if (dim := self.numbers.batch_dim(node)) is not None:
            if self.numbers.depend(node, self.alike.constants):
                return UNKNOWN
            return Along(dim) if shape_of(node)[dim] % self.rows == 0 else UNKNOWN
        places = [self.places[operand] for operand in node.all_input_nodes]
        if self.numbers.known and self.numbers.depend(node, self.alike.constants):
            places.append(SIZED)
        if SIZED in places:
            return self._made_of_sizes(node, places)
        if node.target is operator.getitem:
            several = places[0]
            return several[args_of(node)[1]] if isinstance(several, tuple) else several
        if all(place == SHARED for place in places) or node.target in _FILLED:
            return SHARED
        if UNKNOWN in places or any(isinstance(place, tuple) for place in places):
            return UNKNOWN
        named = next((rule for name, rule in _NAMED.items() if name in str(node.target)), None)
        rule = named or _RULES.get(node.target)
        if rule is None and (torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _ALIKE):
            rule = _pointwise
        return (rule or of_twice_as_many)(self, node)

    def _made_of_sizes(self, node: fx.Node, places: list[Places]) -> Place:
        """The place in what is computed with a number of rows: what is made of a row then differs in the whole batch."""
        if all(place in (SHARED, SIZED) for place in places):
            return SIZED
        linear = node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
        return REDUCED if linear and all(place in (SHARED, SIZED, REDUCED) for place in places) else UNKNOWN

    def along(self, node: fx.Node) -> Iterator[tuple[fx.Node, Along]]:
        """The operands that have the batch along a dimension."""
        for operand in node.all_input_nodes:
            if isinstance(place := self.places[operand], Along):
                yield operand, place


# -------------------------------------------------------------------------------------------------------- known by name


def _pointwise(following: _Following, node: fx.Node) -> Place:
    """Operands are aligned at their last dimension. What has no batch is read by each row alike."""
    shape, places = shape_of(node), set[Along]()
    for operand, place in following.along(node):
        dim = place.dim + len(shape) - len(shape_of(operand))
        if shape[dim] != shape_of(operand)[place.dim]:
            return UNKNOWN
        places.add(replace(place, dim=dim))
    for operand in node.all_input_nodes if places else []:  # each row reads what is made of all, or numbers of its own
        dim, outer = next((place.dim, place.outer) for place in places)
        at = dim - len(shape) + len(shape_of(operand))
        other = following.places[operand]
        if other == REDUCED or (other == SHARED and at >= 0 and not following.alike(operand, at, outer)):
            return UNKNOWN
    if node.target is aten.add.Tensor and any(not place.routed for place in places):
        places = {replace(place, routed=False) for place in places}  # hidden states, and what experts add to them
    if len({replace(place, routed=False) for place in places}) > 1:
        return UNKNOWN
    return max(places, key=lambda place: place.routed, default=REDUCED)


def _view(following: _Following, node: fx.Node) -> Place:
    """Another shape of the same elements, in row-major order: as many are before and behind the rows as there were."""
    source: Any = node.args[0]
    place, shape, out = following.places[source], shape_of(source), shape_of(node)
    if not isinstance(place, Along):
        return place
    if place.outer == 1 and out[: place.dim + 1] == shape[: place.dim + 1]:
        return place
    before, places = prod(shape[: place.dim]) * place.outer, list[Along]()
    for dim, length in enumerate(out):
        outer, rest = divmod(before, prod(out[:dim]))
        if outer and not rest and length % (outer * following.rows) == 0:
            places.append(replace(place, dim=dim, outer=outer))
    if len(out) >= len(shape):  # one row may be in several places; [tokens, 1, n] as [tokens, heads, n / heads]
        places.sort(key=lambda each: each.outer > 1)
    return places[0] if places else UNKNOWN


def _expand(following: _Following, node: fx.Node) -> Place:
    source: Any = node.args[0]
    place, shape, out = following.places[source], shape_of(source), shape_of(node)
    if not isinstance(place, Along):
        return place
    dim = place.dim + len(out) - len(shape)
    return replace(place, dim=dim) if out[dim] == shape[place.dim] else UNKNOWN


def _repeat(following: _Following, node: fx.Node) -> Place:
    source, times = args_of(node)
    place = following.places[source]
    if not isinstance(place, Along):
        return UNKNOWN
    dim = place.dim + len(times) - len(shape_of(source))
    return replace(place, dim=dim, outer=place.outer * times[dim])


def _slice(following: _Following, node: fx.Node) -> Places:
    source: Any = node.args[0]
    return following.places[source] if shape_of(source) == shape_of(node) else of_twice_as_many(following, node)


def _index(following: _Following, node: fx.Node) -> Places:
    """x[indices]. Where rows are picked, each picks from itself, as in x[arange(batch), last], or it is by numbers of the
    batch's own."""
    source, indices = args_of(node)[:2]
    place: Any = following.places[source]
    index = indices[place.dim] if isinstance(place, Along) and place.dim < len(indices) else None
    if index is None:
        return of_twice_as_many(following, node)
    if following.places[index] != SHARED:
        return _routed(following, node)
    own = _dim_of_own(index, shape_of(source)[place.dim], following.rows) if place.outer == 1 else None
    if own is None:
        return UNKNOWN
    at = [number for number, each in enumerate(indices) if each is not None]
    dims = max(len(shape_of(indices[number])) for number in at)
    own += dims - len(shape_of(index))
    for each, other in following.along(node):
        if each is not source and other.dim + dims - len(shape_of(each)) != own:
            return UNKNOWN
    adjacent = at[-1] - at[0] + 1 == len(at)
    return replace(place, dim=own + (at[0] if adjacent else 0))


def _put(following: _Following, node: fx.Node) -> Places:
    """x[indices] = values."""
    source, indices = args_of(node)[:2]
    if any(following.places[operand] == REDUCED for operand in node.all_input_nodes):
        return UNKNOWN
    place: Any = following.places[source]
    at = next(number for number, each in enumerate(indices) if each is not None)
    if isinstance(place, Along) and place.dim != at:
        return place if all(other == place for _, other in following.along(node)) else UNKNOWN
    index, length = indices[at], shape_of(source)[at]
    if following.places[index] != SHARED:
        return Along(at, routed=True) if length % following.rows == 0 else REDUCED
    own = None if length % following.rows else _dim_of_own(index, length, following.rows)
    routed = any(other.routed for _, other in following.along(node))
    return UNKNOWN if own is None else Along(at, routed=routed)


def _routed(following: _Following, node: fx.Node) -> Place:
    """Rows are picked, or added up, by numbers of the batch's own: those of a sort, as others would be of the whole batch."""
    dim: Any = node.args[1] if isinstance(node.args[1], int) else 0
    fits = shape_of(node)[dim] % following.rows == 0
    fits = fits and all(place.outer == 1 and place.dim == dim for _, place in following.along(node))
    numbers = [place for each, place in following.along(node) if not each.meta["val"].is_floating_point()]
    return Along(dim, routed=True) if fits and any(place.routed for place in numbers) else UNKNOWN


def _scatter(following: _Following, node: fx.Node) -> Places:
    """Along the batch's dimension, rows are picked; along another, each row has its own."""
    dim = args_of(node)[1] % max(len(shape_of(node)), 1)
    picks = any(place.dim == dim for _, place in following.along(node))
    if picks and node.target not in _PICKS and following.numbers.known and following.places[args_of(node)[0]] == SHARED:
        return REDUCED  # of each expert, say, from all rows
    return _routed(following, node) if picks else of_twice_as_many(following, node, written=node.target not in _PICKS)


def _written(following: _Following, node: fx.Node) -> Places:
    """A part of the first operand is written over."""
    return of_twice_as_many(following, node, written=True)


def _masked(following: _Following, node: fx.Node) -> Place:
    """masked_scatter(x, mask, source): each row takes its own part of the source, as a sequence takes its images."""
    places = [place for _, place in following.along(node)]
    return replace(places[0], routed=False) if all(place == Along(0) for place in places) else UNKNOWN


def _grouped(following: _Following, node: fx.Node) -> Place:
    """grouped_mm(x [tokens, n], weights [experts, n, m], ends): the expert of a row depends on the row's place."""
    place = following.places[args_of(node)[0]]
    return Along(0, routed=True) if isinstance(place, Along) and place.dim == 0 and len(shape_of(node)) == 2 else UNKNOWN


def _group_norm(following: _Following, node: fx.Node) -> Places:
    place = following.places[args_of(node)[0]]
    return (place,) * 3 if place == Along(0) else (UNKNOWN,) * 3


def _recurrent(following: _Following, node: fx.Node) -> Places:
    """Inputs [tokens, batch, n], results such, and states [..., batch, n]."""
    place = following.places[args_of(node)[0]]
    fits = isinstance(place, Along) and place == Along(1)
    return tuple(Along(val.dim() - 2) if fits and val.dim() > 1 else UNKNOWN for val in node.meta["val"])


def _strided(following: _Following, node: fx.Node) -> Place:
    """The same elements in the same places, where a dimension of one element may have another stride."""
    source: Any = node.args[0]
    places = [
        [(size, stride) for size, stride in zip(each.shape, each.stride(), strict=True) if size != 1]
        for each in (source.meta["val"], node.meta["val"])
    ]
    alike = places[0] == places[1] and shape_of(source) == shape_of(node)
    return _place(following, source) if alike else UNKNOWN


def _place(following: _Following, node: fx.Node) -> Place:
    place = following.places[node]
    return UNKNOWN if isinstance(place, tuple) else place


def _dim_of_own(index: fx.Node, length: int, rows: int) -> int | None:
    """The dimension of an index whose numbers are those of the same row: 0, 1, 2... for one element of each."""
    dim = next((dim for dim, size in enumerate(shape_of(index)) if size == prod(shape_of(index))), None)
    numbers = None if dim is None or shape_of(index)[dim] % rows else constant(index)
    if numbers is None:
        return None
    each = numbers.flatten() % length // (length // rows)
    own = torch.arange(len(each)) // (len(each) // rows)
    return dim if torch.equal(each, own) else None


_FILLED = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
_ALIKE = (restride, aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)
_PICKS = (aten.gather.default, aten.index_select.default)
_SCATTERS = (aten.index_add.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
_NAMED: dict[str, Callable[[Any, fx.Node], Places]] = {  # in several libraries
    "grouped_mm": _grouped,
    "rnn": _recurrent,
    "_pad": padded,
}
_RULES: dict[Any, Callable[[Any, fx.Node], Places]] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    **dict.fromkeys(ATTENTIONS, in_dims(0, 1)),
    **dict.fromkeys((*_PICKS, *_SCATTERS), _scatter),
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default), _written),
    **dict.fromkeys((aten.triu.default, aten.tril.default, aten.diagonal.default), by_place),
    aten.convolution.default: in_dims(0),
    aten.as_strided.default: _strided,
    aten.embedding.default: embedding,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _index,
    aten.index_put.default: _put,
    aten.masked_scatter.default: _masked,
    aten.native_group_norm.default: _group_norm,
}
