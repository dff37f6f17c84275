"""Runs pieces of a joint graph in tiles of tokens, so that what is made inside a piece exists for one tile at a time.

    h = up(x) * silu(gate(x)); y = down(h)        y = run_tiles("h = up(x) * ...", x, up, gate, down)

The backward makes the inside of a tile again, uses it, and drops it. A piece is one operation of the joint graph, so everything
after plans, proves and runs it like any other.

Every row is computed by the same operations on the same row; a matrix product or reduction of fewer rows may round otherwise
where a kernel's order of summation depends on the number of rows. Gradients of weights are sums over tiles, in their order;
those of half-precision weights are added up in fp32.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mtcompile.passes.analysis.kernels import Operand, drop_dead
from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.analysis.tiles import Program, Tiled, run_tiles
from mtcompile.passes.cuts.tiles.layouts import Layout, Tiling, cut
from mtcompile.passes.cuts.tiles.pieces import Piece, Pieces, base_of, pieces_of, rows_of_tokens
from mtcompile.passes.cuts.tiles.rules import args_in_tile
from mtcompile.passes.joint.loss_head import Add, adder, viewed
from mtcompile.passes.joint.regions import STARTS_BLOCK
from mtcompile.passes.joint.shapes import result_of
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.passes.step_graph import is_random, is_view, iter_tensors

aten = torch.ops.aten
_MOST_ALIGNED = 64  # rows: kernels work on rows in groups, which a tile does not cut


def tile_tokens(joint: fx.GraphModule, tiles: int) -> int:
    """Rewrites, in place, the pieces of a normalized joint graph that work row by row, to run in at most ``tiles`` tiles.
    Returns how many tiles there are; 1 where nothing is cut."""
    if tiles < 2:
        return 1
    rows = rows_of_tokens(joint.graph)
    tiling = Tiling(rows, tile_rows(rows, tiles))
    if tiling.size >= rows:
        return 1
    pieces = pieces_of(joint.graph, tiling)
    wholes: dict[fx.Node, fx.Node] = {}
    texts: dict[tuple[Any, ...], str] = {}
    tiled: set[fx.Node] = set()
    for piece in (*pieces.forward, *pieces.backward):
        if _rewrite(joint.graph, piece, pieces, wholes, texts):
            tiled.update(piece.nodes)
    if not tiled:
        return 1
    for node, whole in wholes.items():
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in tiled)
    drop_dead(joint.graph)
    _start_blocks(joint.graph)
    joint.graph.lint()
    joint.recompile()
    return -(-rows // tiling.size)


def _start_blocks(graph: fx.Graph) -> None:
    """Lets a block start with each piece of the forward, and behind it: what only a piece reads is gone when others run."""
    starts = True
    for node in graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "forward" or is_view(node) or node.target is operator.getitem:
            continue
        if starts or node.target is run_tiles:
            first = node
            while node.target is run_tiles and first.prev in node.all_input_nodes and is_view(first.prev):
                first = first.prev
            first.meta[STARTS_BLOCK] = True
        starts = node.target is run_tiles


def tiles_contract(tiles: int) -> str:
    """Says what tiles change."""
    return (
        f"what works token by token in {tiles} tiles of tokens: weight gradients there are sums over tiles (in fp32), and "
        "rounding may depend on a tile's number of rows"
    )


def tile_rows(rows: int, tiles: int) -> int:
    """The rows of a tile: a multiple of a power of two, as large as there are rows enough for."""
    size = max(1, -(-rows // tiles))
    unit = min(_MOST_ALIGNED, 1 << (size.bit_length() - 1))
    return -(-size // unit) * unit


def _rewrite(
    graph: fx.Graph, piece: Piece, pieces: Pieces, wholes: dict[fx.Node, fx.Node], texts: dict[tuple[Any, ...], str]
) -> bool:
    """Puts the call that runs a piece in tiles behind its last operation, and what stands for each leaving operation into
    ``wholes``. ``texts``: those of programs so far. Returns False where the order of the graph does not allow that."""
    nodes = sorted(piece.nodes)
    if not _make_way(nodes):
        return False
    needed = _needed(piece, pieces)
    builder = _Builder(pieces, needed, texts)
    bases = list(dict.fromkeys(base_of(node, piece, pieces.uses) for node in piece.leaving))
    operands, text = builder.program(bases)
    with graph.inserting_before(nodes[-1].next):
        values = [wholes.get(operand, operand) for operand in operands]
        call = graph.call_function(run_tiles, (text, *values))
        call.meta.update(_place(nodes[0], needed, pieces))
        call.meta["val"] = tuple(_alone(base.meta["val"]) for base in bases)
        add = adder(graph, call)
        with graph.inserting_before(call):  # views of weights are made here, so that no other layer's order counts
            own = [viewed(add, value) if owner(value).op == "placeholder" else value for value in values]
        call.args = (call.args[0], *own)
        for place, base in enumerate(bases):
            wholes[base] = add(operator.getitem, call, place)
        for node in piece.leaving:
            _viewed(add, node, wholes)
    return True


def _place(first: fx.Node, needed: Sequence[fx.Node], pieces: Pieces) -> dict[str, Any]:
    """The phase and place in the model of a piece: that of its first product, or of that of the forward piece whose inside it
    makes again, so that both are in the same block."""
    inside = set(needed)
    of = next((piece.nodes for piece in pieces.forward if not inside.isdisjoint(piece.nodes)), needed)
    like = next(node for node in of if node.target in (aten.mm.default, aten.addmm.default))
    about: dict[str, Any] = {key: like.meta[key] for key in ("seq_nr", "module_path") if key in like.meta}
    return {"phase": first.meta["phase"], **about}


def _alone(val: torch.Tensor) -> torch.Tensor:
    """A value of that layout in memory of its own."""
    with getattr(val, "fake_mode", None) or nullcontext():
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


def _viewed(add: Add, node: fx.Node, wholes: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns what stands for a view of a result: the same view of what stands for that."""
    if node not in wholes:
        wholes[node] = add(node.target, _viewed(add, node.args[0], wholes), *node.args[1:], **node.kwargs)
    return wholes[node]


def _needed(piece: Piece, pieces: Pieces) -> list[fx.Node]:
    """The operations of a tile in their order: those of the piece that lead to what leaves, and those of the forward that
    they read."""
    own = set(piece.nodes)
    needed: set[fx.Node] = set()
    stack = list(piece.leaving)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            takes = pieces.uses[node].takes
            stack += [each for each, layout in takes.items() if each in own or each in pieces.again or layout == "turned"]
    return sorted(needed)


def _make_way(nodes: Sequence[fx.Node]) -> bool:
    """Moves what depends on a piece, and stands among its operations, behind the last of these."""
    inside, dependent = set(nodes), dict[fx.Node, None]()
    node, last = nodes[0], nodes[-1]
    while node is not last:
        if node not in inside and any(operand in inside or operand in dependent for operand in node.all_input_nodes):
            dependent[node] = None
        node = node.next
    if any(map(is_random, dependent)):
        return False
    place = last
    for node in dependent:
        place.append(node)
        place = node
    return True


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the program of a piece. ``needed``: the operations of a tile, in their order. ``texts``: of programs, by all that
    they are made from, since those of equal layers are equal, and the shapes in a tile take long to find."""

    pieces: Pieces
    needed: Sequence[fx.Node]
    texts: dict[tuple[Any, ...], str]

    def program(self, bases: Sequence[fx.Node]) -> tuple[list[fx.Node], str]:
        """The operands of a program that makes ``bases``, and the program's text."""
        inside, uses, (rows, size) = set(self.needed), self.pieces.uses, astuple(self.pieces.tiling)
        taken = (
            (each, layout, uses[node].length * (layout == "repeated"))
            for node in self.needed
            for each, layout in uses[node].takes.items()
            if each not in inside
        )
        takes = {(each, layout): self._cut(each, layout, length) for each, layout, length in taken}
        makes = tuple(self._put_together(base) for base in bases)
        key = self._key(takes, bases), makes, rows, size
        if key not in self.texts:
            tile = self._tile(takes, bases, size)
            last = self._tile(takes, bases, rows % size) if rows % size else None
            self.texts[key] = Program(rows, size, tuple(takes.values()), makes, tile, last).text()
        return [operand for operand, _ in takes], self.texts[key]

    def _key(self, takes: Mapping[tuple[fx.Node, Layout], Tiled], bases: Sequence[fx.Node]) -> tuple[Any, ...]:
        """Returns what is equal for two programs of the same operations on operands alike."""
        place = {node: position for position, node in enumerate(self.needed)}
        given = {operand: f"x{position}" for position, operand in enumerate(takes)}
        operands = [(_like(node), tiled) for (node, _), tiled in takes.items()]
        rows: list[Any] = []
        for node in self.needed:
            layouts = self.pieces.uses[node].takes
            names = {each: place[each] if each in place else given[each, layout] for each, layout in layouts.items()}
            arguments = map_arg((node.args, node.kwargs), lambda operand, names=names: Operand(names[operand]))
            rows.append((node.target, repr(arguments), _like(node)))
        return tuple(operands), tuple(rows), tuple(place[base] for base in bases)

    def _cut(self, node: fx.Node, layout: Layout, length: int = 0) -> Tiled:
        tiled = cut(node.meta["val"], layout, self.pieces.tiling, length)
        assert tiled is not None, "the rules only know values that can be cut"
        return tiled

    def _put_together(self, node: fx.Node) -> Tiled:
        tiled, val = self._cut(node, self.pieces.uses[node].makes), node.meta["val"]
        return tiled if tiled.dim < 0 or val.is_contiguous() else replace(tiled, strides=tuple(val.stride()))

    def _tile(self, takes: Mapping[tuple[fx.Node, Layout], Tiled], bases: Sequence[fx.Node], size: int) -> fx.GraphModule:
        """The operations of a tile of so many rows."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        given: dict[tuple[fx.Node, Layout], fx.Node] = {}
        for place, ((operand, layout), tiled) in enumerate(takes.items()):
            given[operand, layout] = graph.placeholder(f"x{place}")
            known = operand.meta["val"]
            val = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
            given[operand, layout].meta["val"] = tiled.tile(val.view(tiled.shape) if tiled.dim >= 0 else val, 0, size)
        for place, node in enumerate(self.needed):
            layouts = self.pieces.uses[node].takes
            operands = {each: env[each] if each in env else given[each, layout] for each, layout in layouts.items()}
            args, kwargs = map_arg((node.args, node.kwargs), operands.__getitem__)
            args = args_in_tile(node, args, self.pieces.tiling, size)
            env[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"n{place}")
            env[node].meta["val"] = _result(env[node])
        graph.output(tuple(env[base] for base in bases))
        return LazyGraphModule(torch.nn.Module(), graph, class_name="Tile")


def _like(node: fx.Node) -> Any:
    """Returns what the shapes in a tile depend on of a value."""
    return tuple((value.shape, value.stride(), value.dtype) for value in iter_tensors(node))


def _result(node: fx.Node) -> Any:
    """Returns what an operation makes of operands without content."""
    vals, keywords = map_arg((node.args, dict(node.kwargs)), lambda operand: operand.meta["val"])
    if "device" in keywords or not node.all_input_nodes:
        keywords = {**keywords, "device": "meta"}
    with torch.no_grad():
        return result_of(node.target, vals, keywords)
