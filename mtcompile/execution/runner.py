"""The runner: executes one phase of a compiled step with arenas, parameters and a device, and tells a listener what ran."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mtcompile import knobs
from mtcompile.capture.refusals import first_line
from mtcompile.errors import CaptureError, device_ended, ends_device, shows_part
from mtcompile.execution.compiled import CompiledStep, Frame, LiveFrames, retimed
from mtcompile.execution.memory.arenas import ArenaPool
from mtcompile.execution.memory.disk_room import direct_reader
from mtcompile.execution.memory.fragments import gradients_in_order, joined_gradients, tensor_of
from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.execution.unchanged import version_of
from mtcompile.kernels.measure import copied
from mtcompile.machine.device import allocator_peak
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.generators import generator_state, set_generator_state
from mtcompile.runtime.devices.arena import fills_storage, span_nbytes, view
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.executor import Delays, PhaseOptions, execute, instruction_of
from mtcompile.runtime.schedule import Instruction, Phase, Queue, placed
from mtcompile.runtime.trace import Record, shifted
from mtcompile.runtime.workers import DeferredQueue, Worker
from mtcompile.torch_private import profiler_runs

_TRIES = 3  # to write buffers, against interrupts


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """One phase that has run. ``records``: when its instructions ran, from the phase's start. ``exact``: False if they say
    only when work was issued (a GPU not timed by its own clock). ``peak_nbytes``: peak of device bytes, if measured."""

    frame: Frame
    phase: Phase
    records: list[Record]
    exact: bool
    peak_nbytes: int | None


class Listener(Protocol):
    """Is told what a runner does."""

    def wants_device_times(self, compiled: CompiledStep) -> bool:
        """Tells whether to ask the device's clock when the instructions of a step run."""

    def phase_ran(self, run: PhaseRun) -> None: ...

    def beside_nbytes(self, compiled: CompiledStep) -> int:
        """Returns the device bytes that others hold now beside a step."""

    def step_ran(self, frame: Frame) -> None:
        """Called when a whole step has run, including updates that continued during the next forward."""

    def backward_issued(self) -> None:
        """Called when all kernels of a backward have been issued. What it raises ends the backward."""

    def updates_failed(self) -> None:
        """Called when updates have failed that a backward had left to run during the next forward."""


@dataclass(frozen=True, slots=True)
class PendingUpdates:
    """Updates that a backward left to run during the next forward of its program, in its frame's memory."""

    frame: Frame
    queue: DeferredQueue
    began_us: float


class Runner:
    """Runs the phases of one session. ``throttle``: the speeds that the emulated device keeps to; None: its own."""

    def __init__(
        self,
        device: Device,
        frames: LiveFrames,
        arenas: ArenaPool,
        parameters: ParameterStore,
        listener: Listener,
        throttle: Machine | None = None,
    ) -> None:
        self.device, self.frames, self.arenas, self.parameters = device, frames, arenas, parameters
        self.listener, self.throttle = listener, throttle
        self.pending: PendingUpdates | None = None
        self._ended = ""  # where and how the GPU failed for good: later errors of it say nothing

    def _check_device(self) -> None:
        """Raises MtcompileError, with the first cause, if the device has failed for good in an earlier phase."""
        if self._ended:
            raise device_ended(*self._ended.split("\n"))

    @contextlib.contextmanager
    def _restoring(self, generator: torch.Tensor | None, phase: Phase) -> Iterator[None]:
        """Restores the generator's state after an error. What that raises in turn on a device that has failed is no news."""
        try:
            yield
        except BaseException as error:
            if ends_device(error):
                failed = instruction_of(error)
                label = "" if failed is None else f", {failed[1].label or failed[1].op}"
                self._ended = f"a {phase}{label}\n{first_line(error)}"
            if generator is not None:
                with contextlib.suppress(RuntimeError) if self._ended else contextlib.nullcontext():
                    set_generator_state(str(self.device.where), generator)
            raise

    def drain(self) -> None:
        """Waits for pending updates. Raises the error that stopped them, if any."""
        if self.pending is not None:
            try:
                self.pending.queue.drain()
            finally:
                self._close_pending()

    def release(self) -> None:
        """Waits for pending updates and forgets them, well or not. Inside them, which goes on then, it does not wait."""
        if self.pending is not None and not isinstance(threading.current_thread(), Worker):
            with contextlib.suppress(Exception):
                self.pending.queue.drain()
        self.pending = None

    def forward(
        self,
        compiled: CompiledStep,
        inputs: tuple[torch.Tensor, ...],
        snapshots: Mapping[int, torch.Tensor] | None = None,
        write_back: bool = True,
    ) -> tuple[Frame, tuple[torch.Tensor, ...]]:
        """Runs the forward. Buffers change only after all of it has succeeded; an error restores the generator's state.

        ``snapshots``: the values to read of buffers that the step changes, if not their current ones. Of tensors that the
        backward changes, it reads the values at its own start.
        """
        self._check_device()
        for source, _ in compiled.inputs if compiled.read_by_place else ():
            if source.index in compiled.read_by_place and source.role in ("input", "buffer"):
                if not fills_storage(inputs[source.index]):
                    raise CaptureError(shows_part(source.name))
        device = str(self.device.where)
        generator = generator_state(device) if compiled.random else None
        if snapshots is None:  # this step reads the old version, even after the new one has been written
            snapshots = {i: copied(inputs[i].detach()) for i in compiled.snapshots}
        arenas, views = self.arenas.lend(compiled)
        memory = self.device.memory(compiled.schedule, compiled.layouts, arenas, knobs.check(), compiled.settled, views)
        memory.slabs, memory.together = self.parameters.memories(), compiled.together
        if self.parameters.disk is not None:
            memory.disk, memory.verified = self.parameters.disk, knobs.disk_check()
            memory.direct = direct_reader(self.parameters) if compiled.plan.disk_direct else None
            memory.home_names = {name: spec.name for spec, name in compiled.inputs}
        new_versions = compiled.new_versions(in_backward=False)
        _bind_forward(compiled, memory, inputs, snapshots, new_versions)
        if self.pending is not None and self.pending.frame.compiled is not compiled:
            self.drain()
        pending = self.pending
        frame = Frame(compiled, memory, inputs, snapshots, tuple(version_of(t) for t in inputs), generator)
        try:
            with self._restoring(generator, "forward"):
                self._execute(frame, "forward", pending)
        except BaseException:
            memory.let_go()
            raise
        if pending is not None:  # updates during this forward have raised versions
            frame.versions = tuple(version_of(t) for t in inputs)
        if write_back:
            write_buffers({inputs[index]: memory.tensors[name] for index, name in new_versions.items()})
        outputs = []
        for spec, name in compiled.outputs:
            if spec.kind == "output":
                outputs.append(without_base(memory.tensors[name]))
                # What the user receives will carry this frame in its grad_fn: the frame must not hold it in turn.
                memory.bind(name, memory.tensors[name].detach())
        if "backward" not in compiled.phases:
            memory.let_go()
        return frame, tuple(outputs)

    def backward(self, frame: Frame, tangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradient of every input, None where none is needed. Leaves weights and old gradients alone; what the
        backward changes in place changes only after all of it has succeeded."""
        self._check_device()
        compiled, memory = frame.compiled, frame.memory
        device = str(self.device.where)
        generator = generator_state(device) if compiled.random else None
        try:
            with self._restoring(generator, "backward"):
                self.arenas.restore(compiled, memory)
                self._bind_backward(compiled, memory, frame.inputs, tangents)
                self._execute(frame, "backward")
                gradients = joined_gradients(compiled.inputs, compiled.outputs, memory.tensors)
            new_versions = compiled.new_versions(in_backward=True)
            write_buffers({frame.inputs[index]: memory.tensors[name] for index, name in new_versions.items()})
        finally:
            if self.pending is None or self.pending.frame is not frame:
                memory.let_go()
        if self.pending is None or self.pending.frame is not frame:
            self.listener.step_ran(frame)
        return tuple(gradients.get(i) for i in range(len(frame.inputs)))

    def _bind_backward(
        self,
        compiled: CompiledStep,
        memory: CpuMemory,
        inputs: tuple[torch.Tensor, ...],
        tangents: Sequence[torch.Tensor | None],
    ) -> None:
        buffers = compiled.schedule.buffers
        for index, name in compiled.new_versions(in_backward=True).items():
            if buffers[name].kind == "home":
                memory.bind(name, copied(inputs[index].detach()))
        for spec, name in compiled.inputs:
            if spec.in_backward:
                memory.bind(name, inputs[spec.index])
            if spec.role == "tangent":
                tangent, layout = tangents[spec.index], compiled.layouts[name]
                assert tangent is not None
                if tuple(tangent.stride()) != layout.stride:  # the bits of some backward formulas depend on strides
                    like = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=tangent.device)
                    tangent = like.copy_(tangent)
                memory.bind(name, tangent)
        gradients = gradients_in_order(compiled.inputs, compiled.outputs)
        homes = [name for _, _, name in gradients if buffers[name].kind == "home"]
        if not homes:
            return
        slab, offset = self.parameters.gradient_slab(sum(placed(buffers[name].nbytes) for name in homes)), 0
        for name in homes:
            memory.bind(name, view(slab, offset, compiled.layouts[name]))
            offset += placed(buffers[name].nbytes)

    def _execute(self, frame: Frame, phase: Phase, pending: PendingUpdates | None = None) -> None:
        """Runs one phase. ``pending``: updates that the previous step left; the phase ends when they are done."""
        compiled, memory = frame.compiled, frame.memory
        delays = Delays(knobs.check_seed()) if memory.check else None
        # The host waits for what the caller may read or change next: weights and, after a backward, gradients.
        visible: tuple[Queue, ...] = ("h2d", "d2h") if phase == "backward" or compiled.mutated else ("h2d",)
        fence = self.device.fence(visible, timed=self.listener.wants_device_times(compiled))
        deferred = DeferredQueue() if phase == "backward" and compiled.schedule.run_ahead else None
        previous = None if pending is None else pending.queue
        options = PhaseOptions(delays, fence, self._pace(compiled), previous, deferred, named if profiler_runs() else None)
        if phase == "backward":
            options = replace(options, issued=self.listener.backward_issued)
        began_us = max((r.end_us for r in frame.records), default=0.0)
        if phase == "forward":  # whole steps only: the profiler must see the allocation of whatever the backward frees
            frame.measured = knobs.check() or not compiled.settled
        base = self._device_nbytes(memory) + self.listener.beside_nbytes(compiled) if frame.measured else 0
        measuring = allocator_peak(self.device.where) if frame.measured else contextlib.nullcontext()
        if deferred is not None:  # before they begin: after an interrupt, nobody else would wait for them
            self.pending = PendingUpdates(frame, deferred, began_us)
        try:
            with torch.no_grad(), without_autocast(self.device.where.type), measuring as peak:
                records = execute(compiled.phases[phase], memory, compiled.kernels, options)
        except BaseException:
            if deferred is not None and deferred.failed:
                self.pending = None  # it has stopped, and what stopped it is raised now
            raise
        finally:
            if pending is not None and pending.queue.ended:
                self._close_pending()
        frame.records += shifted(records, began_us)
        nbytes = None if peak is None or peak.nbytes is None else base + peak.nbytes
        self.listener.phase_ran(PhaseRun(frame, phase, records, fence is None or fence.timed, nbytes))

    def _pace(self, compiled: CompiledStep) -> Mapping[int, float]:
        """Returns the least time of each instruction, in µs, on the device as it is throttled now."""
        machine, instructions = self.throttle, compiled.schedule.instructions
        if machine is None:
            return {}
        if machine == compiled.problem.machine:
            return {index: each.time_us for index, each in enumerate(instructions)}
        return {index: each.time_us for index, each in enumerate(retimed(compiled, machine))}

    def _close_pending(self) -> None:
        """Ends a step whose updates have been drained."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        if pending.queue.failed:
            self.listener.updates_failed()
        pending.frame.memory.let_go()
        pending.frame.records += shifted(pending.queue.records, pending.began_us)
        self.listener.step_ran(pending.frame)

    def _device_nbytes(self, memory: CpuMemory) -> int:
        """Returns the bytes on the device when a phase starts: persistent state, the arena, and allocations for the rest. A
        GPU's generator state is planned as a device value but is in host memory, so it does not count."""
        schedule = memory.schedule
        fixed = schedule.arena_nbytes.get("device", 0) + schedule.resident_nbytes.get("device", 0)
        named = [(schedule.buffers[name], tensor) for name, tensor in memory.tensors.items()]
        held = [(buffer, tensor) for buffer, tensor in named if buffer.tier == "device" and tensor.device == self.device.where]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for b, t in held if b.kind == "pooled"}
        pooled = sum(storage.nbytes() for storage in storages.values())
        # A tangent may be a part of what another model has made.
        return fixed + pooled + sum(span_nbytes(tensor) for buffer, tensor in held if buffer.role == "tangent")


def _bind_forward(
    compiled: CompiledStep,
    memory: CpuMemory,
    inputs: tuple[torch.Tensor, ...],
    snapshots: Mapping[int, torch.Tensor],
    new_versions: Mapping[int, str],
) -> None:
    for spec, name in compiled.inputs:
        if spec.role == "constant":
            memory.bind(name, compiled.step.meta["constants"][spec.name])
        elif spec.role != "tangent" and not spec.in_backward:
            memory.bind(name, snapshots[spec.index] if spec.index in snapshots else tensor_of(spec, inputs))
    for index, name in new_versions.items():
        if compiled.schedule.buffers[name].kind == "home":
            memory.bind(name, copied(snapshots[index]))


def named(instruction: Instruction) -> contextlib.AbstractContextManager[object]:
    """Shows an instruction in a profile of torch.profiler by its block, such as ``layers.3 backward (recompute)``."""
    block, work = instruction.block or instruction.label, instruction.work
    if instruction.op == "run" and work in ("compute", "recompute"):
        text = f"{block} {instruction.phase}" + (" (recompute)" if work == "recompute" else "")
    else:
        text = f"{work} {block}"
    return torch.profiler.record_function(text)


def write_buffers(versions: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Copies new versions of buffers to them. An interrupt is raised after the last copy: a batch norm with half of its
    statistics would be another model."""
    interrupt: BaseException | None = None
    for _ in range(_TRIES):
        try:
            with torch.no_grad():
                for buffer, version in versions.items():
                    buffer.copy_(version)
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def without_base(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is nobody's view."""
    if not tensor._is_view():
        return tensor
    whole = tensor.new_empty(0)
    return whole.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@contextlib.contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Turns autocast off: kernels were captured after autocast, and casting again would change the numbers."""
    with torch.autocast("cpu", enabled=False):
        if device == "cpu" or not torch.amp.is_autocast_available(device):
            yield
        else:
            with torch.autocast(device, enabled=False):
                yield
