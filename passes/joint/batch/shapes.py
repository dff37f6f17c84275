"""Asks an operation's shape function where the batch is in its results: what would they be with twice as many rows?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from mtcompile.passes.step_graph import iter_tensors

aten = torch.ops.aten
_MOVES = (aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default, aten.stack.default)
_MOVES += (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
ATTENTIONS = (
    *(aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default),
    *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default),
)
_ALONG_ONE = (aten._softmax.default, aten._log_softmax.default)
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)


@dataclass(frozen=True, slots=True)
class Along:
    """The batch is a part of dimension ``dim``: of ``outer`` times rows times more elements, the rows are in the middle.
    ``routed``: elements of each row were picked by numbers of the batch's own, as experts' tokens are; those of other rows
    may be among them until this is added to what is known to be of each row."""

    dim: int
    outer: int = 1
    routed: bool = False


SHARED, REDUCED, UNKNOWN = "the same for all rows", "reduced over the batch", "not known to be of each row"
SIZED = "made of a number that depends on how many rows there are"
Place = Along | str
Places = Place | tuple[Place, ...]


class Following(Protocol):
    """The place of the batch in each value, as far as it is known, of a micro-batch of so many ``rows``."""

    rows: int
    places: Mapping[fx.Node, Places]

    def along(self, node: fx.Node) -> Iterator[tuple[fx.Node, Along]]:
        """The operands that have the batch along a dimension."""

    def alike(self, node: fx.Node, dim: int, outer: int = 1) -> bool:
        """Says whether what all rows share is the same for each of them, which are along ``dim``."""


def of_twice_as_many(following: Following, node: fx.Node, written: bool = False) -> Places:
    """Returns the places of the batch in results, as the shape function tells for twice as many rows. Operands that all rows
    share may have the batch's length too, such as zeros(batch, n): these are lengthened where the operation does not work
    otherwise, or the first if it is ``written``. What is reduced over the batch may not be read by its rows again."""
    vals: Any = node.meta["val"]
    along = [(shape_of(operand)[place.dim], place) for operand, place in following.along(node)]
    if not along:
        return _of_each(vals, REDUCED)
    if any(following.places[operand] == REDUCED for operand in node.all_input_nodes):
        return _of_each(vals, UNKNOWN)
    if (place := _by_dims(following, node)) is not None:
        return place

    def same_dim(operand: fx.Node) -> int | None:
        shape = shape_of(operand)
        return next((place.dim for length, place in along if shape[place.dim : place.dim + 1] == (length,)), None)

    def first_dim(operand: fx.Node) -> int | None:
        lengths = {length for length, _ in along}
        return next((dim for dim, length in enumerate(shape_of(operand)) if length in lengths), None)

    ways: list[Callable[[fx.Node], int | None]]
    ways = [same_dim] if written else [lambda operand: None, same_dim, first_dim]
    longer, way = next(((result, way) for way in ways if (result := _run(following, node, way)) is not None), (None, ways[0]))
    if longer is None or not _lengthened_alike(following, node, way):
        return _of_each(vals, UNKNOWN)
    if isinstance(vals, torch.Tensor):
        return _compared(following, node, vals, longer)
    if len(vals) != len(longer):  # rows cut into pieces
        return _of_each(vals, UNKNOWN)
    return tuple(
        _compared(following, node, val, new) if isinstance(val, torch.Tensor) else SHARED
        for val, new in zip(vals, longer, strict=True)
    )


def _by_dims(following: Following, node: fx.Node) -> Places | None:
    """The place in a result of common operations, by the dimensions that they name; None for all others. Shape functions of
    these load large parts of torch, which takes a second."""
    along = list(following.along(node))
    if node.target in _REDUCTIONS:
        ((source, place),) = along
        given, keeps = [*args_of(node)[1:], None, False][:2]
        dims = {dim % len(shape_of(source)) for dim in given or range(len(shape_of(source)))}
        if place.dim in dims:
            return REDUCED
        return replace(place, dim=place.dim - (0 if keeps else sum(dim < place.dim for dim in dims)))
    if node.target in _ALONG_ONE and not _runs_along(following, node):
        return along[0][1]
    if node.target in ATTENTIONS and all(place == Along(0) for _, place in along):  # [batch, heads, tokens, n]
        rows, tensors = shape_of(node)[0], [val if isinstance(val, torch.Tensor) else None for val in node.meta["val"]]
        return tuple(SHARED if val is None else Along(0) if val.shape[:1] == (rows,) else REDUCED for val in tensors)
    if node.target is aten.nll_loss_forward.default and args_of(node)[3] and {place.dim for _, place in along} == {0}:
        return (REDUCED, REDUCED) if len(along) == 2 else None
    if node.target is aten.cat.default and len(along) == len(node.all_input_nodes):
        (first, *others) = {replace(place, routed=False) for _, place in along}
        joined = (args_of(node)[1] if len(node.args) > 1 else 0) % len(shape_of(node))
        lengths = {len(shape_of(operand)) for operand in node.all_input_nodes}
        if not others and lengths == {len(shape_of(node))} and first.dim != joined:
            return replace(first, routed=any(place.routed for _, place in along))
    return None


def _of_each(vals: Any, place: Place) -> Places:
    """The places of all results of an operation, which are alike."""
    return place if isinstance(vals, torch.Tensor) else (place,) * len(vals)


def _lengthened_alike(following: Following, node: fx.Node, lengthened: Callable[[fx.Node], int | None]) -> bool:
    """Says whether the operands without the batch that were lengthened are the same for each row."""
    shared = [operand for operand in node.all_input_nodes if following.places[operand] == SHARED]
    return all(following.alike(operand, dim) for operand in shared if (dim := lengthened(operand)) is not None)


def _run(following: Following, node: fx.Node, lengthened: Callable[[fx.Node], int | None]) -> Any:
    """Runs an operation on tensors without content, of twice as many rows; None where it does not work. ``lengthened``: the
    dimension of an operand without the batch that is lengthened too."""

    def longer(operand: fx.Node) -> Any:
        place = following.places[operand]
        dim = place.dim if isinstance(place, Along) else lengthened(operand)
        shape = [2 * length if at == dim else length for at, length in enumerate(shape_of(operand))]
        return torch.empty(shape, dtype=operand.meta["val"].dtype, device="meta")

    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), longer)
        target: Any = node.target
        return target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
    except Exception:  # whatever a shape function says of shapes that do not fit
        return None


def _compared(following: Following, node: fx.Node, val: torch.Tensor, new: Any) -> Place:
    """The place of the batch in a result, from the shape that it has with twice as many rows."""
    if not isinstance(new, torch.Tensor) or new.dim() != val.dim():
        return UNKNOWN
    longer = [dim for dim, (one, other) in enumerate(zip(val.shape, new.shape, strict=True)) if one != other]
    if not longer:
        return REDUCED
    places = {(shape_of(operand)[place.dim], place.outer) for operand, place in following.along(node)}
    (length, outer), *others = places
    if others or len(longer) > 1 or val.shape[longer[0]] != length or new.shape[longer[0]] != 2 * length:
        return UNKNOWN
    routed = any(place.routed for _, place in following.along(node))
    if _runs_along(following, node):  # numbers that sort rows may route them
        return UNKNOWN if val.is_floating_point() else Along(longer[0], outer, routed=True)
    return Along(longer[0], outer, routed)


def _runs_along(following: Following, node: fx.Node) -> bool:
    """Says whether an operation names the batch's dimension as the one that it works along."""
    if node.target in _MOVES:
        return False
    rank = max(len(shape_of(operand)) for operand in node.all_input_nodes)
    for position, argument in enumerate(getattr(getattr(node.target, "_schema", None), "arguments", ())):
        if argument.name not in ("dim", "dims", "dimension"):
            continue
        given: Any = (
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        )
        if given is None or given == []:
            return True
        dims = {dim % rank for dim in ([given] if isinstance(given, int) else given)}
        if any(place.dim in dims and len(shape_of(operand)) == rank for operand, place in following.along(node)):
            return True
    return False


def args_of(node: fx.Node) -> Any:
    return node.args


def shape_of(node: Any) -> Sequence[int]:
    return tuple(next(iter_tensors(node)).shape)
