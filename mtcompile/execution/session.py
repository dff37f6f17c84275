"""A session: the state that one compiled callable keeps between steps. It compiles programs when they are first needed, runs
them with its ``Runner``, and tells listeners what ran."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from mtcompile import knobs, progress, torch_private
from mtcompile.capture.description import enabled_autocast
from mtcompile.capture.refusals import not_compiled, place_of, refuse
from mtcompile.compiler import CapturedStep, Searched, Target, compile_step, pass_errors
from mtcompile.errors import BudgetError, MtcompileError
from mtcompile.execution.calibration import Calibrator, known_machine, speeds
from mtcompile.execution.compiled import CompiledStep, Frame, LiveFrames, PlainGraph
from mtcompile.execution.door import Door
from mtcompile.execution.dump import dump
from mtcompile.execution.elastic import Replanner
from mtcompile.execution.memory.arenas import ArenaPool
from mtcompile.execution.memory.host_room import Watchdog
from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.execution.memory.shortage import with_retry
from mtcompile.execution.runner import PhaseRun, Runner, without_autocast
from mtcompile.execution.unchanged import check_unchanged, check_versions
from mtcompile.kernels.toolchain import chosen_kernels, toolchain_for
from mtcompile.machine.device import process_nbytes
from mtcompile.options import Options
from mtcompile.passes.generators import rng_preserved, set_generator_state
from mtcompile.passes.joint.exceptions import BIT_EQUAL, DIFFERENTIATED
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import leaves_room
from mtcompile.references import collecting_seldom, weakly
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.pages import give_back
from mtcompile.runtime.schedule import Schedule, gib
from mtcompile.runtime.trace import Trace, moved_nbytes

Refusal = tuple[str, int]  # why nothing fits, and the smallest budget that does
# Each with the version of the parameters' places that it was compiled for.
CompiledSteps = MutableMapping[Hashable, tuple[int, CompiledStep | Refusal]]


class StepListener(Protocol):
    """Listens to the steps of a session."""

    def wants_device_times(self, schedule: Schedule) -> bool:
        """Tells whether the next step is to be timed by the device's clock."""

    def step_ran(self, compiled: CompiledStep, measured: Trace | None) -> None:
        """Called after a step. ``measured``: None if the records say only when work was issued."""


class Session:
    """The session of one compiled callable. ``door``: says where inputs live, and sets the limits on plans. ``last``: the
    program that last trained (or ran, before any training). ``planned_device_bytes``: the largest peak of a program that has
    run, with what others held beside it. ``last_step``: the schedule of the last whole step, and when its instructions ran by
    the device's clock."""

    def __init__(
        self, device: Device, options: Options, door: Door, parameters: ParameterStore, frames: LiveFrames, title: str = ""
    ) -> None:
        options = replace(options, kernels=chosen_kernels(options.kernels))
        self.device, self.options, self.door, self.parameters = device, options, door, parameters
        self.frames, self.title = frames, title
        self.toolchain = toolchain_for(device.where, options.kernels)
        self.machine = speeds(device, options)
        self.calibrator = Calibrator(device, options)
        self.listeners: list[StepListener] = []
        self.arenas = ArenaPool(device, frames, weakly(self.drain), lambda: parameters.disk)
        throttle = None if options.throttle is None else door.share_of(self.machine)
        self.runner = Runner(device, frames, self.arenas, parameters, weakref.proxy(self), throttle)
        self._searched: dict[Hashable, dict[bytes, Searched]] = {}  # by what plans depend on beside the step
        self._advised: set[str] = set()  # changes of options whose gains were told
        self.closed = False
        self._watchdog = Watchdog()
        self.planning = threading.RLock()  # held while a plan is made: plans of one step share what is known of it
        self.replanner: Replanner | None = None
        self.last: CompiledStep | None = None
        self.last_trace: Trace | None = None
        self.last_step: tuple[Schedule, Trace] | None = None
        self.last_ran: tuple[Schedule, Trace] | None = None  # as last_step, by whatever clock
        self.peak_device_bytes = self.peak_host_bytes = self.planned_device_bytes = 0
        self._noted_host: CompiledStep | None = None  # whose forwards would find the host as the last one has
        self.differentiated = False  # whether a backward was called with create_graph=True

    @property
    def plan(self) -> Plan | None:
        """The plan of the last program. Its numerics promise fewer equal bits after a backward with create_graph=True; its
        notes name the operations that exact kernels leave eager, as far as they have shown now."""
        if self.last is None:
            return None
        plan, notes = self.last.plan, self.toolchain.notes()
        if not self.differentiated and not notes:
            return plan
        return replace(plan, numerics=self.numerics_now(plan.numerics), notes=(*plan.notes, *notes))

    def numerics_now(self, contract: str) -> str:
        """Returns a contract as it holds now: a backward with create_graph=True has weakened it."""
        return contract.replace(BIT_EQUAL, DIFFERENTIATED) if self.differentiated else contract

    def note_differentiated(self) -> None:
        """Withdraws the promise of equal bits, and warns, when a backward is first called with create_graph=True."""
        if not self.differentiated and self.last is not None and BIT_EQUAL in self.last.plan.numerics:
            warnings.warn(
                "backward was called with create_graph=True. Gradients of that forward are added up in another order than in "
                "plain PyTorch, so that their last bits may differ; plan.numerics says so from now on",
                stacklevel=2,
            )
        self.differentiated = True

    @torch_private.one_at_a_time
    def drain(self) -> None:
        """Waits for updates that the last backward left to run during a forward. Raises the error that stopped them, if any."""
        self.runner.drain()

    def release(self) -> None:
        """Frees arenas, what the last steps left, and the homes of parameters, which keep their values."""
        self.runner.release()
        self.arenas.release()
        self.parameters.release()
        self.toolchain = toolchain_for(self.device.where, self.options.kernels)
        self.last = self.last_trace = self.last_step = self.last_ran = self._noted_host = None
        self.calibrator.phases.clear()
        self.listeners.clear()
        self.replanner = None
        self._searched.clear()

    # ------------------------------------------------------------------------------------------------------- compiling

    def compile(self, captured: CapturedStep, known: CompiledSteps) -> CompiledStep:
        """Returns the step compiled for this thread count and free memory, from ``known`` if it was compiled before. Evicts
        waiting forwards if there is no other way. Raises CaptureError and BudgetError."""
        waits = captured.tangents is not None and not self.frames.in_backward
        if waits and self.replanner is not None:
            self.replanner.before_step(known)
        beside = self.frames.expected - 1 - len(self.frames.waiting()) if waits else 0
        if beside > 0:
            with contextlib.suppress(BudgetError):  # this one may be alone
                return self._known_or_compiled(captured, known, beside)
        try:
            return self._known_or_compiled(captured, known)
        except BudgetError:
            if not (before := len(self.frames.waiting())):
                raise
            gc.collect()  # frees a loss that only a reference cycle holds
            if len(self.frames.waiting()) == before:
                self._evict(captured, known, waits)
            return self._known_or_compiled(captured, known)

    def _evict(self, captured: CapturedStep, known: CompiledSteps, waits: bool) -> None:
        """Evicts all waiting forwards. They run again before their backward, once: from then on, the first plan leaves room
        for the others. Raises BudgetError, and evicts none, if there is no such plan."""
        waiting, of_this = self.frames.waiting(), {id(compiled) for _, compiled in known.values()}
        if waits and self.door.waits_together() and all(id(frame.compiled) in of_this for frame in waiting):
            self.frames.leaving = True
            try:
                self._known_or_compiled(captured, known, len(waiting))
            except BudgetError as error:
                raise BudgetError(
                    f"{len(waiting) + 1} training forwards are to wait for their backward at the same time, and "
                    f"{len(waiting)} fit: {error}\n  or call backward after {len(waiting)}, drop losses that you no longer "
                    "need (del loss), or use torch.no_grad() for evaluation",
                    error.minimum_bytes,
                ) from None
            finally:
                self.frames.leaving = False
        self.frames.evict()

    def _known_or_compiled(self, captured: CapturedStep, known: CompiledSteps, beside: int = 0) -> CompiledStep:
        """``beside``: the number of further forwards like this one that the memory has to hold, as saved for a backward."""
        gradients = self.door.gradients_nbytes() if captured.tangents is None else self.door.sums
        reserved = self.frames.nbytes(), self.frames.host_nbytes(), self.frames.hold, gradients
        autocast = captured.description.backward_autocast
        base = (captured.tangents, autocast, torch.get_num_threads(), self.door.plan_key())
        key = (*base, reserved, beside)
        version, compiled = known.get(key, (-1, None))
        if compiled is None or version != self.parameters.version:
            compiled = self._roomy(known, base, beside)
            if compiled is None:
                self.drain()
                try:
                    compiled = self._compile(captured, beside)
                except BudgetError as error:
                    if not self.frames.waiting() and not beside:
                        raise
                    # Keep the refusal, or every step would plan again. Not the error: its traceback holds the call's tensors.
                    compiled = str(error), error.minimum_bytes
            known[key] = self.parameters.version, compiled
        if isinstance(compiled, tuple):
            raise BudgetError(*compiled)
        return compiled

    def _roomy(self, known: CompiledSteps, base: tuple[Hashable, ...], beside: int) -> CompiledStep | None:
        """Returns the fastest step compiled so far that finds room now, and leaves enough of it."""
        version = self.parameters.version
        steps = [
            compiled
            for key, (made_for, compiled) in known.items()
            if isinstance(compiled, CompiledStep)
            and made_for == version
            and isinstance(key, tuple)
            and key[: len(base)] == base
        ]
        roomy = [step for step in steps if self._fits(step, beside)]
        return min(roomy, key=lambda step: step.plan.total_us, default=None)

    def _fits(self, compiled: CompiledStep, beside: int = 0) -> bool:
        budgets, _ = self.door.constraints(compiled.problem.step)
        return leaves_room(budgets, compiled.schedule, beside, compiled.uncounted_nbytes(budgets.sums))

    def _compile(self, captured: CapturedStep, beside: int) -> CompiledStep:
        self.door.before_planning()
        self.machine = self.door.share_of(known_machine(self.device, self.options))
        searched = self._searched.setdefault(self.door.plan_key(), {})
        target = Target(self.options, self.device, self.toolchain, self.machine, beside, searched, self._advised)
        planning = progress.doing(f"planning {self.title or 'a graph'}")
        with self.planning, planning, collecting_seldom(), torch_private.lasting(), without_autocast(self.device.where.type):
            try:
                with pass_errors():
                    compiled = compile_step(captured, target, self.door)
            except (MtcompileError, DiskError):
                raise
            except Exception as error:
                doing = f"{self.title or 'the model'} could not be planned"
                refuse(not_compiled(error, doing, place_of(captured.description.graph.graph.nodes)), error)
            finally:
                self.parameters.ahead.end()
                self.parameters.residents_may_leave = False
        dump(compiled)
        return compiled

    # --------------------------------------------------------------------------------------------------------- running

    def infer(self, compiled: CompiledStep, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Runs a forward without a backward. Allowed at any time, in the memory that a waiting step leaves free."""
        self.drain()
        with self.door.evaluation(compiled):
            _, outputs = self.runner.forward(compiled, inputs)
        self.last = self.last or compiled
        return outputs

    def forward(self, compiled: CompiledStep, inputs: tuple[torch.Tensor, ...]) -> tuple[Frame, tuple[torch.Tensor, ...]]:
        """Runs a training forward. Its frame waits for the backward. Raises BudgetError if the host has no room for it."""
        if self.device.where.type == "cpu":  # where everything that is not placed is allocated anew
            self._watchdog.before_step(pooled_nbytes(compiled.schedule))
        self.last = compiled
        with self.door.phase(compiled, "forward"):
            frame, outputs = self.runner.forward(compiled, inputs)
        frame.sent_nbytes, frame.sums = self.door.sent_nbytes, self.door.sums
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
        adds = self.door.note_sums(frame.inputs) and self.door.sums > frame.sums  # to gradients that its forward did not see
        self._make_room_beside(frame)
        tangents = [None if t is None else t.resolve_conj().resolve_neg() for t in tangents]  # kernels see memory
        pattern = frame.compiled.tangents_of(tangents)
        autocast = enabled_autocast(self.device.where)
        expected = captured.description.backward_autocast
        again = frame.evicted or pattern != frame.compiled.tangents or autocast != expected
        again = again or (adds and not self._fits(frame.compiled))
        check_versions(frame, captured.description, again)
        description = replace(captured.description, backward_autocast=autocast)
        traced = replace(captured, description=description, tangents=pattern)

        def run(again: bool) -> tuple[torch.Tensor | None, ...]:
            nonlocal frame
            if again:
                check_versions(frame, captured.description, again)  # of all that the forward reads
                self.frames.in_backward = True
                try:
                    compiled = compile_again(traced)
                    check_unchanged(frame, captured.description, compiled.snapshots - frame.snapshots.keys())
                    frame = self._run_again(frame, compiled)
                finally:
                    self.frames.in_backward = False
            with self.door.phase(frame.compiled, "backward"):
                return self.runner.backward(frame, tangents)

        return with_retry(self, lambda retried: run(again or retried), self.door.may_run_again)

    def _make_room_beside(self, frame: Frame) -> None:
        """Evicts the other forwards if a backward would not fit beside them, since it runs in another order than the plans
        expected. Notes how many forwards were alive when one was evicted that is needed after all."""
        if frame.evicted and self.door.waits_together():
            self.frames.learn()
        if not frame.evicted and self.frames.waiting() and not self._fits(frame.compiled):
            self.frames.evict()

    def make_room_for(self, plain: PlainGraph, what: str) -> None:
        """Counts a graph of autograd's own from now on. If it needs the room, evicts waiting forwards, frees the arena and
        sends parameters home; later plans leave the room free. Raises BudgetError, which says ``what`` runs."""
        memory = self.options.memory
        self.frames.plain.add(plain)
        if memory is not None and self.held_nbytes() > memory:
            self.frames.evict()
            self.arenas.release_device()
            self.door.send_residents_home()
            if (needed := self.held_nbytes()) > memory:
                self.frames.plain.discard(plain)
                raise BudgetError(
                    f"{what} runs in plain PyTorch and takes {gib(plain.nbytes)}: "
                    f"the smallest memory that works is {needed} bytes ({gib(needed)}), found {gib(memory)}. Pass "
                    f"memory={needed} or more, or a smaller batch",
                    needed,
                )
            self.frames.plain_nbytes = max(self.frames.plain_nbytes, plain.nbytes)
        self.note_call(self.held_nbytes())

    def note_call(self, nbytes: int) -> None:
        """Notes the device bytes that something without a plan takes at most."""
        self.note_planned(nbytes)
        self.peak_device_bytes = max(self.peak_device_bytes, nbytes)

    def note_planned(self, nbytes: int) -> None:
        """Notes the device bytes that something may take."""
        self.planned_device_bytes = max(self.planned_device_bytes, nbytes)

    def held_nbytes(self) -> int:
        """Returns the device bytes that are held between phases."""
        if self.parameters.provisional:
            resident = self.parameters.resident_nbytes()
        else:
            resident = self.last.schedule.resident_nbytes.get("device", 0) if self.last and self.parameters.has_residents else 0
        return self.arenas.nbytes("device") + resident + self.beside_nbytes(self.last)

    def beside_nbytes(self, compiled: CompiledStep | None) -> int:
        """Returns the device bytes of forwards that wait, and of gradients that are there and that no plan counts."""
        counted = compiled is not None and compiled.problem.budgets.sums
        return self.frames.nbytes() + (0 if counted else self.door.gradients_nbytes())

    def resting_nbytes(self) -> int:
        """Returns the device bytes that stay held during a call, if it needs the arena's: the call's arguments included."""
        return self.held_nbytes() - self.arenas.nbytes("device") + self.door.sent_nbytes

    def _run_again(self, frame: Frame, compiled: CompiledStep) -> Frame:
        self.last = compiled
        device = str(self.device.where)
        with rng_preserved(device):
            if frame.generator is not None:
                set_generator_state(device, frame.generator)
            with self.door.phase(compiled, "forward"):
                frame, _ = self.runner.forward(compiled, frame.inputs, frame.snapshots, write_back=False)
        return frame

    # ------------------------------------------------------------------------------------------- what the runner tells

    def wants_device_times(self, compiled: CompiledStep) -> bool:
        return knobs.trace() or any(listener.wants_device_times(compiled.schedule) for listener in self.listeners)

    def phase_ran(self, run: PhaseRun) -> None:
        compiled, frame = run.frame.compiled, run.frame
        self.note_planned(self._planned_nbytes(compiled))
        self.arenas.note_planned(compiled.schedule, self.door.host_beside + compiled.uncounted_nbytes(self.door.sums)["host"])
        # Optimizer state counts as resident from the start, so a backward that allocates it is not measured.
        if not (frame.measured and run.phase == "backward" and self.door.optimizer_state_was_made()):
            compiled.completed_phases.add(run.phase)
            if run.peak_nbytes is not None:
                self._device_peaked(compiled, run.peak_nbytes)
        self.calibrator.phase_ran(run)
        self.last_trace = Trace(tuple(frame.records), "measured")
        if run.phase == "forward" and (frame.measured or self._noted_host is not compiled):
            self.note_host_bytes(compiled)
            self._noted_host = None if frame.measured else compiled  # again when the optimizer has made its state

    def backward_issued(self) -> None:
        self.door.backward_issued()

    def updates_failed(self) -> None:
        self.door.updates_failed()

    def step_ran(self, frame: Frame) -> None:
        first = self.last_ran is None  # what moved before and in it left more behind than any other step
        if (first or self.door.on_disk_nbytes()) and process_nbytes() > self.door.planned_process_nbytes:
            give_back()  # as much as the host was told to hold is used, and the C library keeps more
        compiled, trace = frame.compiled, Trace(tuple(frame.records), "measured")
        exact = self.device.where.type == "cpu" or self.wants_device_times(compiled)  # else: when work was issued
        self.last_trace, self.last_ran = trace, (compiled.schedule, trace)
        if exact:
            self.last_step = compiled.schedule, trace
        for listener in self.listeners:
            listener.step_ran(compiled, trace if exact else None)

    def _planned_nbytes(self, compiled: CompiledStep) -> int:
        """Returns the device bytes that a step may take with what others hold."""
        own = compiled.schedule.peak_nbytes["device"]
        if compiled.tangents is None:
            return own + self.beside_nbytes(compiled)
        return own + self.frames.nbytes() + compiled.uncounted_nbytes(self.door.sums)["device"]

    def _device_peaked(self, compiled: CompiledStep, nbytes: int) -> None:
        self.peak_device_bytes = max(self.peak_device_bytes, nbytes)
        if nbytes > (planned := self._planned_nbytes(compiled)):
            warnings.warn(
                f"the device peak was {nbytes} bytes, expected at most the planned {planned}: a kernel took more than when "
                "it was measured. Please report it with what MT_DUMP=dir writes",
                stacklevel=2,
            )

    def fetched_nbytes(self) -> dict[str, int]:
        """Returns the bytes that the last whole step copied from host to device, and those that its plan counts on."""
        if self.last_ran is None:
            return {"fetched_bytes": 0, "planned_fetched_bytes": 0}
        schedule, trace = self.last_ran
        planned = sum(i.nbytes for i in schedule.instructions if i.op == "copy" and i.queue == "h2d")
        return {"fetched_bytes": moved_nbytes(schedule, trace, "h2d"), "planned_fetched_bytes": planned}

    def note_host_bytes(self, compiled: CompiledStep | None) -> None:
        """Updates the host peak with the memory held now: the training state that is neither on the device nor on disk, the
        arena, and what requests to the disk go through."""
        resident = 0
        if compiled is not None:
            new = compiled.uncounted_nbytes(1)["device"] if compiled.problem.budgets.updates is None else 0
            resident = compiled.schedule.resident_nbytes.get("device", 0) + new
        state = max(0, sum(self.door.state_nbytes().values()) - resident - self.door.on_disk_nbytes())
        beside = self.arenas.all_host_nbytes() + self.door.disk_staging_nbytes()
        self.peak_host_bytes = max(self.peak_host_bytes, state + beside)


def pooled_nbytes(schedule: Schedule) -> int:
    """Returns the most device bytes that a step allocates beside its arena and resident parameters."""
    placed = schedule.arena_nbytes.get("device", 0) + schedule.resident_nbytes.get("device", 0)
    return schedule.peak_nbytes["device"] - placed
