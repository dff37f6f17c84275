"""What every compiled callable stands on: it plans, proves and runs programs within a budget, and knows which training
steps are alive. ``model.py`` adds a model's home; ``backend.py`` is the torch.compile door."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mtcompile import cache, knobs, torch_private
from mtcompile.capture.joint import joint_graph, joint_key
from mtcompile.capture.tracing import collecting_later
from mtcompile.errors import BudgetError, CaptureError
from mtcompile.execution.calibration import KEPT_PHASES, Timed, known_machine
from mtcompile.execution.parameters import Home
from mtcompile.execution.program import Collected, Program
from mtcompile.execution.runner import Compiled, Frame, Left, Tangents, describe_compiled, run_forward, without_autocast
from mtcompile.kernels.cuda_graphs import Graphs, TorchGraphs, graphed
from mtcompile.kernels.eager import Built, EagerKernels
from mtcompile.kernels.inductor import InductorKernels
from mtcompile.kernels.measure import strides_on
from mtcompile.knobs import cuda_graphs
from mtcompile.machine.presets import machine_of
from mtcompile.optim.backward_update import UpdatesInBackward
from mtcompile.optim.precision import PRECISIONS, Precision
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.check import check_schedule, same_computation
from mtcompile.passes.generators import generator_nbytes, rng_preserved
from mtcompile.passes.joint.accumulate import Micro, repeat, weights_of
from mtcompile.passes.joint.build import build
from mtcompile.passes.joint.loss_head import chunk_loss
from mtcompile.passes.joint.loss_weights import Weights
from mtcompile.passes.joint.normalize import normalize
from mtcompile.passes.planning.planner import (
    BIT_EQUAL,
    FUSED,
    DoesNotFit,
    Planned,
    Source,
    make_plan,
    may_be_resident,
    relowered,
    resident_plan,
)
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.step_graph import calls, copy_step, has_random, is_convert, listing
from mtcompile.report.live_timeline import pages
from mtcompile.runtime.devices.cpu import Arenas, CpuMemory
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Schedule, Tier, aligned, gib
from mtcompile.runtime.trace import Trace
from mtcompile.runtime.verify import verify

KERNELS = ("eager", "inductor")
_AUTO_CHUNKS = (1, 4, 16, 64)  # what loss_chunks="auto" chooses among


def check_options(kernels: str, loss_chunks: int | str, policy: str = "fastest") -> None:
    """Raise ValueError for what cannot be honoured."""
    if policy not in ("fastest", *POLICIES):
        raise ValueError(f"expected policy to be one of fastest, {', '.join(POLICIES)}, found {policy!r}")
    if kernels not in KERNELS:
        raise ValueError(f"expected kernels to be one of {', '.join(KERNELS)}, found {kernels!r}")
    number = isinstance(loss_chunks, int) and not isinstance(loss_chunks, bool) and loss_chunks >= 1
    if not number and loss_chunks != "auto":
        raise ValueError(f'expected loss_chunks to be a whole number of 1 or more, or "auto", found {loss_chunks!r}')


def _as_it_is(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values


def _not_repeated(micro: Micro, error: NotImplementedError) -> CaptureError:
    return CaptureError(f"accumulate={micro.count}: the model has {error}; accumulate by hand")


class Engine:
    """Compiles and runs programs. ``memory``, ``host``: budgets in bytes, None for no limit; ``knobs``: what the caller
    calls them. ``throttle``: speeds that the emulated device keeps to, None for its own. ``viz``: where timelines go."""

    def __init__(
        self,
        device: Device,
        memory: int | None,
        host: int | None,
        knobs: dict[str, str],
        kernels: str,
        loss_chunks: int | str,
        policy: str = "fastest",
        throttle: Machine | None = None,
        precision: Precision = PRECISIONS["model"],
        viz: str | Path | None = None,
    ) -> None:
        self.precision = precision
        self.loss_chunks, self.policy = loss_chunks, policy
        self.memory, self.host, self.knobs, self.kernels = memory, host, knobs, kernels
        self.device, self.throttle = device, throttle
        self.home = Home(device, self.moved, self.replaced)
        self.eager = EagerKernels(device.where)
        self.inductor = InductorKernels(device.where)
        on = device.where.type == "cuda" and cuda_graphs()
        self.graphs: Graphs | None = TorchGraphs(device.where) if on else None
        self.staged = self.in_backward = False
        self.machine = self.speeds()
        self.timed: deque[Timed] = deque(maxlen=KEPT_PHASES)
        self.last: Compiled | None = None
        self.last_trace: Trace | None = None
        self.pages, self.title = pages(viz), ""
        self.last_step: tuple[Schedule, Trace] | None = None  # whole, and by the device's clock
        self.peak_device_bytes = 0
        self.peak_host_bytes = 0
        self.left: Left | None = None
        self.collected: Collected | None = None  # while the calls of one step are
        self.updates: UpdatesInBackward | None = None
        self._frames: list[weakref.ref[Frame]] = []
        self._arenas: dict[str, torch.Tensor] = {}
        self._views: list[dict[str, torch.Tensor]] = []

    # ------------------------------------------------------------------------------- what the two doors do differently

    def place(self, step: fx.GraphModule) -> None:
        """Where the step graph's inputs are at home."""

    def needs_loss_head(self, joint: fx.GraphModule) -> bool:
        """Whether a training graph without one cannot be what ``loss_chunks`` was meant for."""
        return True

    def constraints(self, step: fx.GraphModule, reserved: int) -> tuple[Budgets, dict[str, str] | None]:
        """What a plan for ``step`` must keep to: the budgets, and the home tiers already decided by block."""
        raise NotImplementedError

    def settle(self, step: fx.GraphModule, planned: Planned) -> None:
        """Called when a plan has been proven, before it first runs."""

    def moved(self, parameter: torch.nn.Parameter) -> None:
        """Called when a parameter has gone to another device."""

    def replaced(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Called when a parameter's ``.data`` was replaced by these values, which are at home now."""

    def before_accumulation(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Called before autograd adds gradients to those that are there."""

    def begin_training_forward(self) -> None:
        """Called before a training forward."""

    def kernels_of(self, step: fx.GraphModule) -> dict[str, Any]:
        """What instructions call that are not regions. A conversion's result is cast as it is written to its place."""
        return {node.name: _as_it_is for node in calls(step) if is_convert(node)}

    def key(self) -> Any:
        """What else a plan depends on that may change."""
        return None

    # ------------------------------------------------------------------------------------------------------- compiling

    def compile(self, program: Program, tangents: Tangents) -> Compiled:
        """The program planned for one gradient pattern, thread count and free memory; made on first use. That nothing
        fits beside a waiting step is remembered too: every step would ask again."""
        reserved = self.held_nbytes()
        key = (tangents, program.description.backward_autocast, torch.get_num_threads(), reserved, self.key())
        known = program.compiled.get(key)
        if known is None or (isinstance(known, Compiled) and known.home_version != self.home.version):
            self.drain()
            try:
                with collecting_later(), torch_private.lasting(), without_autocast(self.device.where.type):
                    known = self._compile(program, tangents, reserved)
            except BudgetError as error:
                if not reserved:
                    raise
                known = str(error), error.minimum_bytes  # not the error: its traceback would hold the call's tensors
            program.compiled[key] = known
        if isinstance(known, tuple):
            raise BudgetError(*known)
        self.last = known
        return known

    def speeds(self) -> Machine:
        """The machine by its figures alone, whatever was measured."""
        fuses = self.kernels == "inductor"
        if self.throttle is not None:
            return replace(self.throttle, name=f"{self.throttle.name}, emulated", fuses=fuses)
        return machine_of(self.device.where, fuses, self.staged)

    @staticmethod
    def reserve(step: fx.GraphModule) -> int:
        """Device bytes held beside a schedule: the generator's state as a step found it, and as a backward did (on the
        emulated device both are in the memory that counts)."""
        return 2 * aligned(generator_nbytes(step.meta["device"])) if has_random(step) else 0

    def available(self, reserved: int) -> int | None:
        """Device bytes of the budget that are left beside ``reserved``."""
        return None if self.memory is None else self.memory - reserved

    def _compile(self, program: Program, tangents: Tangents, reserved: int) -> Compiled:
        self.machine = known_machine(self)
        probing = torch_private.probe_inductor() if self.kernels == "inductor" else None
        joint = self._joint(program, tangents)
        joint, source, planned = self._loss_head(joint, reserved, bool(tangents), program.micro)
        if probing is not None:
            probing.join()
        planned, kernels = self._kernels(planned)
        same_computation(joint, planned.step)
        check_schedule(planned.step, planned.schedule)
        verify(planned.schedule)
        self.settle(source.step, planned)
        if self.device.staging is not None and not self.staged:
            self._say_not_pinned()
            return self._compile(program, tangents, reserved)
        kernels |= self.kernels_of(planned.step)
        compiled = describe_compiled(self, tangents, planned, source, kernels)
        self._show(source.step, planned)
        return compiled

    def _say_not_pinned(self) -> None:
        """Plan again for slower copies: host memory could not be pinned, which is known once it is taken."""
        self.staged = True
        warnings.warn(
            "host memory could not be pinned (expected room under the limit on locked memory, ulimit -l; under WSL about "
            "1 GiB is all there is): copies go through a small pinned ring, and the plan counts on "
            f"{self.speeds().h2d_gbps:.0f} GB/s. Raise the limit for full speed; results are the same",
            stacklevel=2,
        )

    def _joint(self, program: Program, tangents: Tangents) -> fx.GraphModule:
        """The normalized joint graph, of one micro-batch; from an earlier run where Inductor, whose parts make the key, is
        there anyway."""
        description = program.description
        if program.micro is not None:
            description = replace(description, inputs=description.inputs[: program.micro.inputs])
        key = joint_key(description, tangents) if self.kernels == "inductor" and knobs.cache() else None
        joint = cache.read_joint(key)
        if joint is None:
            try:
                joint = normalize(joint_graph(description, tangents), strides_on(self.device.where))
            except NotImplementedError as error:
                raise CaptureError(f"the model uses {error}; expected ATen operations only") from None
            cache.write_joint(key, joint)
        return joint

    def _loss_head(
        self, joint: fx.GraphModule, reserved: int, training: bool, micro: Micro | None
    ) -> tuple[fx.GraphModule, Source, Planned]:
        """The joint graph with its loss head in as many chunks as asked for, its step graph and its plan: for "auto", the
        fastest that fits."""
        found: list[tuple[fx.GraphModule, Source, Planned]] = []
        refused: list[BudgetError] = []
        weights = {} if micro is None else self._weights(joint, micro)
        for chunks in _AUTO_CHUNKS if self.loss_chunks == "auto" else (int(self.loss_chunks),):
            candidate = joint if chunks == 1 else copy_step(joint)
            if chunks > 1 and not chunk_loss(candidate, chunks):
                if self.loss_chunks == "auto":
                    break
                if training and self.needs_loss_head(joint):
                    raise CaptureError(
                        f"loss_chunks={chunks}: expected a linear layer followed by a mean cross-entropy whose logits nobody "
                        "else reads, found none; return the loss without the logits, or leave loss_chunks out"
                    )
            numerics = self._numerics(chunks, micro, weights)
            if micro is not None:
                try:
                    candidate = repeat(candidate, micro, weights)
                except NotImplementedError as error:
                    raise _not_repeated(micro, error) from None
            try:
                found.append((candidate, *self._plan(candidate, reserved, numerics)))
            except BudgetError as error:
                refused.append(error)
            else:
                if found[-1][-1].plan.all_resident:
                    break
        if not found:
            raise min(refused, key=lambda error: error.minimum_bytes)
        return min(found, key=lambda each: each[-1].plan.total_us)

    @staticmethod
    def _weights(joint: fx.GraphModule, micro: Micro) -> dict[int, Weights]:
        try:
            return weights_of(joint, micro)
        except NotImplementedError as error:
            raise _not_repeated(micro, error) from None

    def _numerics(self, chunks: int, micro: Micro | None, weights: Mapping[int, Weights]) -> str:
        """The contract in words."""
        numerics = f"{self.precision.contract()}; {FUSED if self.kernels == 'inductor' else BIT_EQUAL}"
        if micro is not None:
            each = ", ".join(dict.fromkeys(map(str, weights.values())))
            summed = " in fp32" if micro.wide else ""
            numerics += f"; {micro.count} micro-batches, their gradients added up{summed} in their order, {each}"
        if chunks > 1:
            numerics += f"; the loss head's sums over tokens (loss, weight and bias gradients) in {chunks} chunks"
        return numerics

    def _plan(self, joint: fx.GraphModule, reserved: int, numerics: str) -> tuple[Source, Planned]:
        """The step graph and its plan: for kernels that fuse, one region per phase where everything fits."""
        step = build(joint)
        self.place(step)
        budgets, fixed = self.constraints(step, reserved)
        if self.kernels == "inductor" and self.policy == "fastest" and may_be_resident(step, budgets):
            whole = build(joint, whole=True)
            whole.meta["homes"] = step.meta["homes"]
            self.place(whole)
            resident = resident_plan(whole, self.machine, budgets, self.eager.workspace, fixed, numerics)
            if resident is not None:
                return Source(whole, self.machine, budgets, self.eager.workspace), resident
        try:
            key = cache.plan_key(step, self.machine, budgets, fixed, numerics, self.policy)
            store = cache.points(step, budgets, self.machine, fixed, numerics)
            source = Source(step, self.machine, budgets, self.eager.workspace)
            within = (step, self.machine, budgets, self.eager.workspace, fixed, numerics)
            return source, cache.planned(key, lambda known: make_plan(*within, known, self.policy, store))
        except DoesNotFit as error:
            if self.relax(error):
                return self._plan(joint, reserved, numerics)
            raise self._budget_error(error, reserved) from None

    def relax(self, error: DoesNotFit) -> bool:
        """Whether something decided earlier has been given up, so that planning again may succeed."""
        return False

    def _kernels(self, planned: Planned) -> tuple[Planned, dict[str, Any]]:
        """What each kernel of the plan is run by; the schedule again, with what those need."""
        used = {i.kernel for i in planned.schedule.instructions if i.op == "run"}
        bodies: dict[str, Any] = {str(n): m for n, m in planned.step.named_children() if n in used}
        eager = {name: self.eager(body) for name, body in bodies.items()}
        if self.kernels == "eager":
            return self._graphed(planned, bodies, eager)
        built = self.inductor.build(bodies.values(), self.eager)
        again = relowered(planned, self.machine, lambda body: built[body.meta["name"]].workspace)
        limit = planned.schedule.limit_nbytes.get("device")
        if limit is not None and again.schedule.peak_nbytes["device"] > limit:
            # Those that need more than was planned for stay as they were planned.
            built = {n: k if k.workspace <= eager[n].workspace else eager[n] for n, k in built.items()}
            again = relowered(planned, self.machine, lambda body: built[body.meta["name"]].workspace)
        return self._graphed(again, bodies, built)

    def _graphed(self, planned: Planned, bodies: dict[str, Any], built: dict[str, Built]) -> tuple[Planned, dict[str, Any]]:
        """Those kernels as CUDA graphs that gain by it, as long as what they hold fits beside the plan."""
        calls: dict[str, Any] = {name: kernel.call for name, kernel in built.items()}
        if self.graphs is None:
            return planned, calls
        limit = planned.schedule.limit_nbytes.get("device")
        room, held = None if limit is None else limit - planned.schedule.peak_nbytes["device"], 0
        for name, kernel in built.items():
            with rng_preserved(str(self.device.where)):
                found = graphed(bodies[name], kernel.call, kernel.workspace, self.graphs, self.eager.examples(bodies[name]))
            if found is not None and (room is None or held + found[1] <= room):
                calls[name] = found[0]
                held += found[1]
        workspaces = {name: kernel.workspace for name, kernel in built.items()}
        return relowered(planned, self.machine, lambda body: workspaces[body.meta["name"]], held), calls

    def _budget_error(self, error: DoesNotFit, reserved: int) -> BudgetError:
        budget = self.memory if error.tier == "device" else self.host
        knob = self.knobs[error.tier]
        largest = "\n".join(f"  {gib(nbytes):>12}  {what}" for what, nbytes in error.causes)
        beside = f" beside {gib(reserved)} held by a training step in progress" if reserved else ""
        minimum = error.minimum + reserved
        return BudgetError(
            f"no plan fits {knob}={gib(budget or 0)}{beside}: the smallest {knob} that works is {minimum} bytes "
            f"({gib(minimum)}); the largest parts of it are\n{largest}\n"
            f"  pass {knob}={minimum} or more, or a smaller batch or sequence",
            minimum,
        )

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

    # --------------------------------------------------------------------------------------------------------- running

    def drain(self) -> None:
        """Wait for the updates that the last backward left to run behind a forward. Raises what stopped them."""
        left, self.left = self.left, None
        if left is not None:
            try:
                left.behind.drain()
            finally:
                left.close(self)

    def alive(self) -> list[Frame]:
        """Training forwards that still wait for their backward, oldest first."""
        frames = [frame for ref in self._frames if (frame := ref()) is not None and not frame.spent]
        self._frames = [weakref.ref(frame) for frame in frames]
        return frames

    def remember(self, frame: Frame) -> None:
        self._frames.append(weakref.ref(frame))

    def held_nbytes(self) -> int:
        """Device bytes that waiting forwards hold."""
        return sum(aligned(frame.memory.live) for frame in self.alive())

    def infer(self, program: Program, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A forward that nobody will differentiate; allowed at any time, in what memory a live step leaves."""
        last = self.last
        self.drain()
        _, outputs = run_forward(self, self.compile(program, None), inputs)
        self.last = last or self.last
        return outputs

    def arenas(self, compiled: Compiled) -> tuple[Arenas, dict[str, torch.Tensor] | None]:
        """The tiers' arenas, shared by all programs, and what is known of the program's slots in them. No device slot
        lives from one phase to the next; host slots do, so while a step is alive another has a host arena of its own."""
        tiers: tuple[Tier, ...] = ("device", "host")
        needed: dict[Tier, int] = {tier: compiled.schedule.arena_nbytes.get(tier, 0) for tier in tiers}
        own = bool(self.alive())
        for tier, nbytes in needed.items():
            size = self._arenas[tier].numel() if tier in self._arenas else -1
            if size < nbytes if tier == "host" else size != nbytes:
                if tier == "host" and own:
                    continue
                self.drain()  # what runs behind would make views of the old arena again
                for views in self._views:  # they would hold the old arena
                    views.clear()
                self._views.clear()
                if tier in self._arenas:
                    self.device.synchronize()  # of a step that was dropped, copies may be on their way
                    del self._arenas[tier]
                if tier == "device":  # waiting steps have nothing there, and will take what there is then
                    for frame in self.alive():
                        frame.memory.leave_device()
                with torch_private.lasting():
                    self._arenas[tier] = self.device.arena(tier, nbytes)
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes())
        if own:
            return Arenas(self._arenas["device"], self.device.arena("host", needed["host"])), None
        if not any(views is compiled.views for views in self._views):
            self._views.append(compiled.views)
        return Arenas(self._arenas["device"], self._arenas["host"]), compiled.views

    def again(self, compiled: Compiled, memory: CpuMemory) -> None:
        """Before a backward: another program may have replaced the device's arena since its forward."""
        if memory.arenas.device is not self._arenas.get("device"):
            arenas, _ = self.arenas(compiled)
            memory.take_device(arenas.device)

    def measured(self, compiled: Compiled, nbytes: int) -> None:
        self.peak_device_bytes = max(self.peak_device_bytes, nbytes)
        planned = compiled.schedule.peak_nbytes["device"] + self.held_nbytes()
        if nbytes > planned:
            warnings.warn(
                f"the device peak was {nbytes} bytes, expected at most the planned {planned}: a kernel took more than when "
                "it was measured. Please report it with what MT_DUMP=dir writes",
                stacklevel=2,
            )

    def host_bytes(self) -> int:
        """Host memory held now."""
        return self._arenas["host"].numel() if "host" in self._arenas else 0
