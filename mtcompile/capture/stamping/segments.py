"""Finds the traced blocks in a joint graph, and checks that the inner ones are alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from mtcompile.capture.stamping.blocks import Blocks, references, structure
from mtcompile.passes.step_graph import InputSpec, inputs_of, outputs_of
from mtcompile.torch_private import pytree

Phase = Literal["input", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a node: an input of a block, or a call of it in a phase; ``key``: which one of them."""

    phase: Phase
    block: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class Read:
    """An operand of a call in any block: a node that all blocks read, or what is at ``key`` in the block that is ``later``
    blocks after its own."""

    shared: fx.Node | None
    phase: Phase = "input"
    later: int = 0
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Segment:
    """The calls of a block in one phase: ``calls[start : start + length]``."""

    block: int
    phase: Phase
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Segments:
    """The blocks in a traced joint graph.

    ``calls``: the graph without its inputs and output. ``inner``: the segments of the inner blocks, in order. ``spots``: where
    calls and inputs are, also in the outer blocks, where they are as far from the inner ones as if these went on. ``reads``:
    (phase, inner block, key) -> what such a call reads. ``results``: (kind of result, input or output within its block) -> what
    is returned for it. ``numbers``: by how much the ``seq_nr`` of a block are above those of the block before. ``numbered``:
    the calls, by (phase, key), whose ``seq_nr`` is not the same in all blocks. ``highest``: the highest in each inner block's
    forward.
    """

    calls: Sequence[fx.Node]
    inner: Sequence[Segment]
    spots: Mapping[fx.Node, Spot]
    reads: Mapping[tuple[Phase, int, Hashable], Sequence[Read]]
    results: Mapping[tuple[str, Hashable], Read]
    numbers: int
    numbered: frozenset[tuple[Phase, Hashable]]
    highest: Sequence[int]


class Unlike(Exception):
    """Raised where traced blocks are not alike; says in what."""


def segments_of(joint: fx.GraphModule, blocks: Blocks) -> Segments:
    """Finds the segments of the traced blocks. Raises Unlike."""
    calls = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    inputs = {node: spec for spec, node in inputs_of(joint) if spec.role != "tangent"}
    own = {node: Spot("input", *blocks.own[spec.index]) for node, spec in inputs.items() if spec.index in blocks.own}
    inner = list(_inner_segments(joint, calls, own, blocks.selection.traced_inner))
    spots = own | dict(_spots(calls, inner, blocks.selection.traced_inner))
    reads, differences = dict[tuple[Phase, int, Hashable], Sequence[Read]](), dict[tuple[Phase, Hashable], int]()
    templates = {segment.phase: segment for segment in inner if segment.block == blocks.selection.traced_inner[0]}
    for segment in inner:
        template = templates[segment.phase]
        if segment is template:
            continue
        for key in range(segment.length):
            one, other = calls[template.start + key], calls[segment.start + key]
            if _code(one) != _code(other) or not _same_path(one, other, segment.block - template.block, blocks):
                raise Unlike(f"{one.name} and {other.name}")
            pairs = zip(references(one), references(other), strict=True)
            both = [_read(*pair, template.block, segment.block, spots, blocks) for pair in pairs]
            for block, read in ((template.block, [read for read, _ in both]), (segment.block, [read for _, read in both])):
                if reads.setdefault((segment.phase, block, key), read) != read:
                    raise Unlike(f"{one.name} and {other.name}: operands change from block to block")
            grown = (_number(other) - _number(one)) / (segment.block - template.block)
            if grown != differences.setdefault((segment.phase, key), int(grown)):
                raise Unlike(f"the sequence numbers of {one.name} and {other.name}")
    _check_contexts(inner, reads, blocks)
    changing = frozenset(place for place, by in differences.items() if by)
    if len(numbers := {differences[place] for place in changing}) > 1:
        raise Unlike(f"sequence numbers that grow by {sorted(numbers)}")
    results = _results(joint, inputs, blocks, spots)
    forward = [calls[s.start : s.start + s.length] for s in inner if s.phase == "forward"]
    highest = [max(map(_number, nodes)) for nodes in forward]
    return Segments(calls, inner, spots, reads, results, next(iter(numbers), 0), changing, highest)


def _check_contexts(
    inner: Sequence[Segment], reads: Mapping[tuple[Phase, int, Hashable], Sequence[Read]], blocks: Blocks
) -> None:
    """Raises Unlike where inner blocks of which one could be a copy of another do not read the same."""
    of_context = dict[tuple[Phase, int, Hashable], Sequence[Read]]()
    for segment in inner:
        for key in range(segment.length):
            place = segment.phase, blocks.selection.context(segment.block), key
            read = reads[segment.phase, segment.block, key]
            if of_context.setdefault(place, read) != read:
                raise Unlike(f"what block {segment.block} reads")


def _inner_segments(
    joint: fx.GraphModule, calls: Sequence[fx.Node], own: Mapping[fx.Node, Spot], inner: range
) -> Iterator[Segment]:
    """Yields the segments of the inner blocks: each begins where an input of its block is first read, or what was made of such
    inputs alone (views and casts of weights); in a backward that reads none, where something of its forward is."""
    backward_from = _backward_from(joint, calls)
    forward, block_of = calls[:backward_from], {node: spot.block for node, spot in own.items()}
    starts = _starts(calls, range(backward_from), block_of)
    if not all(block in starts for block in (*inner, inner.stop)):
        raise Unlike("a block that reads no input of its own")
    length = starts[inner.start + 1] - starts[inner.start]
    if any(starts[block + 1] - starts[block] != length for block in inner):
        raise Unlike("the lengths of blocks")
    for block in inner:
        yield Segment(block, "forward", starts[block], length)
    if backward_from == len(calls):
        return
    for node in forward:
        about = {block_of.get(operand) for operand in node.all_input_nodes}
        if len(about) == 1 and (only := about.pop()) is not None:
            block_of[node] = only
    of_forward = {node: block for block in inner for node in calls[starts[block] : starts[block] + length]}
    for within in (block_of, of_forward):
        starts = _starts(calls, range(backward_from, len(calls)), within)
        if all(block in starts for block in inner):
            break
    else:
        raise Unlike("a backward that reads nothing of its block")
    length = starts[inner.start] - starts[inner.start + 1]
    if length <= 0 or any(starts[block] - starts[block + 1] != length for block in inner[:-1]):
        raise Unlike("the order of backwards")
    for block in reversed(inner):
        yield Segment(block, "backward", starts[block], length)


def _backward_from(joint: fx.GraphModule, calls: Sequence[fx.Node]) -> int:
    """Returns the position of the first call that depends on a gradient from outside."""
    arriving = {node for spec, node in inputs_of(joint) if spec.role == "tangent"}
    first = (position for position, node in enumerate(calls) if any(operand in arriving for operand in node.all_input_nodes))
    return next(first, len(calls))


def _starts(calls: Sequence[fx.Node], positions: range, block_of: Mapping[fx.Node, int]) -> Mapping[int, int]:
    """Returns block -> the first of some calls that reads something of it."""
    first = dict[int, int]()
    for position in positions:
        for operand in calls[position].all_input_nodes:
            if operand in block_of:
                first.setdefault(block_of[operand], position)
    return first


def _spots(calls: Sequence[fx.Node], segments: Sequence[Segment], inner: range) -> Iterator[tuple[fx.Node, Spot]]:
    for phase in ("forward", "backward"):
        for segment in (segment for segment in segments if segment.phase == phase):
            step = segment.length if phase == "forward" else -segment.length
            for block in (segment.block, inner.start - 1, inner.stop):
                start = segment.start + (block - segment.block) * step
                for key in range(segment.length):
                    if 0 <= start + key < len(calls):
                        yield calls[start + key], Spot(segment.phase, block, key)


def _code(node: fx.Node) -> tuple[Any, ...]:
    values = pytree.tree_leaves(node.meta.get("val"))
    shapes = [_shape(value) if isinstance(value, torch.Tensor) else repr(value) for value in values]
    return node.op, node.target, structure(node), shapes, node.meta.get("partitioner_tag")


def _shape(value: torch.Tensor) -> tuple[Any, ...]:
    nbytes = value.untyped_storage().nbytes()
    return value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), nbytes, value.requires_grad


def _same_path(one: fx.Node, other: fx.Node, later: int, blocks: Blocks) -> bool:
    paths = [str(node.meta.get("module_path", "")) for node in (one, other)]
    places = [blocks.paths.get(path) for path in paths]
    if places[0] is None or places[1] is None:
        return paths[0] == paths[1]
    return places[1] == (places[0][0] + later, places[0][1])


def _number(node: fx.Node) -> int:
    return int(node.meta.get("seq_nr", -1))


def _read(
    one: fx.Node, other: fx.Node, block: int, later: int, spots: Mapping[fx.Node, Spot], blocks: Blocks
) -> tuple[Read, Read]:
    """Returns the reads of the same operand in two inner blocks: ``one`` in ``block``, ``other`` in the ``later`` block. Raises
    Unlike if they do not match."""
    selection = blocks.selection
    if one in spots and other in spots and one is not other:
        here, there = spots[one], spots[other]
        if (here.phase, here.key, here.block + later - block) == (there.phase, there.key, there.block):
            read = Read(None, here.phase, here.block - block, here.key)
            return read, read
    elif one is other and (one not in spots or spots[one].phase == "input" or spots[one].block not in selection.traced_inner):
        return Read(one), Read(one)
    elif one not in spots and other not in spots and selection.context(block) != selection.context(later):
        return Read(one), Read(other)
    raise Unlike(f"{one.name} and {other.name}: operands of equal calls do not match")


def _results(
    joint: fx.GraphModule, inputs: Mapping[fx.Node, InputSpec], blocks: Blocks, spots: Mapping[fx.Node, Spot]
) -> dict[tuple[str, Hashable], Read]:
    """Returns what the inner blocks return: outputs, and gradients and new versions of their inputs. Raises Unlike."""
    inner = blocks.selection.traced_inner
    returned: dict[int, dict[tuple[str, Hashable], fx.Node]] = {block: {} for block in inner}
    for spec, node in outputs_of(joint):
        block, key = blocks.place_of(spec) or (-1, None)
        if block in inner:
            returned[block][spec.kind, key] = node
    results = dict[tuple[str, Hashable], Read]()
    for block in inner[1:]:
        if returned[block].keys() != returned[inner[0]].keys():
            raise Unlike("results of blocks")
        for about, node in returned[inner[0]].items():
            read, alike = _read(node, returned[block][about], inner[0], block, spots, blocks)
            if results.setdefault(about, read) != read or read != alike:
                raise Unlike("results of blocks")
    return results
