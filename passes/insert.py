"""Inserts calls into graphs, each at the graph's insertion point."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.passes.step_graph import TIER_OF_MOVE, new_node, offload_rows, prefetch_rows, restride, span_nbytes
from mtcompile.runtime.schedule import Phase, aligned


def add_call(graph: fx.Graph, call: fx.Node, outputs: list[tuple[str, dict[str, Any]]]) -> list[fx.Node]:
    """Appends getitems for the results of ``call``; ``outputs``: (name, meta) of each."""
    items = []
    for position, (name, meta) in enumerate(outputs):
        item = new_node(graph, "call_function", operator.getitem, (call, position), {}, name)
        item.meta.update(meta)
        items.append(item)
    return items


def add_move(
    graph: fx.Graph,
    target: Any,
    values: list[fx.Node],
    about: tuple[Phase, int],
    name: str,
    by: Sequence[fx.Node] = (),
    pooled: bool = False,
) -> list[fx.Node]:
    """Appends one move of ``values`` (a prefetch, say) and returns the moved values. ``about``: phase and block. ``by``: of a
    move of slices, what says which. ``pooled``: what arrives comes from the allocator instead of having a slot."""
    tier = TIER_OF_MOVE[target]
    call = new_node(graph, "call_function", target, (*values, *by), {}, name)
    call.meta.update(phase=about[0], block=about[1])
    outputs = [(f"{value.name}_{tier}", dict(value.meta, tier=tier, pooled=pooled)) for value in values]
    return add_call(graph, call, outputs)


def add_prefetch_of_rows(
    graph: fx.Graph, value: fx.Node, indices: Sequence[fx.Node], held: int, about: tuple[Phase, int], name: str, pooled: bool
) -> list[fx.Node]:
    """Appends a prefetch of the rows of ``value`` that ``indices`` name, and returns the ``held`` rows that arrive."""
    call = graph.create_node("call_function", prefetch_rows, (value, *indices), {"held": held}, name=name)
    call.meta.update(phase=about[0], block=about[1])
    meta = {**value.meta, **_in_rows(value.meta["val"], held), "tier": "device", "pooled": pooled}
    return add_call(graph, call, [(f"{value.name}_device", meta)])


def add_offload_of_rows(
    graph: fx.Graph, value: fx.Node, indices: Sequence[fx.Node], rows: int, about: tuple[Phase, int], name: str
) -> list[fx.Node]:
    """Appends an offload of a gradient in the rows that ``indices`` name, and returns all its ``rows``."""
    call = graph.create_node("call_function", offload_rows, (value, *indices), {"rows": rows}, name=name)
    call.meta.update(phase=about[0], block=about[1])
    meta = {**value.meta, **_in_rows(value.meta["val"], rows), "tier": "host", "pooled": False}
    return add_call(graph, call, [(f"{value.name}_host", meta)])


def _in_rows(val: torch.Tensor, rows: int) -> dict[str, Any]:
    shaped = torch.empty((rows, *val.shape[1:]), dtype=val.dtype, device="meta")
    return {"val": shaped, "nbytes": aligned(span_nbytes(shaped))}


def add_restride(graph: fx.Graph, value: fx.Node, like: torch.Tensor) -> fx.Node:
    """Appends a copy of ``value`` that is strided as ``like``."""
    copy = graph.call_function(restride, (value, tuple(like.shape), tuple(like.stride())))
    copy.meta["val"] = value.meta["val"].new_empty_strided(like.shape, like.stride())
    return copy
