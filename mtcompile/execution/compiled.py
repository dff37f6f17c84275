"""A compiled step, with everything needed to run it, and the frame that a training forward leaves for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mtcompile.capture.joint import Pattern, Tangents
from mtcompile.passes.analysis.storages import inputs_read_by_place
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.passes.step_graph import (
    InputSpec,
    OutputSpec,
    has_random,
    inputs_of,
    kernel_of,
    outputs_of,
    placeholders,
    regions,
    source,
)
from mtcompile.runtime.devices.arena import Layout, layout_of, same_strides
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.executor import Prepared, prepare
from mtcompile.runtime.schedule import PHASES, Phase, Schedule, aligned
from mtcompile.runtime.trace import Record


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """One program, planned and proven for one pattern of gradients. ``problem``: the problem that its plan solves."""

    tangents: Tangents
    plan: Plan
    step: fx.GraphModule
    schedule: Schedule
    kernels: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    inputs: tuple[tuple[InputSpec, str], ...]
    outputs: tuple[tuple[OutputSpec, str], ...]
    mutated: frozenset[int]
    read_in_backward: frozenset[int]
    outputs_read_in_backward: frozenset[int]
    read_by_place: frozenset[int]
    random: bool
    phases: Mapping[Phase, Prepared]
    problem: PlanningProblem
    # Kept from step to step: tensors of arena slots, and the phases that have run at least once.
    slot_views: dict[str, torch.Tensor] = field(default_factory=dict)
    completed_phases: set[Phase] = field(default_factory=set)

    def tangents_of(self, gradients: Sequence[torch.Tensor | None]) -> Pattern:
        """The tangents of gradients that arrive: those that this step was traced for, as far as it fits."""
        pattern: list[bool | tuple[int, ...]] = [gradient is not None for gradient in gradients]
        layouts = {spec.index: self.layouts[name] for spec, name in self.inputs if spec.role == "tangent"}
        for index, gradient in enumerate(gradients):
            if gradient is not None and index in layouts and self.tangents is not None:
                fits = same_strides(gradient.shape, gradient.stride(), layouts[index].stride)
                pattern[index] = self.tangents[index] if fits else tuple(gradient.stride())
        return tuple(pattern)

    @property
    def settled(self) -> bool:
        """True once every phase has run, so that results have been checked and the peak measured."""
        return self.completed_phases >= self.phases.keys()


def compiled_step(tangents: Tangents, planned: Planned, problem: PlanningProblem, kernels: Mapping[str, Any]) -> CompiledStep:
    """Resolves all names once, so that running a step needs no look-up in a graph."""
    step, schedule = planned.step, planned.schedule
    inputs = tuple((spec, node.name) for spec, node in inputs_of(step))
    outputs = tuple((spec, node.name) for spec, node in outputs_of(step))
    by_name = {node.name: node for node in step.graph.nodes}
    backward_reads = {name for _, i in schedule.phase("backward") for name in i.reads}
    values = {source(by_name[name]).name for name in backward_reads}
    training = any(spec.role == "tangent" for spec, _ in inputs)  # even if its backward has nothing to do
    return CompiledStep(
        tangents,
        planned.plan,
        step,
        schedule,
        kernels,
        {name: layout_of(by_name[name].meta["val"]) for name in schedule.buffers},
        inputs,
        outputs,
        frozenset(spec.index for spec, _ in outputs if spec.kind == "mutation"),
        frozenset(spec.index for spec, name in inputs if name in backward_reads and spec.role in ("param", "input", "buffer")),
        frozenset(spec.index for spec, name in outputs if spec.kind == "output" and name in values),
        _read_by_place(step),
        any(buffer.role == "rng" for buffer in schedule.buffers.values()) or has_random(step),
        {phase: prepare(schedule, phase) for phase in PHASES if phase == "forward" or training},
        problem,
    )


def _read_by_place(step: fx.GraphModule) -> frozenset[int]:
    """Returns the indices of the inputs in whose storage a kernel finds elements by their place."""
    specs = {node: spec for spec, node in inputs_of(step)}
    indices = set()
    for region in regions(step):
        operands: Any = region.args
        body = kernel_of(step, region).graph
        by_place = inputs_read_by_place(body)
        for operand, node in zip(operands, placeholders(body), strict=True):
            if node in by_place and (spec := specs.get(source(operand))) is not None:
                indices.add(spec.index)
    return frozenset(indices - {-1})


@dataclass
class Frame:
    """The state of one training forward, for its backward; owned by the autograd context.

    ``snapshots``: by input index, the buffers that the forward changes, as they were before. ``versions``: version counters of
    the inputs. ``spent``: its backward has begun. ``evicted``: its saved values are gone, so its backward runs the forward
    again.
    """

    compiled: CompiledStep
    memory: CpuMemory
    inputs: tuple[torch.Tensor, ...]
    snapshots: Mapping[int, torch.Tensor]
    versions: tuple[int, ...]
    generator: torch.Tensor | None
    outputs: tuple[weakref.ref[torch.Tensor], ...] = ()
    output_versions: Mapping[int, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    spent: bool = False
    evicted: bool = False
    measured: bool = False

    def hand_out(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Keeps weak references to the outputs that the caller receives: their ``grad_fn`` holds this frame."""
        self.outputs = tuple(weakref.ref(output) for output in outputs)
        self.output_versions = {i: outputs[i]._version for i in self.compiled.outputs_read_in_backward}

    def evict(self) -> None:
        """Frees what the forward saved; the backward will run the forward again."""
        self.memory.tensors.clear()
        buffers = self.compiled.schedule.buffers.values()
        self.memory.live = sum(b.nbytes for b in buffers if b.returned and b.role == "output")  # still the caller's
        self.evicted = True

    def abandon(self) -> None:
        """Frees what the forward saved; there will be no backward."""
        self.spent = True
        self.memory.tensors.clear()


class LiveFrames:
    """The training forwards that still wait for their backward. If the loss is dropped, its frame leaves by itself."""

    def __init__(self) -> None:
        self._frames: list[weakref.ref[Frame]] = []
        self.in_backward = False  # True while a backward runs its forward again

    def add(self, frame: Frame) -> None:
        self._frames = [weakref.ref(frame) for frame in (*self.waiting(), frame)]

    def waiting(self) -> list[Frame]:
        """Returns the waiting frames, oldest first."""
        return [frame for ref in self._frames if (frame := ref()) is not None and not frame.spent]

    def nbytes(self) -> int:
        """Returns the device bytes that waiting forwards hold."""
        return sum(aligned(frame.memory.live) for frame in self.waiting())
