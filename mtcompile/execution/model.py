"""One compiled model: where its parameters are at home, what its optimizer will need, and its one step at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from mtcompile.capture.arguments import micro_batches, sent
from mtcompile.capture.description import describe
from mtcompile.capture.dynamo import front_end
from mtcompile.errors import StepError
from mtcompile.execution.program import Collected, DifferentMicroBatches, Program
from mtcompile.execution.session import Engine
from mtcompile.machine.device import free_nbytes, total_nbytes
from mtcompile.optim.backward_update import UpdatesInBackward
from mtcompile.optim.master_weights import cast
from mtcompile.optim.precision import Precision
from mtcompile.optim.update_options import UpdateOptions
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.planning.planner import DoesNotFit, Planned
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import gib

# Optimizer state per parameter, in parameter sizes, of the torch.optim classes; anything else is taken as Adam's.
_STATE_COPIES = {
    "SGD": 1.0,
    "Adagrad": 1.0,
    "RMSprop": 3.0,
    "Adam": 2.0,
    "AdamW": 2.0,
    "Adamax": 2.0,
    "NAdam": 2.0,
    "RAdam": 2.0,
}
_UNKNOWN_STATE_COPIES = 2.0


class ModelEngine(Engine):
    """``memory``, ``host``: bytes; without ``memory``, what ``free_nbytes`` says. The model is on the host."""

    def __init__(
        self,
        model: nn.Module,
        call: Any,
        device: Device,
        memory: int | None,
        host: int | None,
        kernels: str,
        loss_chunks: int | str,
        policy: str,
        optimizer: torch.optim.Optimizer | None,
        throttle: Machine | None,
        precision: Precision,
        updates: UpdateOptions | None,
        accumulate: int,
        viz: str | Path | None,
    ) -> None:
        there = total_nbytes(device)
        if memory is not None and there is not None and memory > there:
            raise ValueError(f"expected memory of at most the {there} bytes ({gib(there)}) of {device.where}, found {memory}")
        self.optimizer: torch.optim.Optimizer | None = None
        self.masters = cast(model, precision)
        memory = memory if memory is not None else free_nbytes(device)
        names = {"device": "memory", "host": "host"}
        super().__init__(device, memory, host, names, kernels, loss_chunks, policy, throttle, precision, viz)
        self.model = weakref.ref(model)
        self.title = type(model).__name__.removeprefix("Compiled")
        if updates is not None:
            self.updates = UpdatesInBackward(model, updates, self.masters, self.drain)
        if optimizer is not None:
            self.bind(optimizer)
        for parameter in model.parameters():  # at home on the host, all of them
            self.moved(parameter)
        self.accumulate = accumulate
        self.sent_nbytes = 0  # of the call's tensors, copied to the device for its length
        self._captured = front_end(call, self._backend, device.where)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer that steps the model from now on."""
        if self.updates is not None and optimizer is not self.optimizer:  # first: its hooks look at p.grad, the others hide it
            self.updates.bind(optimizer)
        if self.masters is not None and optimizer is not self.optimizer:
            self.masters.bind(optimizer)
        self.optimizer = optimizer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call. Tensors of the host that are passed to it go to the device first."""
        if self.device.where.type != "cpu":
            (args, kwargs), self.sent_nbytes = sent((args, kwargs), self.device.where)
        if self.accumulate == 1 or not torch.is_grad_enabled():
            return self._captured(*args, **kwargs)
        if self.masters is not None:
            self.masters.take_any()
        try:
            return self._in_micro_batches(args, kwargs)
        except DifferentMicroBatches:  # a model may settle at its first call what it does from then on
            return self._in_micro_batches(args, kwargs)

    def _in_micro_batches(self, args: Any, kwargs: Any) -> Any:
        self.collected = Collected(self.accumulate, self.masters is not None)
        try:
            for some, named in micro_batches((args, kwargs), self.accumulate):
                made = self._captured(*some, **named)
            return made
        finally:
            self.collected = None

    def moved(self, parameter: nn.Parameter) -> None:
        """Optimizer state goes where its parameter went (a step counter only where the optimizer wants it there)."""
        if self.masters is not None:
            self.masters.moved(parameter)
        state = self.optimizer.state.get(parameter) if self.optimizer is not None else None
        if self.optimizer is None or not state:
            return
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        counters_too = parameter.device.type == "cpu" or group.get("fused") or group.get("capturable")
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (value.dim() > 0 or counters_too):
                state[key] = value.to(parameter.device)

    def replaced(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        if self.masters is not None:
            self.masters.replace(parameter, values)

    def _backend(self, graph: Any, inputs: Any) -> Program:
        """What Dynamo calls with a captured graph."""
        model = self.model()
        assert model is not None
        names: dict[int, tuple[str, str]] = {id(b): ("buffer", n) for n, b in model.named_buffers()}
        names |= {id(p): ("param", n) for n, p in model.named_parameters()}
        program = Program(self, describe(graph, inputs, lambda tensor: names.get(id(tensor)), self.device.where))
        if self.device.where.type != "cpu" and not self.home.tiers and self.collected is None:
            # Dynamo guards the devices of parameters as they are when this returns: send them where they will stay, or
            # the second call is captured again.
            self.compile(program, program.pattern if torch.is_grad_enabled() and any(program.pattern) else None)
        return program

    def place(self, step: fx.GraphModule) -> None:
        step.meta["homes"] |= {name: block for name, block in self.home.blocks.items() if name in step.meta["homes"]}

    def constraints(self, step: fx.GraphModule, reserved: int) -> tuple[Budgets, dict[str, str] | None]:
        """Residency of parameters is the model's: the first program decides it."""
        fixed = None
        if self.masters is not None and not self.masters.may_be_on(self.device.where, self.optimizer):
            fixed = dict.fromkeys(step.meta["homes"].values(), "host")
        if self.home.tiers:
            fixed = dict(self.home.tiers)
            for name, block in step.meta["homes"].items():
                if name not in self.home.places:
                    fixed.setdefault(block, "host")
        free, copies = self.available(reserved), self.state_copies()
        elsewhere = {b for b, tier in self.home.tiers.items() if tier == "device"} - set(step.meta["homes"].values())
        if free is not None:  # resident parameters that this program does not read take their room all the same
            free -= sum(int(self.home.slabs[b].numel() * (2 + copies)) for b in elsewhere)
        updates = None
        if self.updates is not None and any(spec.kind == "grad" for spec in step.meta["outputs"]):
            updates, step.meta["updated"] = self.updates.plan_updates(copies), self.updates.updated_names()
        return Budgets(free, self.host, copies, reserve=self.reserve(step) + self.sent_nbytes, updates=updates), fixed

    def kernels_of(self, step: fx.GraphModule) -> dict[str, Any]:
        return super().kernels_of(step) | ({} if self.updates is None else self.updates.kernels(step))

    def key(self) -> Any:
        return None if self.updates is None else self.updates.parameter_ids()

    def relax(self, error: DoesNotFit) -> bool:
        """A later program that does not fit beside resident parameters sends them home."""
        if error.tier != "device" or "device" not in self.home.tiers.values() or self.alive():
            return False
        if self.device.where.type != "cpu" and self.in_backward:  # autograd expects gradients where parameters were
            return False
        self.home.tiers = dict.fromkeys(self.home.tiers, "host")
        self.home.version += 1
        return True

    def settle(self, step: fx.GraphModule, planned: Planned) -> None:
        model = self.model()
        assert model is not None
        for block in dict.fromkeys(step.meta["homes"].values()):
            self.home.tiers.setdefault(block, planned.plan.params(block))
        self.home.adopt(step.meta["homes"], dict(model.named_parameters()))
        self.home.arrange()
        for key in self.home.slabs:
            self.home.tiers.setdefault(key, "host")

    def state_copies(self) -> float:
        if self.optimizer is None:
            return 1.0 + 2.0 * _UNKNOWN_STATE_COPIES if self.precision.split else _UNKNOWN_STATE_COPIES
        copies = _STATE_COPIES.get(type(self.optimizer).__name__, _UNKNOWN_STATE_COPIES)
        if self.precision.split:  # in bf16 weights: fp32 state, and a remainder
            return 1.0 + 2.0 * copies
        return copies + (1.0 if any(g.get("amsgrad") for g in self.optimizer.param_groups) else 0.0)

    def before_accumulation(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        if self.masters is not None:
            self.masters.widen(t for t, gradient in zip(inputs, gradients, strict=True) if gradient is not None)

    def begin_training_forward(self) -> None:
        """Raise when an earlier training forward still waits for its backward, or a fault left the model between two steps."""
        if self.updates is not None:
            self.updates.before_forward()
        if not self.alive():
            return
        gc.collect()  # a loss in a reference cycle is not alive
        waiting = self.alive()
        if not waiting:
            return
        frame = waiting[-1]
        losses = [t for ref in frame.outputs if (t := ref()) is not None and t.numel() == 1 and t.is_floating_point()]
        if losses and not any(bool(t.detach().isfinite()) for t in losses):
            frame.spent = True  # the step was skipped for its non-finite loss, which the caller's variable still holds
            frame.memory.tensors.clear()
            return
        raise StepError(
            "a second training forward was started while an earlier one still waits for its backward; one step's saved "
            "values are kept at a time. Call backward first, drop the earlier loss (del loss), or use torch.no_grad() "
            "for evaluation"
        )

    def state_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state as they are now."""
        model = self.model()
        assert model is not None
        parameters = [p for _, p in nn.Module.named_parameters(model)]  # the model's own waits for updates under way
        weights = sum(p.numel() * p.element_size() for p in parameters)
        widths = ((p, p if p.grad is None else p.grad) for p in parameters if p.requires_grad)  # accumulated ones are wider
        gradients = sum(p.numel() * like.element_size() for p, like in widths) if self.updates is None else 0
        state = 0
        if self.optimizer is not None:
            for entry in self.optimizer.state.values():
                state += sum(v.numel() * v.element_size() for v in entry.values() if isinstance(v, torch.Tensor))
        masters = self.masters.nbytes() if self.masters is not None else 0
        return {"weights": weights, "masters": masters, "gradients": gradients, "optimizer": state}

    def host_bytes(self) -> int:
        """Host memory held for this model: everything at home that is not on the device, and the host arena."""
        resident = self.last.schedule.resident_nbytes.get("device", 0) if self.last else 0
        return max(0, sum(self.state_bytes().values()) - resident) + super().host_bytes()

    def report(self) -> dict[str, Any]:
        state = self.state_bytes()
        peaks = self.last.schedule.peak_nbytes if self.last else {}
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes())
        return {
            "budget_device_bytes": self.memory,
            "peak_device_bytes": self.peak_device_bytes,
            "planned_peak_device_bytes": peaks.get("device", 0),
            "budget_host_bytes": self.host,
            "peak_host_bytes": self.peak_host_bytes,
            "planned_peak_host_bytes": peaks.get("host", 0),
            "state_bytes": sum(state.values()),
            **{f"{name}_bytes": nbytes for name, nbytes in state.items()},
        }
