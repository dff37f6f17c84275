"""What stands behind one compiled model: its home, its programs, its budget, and the one step that may be alive."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from mtcompile import capture, knobs
from mtcompile.errors import BudgetError, CaptureError, StepError
from mtcompile.home import Home
from mtcompile.kernels import Workspaces, eager_kernel
from mtcompile.passes import rewrite
from mtcompile.passes.build import build
from mtcompile.passes.check import check_schedule, same_computation
from mtcompile.passes.cost import Machine
from mtcompile.passes.normalize import normalize
from mtcompile.passes.planner import Budgets, DoesNotFit, Planned, make_plan
from mtcompile.passes.step_graph import listing
from mtcompile.program import Compiled, Frame, Program, Tangents, describe_compiled, run_forward
from mtcompile.runtime.arena import arena
from mtcompile.runtime.cpu import Arenas
from mtcompile.runtime.schedule import aligned, gib
from mtcompile.runtime.trace import Trace
from mtcompile.runtime.verify import verify

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


class Engine:
    """Compiles and runs one model's programs. ``memory``, ``host``: bytes; None takes half of what is free."""

    def __init__(self, model: nn.Module, call: Any, memory: int | None, host: int | None) -> None:
        self.model = weakref.ref(model)
        free = psutil.virtual_memory().available
        self.memory = memory if memory is not None else free // 2
        self.host = host
        self.machine = Machine()
        self.home = Home()
        self.workspaces = Workspaces()
        self.optimizer: torch.optim.Optimizer | None = None
        self.alive: weakref.ref[Frame] | None = None
        self.last: Compiled | None = None
        self.last_trace: Trace | None = None
        self.peak_device_bytes = 0
        self.peak_host_bytes = 0
        self._measured: set[tuple[int, str]] = set()
        self._arenas: dict[str, torch.Tensor] = {}
        self.call = capture.front_end(call, self._backend)

    # ------------------------------------------------------------------------------------------------- compiling

    def _backend(self, graph: Any, inputs: Any) -> Program:
        """What Dynamo calls with a captured graph."""
        model = self.model()
        assert model is not None
        names: dict[int, tuple[str, str]] = {id(b): ("buffer", n) for n, b in model.named_buffers()}
        names |= {id(p): ("param", n) for n, p in model.named_parameters()}
        return Program(self, capture.describe(graph, inputs, lambda tensor: names.get(id(tensor))))

    def compile(self, program: Program, tangents: Tangents, reserved: int = 0) -> Compiled:
        """The program planned for one gradient pattern, thread count and free memory; made on first use."""
        key = (tangents, torch.get_num_threads(), reserved)
        known = program.compiled.get(key)
        if known is None or known.home_version != self.home.version:
            known = program.compiled[key] = self._compile(program, tangents, reserved)
        self.last = known
        return known

    def _compile(self, program: Program, tangents: Tangents, reserved: int) -> Compiled:
        joint = capture.joint_graph(program.description, tangents)
        try:
            joint = normalize(joint)
        except NotImplementedError as error:
            raise CaptureError(f"the model uses {error}; expected ATen operations only") from None
        step = build(joint)
        step.meta["homes"] |= {name: block for name, block in self.home.blocks.items() if name in step.meta["homes"]}
        planned = self._plan(step, reserved)
        same_computation(joint, planned.step)
        check_schedule(planned.step, planned.schedule)
        verify(planned.schedule)
        self._settle_homes(step, planned)
        kernels = {str(n): eager_kernel(m) for n, m in planned.step.named_children()}  # type: ignore[arg-type]
        used = {i.kernel for i in planned.schedule.instructions}
        compiled = describe_compiled(
            self,
            tangents,
            planned.plan,
            planned.step,
            planned.schedule,
            {n: k for n, k in kernels.items() if n in used},
        )
        self._show(step, planned)
        return compiled

    def _plan(self, step: Any, reserved: int) -> Planned:
        """Residency of parameters is the model's: the first program decides it, a later one that does not fit beside it
        sends parameters home."""
        budgets = Budgets(self.memory - reserved, self.host, self.state_copies())
        fixed = None
        if self.home.tiers:
            fixed = dict(self.home.tiers)
            for name, block in step.meta["homes"].items():
                if name not in self.home.places:
                    fixed.setdefault(block, "host")
        elsewhere = {b for b, tier in self.home.tiers.items() if tier == "device"} - set(step.meta["homes"].values())
        if elsewhere:  # resident parameters that this program does not read take their room all the same
            taken = sum(int(self.home.slabs[b].numel() * (2 + budgets.state_copies)) for b in elsewhere)
            budgets = Budgets(self.memory - reserved - taken, self.host, self.state_copies())
        try:
            return make_plan(step, self.machine, budgets, self.workspaces, fixed)
        except DoesNotFit as error:
            if error.tier == "device" and fixed and "device" in fixed.values() and not self._frame_alive():
                self.home.tiers = dict.fromkeys(self.home.tiers, "host")
                self.home.version += 1
                return self._plan(step, reserved)
            raise self._budget_error(error, reserved) from None

    def _budget_error(self, error: DoesNotFit, reserved: int) -> BudgetError:
        budget = self.memory if error.tier == "device" else self.host
        knob = "memory" if error.tier == "device" else "host"
        largest = "\n".join(f"  {gib(nbytes):>12}  {what}" for what, nbytes in error.causes)
        beside = f" beside {gib(reserved)} held by a training step in progress" if reserved else ""
        minimum = error.minimum + reserved
        return BudgetError(
            f"no plan fits {knob}={gib(budget or 0)}{beside}: the smallest {knob} that works is {minimum} bytes "
            f"({gib(minimum)}); the largest parts of it are\n{largest}\n"
            f"  pass {knob}={minimum} or more, or a smaller batch or sequence",
            minimum,
        )

    def _settle_homes(self, step: Any, planned: Planned) -> None:
        model = self.model()
        assert model is not None
        for block in dict.fromkeys(step.meta["homes"].values()):
            self.home.tiers.setdefault(block, planned.plan.params(block))
        self.home.adopt(step.meta["homes"], dict(model.named_parameters()))
        for key in self.home.slabs:
            self.home.tiers.setdefault(key, "host")

    def _show(self, step: Any, planned: Planned) -> None:
        level, folder = knobs.debug(), knobs.dump()
        if level >= 1:
            print(planned.plan)
        if level >= 2:
            print(planned.schedule)
        if level >= 3:
            rewrite(step, planned.plan, lambda name, graph: print(f"--- after {name}\n{listing(graph)}"))
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = f"program{len(list(Path(folder).glob('*.plan.json')))}-{os.getpid()}"
            Path(folder, f"{name}.plan.json").write_text(planned.plan.to_json(indent=1))
            Path(folder, f"{name}.schedule.json").write_text(planned.schedule.to_json(indent=1))
            Path(folder, f"{name}.step.txt").write_text(listing(planned.step))

    def state_copies(self) -> float:
        if self.optimizer is None:
            return _UNKNOWN_STATE_COPIES
        copies = _STATE_COPIES.get(type(self.optimizer).__name__, _UNKNOWN_STATE_COPIES)
        return copies + (1.0 if any(g.get("amsgrad") for g in self.optimizer.param_groups) else 0.0)

    # ---------------------------------------------------------------------------------------------------- running

    def _frame_alive(self) -> Frame | None:
        frame = self.alive() if self.alive is not None else None
        return None if frame is None or frame.spent else frame

    def begin_training_forward(self) -> None:
        """Raise when an earlier training forward still waits for its backward."""
        frame = self._frame_alive()
        if frame is None:
            return
        del frame
        gc.collect()  # a loss in a reference cycle is not alive
        frame = self._frame_alive()
        if frame is None:
            return
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

    def infer(self, program: Program, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A forward that nobody will differentiate; allowed at any time, in what memory a live step leaves."""
        frame = self._frame_alive()
        held = aligned(frame.memory.live) if frame is not None else 0
        last = self.last
        _, outputs = run_forward(self, self.compile(program, None, held), inputs)
        self.last = last or self.last
        return outputs

    def arenas(self, compiled: Compiled) -> Arenas:
        """The tiers' arenas, shared by all programs. No device slot lives from one phase to the next; host slots do, so
        a live step keeps its own host arena."""
        frame = self._frame_alive()
        made = {}
        for tier in ("device", "host"):
            nbytes = compiled.schedule.arena_nbytes.get(tier, 0)
            if tier == "host" and frame is not None:
                made[tier] = arena(nbytes)
                continue
            if (
                tier not in self._arenas
                or self._arenas[tier].numel() < nbytes
                or (tier == "device" and self._arenas[tier].numel() > nbytes)
            ):
                self._arenas.pop(tier, None)
                self._arenas[tier] = arena(nbytes)
            made[tier] = self._arenas[tier]
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes())
        return Arenas(made["device"], made["host"])

    def measuring(self, compiled: Compiled, phase: str) -> bool:
        """Whether to ask the allocator for its events: the first step of every program, and always under MT_CHECK."""
        key = (id(compiled), phase)
        first = key not in self._measured
        self._measured.add(key)
        return first or knobs.check()

    def measured(self, compiled: Compiled, nbytes: int) -> None:
        self.peak_device_bytes = max(self.peak_device_bytes, nbytes)

    # -------------------------------------------------------------------------------------------------- reporting

    def state_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state as they are now."""
        model = self.model()
        assert model is not None
        parameters = list(model.parameters())
        weights = sum(p.numel() * p.element_size() for p in parameters)
        gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        state = 0
        if self.optimizer is not None:
            for entry in self.optimizer.state.values():
                state += sum(v.numel() * v.element_size() for v in entry.values() if isinstance(v, torch.Tensor))
        return {"weights": weights, "gradients": gradients, "optimizer": state}

    def host_bytes(self) -> int:
        """Host memory held for this model: everything at home that is not on the device, and the host arena."""
        arena_bytes = self._arenas["host"].numel() if "host" in self._arenas else 0
        resident = self.last.schedule.resident_nbytes.get("device", 0) if self.last else 0
        return max(0, sum(self.state_bytes().values()) - resident) + arena_bytes

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
