"""Finds the pieces of a joint graph that may run tile by tile: parts of blocks whose operations all work row by row.

No path leads out of a piece and back into it, so it can run as one. A forward piece is worth its tiles if most of what it
makes stays inside; what its backward needs of that is then made again, tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from mtcompile.passes.cuts.tiles.layouts import Tiling, cut, is_dense
from mtcompile.passes.cuts.tiles.rules import Use, use_of_rows
from mtcompile.passes.joint.regions import assign, block_label, module_path
from mtcompile.passes.step_graph import is_view, span_nbytes

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_NOWHERE = ("", "None")
Layer = tuple[str, str | int]  # the phase, and a layer's name or a region's place


@dataclass(frozen=True, slots=True)
class Piece:
    """Operations that all work row by row, in their order. ``leaving``: those whose results others read."""

    nodes: tuple[fx.Node, ...]
    leaving: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a graph that a ``tiling`` cuts, and the ``uses`` of rows by their operations. ``again``: operations of
    forward pieces, and loose ones, whose results the backward pieces make where they read them."""

    tiling: Tiling
    uses: Mapping[fx.Node, Use]
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    again: frozenset[fx.Node]


def rows_of_tokens(graph: fx.Graph) -> int:
    """The rows of the largest matrix products of the forward of a joint graph: its tokens; 0 where it has none."""
    products = [node for node in graph.nodes if node.target in _PRODUCTS and node.meta["phase"] == "forward"]
    return max((int(node.args[-2].meta["val"].shape[0]) for node in products), default=0)


def pieces_of(graph: fx.Graph, tiling: Tiling) -> Pieces:
    """The pieces of a normalized joint graph. ``tiling``: of more than one row."""
    uses = {node: use for node in graph.nodes if (use := use_of_rows(node, tiling)) is not None}
    groups = _groups(graph, uses)
    with_products = [(phase, nodes) for phase, nodes in groups if any(_is_product(node, uses) for node in nodes)]

    def can_leave(piece: Piece) -> bool:
        bases = {base_of(node, piece, uses) for node in piece.leaving}
        return all(_can_leave(base, uses[base], tiling) for base in bases)

    backward = [_piece(nodes, set(), uses) for phase, nodes in with_products if phase == "backward"]
    backward = [piece for piece in backward if can_leave(piece)]
    inside_backward = {node for piece in backward for node in piece.nodes}
    loose = _read_only_by(inside_backward, uses)
    inside_backward |= loose
    forward = []
    for nodes in (nodes for phase, nodes in with_products if phase == "forward"):
        piece = _piece(nodes, inside_backward, uses)
        if _is_worth_it(piece) and can_leave(piece):
            forward.append(piece)
    leaving = {node for piece in forward for node in piece.leaving}
    again = {node for piece in forward for node in piece.nodes} - leaving | loose
    reading = [piece for piece in backward if any(operand in again for node in piece.nodes for operand in node.all_input_nodes)]
    return Pieces(tiling, uses, tuple(forward), tuple(reading), frozenset(again))


def _groups(graph: fx.Graph, uses: Mapping[fx.Node, Use]) -> list[tuple[str, list[fx.Node]]]:
    """Sets of operations of one layer, each with its phase, such that no path leads out of a set and back: a level rises
    wherever a path leaves what works row by row, or a layer, or goes through a sum over all rows. Paths to a layer from what
    no layer leads to, such as the angles of a rotary embedding, do not count."""
    layer = _layers(graph)
    ahead = _ahead_of_layers(graph, layer)
    level: dict[fx.Node, int] = {}
    groups: dict[tuple[Layer, int], list[fx.Node]] = {}
    for node in graph.nodes:
        use, reached = uses.get(node), 0
        for operand in node.all_input_nodes:
            if operand in ahead and node not in ahead:
                continue
            before = uses.get(operand)
            crosses = before is not None and (
                use is None or layer[operand] != layer[node] or before.makes != use.takes.get(operand, "whole")
            )
            reached = max(reached, level[operand] + crosses)
        level[node] = reached
        if use is not None:
            groups.setdefault((layer[node], reached), []).append(node)
    in_order = sorted(groups.items(), key=lambda group: group[0][1])  # what a group reads comes from lower levels
    return [(layer[0], nodes) for (layer, _), nodes in in_order]


def _ahead_of_layers(graph: fx.Graph, layer: Mapping[fx.Node, Layer]) -> set[fx.Node]:
    """Returns what is made of inputs alone, outside of all layers."""
    ahead: set[fx.Node] = set()
    for node in graph.nodes:
        inside = node in layer and isinstance(layer[node][1], str)
        if not inside and ahead.issuperset(node.all_input_nodes):
            ahead.add(node)
    return ahead


def _read_only_by(inside: set[fx.Node], uses: Mapping[fx.Node, Use]) -> set[fx.Node]:
    """Operations of the backward, other than products, that are in no piece but are read by pieces alone, row by row: such as
    factors of a norm's backward that come from the forward. They are made where they are read."""
    loose: set[fx.Node] = set()
    for node, use in reversed(uses.items()):
        if node not in inside and node.meta["phase"] == "backward" and use.makes == "rows" and node.target not in _PRODUCTS:
            readers = [user in inside or user in loose for user in node.users]
            alone = "several" not in use.takes.values()  # else an operation of several results would be made again for one
            if alone and readers and all(readers) and all(uses[user].takes[node] == "rows" for user in node.users):
                loose.add(node)
    return loose


def _layers(graph: fx.Graph) -> dict[fx.Node, Layer]:
    """The layer of each operation: by its module; outside of a list of modules, the region. A sum of gradients, which no module
    makes, is of the layer that it comes from last."""
    region, _ = assign(graph)
    layers: dict[fx.Node, Layer] = {}
    order: dict[fx.Node, int] = {}
    for node, (phase, block) in ((node, region[node]) for node in graph.nodes if node in region):
        order[node] = len(order)
        label = block_label(module_path(node))
        before = [each for each in node.all_input_nodes if each in layers and layers[each][0] == phase]
        if label or phase == "forward" or module_path(node) not in _NOWHERE or not before:
            layers[node] = phase, label or block
        else:
            layers[node] = layers[max(before, key=order.__getitem__)]
    return layers


def _is_product(node: fx.Node, uses: Mapping[fx.Node, Use]) -> bool:
    return node.target in _PRODUCTS and uses[node].makes == "rows"


def _piece(nodes: list[fx.Node], others: set[fx.Node], uses: Mapping[fx.Node, Use]) -> Piece:
    """A piece; its results that only ``others`` read, row by row, stay inside."""
    own = set(nodes)

    def stays(node: fx.Node, user: fx.Node) -> bool:
        return user in own or (user in others and uses[user].takes[node] == uses[node].makes)

    return Piece(tuple(nodes), tuple(node for node in nodes if not all(stays(node, user) for user in node.users)))


def base_of(node: fx.Node, piece: Piece, uses: Mapping[fx.Node, Use]) -> fx.Node:
    """The operation of a piece whose rows a leaving view shows; the node itself where there is no other."""
    base = node
    while is_view(node) and node.args[0] in piece.nodes and uses[node.args[0]].makes in ("rows", "several"):
        node = node.args[0]
        base = node if uses[node].makes == "rows" else base
    return base


def _is_worth_it(piece: Piece) -> bool:
    """Says whether more bytes stay inside a piece than leave it."""
    leaving = sum(span_nbytes(node.meta["val"]) for node in piece.leaving if "val" in node.meta)
    tensors = [node.meta["val"] for node in piece.nodes if not is_view(node) and isinstance(node.meta.get("val"), torch.Tensor)]
    return sum(map(span_nbytes, tensors)) > 2 * leaving


def _can_leave(node: fx.Node, use: Use, tiling: Tiling) -> bool:
    """Says whether a result can be put together from tiles: a sum, or rows in memory that the result fills."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    if use.makes != "rows":
        return use.makes == "sum"
    tiled = cut(val, "rows", tiling)
    return tiled is not None and (val.is_contiguous() or (tiled.shape == tiled.whole and is_dense(val)))
