"""A compiled step, with everything needed to run it, and the frame that a training forward leaves for its backward."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mtcompile.capture.description import Pattern, Tangents
from mtcompile.execution.memory.fragments import index_of
from mtcompile.passes.analysis.cost import Machine, crossing, kernel_us
from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.analysis.state import state_by_tier
from mtcompile.passes.analysis.storages import inputs_read_by_place
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import NOTHING, Planned, PlanningProblem
from mtcompile.passes.step_graph import (
    MOVES_OF_ROWS,
    InputSpec,
    OutputSpec,
    calls,
    has_random,
    inputs_of,
    is_convert,
    kernel_of,
    outputs_of,
    placeholders,
    regions,
    source,
)
from mtcompile.runtime.devices.arena import Layout, layout_of, same_strides
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.executor import Prepared, prepare
from mtcompile.runtime.schedule import PHASES, Instruction, Phase, Schedule, aligned, listed, way_of
from mtcompile.runtime.trace import Record
from mtcompile.runtime.usage import allocated_together
from mtcompile.torch_private import DataWrites

_OF_CALL = ("args_", "kwargs_")  # the names of a call's arguments begin so
_MOST_SHAPES = 4  # in a signature


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """One program, planned and proven for one pattern of gradients. ``problem``: the problem that its plan solves.
    ``together``: as ``usage.allocated_together`` returns it. ``joint``: the graph whose results it reproduces. ``mutated``, and
    ``changed_in_backward``: the inputs that its forward and its backward change in place. ``snapshots``: those of both whose
    values at the start of the forward it still needs after they have changed."""

    tangents: Tangents
    plan: Plan
    step: fx.GraphModule
    schedule: Schedule
    kernels: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    inputs: tuple[tuple[InputSpec, str], ...]
    outputs: tuple[tuple[OutputSpec, str], ...]
    mutated: frozenset[int]
    changed_in_backward: frozenset[int]
    snapshots: frozenset[int]
    read_in_backward: frozenset[int]
    outputs_read_in_backward: frozenset[int]
    read_by_place: frozenset[int]
    random: bool
    phases: Mapping[Phase, Prepared]
    problem: PlanningProblem
    together: Mapping[str, tuple[str, int, int]]
    joint: fx.GraphModule
    # Kept from step to step: tensors of arena slots, the phases that have run at least once, and ``uncounted_nbytes``.
    slot_views: dict[str, torch.Tensor] = field(default_factory=dict)
    completed_phases: set[Phase] = field(default_factory=set)
    uncounted: dict[int, dict[str, int]] = field(default_factory=dict)

    def uncounted_nbytes(self, sums: int) -> Mapping[str, int]:
        """Returns by tier the bytes of earlier gradients that its backward adds to and its plan does not count. ``sums``: what
        these take, in sizes of the parameters."""
        budgets, step = self.problem.budgets, self.problem.step
        if self.tangents is None or sums <= budgets.sums:
            return NOTHING
        if sums not in self.uncounted:
            held, needed = (state_by_tier(step, self.plan, each) for each in (budgets, replace(budgets, sums=sums)))
            self.uncounted[sums] = {tier: nbytes - held[tier] for tier, nbytes in needed.items()}
        return self.uncounted[sums]

    def tangents_of(self, gradients: Sequence[torch.Tensor | None]) -> Pattern:
        """The tangents of gradients that arrive: those that this step was traced for, as far as it fits."""
        pattern: list[bool | tuple[int, ...]] = [gradient is not None for gradient in gradients]
        traced = {spec.index: self.layouts[name] for spec, name in self.inputs if spec.role == "tangent"}
        layouts = {s.index: self.layouts[n] for s, n in self.outputs if s.kind == "output" and n in self.layouts} | traced
        for index, gradient in enumerate(gradients):
            if gradient is None or self.tangents is None or index not in layouts:
                continue
            if not same_strides(gradient.shape, gradient.stride(), layouts[index].stride):
                pattern[index] = tuple(gradient.stride())
            elif index in traced:
                pattern[index] = self.tangents[index]
        return tuple(pattern)

    def outputs_of_backward(self) -> frozenset[int]:
        """The outputs that a plain run saves for its backward."""
        nodes = [node for node in self.joint.graph.nodes if node.meta.get("phase") == "backward"]
        saved = {owner(operand) for node in nodes for operand in node.all_input_nodes}
        return frozenset(spec.index for spec, node in outputs_of(self.joint) if spec.kind == "output" and owner(node) in saved)

    def new_versions(self, in_backward: bool) -> dict[int, str]:
        """Returns the names of the new versions of inputs that the forward, or the backward, makes."""
        changed = (each for each in self.outputs if each[0].kind == "mutation" and each[0].in_backward == in_backward)
        return {spec.index: name for spec, name in changed}

    @property
    def signature(self) -> str:
        """Tells this program from others of the model, by whether it trains and by the shapes of its inputs."""
        taken = [(spec.name, self.layouts[name]) for spec, name in self.inputs if spec.role == "input" and name in self.layouts]
        arguments = [each for each in taken if each[0].startswith(_OF_CALL)] or taken  # others are tensors of the model's own
        shapes = [f"{name.removeprefix('kwargs_')} {str(held.dtype)[6:]} {held.size}" for name, held in arguments]
        return f"{'training' if self.tangents is not None else 'no gradients'}, {listed(shapes, _MOST_SHAPES) or 'no inputs'}"

    @property
    def settled(self) -> bool:
        """True once every phase has run, so that results have been checked and the peak measured."""
        return self.completed_phases >= self.phases.keys()


def compiled_step(
    tangents: Tangents, planned: Planned, problem: PlanningProblem, kernels: Mapping[str, Any], joint: fx.GraphModule
) -> CompiledStep:
    """Resolves all names once, so that running a step needs no look-up in a graph."""
    step, schedule = planned.step, planned.schedule
    inputs = tuple((spec, node.name) for spec, node in inputs_of(step))
    outputs = tuple((spec, node.name) for spec, node in outputs_of(step))
    by_name = {node.name: node for node in step.graph.nodes}
    backward_reads = {name for _, i in schedule.phase("backward") for name in i.reads}
    values = {_first(by_name[name]).name for name in backward_reads}
    training = any(spec.role == "tangent" for spec, _ in inputs)  # even if its backward has nothing to do
    changed = [spec for spec, _ in outputs if spec.kind == "mutation"]
    mutated = frozenset(spec.index for spec in changed if not spec.in_backward)
    changed_in_backward = frozenset(spec.index for spec in changed if spec.in_backward)
    read = {name for instruction in schedule.instructions for name in instruction.reads}
    read_in_forward = {spec.index for spec, name in inputs if name in read and not spec.in_backward}
    return CompiledStep(
        tangents,
        planned.plan,
        step,
        schedule,
        kernels,
        {name: layout_of(by_name[name].meta["val"]) for name in schedule.buffers},
        inputs,
        outputs,
        mutated,
        changed_in_backward,
        mutated | (changed_in_backward & read_in_forward),
        frozenset(index_of(spec) for spec, name in inputs if name in values and spec.role in ("param", "input", "buffer")),
        frozenset(spec.index for spec, name in outputs if spec.kind == "output" and name in values),
        _read_by_place(step),
        any(buffer.role == "rng" for buffer in schedule.buffers.values()) or has_random(step),
        {phase: prepare(schedule, phase) for phase in PHASES if phase == "forward" or training},
        problem,
        allocated_together(schedule),
        joint,
    )


def retimed(compiled: CompiledStep, machine: Machine) -> Iterator[Instruction]:
    """Yields the instructions of a step as another machine would run them: kernels of the device, and copies."""
    moving = calls(compiled.step) if compiled.step.meta.get("rows") else ()
    of_rows = {call.name: call for call in moving if call.target in MOVES_OF_ROWS}
    for each in compiled.schedule.instructions:
        if each.rows:
            yield replace(each, time_us=crossing(of_rows[each.label], machine, each.queue)[1])
        elif each.work in ("compute", "recompute"):
            body: Any = compiled.step.get_submodule(each.kernel)
            yield replace(each, time_us=kernel_us(body, machine))
        else:
            way = way_of(each, compiled.schedule.buffers)
            yield replace(each, time_us=machine.copy_us(each.nbytes, way)) if each.op == "copy" else each


def _first(value: fx.Node) -> fx.Node:
    """Returns the value that another is a copy of, or that it is cast from on the host, unless in the forward."""
    value = source(value)
    while value.target is operator.getitem and is_convert(value.args[0]):  # type: ignore[arg-type]
        call: Any = value.args[0]
        if call.meta["phase"] == PHASES[0]:
            break
        value = source(call.args[int(value.args[1])])  # type: ignore[arg-type]
    return value


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
                indices.add(index_of(spec))
    return frozenset(indices - {-1})


@dataclass(eq=False)
class Frame:
    """The state of one training forward, for its backward; owned by the autograd context.

    ``snapshots``: by input index, the buffers that the forward changes, as they were before. ``versions``: version counters of
    the inputs. ``sent_nbytes``: device bytes of the arguments that were sent there for it. ``sums``: what gradients of earlier
    backwards its forward left room for, in sizes of the parameters. ``spent``: its backward has begun.
    ``evicted``: its saved values are gone, so its backward runs the forward again. ``repeated``: an earlier backward of the
    same forward has run. ``writes``: notices changes through ``.data`` of its inputs and outputs.
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
    sent_nbytes: int = 0
    sums: int = 0
    spent: bool = False
    evicted: bool = False
    measured: bool = False
    repeated: bool = False
    replaced: bool = False
    writes: DataWrites | None = None

    def hand_out(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Keeps weak references to the outputs that the caller receives: their ``grad_fn`` holds this frame."""
        self.outputs = tuple(weakref.ref(output) for output in outputs)
        self.output_versions = {i: outputs[i]._version for i in self.compiled.outputs_read_in_backward}
        self.writes = DataWrites((*self.inputs, *outputs))

    @property
    def outputs_nbytes(self) -> int:
        """The device bytes of its outputs, which are the caller's."""
        buffers = self.compiled.schedule.buffers.values()
        return sum(b.nbytes for b in buffers if b.returned and b.role == "output")

    def evict(self) -> None:
        """Frees what the forward saved, unless that is gone; the backward will run the forward again."""
        if self.evicted:
            return
        self.memory.let_go()
        self.memory.live = self.outputs_nbytes
        self.memory.leave()
        self.evicted = True

    def repeat(self) -> Frame:
        """Returns the frame for another backward of the same forward, which will run the forward again."""
        nothing = CpuMemory(self.compiled.schedule, self.compiled.layouts, self.memory.arenas)
        nothing.leave()
        return replace(self, memory=nothing, records=[], spent=False, evicted=True, measured=False, repeated=True)


class PlainGraph:
    """A graph of autograd's own beside planned steps. ``nbytes``: the device bytes that it and its backward take at most."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = aligned(nbytes)


class LiveFrames:
    """The training forwards that still wait for their backward. If the loss is dropped, its frame leaves by itself.

    ``repeated``: the frames for a further backward of the same forward, which hold the call's arguments only. ``plain``:
    graphs of autograd's own, which are alive until nothing can run their backward; ``plain_nbytes`` is left free for them at
    all times, as is ``glue_nbytes`` for parameters that lines between captured parts compute with. ``expected``: how many
    forwards wait at the same time, as far as is known. ``leaving``: True while a plan is made for the case that all of them
    are evicted.
    """

    def __init__(self) -> None:
        self._frames: list[weakref.ref[Frame]] = []
        self.repeated: weakref.WeakSet[Frame] = weakref.WeakSet()
        self.plain: weakref.WeakSet[PlainGraph] = weakref.WeakSet()
        self.plain_nbytes = self.glue_nbytes = self.lost_nbytes = 0
        self.in_backward = False  # True while a backward runs its forward again
        self.expected = self._together = 1  # together: the most that waited since none did
        self.leaving = False

    def add(self, frame: Frame) -> None:
        waiting = (*self.waiting(), frame)
        self._frames = [weakref.ref(frame) for frame in waiting]
        self._together = max(self._together, len(waiting)) if len(waiting) > 1 else 1

    def waiting(self) -> list[Frame]:
        """Returns the waiting frames, oldest first."""
        return [frame for ref in self._frames if (frame := ref()) is not None and not frame.spent]

    @property
    def hold(self) -> bool:
        """True if a waiting forward holds saved values."""
        return not self.leaving and any(not frame.evicted for frame in self.waiting())

    def evict(self) -> None:
        """Evicts all frames that wait, to make room for another one."""
        for frame in self.waiting():
            frame.evict()

    def learn(self) -> None:
        """Notes that an evicted forward was needed after all."""
        self.expected = max(self.expected, self._together)

    def nbytes(self) -> int:
        """Returns the device bytes that waiting forwards hold, and those that graphs of autograd's own hold or need."""
        held = ((f.outputs_nbytes if self.leaving else f.memory.live, f.sent_nbytes) for f in self.waiting())
        plain = self.glue_nbytes + max(self.plain_nbytes, sum(graph.nbytes for graph in self.plain))
        return (
            sum(aligned(live) + sent for live, sent in held)
            + sum(frame.sent_nbytes for frame in self.repeated)
            + plain
            + self.lost_nbytes
        )

    def host_nbytes(self) -> int:
        """Returns the bytes of the host arenas in which waiting forwards keep saved values."""
        return 0 if self.leaving else sum(frame.memory.arenas.host.numel() for frame in self.waiting())

    def disk_nbytes(self) -> int:
        """Returns the bytes of the files in which waiting forwards keep saved values."""
        stores = [] if self.leaving else [frame.memory.arenas.scratch for frame in self.waiting()]
        return sum(store.used_nbytes for store in stores if store is not None)
