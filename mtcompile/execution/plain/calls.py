"""Gradient-free calls (evaluation, generation, reference models): the plain forward runs at any shape, within the budget.

Parameters that the device has no lasting place for are lent to it. What else a call takes is measured for each size and each
change of the modules' attributes, now and then, and always where twice as much would not fit. A call that is not known to fit,
and may not, is planned.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from mtcompile import knobs, torch_private
from mtcompile.capture.dynamo import only_whole
from mtcompile.errors import BudgetError, CaptureError
from mtcompile.execution.plain.held import buffers_on, held_nbytes, held_on
from mtcompile.execution.plain.lending import Lending, call_lending, changed_unseen, is_lendable, keepers, lent_nbytes
from mtcompile.execution.plain.sizes import CallSize, KnownCalls, attributes_of, size_of_call, tensors_in
from mtcompile.execution.session import Session
from mtcompile.execution.unchanged import version_of
from mtcompile.machine.device import allocator_peak
from mtcompile.passes.generators import generator_state, set_generator_state
from mtcompile.passes.step_graph import calls, fragments_of, inputs_of, results
from mtcompile.runtime.devices.fetching import CpuFetcher, CudaFetcher, Fetcher
from mtcompile.runtime.schedule import gib

_AT_ONCE = 2  # parameters that have to fit: one that is read, and one on its way
_SURE = 8  # times an estimate by sizes alone: where so much is free, a call runs without a plan
_CHANGED = 64  # times what calls took before attributes changed: likewise
_ROOMY = 2  # times what calls of a size took: where so much is free, they are seldom measured
_MARGIN = 1.5  # of what a plain forward may take over a planned one


@dataclass(frozen=True, slots=True)
class _Room:
    """Device bytes for one call. ``held``: what stays there meanwhile. ``others``: what the call takes beside parameters; None
    if that is not known. ``lent``: the most that lent parameters may take."""

    held: int
    others: int | None
    lent: int


@dataclass(frozen=True, slots=True)
class _Homes:
    """The tensors of a model that are on the host. ``lent``: those that are on the device while they are read. ``held``: those
    that are there for the whole call, as they share memory or opaque modules read them. ``odd``: those that can be neither.
    ``unseen``: ids of those that may change without a sign."""

    lent: list[torch.Tensor]
    held: list[torch.Tensor]
    odd: list[torch.Tensor]
    unseen: set[int]

    @property
    def held_nbytes(self) -> int:
        return held_nbytes((*self.held, *self.odd))


@dataclass(frozen=True, slots=True)
class _Modules:
    """Modules that need care. ``keeping``: those that hold parameters in other places too. ``opaque``: those whose code is not
    run by Python as it stands: TorchScript's, and what ``torch.compile`` captures."""

    keeping: tuple[weakref.ref[nn.Module], ...]
    opaque: tuple[weakref.ref[nn.Module], ...]


class GradientFreeCalls:
    """Runs the gradient-free calls of one model. ``call``: the plain forward of a model that it is given. ``planned``:
    its forward by a plan, for a model whose tensors a plain forward would not find on the device."""

    def __init__(self, session: Session, call: Callable[..., Any], planned: Callable[[Any, Any], Any]) -> None:
        self.session, self.call, self.planned = session, call, planned
        self._where = session.device.where
        self._known, self._planned = KnownCalls(), KnownCalls()  # as measured, and by plans
        self._order: list[int] = []  # in which the last call read what was lent
        self._care: _Modules | None = None
        self._reads_unseen = self._has_warned = False
        self._by_values = False  # whether a measured call read values, which may be sizes
        self._is_whole = True  # whether one plan may be all of a call

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns what the plain forward returns. Raises BudgetError where the call does not fit."""
        if self._reads_unseen or self.session.door.in_parts:
            return self.planned(args, kwargs)
        self.session.drain()
        size = replace(size_of_call(model, args, kwargs, self._where), attributes=attributes_of(model))
        others = self._known.nbytes(size)
        with torch_private.lasting():
            self._place_parameters(others)
        homes = self._homes(model)
        if (homes.odd and self._where.type != "cpu") or not self._fits(homes, others):
            return self.planned(args, kwargs)
        most = self._most(model, size, homes, args, kwargs) if self._is_whole else 0
        if self.session.resting_nbytes() + homes.held_nbytes + most > self._budget:
            try:
                return self._by_plan(size, args, kwargs)
            except CaptureError:  # what no plan can be made of runs, and is measured
                self._is_whole = False
        if self._where.type == "cpu":
            return self._within(model, size, others, homes, args, kwargs)
        generator, versions = generator_state(str(self._where)), _versions(model)
        try:
            with held_on(self._where, homes.held, homes.unseen):
                return self._within(model, size, others, homes, args, kwargs)
        except RuntimeError as error:
            if "same device" not in str(error) or homes.unseen or versions != _versions(model):
                raise
        warnings.warn(
            "the forward reads a tensor of the host that is neither a parameter nor a buffer of the model. From now on, calls "
            "without gradients are planned for each shape; to avoid that, register the tensor as a buffer",
            stacklevel=2,
        )
        self._reads_unseen = True
        set_generator_state(str(self._where), generator)
        return self.planned(args, kwargs)

    def _fits(self, homes: _Homes, others: int | None) -> bool:
        """Tells whether what must be held fits; beside a forward that waits for its backward, also what else is taken (half of
        the budget if that is not known). A plan can do with less: that forward may run again, and weights may be cut."""
        needed = self.session.resting_nbytes() + homes.held_nbytes
        if self.session.frames.waiting():
            needed += self._budget // 2 if others is None else others + self._least_lent(homes)
        elif self.session.options.cuts is not None or self._takes_parts():  # a plan needs no weight whole
            needed += self._least_lent(homes)
        return needed <= self._budget

    def _most(self, model: nn.Module, size: CallSize, homes: _Homes, args: Any, kwargs: Any) -> int:
        """Returns the most bytes that a call may take: those that it took; by what others took, or were planned to, before
        attributes changed if need be; by the last step that ran, in whose forward each region has there what it reads and the
        largest value that it makes; else by its sizes."""
        if self._known.has(size):
            return self._known.nbytes(size) or 0
        for changed, times in ((False, 1), (True, _CHANGED)):
            if known := [most for calls in (self._known, self._planned) if (most := calls.most(size, changed)) is not None]:
                return times * (max if changed else min)(known) + self._least_lent(homes)
        estimate, last = _AT_ONCE * _largest_value(model, args, kwargs), self.session.last
        if last is not None:
            step = last.problem.step
            taken = sum(node.meta["nbytes"] for spec, node in inputs_of(step) if spec.role == "input")
            given = sum(tensor.nbytes for tensor in tensors_in((args, kwargs)))
            estimate = int(_least_of_forward(step) * max(1.0, given / taken)) if taken else estimate
        return _SURE * estimate + self._least_lent(homes)

    def _by_plan(self, size: CallSize, args: Any, kwargs: Any) -> Any:
        """Returns what a planned forward returns; notes what it takes. Raises BudgetError, and CaptureError if one plan cannot
        be all of it."""
        with only_whole():
            output = self.planned(args, kwargs)
        last = self.session.last
        if last is not None and last.tangents is None:
            peak, resident = last.schedule.peak_nbytes["device"], last.schedule.resident_nbytes.get("device", 0)
            self._planned.note(size, int(_MARGIN * (peak - resident)))
        return output

    def _takes_parts(self) -> bool:
        """Tells whether the last training step takes weights in fragments, or rows of embeddings."""
        last = self.session.last
        step = None if last is None else last.problem.step
        return step is not None and bool(fragments_of(step) or step.meta.get("rows"))

    def _within(self, model: nn.Module, size: CallSize, others: int | None, homes: _Homes, args: Any, kwargs: Any) -> Any:
        """Runs the forward within the budget, and measures it if that is due."""
        is_due = self._known.is_due(size) or knobs.check() or not self._is_roomy(size, others, homes)
        room = self._room(None if is_due else others, homes)
        if room.others is not None:
            output, most_lent = self._run(model, homes, room, args, kwargs)
            # What had to be there at once although it was more than the room, was so when the others were measured.
            self.session.note_call(room.held + room.others + min(most_lent, room.lent))
            return output
        with allocator_peak(self._where) as measured:
            output, most_lent = self._run(model, homes, room, args, kwargs)
        self._by_values |= measured.reads_values
        if measured.nbytes is not None:  # there was no other profiler
            self._known.note(size, measured.nbytes, most_lent)
            self.session.note_call(room.held + measured.nbytes)
            self._check(room, measured.nbytes, self._least_lent(homes))
        return output

    def _is_roomy(self, size: CallSize, others: int | None, homes: _Homes) -> bool:
        """Tells whether a call of a known size would fit even if it took a multiple of what was measured: that may depend on
        what no attribute of a module shows. Not so of calls that read values."""
        if others is None or self._by_values or not self._known.has(size):
            return False
        held = self.session.resting_nbytes() + homes.held_nbytes
        return held + _ROOMY * others + self._least_lent(homes) <= self._budget

    def _run(self, model: nn.Module, homes: _Homes, room: _Room, args: Any, kwargs: Any) -> tuple[Any, int]:
        """Returns the forward's output, and the most bytes that were lent at once."""
        with _without_cast_cache():
            if not homes.lent:
                return self.call(model, *args, **kwargs), 0
            order = self._order or [id(home) for home in homes.lent]
            lent = Lending(homes.lent, order, self._fetcher(), room.lent, homes.unseen)
            keeping = _alive(self._modules(model).keeping)
            output = call_lending(functools.partial(self.call, model, *args, **kwargs), model, lent, keeping)
            self._order = lent.reads or self._order
            self._warn_of_torn(model, lent.torn)
            return output, lent.most_nbytes

    def _warn_of_torn(self, model: nn.Module, torn: Collection[int]) -> None:
        if not torn or self._has_warned:
            return
        self._has_warned = True
        tensors = (*nn.Module.named_parameters(model), *model.named_buffers())
        name = next((name for name, tensor in tensors if id(tensor) in torn), "a parameter")
        warnings.warn(
            f"the forward returns or keeps a view of {name}: without gradients, that is a copy on the device, which does not "
            f"change when {name} does. Make a new view in each forward, or return a clone",
            stacklevel=2,
        )

    def plain_step(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the forward of a training step. Its parameters are on the device."""
        with buffers_on(self._where, model):
            return self.call(model, *args, **kwargs)

    def _fetcher(self) -> Fetcher:
        session = self.session
        if session.device.where.type != "cpu":
            return CudaFetcher(session.device)
        return CpuFetcher(session.machine.h2d_gbps if session.options.throttle is not None else None)

    # ---------------------------------------------------------------------------------------------------------- the room

    def _modules(self, model: nn.Module) -> _Modules:
        if self._care is None:
            opaque: list[nn.Module] = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
            opaque += [inner for module in model.modules() if torch_private.is_compiled(module) for inner in module.modules()]
            self._care = _Modules(tuple(map(weakref.ref, keepers(model))), tuple(map(weakref.ref, opaque)))
        return self._care

    def _homes(self, model: nn.Module) -> _Homes:
        tiers = self.session.parameters.tiers_at_home()
        tensors: list[torch.Tensor] = [p for _, p in nn.Module.named_parameters(model) if tiers.get(id(p)) != "device"]
        if self._where.type != "cpu":
            tensors += model.buffers()
        read_unseen = {
            id(t) for m in _alive(self._modules(model).opaque) for t in (*m._parameters.values(), *m._buffers.values())
        }
        homes = _Homes([], [], [], changed_unseen(model) if self._where.type != "cpu" else set())
        for tensor in tensors:
            if tensor.device.type != "cpu":
                continue
            if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout != torch.strided or tensor.is_inference():
                homes.odd.append(tensor)
            elif id(tensor) not in read_unseen and is_lendable(tensor, 2 if id(tensor) in tiers else 1):
                homes.lent.append(tensor)
            else:
                homes.held.append(tensor)
        return homes

    def _place_parameters(self, others: int | None) -> None:
        """Gives the parameters of a model that has not trained lasting places, on the device if they fit beside the call. Those
        of one that has trained leave the device if the call does not fit beside them."""
        session, door = self.session, self.session.door
        parameters = session.parameters
        if parameters.slabs and not parameters.provisional:
            if others is not None and session.resting_nbytes() + others > self._budget:
                door.send_residents_home()
            return
        held = session.frames.nbytes() + door.sent_nbytes
        fits = others is not None and held + others + door.weights_nbytes() <= self._budget
        if not parameters.slabs:
            door.place_for_calls("device" if fits else "host")
        elif not fits:
            door.send_residents_home()
        elif not parameters.has_residents:
            parameters.forget()

    @staticmethod
    def _least_lent(homes: _Homes) -> int:
        every = list(map(lent_nbytes, homes.lent))
        return min(sum(every), _AT_ONCE * max(every, default=0))

    def _room(self, others: int | None, homes: _Homes) -> _Room:
        """Divides the budget. Frees the arenas of training steps where the call may need their room. Raises BudgetError."""
        session, budget = self.session, self._budget
        every = sum(map(lent_nbytes, homes.lent))
        least = self._least_lent(homes)
        held = session.held_nbytes() + session.door.sent_nbytes + homes.held_nbytes
        if session.arenas.nbytes("device") and (others is None or held + others + every > budget):
            session.arenas.release_device()
            held = session.held_nbytes() + session.door.sent_nbytes + homes.held_nbytes
        if held + least > budget:
            raise BudgetError(
                f"a call without gradients needs {held + least} bytes ({gib(held + least)}) of the device for parameters "
                f"alone: {gib(held)} that are held there and {gib(least)} that it reads at once; found {gib(budget)}. Pass "
                f"more than memory={held + least}: what the call computes comes on top",
                held + least,
            )
        if others is None or held + others + least > budget:  # what is known may be more than this call takes
            # It may leave nothing for what the call computes that two large parameters are there at once.
            largest = max(map(lent_nbytes, homes.lent), default=0)
            return _Room(held, None, max(largest, min(least, (budget - held) // 2)))
        return _Room(held, others, min(every, budget - held - others))

    def _check(self, room: _Room, nbytes: int, least_lent: int) -> None:
        """Raises BudgetError if a call took more than it may, and parameters on the device are not the reason. ``least_lent``:
        what parameters get to take where there is more room."""
        if room.held + nbytes <= self._budget:
            return
        if room.held + nbytes - self.session.parameters.resident_nbytes() > self._budget:
            taken = room.held + nbytes
            needed = taken + max(0, least_lent - room.lent)
            raise BudgetError(
                f"a call without gradients took {taken} bytes ({gib(taken)}) of the device: {gib(room.held)} that are held "
                f"there, {gib(nbytes)} for what it reads and computes; found {gib(self._budget)}. It has run: buffers may have "
                f"changed. Pass memory={needed} or more, or a smaller batch",
                needed,
            )
        warnings.warn(
            f"a call without gradients took {gib(room.held + nbytes)} of the device, more than memory={gib(self._budget)}. "
            "From now on, parameters are moved to the host before such calls; nothing is to be done",
            stacklevel=2,
        )

    @property
    def _budget(self) -> int:
        budget = self.session.options.memory
        assert budget is not None, "a compiled model always has one"
        return budget


@contextlib.contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Lets autocast keep no casts of parameters: they would stay until it ends, beside the budget."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Returns what tells whether a forward has changed buffers."""
    return [(id(buffer), version_of(buffer)) for buffer in model.buffers()]


def _largest_value(model: nn.Module, args: Any, kwargs: Any) -> int:
    """Returns about the bytes of the largest value of a call of which nothing is known: for each row of an input, each pixel of
    images, or each number if these are integers, as many numbers as the widest parameter has."""
    widest = max((max(p.shape, default=1) * p.element_size() for p in nn.Module.parameters(model)), default=1)
    return widest * max((t.numel() // max(1, _width(t)) for t in tensors_in((args, kwargs))), default=0)


def _width(tensor: torch.Tensor) -> int:
    if not tensor.is_floating_point() or not tensor.dim():
        return 1
    return tensor.shape[-1] if tensor.dim() < 4 else min(tensor.shape[1], tensor.shape[-1])


def _least_of_forward(step: fx.GraphModule) -> int:
    """Returns the device bytes that any forward of a step takes at least, beside parameters."""
    inputs = {node for spec, node in inputs_of(step) if spec.role != "input"}
    most = 0
    for call in calls(step):
        if call.meta["phase"] == "forward":
            read = sum(each.meta.get("nbytes", 0) for each in call.all_input_nodes if each not in inputs)
            most = max(most, read + max((each.meta.get("nbytes", 0) for each in results(call)), default=0))
    return most


def _alive(references: tuple[weakref.ref[nn.Module], ...]) -> list[nn.Module]:
    return [module for reference in references if (module := reference()) is not None]
