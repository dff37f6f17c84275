"""A session: the state that one compiled callable keeps between steps. It compiles programs when they are first needed, runs
them with its ``Runner``, and tells listeners what ran."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from mtcompile import knobs, torch_private
from mtcompile.capture.description import enabled_autocast
from mtcompile.capture.refusals import not_compiled, place_of, refuse
from mtcompile.capture.tracing import collecting_later
from mtcompile.compiler import CapturedStep, Target, compile_step
from mtcompile.errors import BudgetError, MtcompileError, StepError
from mtcompile.execution.arenas import ArenaPool
from mtcompile.execution.calibration import Calibrator, known_machine, speeds
from mtcompile.execution.compiled import CompiledStep, Frame, LiveFrames
from mtcompile.execution.dump import dump
from mtcompile.execution.parameters import ParameterStore
from mtcompile.execution.placement import RunnablePlacement
from mtcompile.execution.runner import PhaseRun, Runner, version_of, without_autocast
from mtcompile.kernels.toolchain import toolchain_for
from mtcompile.options import Options
from mtcompile.passes.generators import rng_preserved, set_generator_state
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.trace import Trace

Refusal = tuple[str, int]  # why nothing fits, and the smallest budget that does
# Each with the version of the parameters' places that it was compiled for.
CompiledSteps = MutableMapping[Hashable, tuple[int, CompiledStep | Refusal]]


class StepListener(Protocol):
    """Listens to the steps of a session."""

    def wants_device_times(self, schedule: Schedule) -> bool:
        """Tells whether the next step is to be timed by the device's clock."""

    def step_ran(self, compiled: CompiledStep, measured: Trace | None) -> None:
        """Called after a step. ``measured``: None if the records say only when work was issued."""


class Door(RunnablePlacement, Protocol):
    """The differences between the two ways into a session: a compiled model, and torch.compile's graphs. What is written out
    here suits parameters and gradients that are the caller's."""

    def plan_key(self) -> Hashable:
        """Returns a key of whatever else a plan depends on and may change between calls."""
        return None

    def make_room(self) -> bool:
        """Evicts waiting forwards if that may make compiling succeed. Tells whether it evicted any."""
        return False

    def before_forward(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raises StepError if a training forward with these inputs, by name, cannot start now."""
        return

    def backward(self, node: Any, frame: Frame, tangents: Sequence[torch.Tensor | None]) -> AbstractContextManager[None]:
        """Surrounds a backward. ``node``: its node in autograd's graph. Raises StepError if it cannot start."""
        return nullcontext()

    def before_accumulation(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Called before autograd adds gradients to existing ones."""
        return

    def updates_failed(self) -> None:
        """Called when updates that the last backward left to run have failed."""
        return

    def optimizer_state_was_made(self) -> bool:
        """Tells whether the last backward allocated optimizer state."""
        return False

    def state_nbytes(self) -> dict[str, int]:
        """Returns the current bytes of weights, masters, gradients and optimizer state, by name."""
        return {}

    def on_disk_nbytes(self) -> int:
        """Returns the bytes of these that are on disk."""
        return 0

    def disk_staging_nbytes(self) -> int:
        """Returns the host bytes that go with a disk."""
        return 0


class Session:
    """The session of one compiled callable. ``door``: says where inputs live, and sets the limits on plans. ``last``: the
    program that last trained (or ran, before any training). ``last_step``: the schedule of the last whole step, and when its
    instructions ran by the device's clock."""

    def __init__(
        self, device: Device, options: Options, door: Door, parameters: ParameterStore, frames: LiveFrames, title: str = ""
    ) -> None:
        self.device, self.options, self.door, self.parameters = device, options, door, parameters
        self.frames, self.title = frames, title
        self.toolchain = toolchain_for(device.where, options.fuses)
        self.machine = speeds(device, options)
        self.calibrator = Calibrator(device, options)
        self.listeners: list[StepListener] = []
        self.arenas = ArenaPool(device, frames, self.drain)
        self.runner = Runner(device, frames, self.arenas, parameters, self, paced=options.throttle is not None)
        self.last: CompiledStep | None = None
        self.last_trace: Trace | None = None
        self.last_step: tuple[Schedule, Trace] | None = None
        self.peak_device_bytes = self.peak_host_bytes = 0

    @torch_private.one_at_a_time
    def drain(self) -> None:
        """Waits for updates that the last backward left to run during a forward. Raises the error that stopped them, if any."""
        self.runner.drain()

    # ------------------------------------------------------------------------------------------------------- compiling

    def compile(self, captured: CapturedStep, known: CompiledSteps) -> CompiledStep:
        """Returns the step compiled for this thread count and free memory, from ``known`` if it was compiled before. Raises
        CaptureError and BudgetError."""
        try:
            return self._known_or_compiled(captured, known)
        except BudgetError:
            if not self.door.make_room():
                raise
            return self._known_or_compiled(captured, known)

    def _known_or_compiled(self, captured: CapturedStep, known: CompiledSteps) -> CompiledStep:
        reserved = self.frames.nbytes()
        autocast = captured.description.backward_autocast
        key = (captured.tangents, autocast, torch.get_num_threads(), reserved, self.door.plan_key())
        version, compiled = known.get(key, (-1, None))
        if compiled is None or (isinstance(compiled, CompiledStep) and version != self.parameters.version):
            self.drain()
            try:
                compiled = self._compile(captured)
            except BudgetError as error:
                if not reserved:
                    raise
                # Keep the refusal, or every step would plan again. Not the error: its traceback holds the call's tensors.
                compiled = str(error), error.minimum_bytes
            known[key] = self.parameters.version, compiled
        if isinstance(compiled, tuple):
            raise BudgetError(*compiled)
        return compiled

    def _compile(self, captured: CapturedStep) -> CompiledStep:
        self.machine = known_machine(self.device, self.options)
        target = Target(self.options, self.device, self.toolchain, self.machine)
        with collecting_later(), torch_private.lasting(), without_autocast(self.device.where.type):
            try:
                compiled = compile_step(captured, target, self.door)
            except (MtcompileError, DiskError):
                raise
            except Exception as error:
                doing = f"{self.title or 'the model'} could not be planned"
                refuse(not_compiled(error, doing, place_of(captured.description.graph.graph.nodes)), error)
        dump(compiled)
        return compiled

    # --------------------------------------------------------------------------------------------------------- running

    def infer(self, compiled: CompiledStep, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Runs a forward without a backward. Allowed at any time, in the memory that a waiting step leaves free."""
        self.drain()
        _, outputs = self.runner.forward(compiled, inputs)
        self.last = self.last or compiled
        return outputs

    def forward(self, compiled: CompiledStep, inputs: tuple[torch.Tensor, ...]) -> tuple[Frame, tuple[torch.Tensor, ...]]:
        """Runs a training forward. Its frame waits for the backward."""
        self.last = compiled
        frame, outputs = self.runner.forward(compiled, inputs)
        self.frames.add(frame)
        frame.hand_out(outputs)
        return frame, outputs

    def backward(
        self,
        frame: Frame,
        captured: CapturedStep,
        tangents: Sequence[torch.Tensor | None],
        compile_again: Callable[[CapturedStep], CompiledStep],
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradient of every input of a forward. The forward first runs again, as the step that ``compile_again``
        returns, if gradients arrive at other outputs, with other strides or under another autocast than was traced, or if its
        saved values have been evicted."""
        frame.spent = True
        tangents = [None if t is None else t.resolve_conj().resolve_neg() for t in tangents]  # kernels see memory
        pattern = frame.compiled.tangents_of(tangents)
        autocast = enabled_autocast(self.device.where)
        expected = captured.description.backward_autocast
        again = frame.evicted or pattern != frame.compiled.tangents or autocast != expected
        _check_versions(frame, captured, again)
        if again:
            self.frames.in_backward = True
            description = replace(captured.description, backward_autocast=autocast)
            try:
                frame = self._run_again(frame, compile_again(replace(captured, description=description, tangents=pattern)))
            finally:
                self.frames.in_backward = False
        return self.runner.backward(frame, tangents)

    def _run_again(self, frame: Frame, compiled: CompiledStep) -> Frame:
        self.last = compiled
        device = str(self.device.where)
        with rng_preserved(device):
            if frame.generator is not None:
                set_generator_state(device, frame.generator)
            frame, _ = self.runner.forward(compiled, frame.inputs, frame.snapshots, write_back=False)
        return frame

    # ------------------------------------------------------------------------------------------- what the runner tells

    def wants_device_times(self, compiled: CompiledStep) -> bool:
        return knobs.trace() or any(listener.wants_device_times(compiled.schedule) for listener in self.listeners)

    def phase_ran(self, run: PhaseRun) -> None:
        compiled, frame = run.frame.compiled, run.frame
        # Optimizer state counts as resident from the start, so a backward that allocates it is not measured.
        if not (frame.measured and run.phase == "backward" and self.door.optimizer_state_was_made()):
            compiled.completed_phases.add(run.phase)
            if run.peak_nbytes is not None:
                self._device_peaked(compiled, run.peak_nbytes)
        self.calibrator.phase_ran(run)
        self.last_trace = Trace(tuple(frame.records), "measured")
        if run.phase == "forward":
            self.note_host_bytes(compiled)

    def updates_failed(self) -> None:
        self.door.updates_failed()

    def step_ran(self, frame: Frame) -> None:
        compiled, trace = frame.compiled, Trace(tuple(frame.records), "measured")
        exact = self.device.where.type == "cpu" or self.wants_device_times(compiled)  # else: when work was issued
        self.last_trace = trace
        if exact:
            self.last_step = compiled.schedule, trace
        for listener in self.listeners:
            listener.step_ran(compiled, trace if exact else None)

    def _device_peaked(self, compiled: CompiledStep, nbytes: int) -> None:
        self.peak_device_bytes = max(self.peak_device_bytes, nbytes)
        planned = compiled.schedule.peak_nbytes["device"] + self.frames.nbytes()
        if nbytes > planned:
            warnings.warn(
                f"the device peak was {nbytes} bytes, expected at most the planned {planned}: a kernel took more than when "
                "it was measured. Please report it with what MT_DUMP=dir writes",
                stacklevel=2,
            )

    def note_host_bytes(self, compiled: CompiledStep | None) -> None:
        """Updates the host peak with the memory held now: the training state that is neither on the device nor on disk, the
        arena, and what requests to the disk go through."""
        resident = compiled.schedule.resident_nbytes.get("device", 0) if compiled else 0
        state = max(0, sum(self.door.state_nbytes().values()) - resident - self.door.on_disk_nbytes())
        beside = self.arenas.nbytes("host") + self.door.disk_staging_nbytes()
        self.peak_host_bytes = max(self.peak_host_bytes, state + beside)


def _check_versions(frame: Frame, captured: CapturedStep, again: bool) -> None:
    """Raises StepError if a tensor has changed since the forward, and the backward (or the forward, ``again``) reads it."""
    compiled = frame.compiled
    for index in range(len(frame.inputs)) if again else compiled.read_in_backward:
        if index not in compiled.mutated and version_of(frame.inputs[index]) != frame.versions[index]:
            raise StepError(
                f"{captured.description.inputs[index].name} was changed in place between this forward and its backward; the "
                "gradients would be of other values. Step the optimizer after backward, or clone what you change"
            )
    for index, version in frame.output_versions.items():
        output = frame.outputs[index]()
        if output is not None and output._version != version:
            raise StepError(
                f"output {captured.description.computed[index][0]} was changed in place before backward, which needs it; "
                "clone it before changing it"
            )
