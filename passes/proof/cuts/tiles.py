"""Proves that a joint graph whose pieces run in tiles does what the whole one does: the same operations on the same values.

Where T is a tile's part of a value that has rows, these rules alone, in a tile:

    f(T(a), b) of the shape of a tile of f(a, b)        T(f(a, b)), for an operation f of the whole graph
    mm(T(a), T(b)), sum(T(a), rows)                     a part of the sum f(a, b), which nothing in the tile reads
    what all tiles write to their rows                  f(a, b)
    what all tiles add up                               f(a, b), if each makes a part of that sum

That an operation such as a norm works row by row is left to ``tiles/rules``. It shares no code with the rewrite.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.tiles import Program, Tiled, program_of, run_tiles
from mtcompile.passes.proof.cuts.numbering import Call, CutNumbers, Layout, check_computed, check_same_tables, layout_of
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.proof.values import Key, arguments
from mtcompile.passes.step_graph import is_random, placeholders

aten: Any = torch.ops.aten
_SIZED = {  # operations with a shape among their arguments, and its place
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default), 1),
    **dict.fromkeys((aten.zeros.default, aten.full.default), 0),
    aten.slice_backward.default: 1,
}


def check_tiles(whole: fx.GraphModule, tiled: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``tiled`` computes the results of ``whole``, if operations work row by row."""
    check_same_tables(whole, tiled, "inputs", "outputs")
    numbers = _Tiles()
    check_computed(numbers, whole, tiled, *numbers.uncut(whole))


class _Tiles(CutNumbers):
    """Numbers of values, also inside tiles. ``sized``: the whole graph's operations with a shape among their arguments, by all
    other arguments; ``results``: of each call that runs a program in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.sized: dict[Any, set[int]] = {}
        self.results: dict[int, list[int]] = {}
        self.rules = {operator.getitem: self._item, **dict.fromkeys(_SIZED, self._noted)}

    def _noted(self, call: Call) -> int | None:
        if not self.is_cut:
            number = self.of((call.node.target, *call.args, call.kwargs, None), call.layout)
            self.sized.setdefault(_but_size(call.node.target, call.args, call.kwargs), set()).add(number)
        return None

    def _item(self, call: Call) -> int | None:
        if call.keys[0][:1] != (run_tiles,):
            return None
        number, item = call.args[0].number, call.args[1]
        _, _, *operands, _, _ = call.keys[0]
        called: Any = call.node.args[0]
        program = program_of(called.args[0])
        if number not in self.results:
            of_each = [self._body(program, body, size, operands) for body, size in _bodies(program)]
            expect(all(results == of_each[0] for results in of_each), lambda: f"{call.node.name} to be the same in each tile")
            self.results[number] = of_each[0]
        make, val = program.makes[item], call.node.meta["val"]
        strides = () if make.dim < 0 or val.is_contiguous() else tuple(val.stride())
        expect(make.strides == strides, lambda: f"{call.node.name} with strides {strides}, found {make.strides}")
        return self.results[number][item]

    def _body(self, program: Program, body: fx.GraphModule, size: int, operands: list[Any]) -> list[int]:
        """Numbers the results of a program for all rows, by its operations in a tile of so many."""
        env: dict[fx.Node, int] = {}
        kinds: dict[fx.Node, str] = {}  # "tile", "whole" or "sum"
        for node, take, operand in zip(placeholders(body.graph), program.takes, operands, strict=True):
            layout = self.layouts[operand.number]
            tile = _tile(take, layout, program.rows, size)
            expect(layout_of(node) == tile, lambda n=node, t=tile: f"{n.name} as {t}, a tile of its operand")
            env[node], kinds[node] = operand.number, "whole" if take.dim < 0 else "tile"
        for node in body.graph.nodes:
            if node.op == "call_function":
                env[node] = self._in_tile(node, env, program.rows, size)
                kinds[node] = self._kind(node, env, kinds, program.rows, size)
        outputs: Any = body.graph.output_node().args[0]
        for node, make in zip(outputs, program.makes, strict=True):
            kind = "sum" if make.dim < 0 else "tile"
            tile, part = _tile(make, self.layouts[env[node]], program.rows, size), layout_of(node)
            right = kinds[node] == kind and tile is not None and part is not None and tile.shape == part.shape
            right = right and (not make.length or make.sequences >= 0)  # each tile writes rows of its own
            expect(right, lambda n=node, k=kind: f"{n.name} to be put together as a {k}, found a {kinds[n]}")
        return [env[node] for node in outputs]

    def _in_tile(self, node: fx.Node, env: dict[fx.Node, int], rows: int, size: int) -> int:
        """Returns the number of the whole graph's operation that a tile's is a part of."""
        args, kwargs = arguments(node, env)
        known, part = self.known.get((node.target, *args, kwargs, None)), layout_of(node)
        if known is None and node.target in _SIZED and part is not None and args[_SIZED[node.target]] == part.shape:
            alike = self.sized.get(_but_size(node.target, args, kwargs), ())
            fits = [number for number in alike if _is_tile(part, self.layouts[number], rows, size)]
            known = fits[0] if len(fits) == 1 else None
        expect(
            known is not None and not is_random(node), lambda: f"an operation of the whole graph, found {node.format_node()}"
        )
        assert known is not None
        return known

    def _kind(self, node: fx.Node, env: dict[fx.Node, int], kinds: dict[fx.Node, str], rows: int, size: int) -> str:
        """Says whether an operation makes a tile of its whole, all of it, or a part of it as a sum over rows."""
        before = {kinds[operand] for operand in node.all_input_nodes}
        if node.target is operator.getitem and before == {"several"}:
            call: Any = node.args[0]
            summed = call.target is aten.native_layer_norm_backward.default and node.args[1] != 0
            return "sum" if summed else self._expect_tile(node, env, rows, size)
        expect("sum" not in before, lambda: f"{node.name} to read no sum over some of the rows")
        if (part := layout_of(node)) is None:
            expect("tile" in before, lambda: f"{node.name} to read a tile")
            return "several"
        if part.shape == self.layouts[env[node]].shape:
            if "tile" not in before:
                return "whole"
            expect(self._sums(node, env), lambda: f"{node.name} to be a sum over rows, or in rows")
            return "sum"
        return self._expect_tile(node, env, rows, size)

    def _expect_tile(self, node: fx.Node, env: dict[fx.Node, int], rows: int, size: int) -> str:
        is_tile = _is_tile(layout_of(node), self.layouts[env[node]], rows, size)
        expect(is_tile, lambda: f"{node.name} to be a tile of {self.layouts[env[node]]}, found {layout_of(node)}")
        return "tile"

    def _sums(self, node: fx.Node, env: dict[fx.Node, int]) -> bool:
        args: Any = node.args
        layouts = [layout_of(operand) for operand in node.all_input_nodes]
        wholes = [self.layouts[env[operand]] for operand in node.all_input_nodes]
        if node.target is aten.mm.default:
            (one, other), (left, right) = layouts, wholes
            return one is not None and other is not None and one.shape[1] == other.shape[0] < left.shape[1] == right.shape[0]
        if node.target is not aten.sum.dim_IntList or layouts[0] is None:
            return False
        differ = {at for at, pair in enumerate(zip(layouts[0].shape, wholes[0].shape, strict=True)) if pair[0] != pair[1]}
        return differ <= {dim % len(wholes[0].shape) for dim in args[1]}


def _bodies(program: Program) -> list[tuple[fx.GraphModule, int]]:
    """Returns what runs for whole tiles, and for the last one, each with its rows."""
    rest = program.rows % program.size
    expect((program.last is not None) == bool(rest), lambda: f"tiles of {program.size} of {program.rows} rows")
    return [(program.tile, program.size), *([] if program.last is None else [(program.last, rest)])]


def _tile(tiled: Tiled, whole: Layout, rows: int, size: int) -> Layout | None:
    """Returns the layout of a tile of a value, which is viewed and cut as ``tiled`` says; None if it cannot be: it has as many
    rows as all tiles, or those of one sequence, which as many sequences have, or which all read."""
    if tiled.whole != whole.shape or tiled.dim < 0:
        return whole if tiled.whole == whole.shape else None
    length, shape = tiled.length or rows, list(tiled.shape)
    sequences = shape[tiled.sequences] if tiled.sequences >= 0 else rows // length
    right = prod(shape) == prod(whole.shape) and shape[tiled.dim] == length and sequences * length == rows
    right = right and tiled.sequences < tiled.dim and (length % size == 0 if tiled.length else tiled.sequences < 0)
    if not right:
        return None
    shape[tiled.dim] = size
    if tiled.sequences >= 0:
        shape[tiled.sequences] = 1
    return whole._replace(shape=tuple(shape))


def _is_tile(tile: Layout | None, whole: Layout, rows: int, size: int) -> bool:
    """Says whether a tile of that shape may be one of a value: other dimensions than those of rows are as long. Dtypes in tiles
    are those of shape functions, which say another one than kernels make of some statistics."""
    if tile is None or len(tile.shape) != len(whole.shape):
        return False
    pairs = [(part, length) for part, length in zip(tile.shape, whole.shape, strict=True) if part != length]
    return all(part in (1, size) for part, _ in pairs) and prod(whole.shape) * size in (prod(tile.shape) * rows, 0)


def _but_size(target: Any, args: tuple[Any, ...], kwargs: Any) -> Key:
    place = _SIZED[target]
    return (target, *args[:place], "size", *args[place + 1 :], kwargs, None)
