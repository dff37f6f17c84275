"""Running a program: what is known of it once it is compiled, what a forward leaves for its backward, and the two phases."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mtcompile import knobs
from mtcompile.capture.description import enabled_autocast
from mtcompile.errors import StepError
from mtcompile.machine.device import allocator_peak
from mtcompile.passes.generators import generator_state, rng_preserved, set_generator_state
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.planner import Planned, Source
from mtcompile.passes.step_graph import InputSpec, OutputSpec, has_random, placeholders, source, step_outputs
from mtcompile.runtime.devices.arena import Layout, layout_of, view
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.executor import Delays, PhaseOptions, Prepared, execute, prepare
from mtcompile.runtime.schedule import PHASES, Phase, Queue, Schedule, placed
from mtcompile.runtime.trace import Record, Trace, shifted
from mtcompile.runtime.workers import DeferredQueue

if TYPE_CHECKING:
    from mtcompile.execution.program import Program
    from mtcompile.execution.session import Engine

Tangents = tuple[bool, ...] | None


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program planned and lowered for one pattern of gradients: all that running it needs."""

    tangents: Tangents
    plan: Plan
    step: fx.GraphModule
    schedule: Schedule
    kernels: dict[str, Any]
    layouts: dict[str, Layout]
    inputs: tuple[tuple[InputSpec, str], ...]
    outputs: tuple[tuple[OutputSpec, str], ...]
    mutated: frozenset[int]
    read_in_backward: frozenset[int]
    outputs_read_in_backward: frozenset[int]
    random: bool
    home_version: int
    phases: Mapping[Phase, Prepared]
    source: Source
    # What steps leave for the next: slot tensors of the engine's arenas, and which phases have run once.
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    passed: set[Phase] = field(default_factory=set)

    @property
    def settled(self) -> bool:
        """Every phase has run once: results are as declared, and the peak has been measured."""
        return self.passed >= self.phases.keys()


@dataclass
class Frame:
    """What a training forward leaves for its backward; owned by the autograd context."""

    compiled: Compiled
    memory: CpuMemory
    inputs: tuple[torch.Tensor, ...]
    snapshots: dict[int, torch.Tensor]
    versions: tuple[int, ...]
    generator: torch.Tensor | None
    outputs: tuple[weakref.ref[torch.Tensor], ...] = ()
    output_versions: dict[int, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    spent: bool = False
    evicted: bool = False
    measured: bool = False

    def evict(self) -> None:
        """Give back what the forward saved; the backward will run the forward again."""
        self.memory.tensors.clear()
        buffers = self.compiled.schedule.buffers.values()
        self.memory.live = sum(b.nbytes for b in buffers if b.returned and b.role == "output")  # still the caller's
        self.evicted = True


@dataclass(frozen=True, slots=True)
class Left:
    """What a backward left to run behind the next forward of its program: its updates, over its memory."""

    frame: Frame
    behind: DeferredQueue
    began_us: float

    def close(self, engine: Engine) -> None:
        """When it has been drained."""
        self.frame.memory.tensors.clear()
        self.frame.records += shifted(self.behind.records, self.began_us)
        engine.last_trace = Trace(tuple(self.frame.records), "measured")
        _finished(engine, self.frame.compiled, self.frame.records)


def _finished(engine: Engine, compiled: Compiled, records: list[Record]) -> None:
    """Tell who listens that a whole training step has run."""
    timed = engine.device.where.type == "cpu" or engine.timeline.wants_times(compiled.schedule)  # else: when issued
    engine.timeline.finished(compiled, records, timed, engine.heading)


def describe_compiled(
    engine: Engine, tangents: Tangents, planned: Planned, made_of: Source, kernels: dict[str, Any]
) -> Compiled:
    """Tables resolved once, so that a step looks nothing up in a graph."""
    step, schedule = planned.step, planned.schedule
    inputs = tuple((spec, node.name) for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True))
    outputs = tuple((spec, node.name) for spec, node in zip(step.meta["outputs"], step_outputs(step), strict=True))
    by_name = {node.name: node for node in step.graph.nodes}
    layouts = {name: layout_of(by_name[name].meta["val"]) for name in schedule.buffers}
    backward_reads = {name for _, i in schedule.phase("backward") for name in i.reads}
    values = {source(by_name[name]).name for name in backward_reads}
    return Compiled(
        tangents,
        planned.plan,
        step,
        schedule,
        kernels,
        layouts,
        inputs,
        outputs,
        frozenset(spec.index for spec, _ in outputs if spec.kind == "mutation"),
        frozenset(spec.index for spec, name in inputs if name in backward_reads and spec.role in ("param", "input", "buffer")),
        frozenset(spec.index for spec, name in outputs if spec.kind == "output" and name in values),
        any(schedule.buffers[n].role == "rng" for n in schedule.buffers) or has_random(step),
        engine.home.version,
        {phase: prepare(schedule, phase) for phase in PHASES if phase == "forward" or any(schedule.phase(phase))},
        made_of,
    )


def run_forward(
    engine: Engine,
    compiled: Compiled,
    inputs: tuple[torch.Tensor, ...],
    snapshots: dict[int, torch.Tensor] | None = None,
    write_back: bool = True,
) -> tuple[Frame, tuple[torch.Tensor, ...]]:
    """Run the forward phase. Buffers change only when all of it has succeeded; on an error the generator is put back."""
    device = str(engine.device.where)
    generator = generator_state(device) if compiled.random else None
    if snapshots is None:  # the old version is what this step reads, also after the new one has been written
        snapshots = {i: inputs[i].detach().clone() for i in compiled.mutated}
    arenas, views = engine.arenas(compiled)
    memory = engine.device.memory(compiled.schedule, compiled.layouts, arenas, knobs.check(), compiled.settled, views)
    for spec, name in compiled.inputs:
        if spec.role == "constant":
            memory.bind(name, compiled.step.meta["constants"][spec.name])
        elif spec.role != "tangent":
            memory.bind(name, snapshots.get(spec.index, inputs[spec.index].detach()))
    news = {result.index: name for result, name in compiled.outputs if result.kind == "mutation"}
    for index, name in news.items():
        if compiled.schedule.buffers[name].kind == "home":
            memory.bind(name, torch.empty_like(snapshots[index]))
    left = engine.left if engine.left is not None and engine.left.frame.compiled is compiled else None
    if left is None:
        engine.drain()
    versions = tuple(_version(t) for t in inputs)
    frame = Frame(compiled, memory, inputs, snapshots, versions, generator)
    try:
        _execute(engine, frame, "forward", left)
    except BaseException:
        if generator is not None:
            set_generator_state(device, generator)
        memory.tensors.clear()
        raise
    if left is not None:  # they were counted up behind this forward
        frame.versions = tuple(_version(t) for t in inputs)
    if write_back:
        with torch.no_grad():
            for index, name in news.items():
                inputs[index].copy_(memory.tensors[name])
    outputs = []
    for result, name in compiled.outputs:
        if result.kind == "output":
            outputs.append(memory.tensors[name])
            # What the user receives will carry this frame in its grad_fn: the frame must not hold it in turn.
            memory.bind(name, memory.tensors[name].detach())
    if "backward" not in compiled.phases:
        memory.tensors.clear()
    return frame, tuple(outputs)


def run_backward(program: Program, frame: Frame, tangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Gradients for every input (None where none was asked for). Weights, buffers and old gradients are not touched."""
    engine = program.engine
    frame.spent = True
    pattern = tuple(t is not None for t in tangents)
    autocast = enabled_autocast(engine.device.where)
    again = frame.evicted or pattern != frame.compiled.tangents or autocast != program.description.backward_autocast
    _check_versions(frame, program, again)
    if again:
        engine.in_backward = True
        program.description = replace(program.description, backward_autocast=autocast)
        try:
            frame = _retrace(program, frame, pattern)
        finally:
            engine.in_backward = False
    compiled, memory = frame.compiled, frame.memory
    device = str(engine.device.where)
    now = generator_state(device) if compiled.random else None
    gradients: dict[int, torch.Tensor] = {}
    try:
        engine.again(compiled, memory)
        _bind_backward(engine, compiled, memory, frame.inputs, tangents)
        _execute(engine, frame, "backward")
        for result, name in compiled.outputs:
            if result.kind == "grad":
                gradients[result.index] = memory.tensors[name]
    except BaseException:
        if now is not None:
            set_generator_state(device, now)
        raise
    finally:
        if engine.left is None or engine.left.frame is not frame:
            memory.tensors.clear()
    if engine.left is None or engine.left.frame is not frame:
        _finished(engine, compiled, frame.records)
    return tuple(gradients.get(i) for i in range(len(frame.inputs)))


def _bind_backward(
    engine: Engine,
    compiled: Compiled,
    memory: CpuMemory,
    inputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> None:
    for spec, name in compiled.inputs:
        if spec.role == "tangent":
            tangent, layout = tangents[spec.index], compiled.layouts[name]
            assert tangent is not None
            if tuple(tangent.stride()) != layout.stride:  # some backward formulas give other bits for other strides
                like = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=tangent.device)
                tangent = like.copy_(tangent)
            memory.bind(name, tangent)
    homes = [
        (spec, name)
        for spec, name in compiled.outputs
        if spec.kind == "grad" and compiled.schedule.buffers[name].kind == "home"
    ]
    total = sum(placed(compiled.schedule.buffers[name].nbytes) for _, name in homes)
    slab = engine.home.gradient_slab(total) if homes else None
    offset = 0
    for _, name in homes:
        assert slab is not None
        memory.bind(name, view(slab, offset, compiled.layouts[name]))
        offset += placed(compiled.schedule.buffers[name].nbytes)


def _retrace(program: Program, frame: Frame, pattern: tuple[bool, ...]) -> Frame:
    """Gradients arrived at other outputs or under another autocast than was traced, or what was saved has been given up:
    run the forward again as it was."""
    engine = program.engine
    frame.memory.tensors.clear()
    compiled = engine.compile(program, pattern)
    program.pattern = pattern
    with rng_preserved(str(engine.device.where)):
        if frame.generator is not None:
            set_generator_state(str(engine.device.where), frame.generator)
        again, _ = run_forward(engine, compiled, frame.inputs, frame.snapshots, write_back=False)
    return again


def _version(tensor: torch.Tensor) -> int:
    """What an in-place change counts up; tensors of torch.inference_mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _check_versions(frame: Frame, program: Program, again: bool) -> None:
    """Raise when a tensor that the backward reads (or the forward, when it is run ``again``) has changed since."""
    compiled = frame.compiled
    read = range(len(frame.inputs)) if again else compiled.read_in_backward
    for index in read:
        if index not in compiled.mutated and _version(frame.inputs[index]) != frame.versions[index]:
            name = program.description.inputs[index].name
            raise StepError(
                f"{name} was changed in place between this forward and its backward; the gradients would be of other "
                "values. Step the optimizer after backward, or clone what you change"
            )
    for index, version in frame.output_versions.items():
        output = frame.outputs[index]()
        if output is not None and output._version != version:
            raise StepError(
                f"output {program.description.computed[index][0]} was changed in place before backward, which needs it; "
                "clone it before changing it"
            )


def _execute(engine: Engine, frame: Frame, phase: Phase, left: Left | None = None) -> None:
    """``left``: by the backward before this forward; drained at its end."""
    compiled, memory = frame.compiled, frame.memory
    delays = Delays(knobs.check_seed()) if memory.check else None
    # The host waits for what the caller may read or change next: weights, and at the end of a backward gradients.
    visible: tuple[Queue, ...] = ("h2d", "d2h") if phase == "backward" or compiled.mutated else ("h2d",)
    fence = engine.device.fence(visible, timed=engine.timeline.wants_times(compiled.schedule))
    deferred = DeferredQueue() if phase == "backward" and compiled.schedule.run_ahead else None
    previous = None if left is None else left.behind
    options = PhaseOptions(delays, fence, engine.throttle is not None, previous, deferred)
    began_us = max((r.end_us for r in frame.records), default=0.0)
    if left is not None:
        engine.left = None
    with torch.no_grad(), without_autocast(engine.device.where.type):
        if phase == "forward":  # the allocator knows the size of what is freed only if it saw it made
            frame.measured = knobs.check() or not compiled.settled
        if frame.measured:
            base = _device_nbytes(memory, engine.device.where) + engine.held_nbytes()
            with allocator_peak(engine.device.where) as peak:
                records = execute(compiled.phases[phase], memory, compiled.kernels, options)
            # Optimizer state counts as resident from the start: measured is a backward that finds it there.
            first = phase == "backward" and engine.updates is not None and engine.updates.made_state
            if peak.nbytes is not None and not first:
                engine.measured(compiled, base + peak.nbytes)
        else:
            first = False
            records = execute(compiled.phases[phase], memory, compiled.kernels, options)
            if fence is None or fence.timed:  # else they say when each was issued
                engine.timed.append((compiled, phase, records))
    if left is not None:
        left.close(engine)
    if deferred is not None:
        engine.left = Left(frame, deferred, began_us)
    if not first:
        compiled.passed.add(phase)
    frame.records += shifted(records, began_us)
    engine.last_trace = Trace(tuple(frame.records), "measured")


@contextlib.contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Bodies are ATen after autocast: casting again would change the numbers."""
    with torch.autocast("cpu", enabled=False):
        if device == "cpu" or not torch.amp.is_autocast_available(device):
            yield
        else:
            with torch.autocast(device, enabled=False):
                yield


def _device_nbytes(memory: CpuMemory, where: torch.device) -> int:
    """Bytes on the device when a phase starts: persistent state, the arena, and what the allocator gave for the rest (a
    generator's state is planned as a value of the device, but is in host memory)."""
    schedule = memory.schedule
    fixed = schedule.arena_nbytes.get("device", 0) + schedule.resident_nbytes.get("device", 0)
    buffers = (schedule.buffers[name] for name in memory.tensors)
    return fixed + sum(
        memory.tensors[b.name].untyped_storage().nbytes()
        for b in buffers
        if b.tier == "device" and (b.kind == "pooled" or b.role == "tangent") and memory.tensors[b.name].device == where
    )
