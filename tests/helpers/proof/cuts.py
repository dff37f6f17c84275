"""Corruptions of a cut joint graph, as by a rewriter that got one thing wrong. Most change results, not all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.tiles import Program, program_of, run_tiles
from mtcompile.passes.step_graph import copy_step

aten = torch.ops.aten
Site = Callable[[], fx.GraphModule]
Edit = Callable[[fx.Node, dict[str, fx.Node]], None]
_LOSSES = {aten.nll_loss_forward.default: 3, aten.nll_loss_backward.default: 4}  # where they are told to add up, or to average


def mutants(whole: fx.GraphModule, cut: fx.GraphModule, seed: int, per_kind: int = 3) -> Iterator[tuple[str, fx.GraphModule]]:
    """Up to ``per_kind`` mutants of every kind, named, the same ones for the same seed. What the cut has made is changed."""
    rng, captured = Random(seed), {node.name for node in whole.graph.nodes}
    made = [node for node in cut.graph.nodes if node.op == "call_function" and node.name not in captured]
    for kind, sites in KINDS.items():
        candidates = list(sites(cut, made))
        for site in rng.sample(candidates, min(per_kind, len(candidates))):
            yield kind, site()


def _edited(cut: fx.GraphModule, name: str, edit: Edit) -> fx.GraphModule:
    copied = copy_step(cut)
    nodes = {node.name: node for node in copied.graph.nodes}
    edit(nodes[name], nodes)
    return copied


def _with_args(cut: fx.GraphModule, node: fx.Node, **by_place: Any) -> Site:
    """The graph with other arguments of a call, which are numbers or names of nodes."""

    def edit(copy: fx.Node, nodes: dict[str, fx.Node]) -> None:
        changed = {int(place[1:]): nodes[arg] if isinstance(arg, str) else arg for place, arg in by_place.items()}
        copy.args = tuple(changed.get(place, arg) for place, arg in enumerate(copy.args))

    return partial(_edited, cut, node.name, edit)


def _left_out(cut: fx.GraphModule, node: fx.Node) -> Site:
    """The graph with the first operand of a call in place of its result."""

    def edit(copy: fx.Node, nodes: dict[str, fx.Node]) -> None:
        copy.replace_all_uses_with(copy.all_input_nodes[0])

    return partial(_edited, cut, node.name, edit)


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one is other:
        return False
    a, b = one.meta.get("val"), other.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)


# kinds: each yields the places where it applies


def other_rows(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    for node in made:
        if node.target is aten.slice.Tensor:
            source, _, start, end = node.args
            length = source.meta["val"].shape[node.args[1]]
            by = 1 if end < length else -1
            if start + by >= 0:
                yield _with_args(cut, node, _2=start + by, _3=end + by)


def a_part_twice(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    for node in made:
        if node.target is aten.add.Tensor and _alike(*node.args[:2]):
            yield _with_args(cut, node, _0=node.args[1].name)
        if node.target is aten.cat.default:

            def edit(copy: fx.Node, nodes: dict[str, fx.Node]) -> None:
                pieces = list(copy.args[0])
                copy.args = ([pieces[0], pieces[0], *pieces[2:]], *copy.args[1:])

            if _alike(*node.args[0][:2]):
                yield partial(_edited, cut, node.name, edit)


def a_part_left_out(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    yield from (_left_out(cut, node) for node in made if node.target is aten.add.Tensor)
    for node in made:
        if node.target is aten.addmm.default and node.args[0].target in (aten.mm.default, aten.addmm.default):

            def edit(copy: fx.Node, nodes: dict[str, fx.Node]) -> None:
                before: Any = copy.args[0]
                copy.replace_input_with(before, before.args[0]) if before.target is aten.addmm.default else None
                copy.replace_all_uses_with(before) if before.target is aten.mm.default else None

            yield partial(_edited, cut, node.name, edit)


def sum_for_mean(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    for node in made:
        if (place := _LOSSES.get(node.target)) is not None:
            yield _with_args(cut, node, **{f"_{place}": 3 - node.args[place]})


def no_division(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    yield from (_left_out(cut, node) for node in made if node.target is aten.div.Tensor)


def another_divisor(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    for node in made:
        if node.target is aten.div.Tensor and isinstance(node.args[1], int):
            yield _with_args(cut, node, _1=node.args[1] + 1)


def no_weight(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    yield from (_left_out(cut, node) for node in made if node.target is aten.mul.Tensor)


def exchanged_operands(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    """An operand of the same operation of two parts that are neighbours."""
    last: dict[Any, fx.Node] = {}
    for node in made:
        before = last.get(node.target)
        last[node.target] = node
        if before is None or node.target is operator.getitem:
            continue
        for place, (one, other) in enumerate(zip(before.args, node.args, strict=False)):
            if _alike(one, other) and before not in (one, other) and _stands_before(before, other):

                def edit(copy: fx.Node, nodes: dict[str, fx.Node], place: int = place, before: str = before.name) -> None:
                    beside = nodes[before]
                    mine, others = copy.args[place], beside.args[place]
                    copy.args = (*copy.args[:place], others, *copy.args[place + 1 :])
                    beside.args = (*beside.args[:place], mine, *beside.args[place + 1 :])

                yield partial(_edited, cut, node.name, edit)


def _stands_before(node: fx.Node, operand: Any) -> bool:
    """Tells whether an operand is there when a node runs."""
    return bool(operand < node)


def exchanged_sums(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    """A part is added to the sum of another gradient: that of one layout which is made last before it."""
    sums = [node for node in made if node.target is aten.add.Tensor]
    for at, node in enumerate(sums):
        other = next((each for each in reversed(sums[:at]) if _alike(each, node) and each is not node.args[0]), None)
        if other is not None and _alike(node.args[0], other.args[0]):
            yield _with_args(cut, node, _0=other.args[0].name)


def exchanged_results(cut: fx.GraphModule, made: list[fx.Node]) -> Iterator[Site]:
    results = list(cut.graph.output_node().args[0])
    for at, one in enumerate(results):
        other = next((place for place in range(at + 1, len(results)) if _alike(one, results[place])), None)
        if other is not None and (one in made or results[other] in made):

            def edit(copy: fx.Node, nodes: dict[str, fx.Node], at: int = at, other: int = other) -> None:
                values = list(copy.args[0])
                values[at], values[other] = values[other], values[at]
                copy.args = (tuple(values),)

            yield partial(_edited, cut, cut.graph.output_node().name, edit)


def tile_mutants(tiled: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Of each piece in tiles: operands exchanged, of the piece and within a tile; a sum as if it were of rows; other tiles."""
    for node in tiled.graph.nodes:
        if node.target is not run_tiles:
            continue
        text, *operands = node.args
        for at, one in enumerate(operands):
            other = next((place for place in range(at) if _alike(one, operands[place])), None)
            if other is not None:
                exchanged = {f"_{1 + at}": operands[other].name, f"_{1 + other}": one.name}
                yield "exchanged operands", _with_args(tiled, node, **exchanged)()
        for kind, program in _programs(program_of(text)):

            def edit(copy: fx.Node, nodes: dict[str, fx.Node], text: str = program.text()) -> None:
                copy.args = (text, *copy.args[1:])

            yield kind, _edited(tiled, node.name, edit)


def _programs(program: Program) -> Iterator[tuple[str, Program]]:
    sums = [place for place, make in enumerate(program.makes) if make.dim < 0]
    for place in sums[:1]:
        whole = program.makes[place].whole
        makes = (*program.makes[:place], replace(program.makes[place], shape=whole, dim=0), *program.makes[place + 1 :])
        yield "a sum as rows", replace(program, makes=makes)
    for field in ("takes", "makes"):
        tiled = getattr(program, field)
        place = next(place for place, each in enumerate(tiled) if each.dim >= 0)
        for changes in ({"length": tiled[place].length + 1}, {"strides": (1,) * len(tiled[place].whole)}):
            changed = (*tiled[:place], replace(tiled[place], **changes), *tiled[place + 1 :])
            yield f"other {next(iter(changes))}", replace(program, **{field: changed})
    yield "other rows", replace(program, size=program.size // 2)
    names = [node.name for node in program.tile.graph.nodes if node.op == "call_function"]
    for name in names:
        for other in names[: names.index(name)]:
            changed = copy_step(program.tile)
            by_name = {node.name: node for node in changed.graph.nodes}
            node, before = by_name[name], by_name[other]
            operand = next((each for each in node.all_input_nodes if _alike(each, before)), None)
            if operand is not None:
                node.replace_input_with(operand, before)
                yield "another operand in a tile", replace(program, tile=changed)
                break


_FUNCTIONS: tuple[Callable[[fx.GraphModule, list[fx.Node]], Iterator[Site]], ...] = (
    other_rows, a_part_twice, a_part_left_out, sum_for_mean, no_division, another_divisor, no_weight, exchanged_operands,
    exchanged_sums, exchanged_results,
)  # fmt: skip
KINDS = {function.__name__: function for function in _FUNCTIONS}
