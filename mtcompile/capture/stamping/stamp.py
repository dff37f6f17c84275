"""Writes the joint graph of a whole model, given one in which only some of its equal blocks are traced."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from mtcompile.capture.stamping.blocks import Blocks
from mtcompile.capture.stamping.segments import Phase, Read, Segment, Segments, Spot, Unlike, segments_of
from mtcompile.passes.graph_json import SMALL
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.passes.step_graph import OutputSpec, inputs_of, new_node, outputs_of

# What the joint graph has been annotated from; copies would have that of another block.
_ANNOTATED_FROM = ("nn_module_stack", "fwd_nn_module_stack", "desc")
# How torch names inputs, with and without a backward.
_NAMINGS: Sequence[Callable[[int], str]] = (lambda index: f"primals_{index + 1}", lambda index: f"arg{index}_1")
Side = Literal["first", "last"]  # of the blocks: a call outside of them is beside the first or beside the last


def stamped(traced: fx.GraphModule, blocks: Blocks) -> fx.GraphModule:
    """Returns the joint graph of the whole model, with the names that ``named`` gives. Raises Unlike where the inner blocks of
    the traced graph are not alike, or something outside reads them in another way than the blocks beside them."""
    try:
        return _Stamping(traced, blocks, segments_of(traced, blocks)).whole()
    except KeyError as error:
        raise Unlike(f"{error}, which is missing") from None


def named(joint: fx.GraphModule) -> fx.GraphModule:
    """Returns a joint graph whose calls are named in their order, so that names do not tell how it was traced, and in which
    small constants that are equal are one: each block makes its own, such as the empty tensor that a cache begins with."""
    graph, copies, constants = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, str]()
    for node in joint.graph.nodes:
        copies[node] = _copy(graph, node, copies.__getitem__)
        if node.op == "get_attr":
            copies[node].target = constants.setdefault(
                _content(operator.attrgetter(str(node.target))(joint), node), node.target
            )
    return _module(joint, graph)


def _content(constant: object, node: fx.Node) -> str:
    """Returns what is equal for small constants with the same content; else what is the node's own."""
    if not isinstance(constant, torch.Tensor) or constant.numel() > SMALL:
        return str(node.target)
    return repr((constant.dtype, constant.device, constant.shape, constant.stride(), constant.tolist()))


def _copy(graph: fx.Graph, node: fx.Node, copy_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy_of)
    name = node.name if node.op in ("placeholder", "output") else re.sub(r"_\d+$", "", node.name)
    copy = new_node(graph, node.op, node.target, args, kwargs, name)  # with a number, if there is one of this name
    copy.meta = _meta(node)
    return copy


def _module(joint: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    module = LazyGraphModule(joint, graph)
    module.meta = dict(joint.meta)
    return module


@dataclass(slots=True)
class _Stamping:
    """The whole graph as it is written. ``copies``: of traced nodes that are written once. ``written``: what is at a place of
    the whole model."""

    traced: fx.GraphModule
    blocks: Blocks
    segments: Segments
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    written: dict[tuple[Phase, int, Hashable], fx.Node] = field(default_factory=dict)

    def whole(self) -> fx.GraphModule:
        self._write_inputs()
        calls, inner = self.segments.calls, self.segments.inner
        forward, backward = ([s for s in inner if s.phase == phase] for phase in ("forward", "backward"))
        ends = [forward[0].start, forward[-1].start + forward[-1].length, len(calls)]
        if backward:
            ends[2:] = [backward[0].start, backward[-1].start + backward[-1].length, len(calls)]
        self._write_outside(0, ends[0], "first")
        self._write_blocks(forward)
        self._write_outside(ends[1], ends[2], "last")
        if backward:
            self._write_blocks(backward)
            self._write_outside(ends[3], ends[4], "first")
        outputs = self._write_results()
        module = _module(self.traced, self.graph)
        tangents = [spec for spec, _ in inputs_of(self.traced) if spec.role == "tangent"]
        specs = [replace(spec, index=self.blocks.output_index(spec.index)) for spec in tangents]
        module.meta.update(inputs=(*self.blocks.inputs, *specs), outputs=outputs)
        return module

    def _write_inputs(self) -> None:
        shared, own = dict[int, fx.Node](), dict[tuple[int, Hashable], fx.Node]()
        taken = [(spec, node) for spec, node in inputs_of(self.traced) if spec.role != "tangent"]
        name_of = next((naming for naming in _NAMINGS if taken[0][1].name == naming(0)), _NAMINGS[0])
        for position, (spec, node) in enumerate(taken):
            if spec.index != position or node.name != name_of(position):
                raise Unlike(f"the input {node.name}")
            if spec.index in self.blocks.own:
                own[self.blocks.own[spec.index]] = node
            else:
                shared[self.blocks.shared[spec.index]] = node
        places = {index: place for place, index in self.blocks.inputs_at.items()}
        for spec in self.blocks.inputs:
            block, key = places.get(spec.index, (0, None))
            traced = shared[spec.index] if spec.index in shared else own[self.blocks.selection.template(block), key]
            copy = self.graph.placeholder(name_of(spec.index))
            copy.meta = _meta(traced)
            if spec.index in shared:
                self.copies[traced] = copy
            else:
                self.written["input", block, key] = copy
                if not self.blocks.selection.removed(block):
                    self.copies[traced] = copy
        for spec, node in inputs_of(self.traced):
            if spec.role == "tangent":
                self.copies[node] = self.graph.placeholder(node.name)
                self.copies[node].meta = _meta(node)

    def _write_outside(self, start: int, end: int, side: Side) -> None:
        """Copies calls between the inner blocks and the ends of the graph."""
        for node in self.segments.calls[start:end]:
            copy = _copy(self.graph, node, lambda operand: self._beside(operand, side))
            if "seq_nr" in copy.meta:
                copy.meta["seq_nr"] = self._number_beside(copy.meta["seq_nr"], side)
            if (place := self.blocks.paths.get(node.meta.get("module_path", ""))) is not None:
                copy.meta["module_path"] = self.blocks.paths_at[self._block_beside(place[0], side), place[1]]
            self.copies[node] = copy
            if (spot := self.segments.spots.get(node)) is not None:
                self.written[spot.phase, self.blocks.selection.in_whole(spot.block), spot.key] = copy

    def _beside(self, node: fx.Node, side: Side) -> fx.Node:
        """Returns what a call outside the inner blocks reads, if it read ``node`` where only some of them are."""
        spot = self._inner_spot(node)
        return self.copies[node] if spot is None else self.written[spot.phase, self._block_beside(spot.block, side), spot.key]

    def _inner_spot(self, node: fx.Node) -> Spot | None:
        """Returns where a traced call is, if it is in an inner block."""
        spot = self.segments.spots.get(node)
        is_inner = spot is not None and spot.phase != "input" and spot.block in self.blocks.selection.traced_inner
        return spot if is_inner else None

    def _block_beside(self, block: int, side: Side) -> int:
        """Returns the number in the whole model of the block that a call outside the inner blocks has to do with."""
        inner = self.blocks.selection.traced_inner
        if block not in inner:
            return self.blocks.selection.in_whole(block)
        if block != (inner[0] if side == "first" else inner[-1]):
            raise Unlike(f"a call outside of the inner blocks that is about block {block}")
        return block if side == "first" else self.blocks.selection.inner[-1]

    def _write_blocks(self, inner: list[Segment]) -> None:
        """Writes all blocks but the first and the last, in the order of the traced ones."""
        numbers, templates = self.blocks.selection.inner, {segment.block: segment for segment in inner}
        for block in numbers if inner[0].block < inner[-1].block else reversed(numbers):
            template = templates[self.blocks.selection.template(block)]
            for key in range(template.length):
                node = self.segments.calls[template.start + key]
                reads = iter(self.segments.reads[template.phase, template.block, key])
                copy = _copy(self.graph, node, lambda _: self._read(next(reads), block))  # noqa: B023
                self._place(copy, (template.phase, key), block - template.block)
                self.written[template.phase, block, key] = copy

    def _place(self, copy: fx.Node, place: tuple[Phase, Hashable], later: int) -> None:
        """Marks a copy with the module path and sequence number that it has ``later`` blocks after the traced one."""
        if place in self.segments.numbered:
            copy.meta["seq_nr"] += later * self.segments.numbers
        elif "seq_nr" in copy.meta:
            copy.meta["seq_nr"] = self._number_beside(copy.meta["seq_nr"], "first")
        if (path := self.blocks.paths.get(copy.meta.get("module_path", ""))) is not None:
            block = path[0] + later
            copy.meta["module_path"] = self.blocks.paths_at[block, path[1]]

    def _read(self, read: Read, block: int) -> fx.Node:
        return self.copies[read.shared] if read.shared is not None else self.written[read.phase, block + read.later, read.key]

    def _number_beside(self, number: int, side: Side) -> int:
        """Returns the sequence number of a call outside the inner blocks, after those that are written between."""
        highest = self.segments.highest
        added = self.blocks.selection.left_out * self.segments.numbers
        own = highest[-2] if side == "last" else highest[-1]
        if highest[0] < number <= own:
            raise Unlike("a sequence number of another block")
        return number + added if number > own else number

    def _write_results(self) -> tuple[OutputSpec, ...]:
        """Writes the results: new versions, outputs and gradients, each kind in the order of the inputs."""
        results = list(self._results())
        order = {"mutation": 0, "output": 1, "grad": 2}
        results.sort(key=lambda result: (order[result[0].kind], result[0].index))
        traced = [(order[spec.kind], spec.index) for spec, _ in outputs_of(self.traced)]
        if traced != sorted(traced):
            raise Unlike("results in another order")
        output = self.graph.output(tuple(node for _, node in results))
        output.meta = _meta(self.traced.graph.output_node())
        return tuple(spec for spec, _ in results)

    def _results(self) -> Iterator[tuple[OutputSpec, fx.Node]]:
        blocks = self.blocks
        for spec, node in outputs_of(self.traced):
            if (place := blocks.place_of(spec)) is None and spec.kind == "output":
                yield replace(spec, index=blocks.output_index(spec.index)), self._beside(node, "last")
                continue
            if place is None:
                spot = self._inner_spot(node)
                side: Side = "first" if spot is not None and spot.phase == "backward" else "last"
                index = blocks.shared[spec.index]
                yield replace(spec, index=index, name=blocks.inputs[index].name), self._beside(node, side)
                continue
            traced, key = place
            inner = self.blocks.selection.traced_inner
            if traced not in inner:
                side = "first" if traced < inner.start else "last"
                results = [(self.blocks.selection.in_whole(traced), self._beside(node, side))]
            elif traced == inner[-1]:
                read = self.segments.results[spec.kind, key]
                results = [(block, self._read(read, block)) for block in self.blocks.selection.inner]
            else:
                continue
            for block, result in results:
                yield blocks.at(spec, (block, key)), result


def _meta(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in _ANNOTATED_FROM}
