"""A compiled model: the call that Dynamo captures, its micro-batches, and its memory report."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mtcompile import torch_private
from mtcompile.capture.arguments import micro_batches, sent
from mtcompile.capture.description import describe
from mtcompile.capture.dynamo import front_end
from mtcompile.capture.surroundings import Surroundings
from mtcompile.distributed.door import RanksDoor
from mtcompile.distributed.ranks import Ranks
from mtcompile.errors import told_briefly
from mtcompile.execution.compiled import LiveFrames
from mtcompile.execution.model_door import ModelDoor
from mtcompile.execution.plain.calls import GradientFreeCalls
from mtcompile.execution.plain.sizes import size_of_call, tensors_in
from mtcompile.execution.plain.steps import PlainSteps, may_be_plain
from mtcompile.execution.program import Collector, DifferentMicroBatches, MicroBatchCalls, Program
from mtcompile.execution.session import Session
from mtcompile.machine.device import free_nbytes, total_nbytes
from mtcompile.options import Options
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import gib


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
        total = total_nbytes(device)
        if options.memory is not None and total is not None and options.memory > total:
            raise ValueError(
                f"expected memory of at most the {total} bytes ({gib(total)}) of {device.where}, found {options.memory}"
            )
        self.options = options if options.memory is not None else replace(options, memory=free_nbytes(device))
        self.device = device
        frames = LiveFrames()
        opens = ModelDoor if ranks is None else functools.partial(RanksDoor, ranks=ranks)
        self.door: ModelDoor = opens(model, self.options, device, frames, lambda: self.session.drain())
        title = type(model).__name__
        self.session = Session(device, self.options, self.door, self.door.parameters, frames, title)
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
        self._without_gradients = GradientFreeCalls(self.session, call, _weak(self._run))
        may = may_be_plain(self.options, self.door.masters is not None) and ranks is None
        self._plain = PlainSteps(self.session, self._without_gradients.plain_step) if may else None
        self._captured = front_end(call, _weak(self._backend), device.where, in_parts, self._programs.clear)
        self._has_new_parts = False

    @told_briefly
    @torch_private.one_at_a_time
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. Sends host tensors among the arguments to the device first."""
        if self.device.where.type != "cpu":
            (args, kwargs), self.door.sent_nbytes = sent((args, kwargs), self.device.where)
        if self._may_be_lazy:
            self._may_be_lazy = bool(lazy := self.door.lazy_modules())
            if lazy:
                return self._initializing(lazy, args, kwargs)
        if (model := self.door.model()) is not None and not _needs_gradients(model, args, kwargs):
            self._surroundings.check_call(model.parameters(), False)
            return self._without_gradients(model, args, kwargs)
        return self._run(args, kwargs)

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
        trains = torch.is_grad_enabled()
        if self.options.accumulate > 1 and trains:
            return self._in_equal_micro_batches(args, kwargs)
        size = None
        if self._plain is not None and model is not None and trains:
            size = size_of_call(model, args, kwargs, self.device.where)
            if (needed := self._plain.room_for(model, size)) is not None:
                return self._plain(model, size, needed, args, kwargs)
        output = self._captured(*args, **kwargs)
        if self._has_new_parts and trains:
            self._has_new_parts = False
            self.door.count_glue(torch_private.leaves_outside(output, "_StepBackward"))
        if self._plain is not None and size is not None:  # the forward is one program
            self._plain.note_planned(size)
        return output

    def _in_equal_micro_batches(self, args: Any, kwargs: Any) -> Any:
        if self.door.masters is not None:
            self.door.masters.take_any()
        try:
            return self._in_micro_batches(args, kwargs)
        except DifferentMicroBatches:  # the first call of a model may differ from all later ones
            return self._in_micro_batches(args, kwargs)

    def _in_micro_batches(self, args: Any, kwargs: Any) -> Any:
        self._collector.batch = MicroBatchCalls(self.options.accumulate, self.door.masters is not None)
        try:
            for micro_args, micro_kwargs in micro_batches((args, kwargs), self.options.accumulate):
                output = self._captured(*micro_args, **micro_kwargs)
            return output
        finally:
            self._collector.batch = None

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
        call = _weak(program.__call__)
        self._programs[call] = program
        return torch_private.after_initialization(call)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that Dynamo may call."""
        return tuple(self._programs.values())

    @property
    def between_backward_and_step(self) -> bool:
        """True from a backward that has updated the parameters to the optimizer's step that ends it."""
        return self.door.updates is not None and not self.door.updates.stepped

    def report(self) -> dict[str, Any]:
        """Returns bytes: budgets, planned and measured peaks per tier, and the training state."""
        session, state = self.session, self.door.state_nbytes()
        planned = session.last.schedule.peak_nbytes if session.last else {}
        session.note_host_bytes(session.last)
        return {
            "budget_device_bytes": self.options.memory,
            "peak_device_bytes": session.peak_device_bytes,
            "planned_peak_device_bytes": session.planned_device_bytes,
            "budget_host_bytes": self.options.host,
            "peak_host_bytes": session.peak_host_bytes,
            "planned_peak_host_bytes": planned.get("host", 0),
            **self._disk_report(planned),
            "state_bytes": sum(state.values()),
            **{f"{name}_bytes": nbytes for name, nbytes in state.items()},
        }

    def _disk_report(self, planned: Mapping[str, int]) -> dict[str, Any]:
        if self.options.disk is None:
            return {}
        disk = self.session.parameters.disk
        return {
            "budget_disk_bytes": self.options.disk.nbytes,
            "peak_disk_bytes": 0 if disk is None else disk.used_nbytes,
            "planned_peak_disk_bytes": planned.get("disk", 0),
        }


def _needs_gradients(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Tells whether a gradient may flow back from what a call returns."""
    if not torch.is_grad_enabled():
        return False
    parameters = (parameter for _, parameter in nn.Module.named_parameters(model))  # the model's own methods wait for updates
    return any(tensor.requires_grad for tensor in itertools.chain(parameters, tensors_in((args, kwargs))))


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method, but does not keep its object. Dynamo keeps all backends that it was given and
    all functions that they returned, until it is reset."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        assert alive is not None, "only calls of the model lead here"
        return alive(*args)

    return call
