"""Describes a model whose equal blocks are not all traced: which blocks are, and what is called what."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mtcompile.passes.step_graph import InputSpec, OutputSpec, inputs_of

INNER = range(1, 3)  # traced blocks that must be alike; the last of them is what others are copies of
FIRST, LAST = INNER.stop, 2  # how many blocks are traced at the beginning, and at the end
TRACED, FEWEST = FIRST + LAST, FIRST + 1  # fewest: where no sum of gradients goes through all blocks
Place = tuple[int, Hashable]  # the number of a block, and what it is within that block


def references(node: fx.Node) -> list[fx.Node]:
    """Returns the operands of a node in order, repeated ones too."""
    operands: list[fx.Node] = []

    def note(operand: fx.Node) -> fx.Node:
        operands.append(operand)
        return operand

    fx.node.map_arg((node.args, node.kwargs), note)
    return operands


WRITTEN_IN_FULL = (int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout)


def structure(node: fx.Node) -> str:
    """Returns the arguments of a node as text, without its operands. An argument whose text may leave
    something out, such as a tensor or an array, equals only itself."""

    def written(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return fx.node.Node
        return leaf if isinstance(leaf, WRITTEN_IN_FULL) else (type(leaf), id(leaf))

    return repr(fx.node.map_aggregate((node.args, node.kwargs), written))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of ``count`` equal blocks are traced: the ``first`` ones, ``later`` inner ones and the ``last``, numbered from 0
    then. (In the backward, which begins at the last block, the sums of gradients are different there.) ``contexts``: a number
    per block. Blocks with the same number read the same shared tensors, and so do their neighbours. Empty: all blocks do."""

    count: int
    last: int = LAST
    first: int = FIRST
    later: int = 0
    contexts: tuple[int, ...] = ()

    @property
    def traced_inner(self) -> range:
        """The inner blocks that are traced: the templates, by their numbers there."""
        return range(INNER.start, self.first + self.later)

    @property
    def inner(self) -> range:
        """The inner blocks of the whole model: each is a template or a copy of one."""
        return range(INNER.start, self.count - self.last)

    @property
    def left_out(self) -> int:
        """How many blocks are not traced."""
        return self.count - self.first - self.later - self.last

    def removed(self, block: int) -> bool:
        """Tells whether a block is not traced."""
        return self.first <= block < self.first + self.left_out

    def as_traced(self, block: int) -> int:
        """Returns the number that a block which is traced has then."""
        return block if block < self.first else block - self.left_out

    def in_whole(self, block: int) -> int:
        """Returns the number in the whole model of a traced block."""
        return block if block < self.first else block + self.left_out

    def context(self, traced: int) -> int:
        """Returns the context of a traced block."""
        return self.contexts[self.in_whole(traced)] if self.contexts else 0

    def template(self, block: int) -> int:
        """Returns the traced block that a block of the whole model is, or is a copy of."""
        if not self.removed(block):
            return self.as_traced(block)
        if not self.contexts:
            return self.first - 1
        return next(traced for traced in self.traced_inner if self.context(traced) == self.contexts[block])


def selection_of(kinds: Sequence[Hashable]) -> Selection | None:
    """Chooses the blocks to trace. Blocks are equal except for the shared tensors they read: ``kinds`` says which those are,
    per block. Returns None if every block must be traced."""
    count, inner = len(kinds), range(INNER.start, len(kinds) - LAST)
    numbers: dict[Hashable, int] = {}
    around = [tuple(kinds[max(0, block - 1) : block + 2]) for block in range(count)]
    contexts = tuple(numbers.setdefault(each, len(numbers)) for each in around)

    def may_go(first: int, resumes: int) -> bool:
        """Tells whether the blocks from ``first`` on may be copies of others, and ``resumes`` follow the block before these."""
        if kinds[first - 1 : first + 1] != kinds[resumes - 1 : resumes + 1]:
            return False
        if resumes == inner.stop and contexts[first - 1] != contexts[inner[-1]]:
            return False
        return set(contexts[first:resumes]) <= {*contexts[inner.start : first], *contexts[resumes : inner.stop]}

    best: Selection | None = None
    for first in range(FIRST, inner.stop):
        for resumes in range(inner.stop, first + (best.left_out if best else 0), -1):
            if may_go(first, resumes):
                best = Selection(count, LAST, first, inner.stop - resumes, contexts)
                break
    return best


@dataclass(frozen=True, slots=True)
class Blocks:
    """A model with equal blocks of which some are traced.

    ``inputs``: of the whole model. ``own``: index of a traced input -> its place, for the inputs of the blocks. ``shared``:
    index of a traced input -> index in the whole model, for the others. ``inputs_at``: place in the whole model -> index there.
    ``paths``: module path -> place, of the traced blocks; ``paths_at``: the reverse, in the whole model. ``outputs``: the names
    of what the whole model returns; ``returned``: index of a traced output -> its place, for what blocks return, or its index
    in the whole model; ``outputs_at``: place in the whole model -> index there. Without these, outputs are those of the traced
    model, and none is of a block.
    """

    selection: Selection
    inputs: tuple[InputSpec, ...]
    own: Mapping[int, Place]
    shared: Mapping[int, int]
    inputs_at: Mapping[Place, int]
    paths: Mapping[str, Place]
    paths_at: Mapping[Place, str]
    outputs: tuple[str, ...] = ()
    returned: Mapping[int, Place | int] = field(default_factory=dict)
    outputs_at: Mapping[Place, int] = field(default_factory=dict)

    def place_of(self, spec: OutputSpec) -> Place | None:
        """Returns the place of a traced result; None if it is of no block."""
        if spec.kind != "output":
            return self.own.get(spec.index)
        place = self.returned.get(spec.index, spec.index)
        return None if isinstance(place, int) else place

    def at(self, spec: OutputSpec, place: Place) -> OutputSpec:
        """Describes the result of the whole model that is at a place, like a traced one."""
        if spec.kind != "output":
            index = self.inputs_at[place]
            return replace(spec, index=index, name=self.inputs[index].name)
        return replace(spec, index=self.outputs_at[place], name=self.outputs[self.outputs_at[place]])

    def output_index(self, traced: int) -> int:
        """Returns the index in the whole model of a traced output that is of no block."""
        index = self.returned.get(traced, traced)
        assert isinstance(index, int), f"expected an output of no block, found {index}"
        return index


def numbered(traced: fx.GraphModule, name: str, count: int) -> Blocks:
    """Describes a model with ``count`` blocks by the joint graph of one with ``FEWEST`` or more, whose names are ``{name}.0.…``
    and so on, and whose inputs are in the order of the blocks."""
    place_in = re.compile(rf"{re.escape(name)}\.(\d+)\b(.*)")
    inputs: list[InputSpec] = []
    own, shared, inputs_at = dict[int, Place](), dict[int, int](), dict[Place, int]()
    specs = [(spec, place_in.fullmatch(spec.name)) for spec, _ in inputs_of(traced) if spec.role != "tangent"]
    those = {int(match[1]) for _, match in specs if match}
    if len(those) < FEWEST or those != set(range(len(those))):
        raise ValueError(f"expected {FEWEST} modules or more in {name}, found inputs of {sorted(those)}")
    selection = Selection(count, len(those) - FIRST)
    template = [(spec, match[2]) for spec, match in specs if match and int(match[1]) == INNER[-1]]
    left_out = [(block, *one) for block in range(count) if selection.removed(block) for one in template]
    for spec, match in specs:
        if match is None:
            shared[spec.index] = len(inputs)
            inputs.append(replace(spec, index=len(inputs)))
            continue
        own[spec.index] = block, rest = int(match[1]), match[2]
        added = [(selection.in_whole(block), spec, rest)]
        if block >= FIRST:
            added, left_out = left_out + added, []
        for in_whole, like, within in added:
            inputs_at[in_whole, within] = len(inputs)
            inputs.append(replace(like, name=f"{name}.{in_whole}{within}", index=len(inputs)))
    every = {str(node.meta.get("module_path", "")) for node in traced.graph.nodes}
    paths: dict[str, Place] = {path: (int(match[1]), match[2]) for path in every if (match := place_in.fullmatch(path))}
    paths_at: dict[Place, str] = {(b, rest): f"{name}.{b}{rest}" for _, rest in paths.values() for b in range(count)}
    return Blocks(selection, tuple(inputs), own, shared, inputs_at, paths, paths_at)
