"""Describes where the rows of a value are: which of its dimensions they make up, and how a tile of them is cut out.

Rows are the leading dimensions, [tokens, width] or [batch, tokens, width], or the first and an inner one, as in attention's
[batch, heads, tokens, width]. What every sequence of a batch reads again, such as the angles of a rotary embedding, [tokens,
width], is cut along its tokens too: the same part for every sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from mtcompile.passes.analysis.tiles import Tiled

Layout = Literal["rows", "whole", "turned", "sum", "several", "repeated"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """``rows`` in tiles of ``size``."""

    rows: int
    size: int


def leading(shape: Sequence[int], rows: int) -> int:
    """How many leading dimensions make up the rows; 0 where none do."""
    return next((count for count in range(1, len(shape) + 1) if prod(shape[:count]) == rows), 0)


def dims_of_rows(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """The dimensions of more than one element that make up the rows, in their order; none where the shape has no rows."""
    if count := leading(shape, rows):
        return tuple(dim for dim in range(count) if shape[dim] > 1)
    inner = range(1, len(shape) if len(shape) > 2 else 0)
    alone = next(((dim,) for dim in inner if shape[dim] == rows), ())
    return alone or next(((0, dim) for dim in inner[1:] if shape[0] > 1 and shape[0] * shape[dim] == rows), ())


def in_tile(shape: Sequence[int], tiling: Tiling, size: int) -> tuple[int, ...]:
    """The shape of a tile of ``size`` rows of a value in rows: other dimensions of rows have one element."""
    dims = dims_of_rows(shape, tiling.rows)
    return tuple(size if dim == dims[-1] else 1 if dim in dims else length for dim, length in enumerate(shape))


def cut(val: torch.Tensor, layout: Layout, tiling: Tiling, length: int = 0) -> Tiled | None:
    """How a value is cut into tiles, or put together from them; None where it cannot be. ``length``: of the sequence, for a
    value that every sequence reads again."""
    shape = tuple(val.shape)
    if layout == "repeated":
        return None if length % tiling.size else Tiled(shape, shape, shape.index(length), length=length)
    if layout != "rows":
        return Tiled(shape)
    dims = dims_of_rows(shape, tiling.rows)
    if len(dims) > 1 and leading(shape, tiling.rows) and _one_behind_the_other(val, dims):
        return Tiled(shape, in_tile(shape, tiling, tiling.rows), dims[-1])
    if len(dims) == 1:
        return Tiled(shape, shape, dims[0])
    if len(dims) != 2 or shape[dims[1]] % tiling.size:
        return None
    return Tiled(shape, shape, dims[1], dims[0], shape[dims[1]])


def _one_behind_the_other(val: torch.Tensor, dims: Sequence[int]) -> bool:
    """Says whether rows are at one distance in memory, so that some of them are a view."""
    outer = [(val.shape[dim], val.stride(dim)) for dim in dims]
    return all(before[1] == after[0] * after[1] for before, after in itertools.pairwise(outer))


def is_dense(val: torch.Tensor) -> bool:
    """Says whether the elements of a value fill its memory, in whatever order of dimensions."""
    places = sorted((stride, length) for length, stride in zip(val.shape, val.stride(), strict=True) if length > 1)
    expected = 1
    for stride, length in places:
        if stride != expected:
            return False
        expected *= length
    return True
