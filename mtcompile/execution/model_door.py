"""The door of ``mtcompile.compile``: where a model's parameters live, and what its optimizer, masters and updates need."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from mtcompile import knobs
from mtcompile.capture.refusals import lazy_modules_in
from mtcompile.errors import BudgetError, StepError
from mtcompile.execution.compiled import Frame, LiveFrames
from mtcompile.execution.door import Door
from mtcompile.execution.memory import disk_room, fragments
from mtcompile.execution.memory.host_room import check_plan, checked_before_first_step
from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.execution.placement import budget_error, conversions, disk_error, host_error, random_reserve_nbytes
from mtcompile.machine.device import process_nbytes
from mtcompile.optim.backward.checks import updates_by_parameter
from mtcompile.optim.backward.finite import DeviceFlags
from mtcompile.optim.backward.update import UpdatesInBackward
from mtcompile.optim.disk_state import PIECE, DiskState, OnDisk
from mtcompile.optim.master_weights import Masters, cast
from mtcompile.optim.own_files import in_memory, is_in_own_file, own_files_nbytes
from mtcompile.optim.state_sizes import average_copies, is_elementwise, master_state_nbytes, state_nbytes
from mtcompile.optim.training_state import state_moved, training_nbytes
from mtcompile.optim.wholeness import Wholeness
from mtcompile.options import Options
from mtcompile.passes.analysis.state import Budgets, update_staging_nbytes
from mtcompile.passes.joint.build import InputHomes
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem
from mtcompile.references import weakly, with_hooks
from mtcompile.runtime.devices.arena import overlaps, span_nbytes
from mtcompile.runtime.devices.cuda import CudaDevice
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.pages import give_back as give_back_pages
from mtcompile.runtime.schedule import placed
from mtcompile.torch_private import shares_storage


class ModelDoor(Door):
    """The door of ``mtcompile.compile`` to its session: a model, its optimizer, masters and updates.

    The model's first program decides which parameters are resident, and later programs keep to it. ``drain``: waits for
    updates that run during a forward.
    """

    def __init__(
        self, model: nn.Module, options: Options, device: Device, frames: LiveFrames, drain: Callable[[], None]
    ) -> None:
        self.options, self.device, self.frames = options, device, frames
        self.model = weakref.ref(model)
        self.optimizer: torch.optim.Optimizer | None = None
        self.masters: Masters | None = cast(model, options.precision)
        if self.masters is not None and device.where.type != "cpu":
            self.masters.reachable = functools.partial(device.arena, "host")
        self.parameters = ParameterStore(device, weakly(self._moved), weakly(self._replaced))
        self.parameters.to_disk = weakly(self._to_disk)
        self.wholeness = Wholeness(model, drain)
        self.updates: UpdatesInBackward | None = None
        if options.updates is not None:
            self.updates = UpdatesInBackward(model, options.updates, self.masters, self.wholeness, device.where)
            if self.alone and isinstance(device, CudaDevice):  # ranks fail together, before their first exchange
                self.updates.flags = DeviceFlags(device)
        elif self.masters is not None:
            self.masters.updating = self.wholeness.updating
        self.disk: DiskState | None = None
        # Whether the next backward is not the last of its step; whether steps have had several, so that plans count their sums.
        self._goes_on = self._adds_up = False
        self._beside = 0  # device bytes beside the step that was planned last
        self.sent_nbytes = 0  # bytes of the arguments, which are on the device during the call

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer that steps the model from now on, without a shell around it."""
        optimizer = with_hooks(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        if self.wholeness.bind(optimizer) and self.updates is None:
            self.wholeness.watch(optimizer, masters=self.masters is not None)
            checked_before_first_step(optimizer, weakly(self._missing_state_nbytes))
        if self.masters is not None and optimizer is not self.optimizer:
            self.masters.bind(optimizer)
        if self.updates is not None and optimizer is not self.optimizer:
            self.updates.bind(optimizer)
        self.optimizer = optimizer

    @property
    def updating(self) -> UpdatesInBackward | None:
        """The updates of the next backward; None if it makes none, and its gradients wait for a step or another backward."""
        return None if self._goes_on else self.updates

    def add_up(self, goes_on: bool) -> None:
        """Takes note whether another backward adds to the gradients of the next one before they are used. Raises StepError
        where updates cannot take such sums."""
        if goes_on and self.updates is not None and (self.options.disk is not None or not self.alone):
            what = "disk=" if self.options.disk is not None else "several ranks"
            raise StepError(
                f'the loop adds up gradients of several backwards, which update="backward" does not do with {what}. Expected '
                "one backward a step: pass a batch that is k times as large, and accumulate=k to compile"
            )
        self._goes_on, self._adds_up = goes_on, self._adds_up or goes_on

    def give_back(self) -> None:
        """Gives parameters, and the state that is on disk, memory of their own."""
        self.parameters.forget()
        if self.disk is not None:
            self.disk.give_back(() if self.optimizer is None else self.optimizer.state.values(), self.masters or ())

    def release(self) -> None:
        self.disk = None
        if self.updates is not None:
            self.updates.release()

    # ------------------------------------------------------------------------------------------------ placement of a step

    def before_planning(self) -> None:
        if self.parameters.provisional:
            self.parameters.forget()

    def expect(self, problem: PlanningProblem) -> None:
        """Pins homes of weights while a plan is searched, as many bytes as the first step will add to the host anyway."""
        if self.parameters.slabs or self.ranks_here > 1 or self.options.disk is not None or self.device.where.type == "cpu":
            return
        parameters, homes = self._parameters(), fragments.parameter_homes(problem.step)
        gradients = 0 if self.updating is not None else sum(p.nbytes for p in parameters.values() if p.requires_grad)
        self.parameters.pin_ahead(homes, parameters, problem.budgets.device, gradients + self._missing_state_nbytes())

    def pinned_ahead_nbytes(self) -> int:
        return self.parameters.ahead.settled_nbytes()

    def place_for_calls(self, tier: str) -> None:
        has_state = self.optimizer is not None and bool(self.optimizer.state)  # which would follow its parameters
        if self.device.where.type != "cpu":
            tier = "host" if self.masters is not None or has_state else tier
        elif tier == "host":  # where they are
            return
        parameters = {name: p for name, p in self._parameters().items() if not (overlaps(p) or is_in_own_file(p))}
        blocks = {name: name.rpartition(".")[0] for name in parameters}
        self.parameters.adopt(blocks, dict.fromkeys(blocks.values(), tier), parameters)
        self.parameters.provisional = True

    def weights_nbytes(self) -> int:
        return sum(placed(span_nbytes(parameter)) for parameter in self._parameters().values())

    def input_homes(self, joint: fx.GraphModule) -> InputHomes:
        names = None if self.updating is None or not _trains(joint) else self.updating.updated_names()
        updated, apart = fragments.with_fragments(names, joint), self.options.disk is not None
        return InputHomes(self.parameters.blocks(), updated=updated, frozen_apart=apart, experts=self.options.experts)

    def constraints(self, step: fx.GraphModule) -> tuple[Budgets, Mapping[str, str]]:
        state = self._optimizer_state(parameters := self._parameters())
        copies = average_copies(state, parameters)
        updates = self.updating.plan_updates(copies) if self.updating is not None and _trains(step) else None
        reserve, available = random_reserve_nbytes(step) + self.sent_nbytes, self._available_nbytes(step, state)
        self.host_beside = self.parameters.unread_nbytes(parameters, fragments.parameter_homes(step), self.optimizer)
        host = None if self.options.host is None else self.options.host - self.frames.host_nbytes() - self.host_beside
        state, fixed = fragments.state_with_fragments(state, step), self._fixed_homes(step)
        sums = self.sums if _trains(step) else 0
        budgets = Budgets(available, host, copies, reserve=reserve, updates=updates, state=state, sums=sums)
        return budgets if self.options.disk is None else self._with_disk(budgets, step, fixed), fixed

    def _with_disk(self, budgets: Budgets, step: fx.GraphModule, fixed: Mapping[str, str]) -> Budgets:
        """Adds the limits of the disk. Raises CaptureError for a parameter that went there frozen, and is to train now."""
        assert self.options.disk is not None
        if self.updates is None and _trains(step):
            disk_room.check_frozen(step, fixed)
        nbytes, loaded = self.parameters_nbytes(), self._loaded_nbytes()
        return replace(
            budgets,
            **disk_room.limits(self.options.disk, self.parameters, self.frames, nbytes, loaded),
            disk_updates=self.updates is not None and is_elementwise(self.optimizer),
            update_piece=2 * PIECE if self.options.precision.split else 0,
            disk_takes=disk_room.movable(step, fixed, self._parameters(), self.parameters, self.frames, self.fragments_begin()),
        )

    def _loaded_nbytes(self) -> int:
        """Returns the bytes of weights and remainders that were loaded to the disk, and have no home yet."""
        return own_files_nbytes([*self._parameters().values(), *(master.remainder for master in self.masters or ())])

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by name. The model's own method waits for updates."""
        return {name: p for name, p in nn.Module.named_parameters(self._model()) if not nn.parameter.is_lazy(p)}

    def _optimizer_state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
        """Returns the bytes that the optimizer keeps for each parameter, masters included."""
        if self.masters is None:
            return state_nbytes(self.optimizer, parameters)
        return master_state_nbytes(self.optimizer, parameters, self.masters.trained())

    def _missing_state_nbytes(self) -> int:
        held = self.state_nbytes()
        return sum(self._optimizer_state(self._parameters()).values()) - held["optimizer"] - held["masters"]

    def _fixed_homes(self, step: fx.GraphModule) -> Mapping[str, str]:
        blocks, off_device = fragments.parameter_homes(step), fragments.homes_off_device(step)
        parameters, settled = self._parameters(), self.parameters.settled_tiers
        if self.parameters.slabs:
            new = {name: block for name, block in blocks.items() if name not in self.parameters.places}
            # Memory that the user has shared on the device stays there, and what is at home in its block goes there too.
            there = [name for name in new if name in parameters and parameters[name].device.type != "cpu"]
            shared = {new[name] for name in there if parameters[name].device == self.device.where}
            return {**off_device, **{block: "device" if block in shared else "host" for block in new.values()}, **settled}
        if self.masters is not None and not self.masters.may_be_on(self.device.where, self.optimizer):
            return dict.fromkeys(blocks.values(), "host")
        # Memory that other tensors share stays where they see it.
        return off_device | {blocks[name]: "host" for name in blocks if name in parameters and shares_storage(parameters[name])}

    def _available_nbytes(self, step: fx.GraphModule, state: Mapping[str, int]) -> int | None:
        """Returns the device budget, less waiting forwards and resident parameters that this program does not read."""
        if self.options.memory is None:
            return None
        read = set(step.meta["homes"].values())
        settled = self.parameters.settled_tiers  # what may leave, does so if the program does not read it
        unread = {block: self.parameters.slabs[block] for block in settled if settled[block] == "device" and block not in read}
        self._beside = self.frames.nbytes() + (0 if _trains(step) else self.gradients_nbytes())
        self._beside += sum(slab.memory.numel() for slab in unread.values())
        beside = [(name, place.parameter) for name, place in self.parameters.places.items() if place.block in unread]
        self._beside += sum(state.get(name, 0) + (placed(p.nbytes) if p.requires_grad else 0) for name, p in beside)
        return self.options.memory - self._beside

    def needs_loss_head(self, joint: fx.GraphModule) -> bool:
        return True

    def may_cut_weights(self) -> bool:
        return self.alone and (self.updating is None or is_elementwise(self.optimizer))

    def is_advised(self) -> bool:
        return self.alone

    def may_update_in_backward(self) -> bool:
        return self.updates is None and self.optimizer is not None and updates_by_parameter(self.optimizer)

    def fragments_begin(self) -> int:
        disk, parameters = self.options.disk, self.parameters
        return super().fragments_begin() if disk is None else disk_room.requests_nbytes(parameters, self.parameters_nbytes())

    def separate_frozen(self) -> None:
        if not self.frames.waiting():  # these read what is at home
            self.parameters.separate_frozen()

    def give_up_residents(self, error: DoesNotFit) -> bool:
        waits = self.frames.waiting() and (self.device.where.type != "cpu" or self.frames.hold)
        if error.tier == "disk" or "device" not in self.parameters.settled_tiers.values() or waits:
            return False
        if self.device.where.type != "cpu" and (self.frames.in_backward or self.parameters.held_elsewhere("device")):
            return False  # autograd expects gradients where parameters were, and a holder would not see them move
        self.parameters.residents_may_leave = True
        return True

    def send_residents_home(self) -> None:
        if self.device.where.type == "cpu" and self.parameters.has_residents:  # autograd expects gradients where they were
            self.parameters.send_home()

    def refusal(self, error: DoesNotFit) -> BudgetError:
        if error.tier == "disk" and self.options.disk is not None:
            free = disk_room.room_nbytes(self.options.disk, self.parameters, self.frames, self._loaded_nbytes())
            return disk_error(error, self.options.disk.folder, self.options.disk.nbytes, free)
        if error.tier == "device":
            refused = budget_error(error, "memory", self.options.memory or 0, self._beside, self.options)
            if self.device.where.type == "cpu" or not self.parameters.held_elsewhere("device"):
                return refused
            way = "delete your tensors that share memory with parameters, such as a state_dict(): they keep these on the device"
            return BudgetError(f"{refused}\n  or {way}", refused.minimum_bytes)
        parameters, waiting = self._parameters(), self.frames.host_nbytes() + self.host_beside
        trained = sum(p.nbytes for p in parameters.values() if p.requires_grad) if self.updating is None else 0
        state = sum(self._optimizer_state(parameters).values())
        return host_error(error, self.options, waiting, trained, state, type(self.optimizer).__name__)

    def adopt(self, step: fx.GraphModule, planned: Planned) -> None:
        blocks = fragments.parameter_homes(step)
        tiers = {block: planned.plan.params(block) for block in blocks.values()}
        if not self.parameters.slabs:
            held = self.state_nbytes() | {"pinned ahead": self.pinned_ahead_nbytes(), "on disk": -self._loaded_nbytes()}
            added = check_plan(planned.schedule, held, self.device.where.type == "cpu")
            give_back_pages()  # what is no longer used would be counted, and used again
            self.planned_process_nbytes = process_nbytes() + added
        if planned.plan.peak_bytes.get("disk", 0):
            self._open_disk(step, planned)
        self.parameters.adopt(blocks, tiers, dict(self._model().named_parameters()))
        for master in self.masters or ():
            master.remainder = in_memory(master.remainder)

    def _open_disk(self, step: fx.GraphModule, planned: Planned) -> None:
        """Makes sure that there is room on disk, and on the host for updates of what is there, before anything moves."""
        budgets, where = self.constraints(step)[0], self.options.disk
        assert where is not None
        store = disk_room.opened_store(where, self.parameters, self.parameters_nbytes(), planned)
        if self.disk is None:
            self.disk = DiskState(store, weakly(self._wrote_on_disk), knobs.disk_verified)
            if self.updates is not None:
                self.updates.disk = self.disk
        self.disk.make_room(update_staging_nbytes(step, planned.plan, budgets))

    def _wrote_on_disk(self, name: str) -> None:
        self.parameters.wrote(name)
        if self.masters is not None:
            self.masters.wrote(self.parameters.places[name].parameter)

    def host_kernels(self, step: fx.GraphModule) -> Mapping[str, Any]:
        return conversions(step) | ({} if self.updating is None else self.updating.kernels(step))

    def parameters_nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._parameters().values())

    # ---------------------------------------------------------------------------------------------- around a step that runs

    def plan_key(self) -> Hashable:
        if self.updates is None:
            return None
        return self.updates.parameter_ids(), self.updates.options, self._goes_on, self._adds_up

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        self.wholeness.check()
        with contextlib.nullcontext() if self.updates is None else self.updates.loop.call():
            yield

    def before_forward(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Lets a forward take the place of earlier ones that wait for a backward, where that would update parameters: in one
        step, only one may. Without updates, takes note whether the backward will add to gradients."""
        self.note_sums(inputs.values())
        read = {id(t) for frame in self.frames.waiting() for t in frame.inputs if isinstance(t, nn.Parameter)}
        self._adds_up |= self.updates is None and any(id(t) in read for t in inputs.values())
        if self.updating is not None and self.updating.before_forward(inputs):
            for frame in self.frames.waiting():
                if fragments.updated_by(frame.compiled.step):
                    frame.evict()
                    frame.spent = frame.replaced = True

    def before_backward(self, frame: Frame, keeps: bool) -> None:
        if self.updates is not None and keeps and fragments.updated_by(frame.compiled.step):
            raise StepError(
                'backward was called with retain_graph=True; with update="backward" the first backward updates the parameters, '
                'and a second one would be of other values. Call loss.backward() without it, or use update="step"'
            )

    def waits_together(self) -> bool:
        return True

    @contextlib.contextmanager
    def backward(self, node: Any, frame: Frame, tangents: Sequence[torch.Tensor | None]) -> Iterator[None]:
        trained = fragments.updated_by(step := frame.compiled.step)
        self._goes_on = self.updates is not None and not trained  # as when the forward ran, if it has to run again
        if self.updates is not None:
            self.updates.check_clipped(fragments.left_by(step), node)
        if self.updates is None or not trained:
            yield
            return
        outputs = [ref() for ref in frame.outputs]
        self.updates.begin_backward(fragments.without_fragments(step), trained, outputs, tangents, node, self._adds_up)
        with self.updates.running():
            yield
        self.updates.end_backward()
        self.updates.loop.let_interrupt_through()

    def before_accumulation(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        if self.masters is not None:
            self.masters.widen(t for t, gradient in zip(inputs, gradients, strict=True) if gradient is not None)

    @property
    def sums(self) -> int:
        return (2 if self.masters is not None else 1) if self._adds_up else 0  # those of masters are fp32

    def gradients_nbytes(self) -> int:
        homes = self.parameters
        there = [place.parameter.grad for place in homes.places.values() if homes.slabs[place.block].tier == "device"]
        return 0 if self.updates is not None else sum(placed(g.nbytes) for g in there if g is not None)

    def note_sums(self, inputs: Iterable[torch.Tensor]) -> bool:
        adds_up = self.updates is None and any(isinstance(t, nn.Parameter) and t.grad is not None for t in inputs)
        self._adds_up |= adds_up
        return adds_up

    def may_run_again(self) -> bool:
        return self.updates is None or not self.updates.has_updated

    def backward_issued(self) -> None:
        if self.updates is not None:
            self.updates.all_issued()

    def updates_failed(self) -> None:
        if self.updates is not None:
            self.updates.failed_behind()

    def optimizer_state_was_made(self) -> bool:
        return self.updates is not None and self.updates.allocated_state

    def state_nbytes(self) -> dict[str, int]:
        """Returns the current bytes of weights, masters, gradients and optimizer state."""
        parameters, places = self._parameters(), self.parameters.places
        if self.updates is None:
            waiting = [p for name, p in parameters.items() if name in places or p.grad is not None]
        else:  # sums
            waiting = [p for p in parameters.values() if type(p.grad) is torch.Tensor]
        nbytes = training_nbytes(parameters.values(), self.optimizer, waiting)
        return {"weights": nbytes.pop("weights"), "masters": 0 if self.masters is None else self.masters.nbytes(), **nbytes}

    def on_disk_nbytes(self) -> int:
        return disk_room.held_nbytes(self.parameters) + (0 if self.disk is None else self.disk.nbytes)

    def disk_staging_nbytes(self) -> int:
        return sum(each.staging_nbytes for each in (self.parameters.disk, self.disk) if each is not None)

    def names(self) -> dict[int, tuple[str, str]]:
        """Returns id of each parameter and buffer -> its role and name."""
        names: dict[int, tuple[str, str]] = {id(b): ("buffer", n) for n, b in self._model().named_buffers()}
        return names | {id(p): ("param", n) for n, p in self._model().named_parameters()}

    def count_glue(self, leaves: Sequence[torch.Tensor] = ()) -> None:
        """Counts the state of those parameters among ``leaves``, and of all that are scripted, on the device from now on: lines
        that Python runs between two captured parts compute with them."""
        model = self._model()
        used = {id(leaf) for leaf in leaves}
        used |= {id(p) for m in model.modules() if isinstance(m, torch.jit.ScriptModule) for p in m.parameters()}
        parameters = self._parameters()
        state, counted = self._optimizer_state(parameters), [(name, p) for name, p in parameters.items() if id(p) in used]
        nbytes = sum(p.nbytes * (2 if p.requires_grad else 1) + state.get(name, 0) for name, p in counted)
        if nbytes > self.frames.glue_nbytes:
            self.frames.glue_nbytes = nbytes
            self.frames.evict()  # they were planned without it

    def lazy_modules(self) -> Mapping[nn.Module, str]:
        """Returns the lazy modules, which the next forward initializes. Raises as ``lazy_modules_in``."""
        return lazy_modules_in(self._model(), self.device.where)

    def initialized(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes the parameters that a lazy module has got."""
        if self.masters is not None:
            self.masters.adopt(self._model(), parameters)

    def _model(self) -> nn.Module:
        model = self.model()
        assert model is not None
        return model

    def _moved(self, parameter: nn.Parameter) -> None:
        if self.masters is not None:
            self.masters.moved(parameter)
        state_moved(self.optimizer, parameter)

    def _to_disk(self, name: str, parameter: nn.Parameter) -> None:
        """Sends what belongs to a parameter that has moved to disk after it."""
        assert self.disk is not None
        master = None if self.masters is None else self.masters.by_parameter.get(id(parameter))
        entry = {} if self.optimizer is None else self.optimizer.state.get(parameter, {})
        remainder = self.disk.take(OnDisk(name, parameter, entry, None if master is None else master.remainder))
        if master is not None and remainder is not None:
            master.remainder = remainder
            self.masters.wrote(parameter)  # type: ignore[union-attr]

    def _replaced(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        if self.masters is not None:
            self.masters.replace(parameter, values)


def _trains(graph: fx.GraphModule) -> bool:
    """Tells whether a joint or step graph computes gradients."""
    return any(spec.kind == "grad" for spec in graph.meta["outputs"])
