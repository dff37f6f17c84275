"""Rules for operations along some of whose dimensions rows are not to be, such as a padded one or those of a triangle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from mtcompile.passes.joint.batch.shapes import SHARED, UNKNOWN, Along, Following, Places, args_of, of_twice_as_many, shape_of

aten = torch.ops.aten


def embedding(following: Following, node: fx.Node) -> Places:
    """Rows of a table, which is no part of the batch."""
    return of_twice_as_many(following, node) if following.places[args_of(node)[0]] == SHARED else UNKNOWN


def padded(following: Following, node: fx.Node) -> Places:
    """Elements are added, or left out, in front of and behind those of the last dimensions."""
    source, pad = args_of(node)[:2]
    place = following.places[source]
    if isinstance(place, Along) and isinstance(pad, (list, tuple)):
        at = 2 * (len(shape_of(source)) - 1 - place.dim)
        if any(pad[at : at + 2]):
            return UNKNOWN
    return of_twice_as_many(following, node)


def by_place(following: Following, node: fx.Node) -> Places:
    """Elements are kept by their place in the last two dimensions, or in those of a diagonal."""
    named = args_of(node)[2:]
    dims = (*named, *(0, 1)[len(named) :]) if node.target is aten.diagonal.default else (-2, -1)
    among = [(place.dim, len(shape_of(operand))) for operand, place in following.along(node)]
    inside = any(place in {dim % rank for dim in dims} for place, rank in among)
    return UNKNOWN if inside else of_twice_as_many(following, node)


def in_dims(*dims: int) -> Callable[[Following, fx.Node], Places]:
    """A rule of operations whose batch can only be in some dimensions."""

    def rule(following: Following, node: fx.Node) -> Places:
        fits = all(place.dim in dims for _, place in following.along(node))
        return of_twice_as_many(following, node) if fits else UNKNOWN

    return rule
