"""A compiled model: the call that Dynamo captures, its micro-batches, and its memory report."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mtcompile import torch_private
from mtcompile.capture.arguments import Attributes, batch_sizes, micro_batches, possible_counts, sent, with_whole
from mtcompile.capture.description import describe
from mtcompile.capture.dynamo import front_end
from mtcompile.capture.refusals import naming_casts
from mtcompile.capture.surroundings import Surroundings
from mtcompile.distributed.door import RanksDoor
from mtcompile.distributed.ranks import Ranks
from mtcompile.errors import BudgetError, CaptureError, StepError, told_briefly
from mtcompile.execution.compiled import CompiledStep, LiveFrames
from mtcompile.execution.elastic.replanner import follow_speeds
from mtcompile.execution.memory.host_room import check_room
from mtcompile.execution.model_door import ModelDoor
from mtcompile.execution.plain.calls import GradientFreeCalls
from mtcompile.execution.plain.sizes import CallSize, size_of_call, tensors_in
from mtcompile.execution.plain.steps import PlainSteps, may_be_plain
from mtcompile.execution.program import Collector, DifferentMicroBatches, MicroBatchCalls, NotCompared, Program, refuse_tangents
from mtcompile.execution.session import Session
from mtcompile.machine.device import free_nbytes, peak_reserved_nbytes, process_nbytes, reservable_nbytes
from mtcompile.optim.calling_trainer import CallingTrainer, accelerate_goes_on, calling_trainer
from mtcompile.optim.wholeness import is_running, parameters_of
from mtcompile.options import Options
from mtcompile.passes.joint.exceptions import of_all
from mtcompile.passes.plan import Plan
from mtcompile.references import weakly
from mtcompile.runtime.devices.caching import needed_nbytes
from mtcompile.runtime.devices.protocol import Device


class CompiledModel:
    """The state of a compiled module: its door, its session, and the call that Dynamo captures. Expects a model on the host."""

    session: Session

    def __init__(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        options: Options,
        device: Device,
        optimizer: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        if options.cuts is not None and ranks is not None and (ranks.hosts > 1 or options.updates is not None):
            cut = f'fragments={options.fragments!r} where several ranks train: expected one host and update="step", found'
            if ranks.hosts > 1:
                raise ValueError(f"{cut} {ranks.hosts} hosts, each with parts of whole weights; leave fragments= out")
            raise ValueError(
                f'{cut} update="backward", by which ranks update shares of whole weights; pass update="step", or leave '
                "fragments= out"
            )
        if options.accumulate == "auto" and ranks is not None:
            raise ValueError('accumulate="auto" where several ranks train: expected a number, since all ranks need the same')
        self.options = options if options.memory is not None else replace(options, memory=free_nbytes(device))
        self.device = device
        frames = LiveFrames()
        opens = ModelDoor if ranks is None else functools.partial(RanksDoor, ranks=ranks)
        self.door: ModelDoor = opens(model, self.options, device, frames, weakly(self._drain))
        self.door.device_room = reservable_nbytes(device) if options.memory is None else None
        title = type(model).__name__
        self.session = Session(device, self.options, self.door, self.door.parameters, frames, title)
        if options.elastic:
            follow_speeds(self.session)
        if optimizer is not None:
            self.door.bind(optimizer)
        for parameter in model.parameters():  # at home on the host, all of them
            self.door.parameters.moved(parameter)
        self._collector = Collector()
        self._may_be_lazy = True
        self._surroundings = Surroundings()
        # The programs that Dynamo may call, by the functions that it has for them.
        self._programs: MutableMapping[Callable[..., Any], Program] = weakref.WeakKeyDictionary()
        # What runs beside programs would use the gradients of one rank alone.
        in_parts = options.updates is None and options.accumulate == 1 and ranks is None
        self._counts: dict[CallSize, int] = {}  # of micro-batches, where accumulate is "auto"
        self._branches = False  # whether a forward was seen to branch by its inputs: micro-batches then do as the whole batch
        self._without_gradients = GradientFreeCalls(self.session, call, weakly(self._run))
        may = may_be_plain(self.options, self.door.masters is not None) and ranks is None
        self._plain = PlainSteps(self.session, self._without_gradients.plain_step) if may else None
        self._captured = front_end(call, weakly(self._backend), device.where, in_parts, self._programs.clear)
        self._has_new_parts = False
        # Its own objects refer to each other, and would hold memory until the next garbage collection.
        self._at_end = weakref.finalize(model, self.release)
        self._at_end.atexit = False

    def follow_trainer(self) -> None:
        """Takes the optimizer of the trainer that calls, if it steps this model, and with ``update="backward"`` how it clips
        and whether it goes on to add up gradients, for as long as its training runs. Raises StepError where it and ``compile``
        were told otherwise."""
        if torch_private.current_backward() >= 0:  # its loop is that of the forward, and may be in another thread
            return
        trainer, model = calling_trainer(), self.door.model()
        if trainer is None or model is None:
            self._follow(None)
            self.door.add_up(accelerate_goes_on())
            return
        own = set(map(id, nn.Module.parameters(model)))
        steps = [each for each in trainer.optimizers if any(id(p) in own for p in parameters_of(each))]
        if len(steps) != 1:
            self._follow(None)
            return
        hooks = self.door.updates is not None or self.door.masters is not None
        if hooks and steps[0] is not self.door.optimizer and is_running(steps[0]):
            raise StepError(
                f"{trainer.name} called the model within optimizer.step(), too late to bind that optimizer. Call "
                "model.bind(optimizer), of the compiled model, where you make it, such as in configure_optimizers"
            )
        if trainer.trains or self.door.optimizer is None:
            self.door.bind(steps[0])
        self.door.add_up(trainer.goes_on if trainer.trains else accelerate_goes_on())
        self._follow(trainer if trainer.trains else None)

    def _follow(self, trainer: CallingTrainer | None) -> None:
        """Clips as the trainer will, or as ``compile`` was told."""
        if self.door.updates is None:
            return
        if trainer is not None and trainer.by_value:
            raise StepError(
                f'{trainer.name} clips gradients by value after the backward, where update="backward" has used them. Expected '
                'gradient_clip_algorithm="norm", or update="step"'
            )
        if self.door.updates.follow(trainer):
            options = replace(self.options, updates=self.door.updates.options)
            self.options = self.door.options = options
            self.session.options = replace(self.session.options, updates=options.updates)

    def _drain(self) -> None:
        self.session.drain()

    @told_briefly
    @torch_private.one_at_a_time
    def close(self) -> None:
        """Ends the use of plans: waits for updates, gives parameters memory of their own, and frees everything else. Raises the
        error that stopped updates, if any, after all that; and BudgetError, before anything has changed, if host memory has no
        room for what is on disk."""
        check_room(self.door.on_disk_nbytes(), "what is on disk", "save a checkpoint and leave the model as it is")
        failure: BaseException | None = None
        try:
            self.session.drain()
        except Exception as error:
            failure = error
        self.session.closed = True
        for frame in self.session.frames.waiting():
            frame.evict()
        self.door.give_back()
        self.release()
        self._at_end.detach()
        if failure is not None:
            raise failure

    def release(self) -> None:
        """Frees arenas, programs, and the homes of parameters, which keep their values."""
        for program in self.programs:
            program.release()
        self._programs.clear()
        self._collector.parts.clear()
        self.session.release()
        self.door.release()

    @told_briefly
    @torch_private.one_at_a_time
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. Sends host tensors among the arguments to the device first. Raises StepError for a model that an
        error has left between two steps."""
        with self.door.call():
            return self._call(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        if torch_private.in_transform():
            return self._in_transform(args, kwargs)
        if self.device.where.type != "cpu":
            (args, kwargs), self.door.sent_nbytes = sent((args, kwargs), self.device.where)
        if self._may_be_lazy:
            self._may_be_lazy = bool(lazy := self.door.lazy_modules())
            if lazy:
                return self._initializing(lazy, args, kwargs)
        if (model := self.door.model()) is not None and not _needs_gradients(model, args, kwargs):
            self._surroundings.check_call(model.parameters(), False)
            with self.door.training_call() if self.door.in_parts else contextlib.nullcontext():
                return self._without_gradients(model, args, kwargs)
        self.follow_trainer()
        if self.door.masters is not None and self.door.optimizer is None:
            raise StepError(
                'precision="bf16-master32" needs the optimizer that updates the fp32 masters: pass optimizer= to compile, or '
                "call model.bind(optimizer)"
            )
        with self.door.training_call(), naming_casts(self.options.precision):
            return self._run(args, kwargs)

    def _in_transform(self, args: Any, kwargs: Any) -> Any:
        """Runs the plain forward, which the budget does not count. Raises StepError if one of its tensors is elsewhere."""
        model = self.door.model()
        assert model is not None, "expected the model whose call this is"
        self.session.drain()
        tensors = (*nn.Module.parameters(model), *model.buffers())
        if self.door.in_parts or any(tensor.device != self.device.where for tensor in tensors):
            raise StepError(
                "the call stands in a transform or a trace (torch.func, vmap, make_fx), and runs the plain forward; "
                f"expected all weights on {self.device.where}, found some elsewhere, where the plan keeps them. Call a "
                f"plain copy in it: copy.deepcopy(model).to({str(self.device.where)!r})"
            )
        return self._without_gradients.call(model, *args, **kwargs)

    def _initializing(self, lazy: Mapping[nn.Module, str], args: Any, kwargs: Any) -> Any:
        """Calls a model with lazy modules, which get their parameters in this call."""
        with torch_private.initializing(lazy, self.door.initialized):
            model = self.door.model()
            if model is not None and model in lazy:
                torch_private.initialize_root(model, args, kwargs)
            return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if (model := self.door.model()) is not None:
            self._surroundings.check_call(model.parameters(), torch.is_grad_enabled())
            refuse_tangents(itertools.chain(tensors_in((args, kwargs)), model.parameters()))  # torch 2.14 captures no such call
        trains = torch.is_grad_enabled()
        if trains and (count := self._count(args, kwargs)) > 1:
            return self._in_equal_micro_batches(args, kwargs, count)
        size = None
        if self._plain is not None and model is not None and trains:
            size = size_of_call(model, args, kwargs, self.device.where)
            if (needed := self._plain.room_for(model, size)) is not None:
                return self._plain(model, size, needed, args, kwargs)
        if trains:
            self._collector.parts.clear()
        output = self._captured(model, *args, **kwargs)
        if self._has_new_parts and trains:
            self._has_new_parts = False
            self.door.count_glue(torch_private.leaves_outside(output, "_StepBackward"))
        if self._plain is not None and size is not None:  # the forward is one program
            self._plain.note_planned(size)
        return output

    def _count(self, args: Any, kwargs: Any) -> int:
        """Returns how many micro-batches a training call runs: with "auto", those of the fastest plan. Raises BudgetError if no
        plan fits."""
        if self.options.accumulate != "auto":
            return int(self.options.accumulate)
        model = self.door.model()
        assert model is not None, "expected the model whose call this is"
        size = size_of_call(model, args, kwargs, self.device.where)
        if size not in self._counts:
            self._counts[size] = self._fastest_count(args, kwargs)
        return self._counts[size]

    def _fastest_count(self, args: Any, kwargs: Any) -> int:
        sizes, step_us, refusals = batch_sizes((args, kwargs)), dict[int, float](), list[BudgetError]()
        for count in possible_counts(sizes[0]) if len(sizes) == 1 else [1]:
            compiled = list[CompiledStep]()
            try:
                self._in_equal_micro_batches(args, kwargs, count, compiled)
            except BudgetError as error:
                refusals.append(error)
                continue
            except (CaptureError, DifferentMicroBatches):
                if count == 1:
                    raise
                break  # a loss that cannot be put together, say
            step_us[count] = compiled[-1].plan.total_us
            if compiled[-1].plan.all_resident:  # smaller micro-batches take longer
                break
        if not step_us:
            raise min(refusals, key=lambda error: error.minimum_bytes)
        return min(step_us, key=lambda count: step_us[count])

    def _in_equal_micro_batches(self, args: Any, kwargs: Any, count: int, compiled: list[CompiledStep] | None = None) -> Any:
        """Runs a training call as that many micro-batches; or compiles it, into ``compiled``."""
        if self.door.masters is not None:
            self.door.masters.take_any()
        try:
            return self._in_micro_batches(args, kwargs, count, compiled, self._branches and count > 1)
        except (DifferentMicroBatches, NotCompared):  # they may differ in the first call alone, or by what each of them holds
            return self._in_micro_batches(args, kwargs, count, compiled, count > 1)

    def _in_micro_batches(self, args: Any, kwargs: Any, count: int, compiled: list[CompiledStep] | None, compares: bool) -> Any:
        """``compares``: enters the model with the whole batch first, to compare with and to follow it where it branches."""
        model = self.door.model()
        assert model is not None, "expected the model whose call this is"
        before, ended, values = Attributes(model), False, list[bool | int]()
        self._collector.batch = batch = MicroBatchCalls(count, self.door.masters is not None, compiled)
        try:
            if compares:
                batch.takes_whole = True
                whole = next(micro_batches((args, kwargs), 1))  # views, as micro-batches are
                with torch_private.noting_values() as values:
                    self._captured(model, *whole[0], **whole[1])
                batch.takes_whole = False
                batch.branches = self._branches = self._branches or bool(values)
            for micro in micro_batches((args, kwargs), count) if count > 1 else ((args, kwargs),):
                before.restore()  # what forward keeps of the micro-batch before is not computed yet
                with torch_private.following(values):
                    output = self._captured(model, *micro[0], **micro[1])
            ended = compiled is None
            return with_whole(output, micro, (args, kwargs))
        finally:
            self._collector.batch = None
            if not ended:
                before.restore()

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Makes a program from a graph that Dynamo has captured."""
        if graph.meta.get("is_part"):
            self._has_new_parts, self._plain = True, None
            self.door.count_glue()
        names, device, whole = self.door.names(), self.device.where, self._collector.batch is None
        description = describe(graph, inputs, lambda t: names.get(id(t)), device, views=whole)
        program = Program(self.session, description, self._collector)
        undecided = not self.door.parameters.slabs or self.door.parameters.provisional
        if device.type != "cpu" and undecided and whole:
            # Dynamo guards on the devices of parameters when this returns. Send them where they will stay, or the second
            # call is captured again.
            program.compile()
        call = weakly(program.__call__)
        self._programs[call] = program
        return torch_private.after_initialization(call)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that Dynamo may call."""
        return tuple(self._programs.values())

    @property
    def parts(self) -> tuple[CompiledStep, ...]:
        """The parts that the last training call ran, in order; empty if the forward is one graph."""
        return tuple(self._collector.parts.values())

    @property
    def plan(self) -> Plan | None:
        """The plan of the program that last trained. Of a forward in parts, with the ``numerics`` of all."""
        plan, parts = self.session.plan, self.parts
        if plan is None or not parts:
            return plan
        numerics = of_all([part.problem.numerics for part in parts])
        note = f"the forward is compiled in parts, {len(parts)} of them with a plan. This is that of one, with numerics of all"
        return replace(plan, numerics=self.session.numerics_now(str(numerics)), notes=(*plan.notes, note))

    @property
    def between_backward_and_step(self) -> bool:
        """True from a backward that has updated the parameters to the optimizer's step that ends it."""
        return self.door.updates is not None and not self.door.updates.loop.stepped

    @torch_private.one_at_a_time
    def report(self) -> dict[str, Any]:
        """Returns bytes: budgets, planned and measured peaks per tier, and the training state; where several ranks train, those
        of the host and of the state are of all ranks of this host together."""
        session, here = self.session, self.door.ranks_here
        state = {name: nbytes * here for name, nbytes in self.door.state_nbytes().items()}
        session.note_host_bytes(session.last)
        return {
            "budget_device_bytes": self.options.memory,
            "peak_device_bytes": session.peak_device_bytes,
            "planned_peak_device_bytes": session.planned_device_bytes,
            **self._reserved_report(),
            "budget_host_bytes": self.door.options.host,
            "peak_host_bytes": session.peak_host_bytes * here,
            "planned_peak_host_bytes": session.arenas.planned_nbytes["host"] * here,
            "process_bytes": process_nbytes(),
            "planned_process_bytes": self.door.planned_process_nbytes,
            **self._disk_report(),
            **({} if session.replanner is None else {"plan_changes": list(session.replanner.changes)}),
            "state_bytes": sum(state.values()),
            **{f"{name}_bytes": nbytes for name, nbytes in state.items()},
        }

    def _reserved_report(self) -> dict[str, int]:
        """Returns what torch's allocator reserves on an accelerator: as simulated for the plan, and as measured."""
        device, last = self.session.device, self.session.last
        if device.where.type == "cpu":
            return {}
        planned = needed_nbytes(last.schedule) if last else 0
        return {"planned_reserved_device_bytes": planned, "peak_reserved_device_bytes": peak_reserved_nbytes(device)}

    def _disk_report(self) -> dict[str, Any]:
        if self.options.disk is None:
            return {}
        disk = self.session.parameters.disk
        return {
            "budget_disk_bytes": self.options.disk.nbytes,
            "peak_disk_bytes": 0 if disk is None else disk.peak_nbytes + disk.moved_nbytes,
            "planned_peak_disk_bytes": self.session.arenas.planned_nbytes["disk"],
        }


def _needs_gradients(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Tells whether a gradient may flow back from what a call returns."""
    if not torch.is_grad_enabled():
        return False
    parameters = (parameter for _, parameter in nn.Module.named_parameters(model))  # the model's own methods wait for updates
    return any(tensor.requires_grad for tensor in itertools.chain(parameters, tensors_in((args, kwargs))))
