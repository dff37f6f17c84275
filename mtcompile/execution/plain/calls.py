"""Gradient-free calls (evaluation, generation, reference models): the plain forward runs at any shape, within the budget.

Parameters that the device has no lasting place for are lent to it. What else a call takes is measured the first time, for each
call that is notably larger than known ones, and now and then.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mtcompile import knobs, torch_private
from mtcompile.errors import BudgetError
from mtcompile.execution.plain.lending import Lending, call_lending, is_lendable, keepers, lent_nbytes
from mtcompile.execution.plain.sizes import KnownCalls, size_of_call
from mtcompile.execution.session import Session
from mtcompile.machine.device import allocator_peak
from mtcompile.runtime.devices.fetching import CpuFetcher, CudaFetcher, Fetcher
from mtcompile.runtime.schedule import gib

_AT_ONCE = 2  # parameters that have to fit: one that is read, and one on its way


@dataclass(frozen=True, slots=True)
class _Room:
    """Device bytes for one call. ``held``: what stays there meanwhile. ``others``: what the call takes beside parameters; None
    if that is not known. ``lent``: the most that lent parameters may take."""

    held: int
    others: int | None
    lent: int


class GradientFreeCalls:
    """Runs the gradient-free calls of one model. ``call``: its plain forward."""

    def __init__(self, session: Session, call: Callable[..., Any]) -> None:
        self.session, self.call = session, call
        self._known = KnownCalls()
        self._order: list[int] = []  # in which the last call read what was lent
        self._keepers: tuple[weakref.ref[nn.Module], ...] | None = None

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns what the plain forward returns. Raises BudgetError where the call does not fit."""
        self.session.drain()
        size = size_of_call(model, args, kwargs)
        others = self._known.nbytes(size)
        with torch_private.lasting():
            self._place_parameters(others)
        homes = self._homes(model)
        is_due = knobs.check() or self._known.is_due(size)
        room = self._room(None if is_due else others, homes)
        if room.others is not None:
            output, most_lent = self._run(model, homes, room, args, kwargs)
            # What had to be there at once although it was more than the room, was so when the others were measured.
            self.session.note_call(room.held + room.others + min(most_lent, room.lent))
            return output
        with allocator_peak(self.session.device.where) as measured:
            output, _ = self._run(model, homes, room, args, kwargs)
        if measured.nbytes is not None:  # there was no other profiler
            self._known.note(size, measured.nbytes)
            self.session.note_call(room.held + measured.nbytes)
            self._check(room, measured.nbytes)
        return output

    def _run(self, model: nn.Module, homes: Sequence[torch.Tensor], room: _Room, args: Any, kwargs: Any) -> tuple[Any, int]:
        with _without_cast_cache():
            return self._lending(model, homes, room.lent, args, kwargs)

    def plain_step(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the forward of a training step. Its parameters are on the device."""
        homes = self._homes(model)
        return self._lending(model, homes, sum(map(lent_nbytes, homes)), args, kwargs)[0]

    def _lending(self, model: nn.Module, homes: Sequence[torch.Tensor], room: int, args: Any, kwargs: Any) -> tuple[Any, int]:
        """Returns the forward's output, and the most bytes that were lent at once."""
        if not homes:
            return self.call(*args, **kwargs), 0
        if self._keepers is None:
            self._keepers = tuple(map(weakref.ref, keepers(model)))
        keeping = [module for reference in self._keepers if (module := reference()) is not None]
        lent = Lending(homes, self._order or [id(home) for home in homes], self._fetcher(), room)
        output = call_lending(functools.partial(self.call, *args, **kwargs), model, lent, keeping)
        self._order = lent.reads or self._order
        return output, lent.most_nbytes

    def _fetcher(self) -> Fetcher:
        session = self.session
        if session.device.where.type != "cpu":
            return CudaFetcher(session.device)
        return CpuFetcher(session.machine.h2d_gbps if session.options.throttle is not None else None)

    # ---------------------------------------------------------------------------------------------------------- the room

    def _homes(self, model: nn.Module) -> list[torch.Tensor]:
        """Returns the tensors of the model that are not where it computes."""
        where, resident = self.session.device.where, self.session.parameters.residents()
        tensors: list[torch.Tensor] = [p for _, p in nn.Module.named_parameters(model) if id(p) not in resident]
        if where.type != "cpu":
            tensors += model.buffers()
        return [tensor for tensor in tensors if tensor.device.type == "cpu" and is_lendable(tensor)]

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

    def _room(self, others: int | None, homes: Sequence[torch.Tensor]) -> _Room:
        """Divides the budget. Frees the arenas of training steps where the call may need their room. Raises BudgetError."""
        session, budget = self.session, self._budget
        every = sum(map(lent_nbytes, homes))
        least = min(every, _AT_ONCE * max(map(lent_nbytes, homes), default=0))
        held = session.held_nbytes() + session.door.sent_nbytes
        if session.arenas.nbytes("device") and (others is None or held + others + every > budget):
            session.arenas.release_device()
            held = session.held_nbytes() + session.door.sent_nbytes
        if held + least > budget:
            raise BudgetError(
                f"a call without gradients needs {held + least} bytes ({gib(held + least)}) of the device for parameters "
                f"alone: {gib(held)} that are held there and {gib(least)} that it reads at once; found {gib(budget)}. Pass "
                f"more than memory={held + least}: what the call computes comes on top",
                held + least,
            )
        if others is None or held + others + least > budget:  # what is known may be more than this call takes
            return _Room(held, None, least)
        return _Room(held, others, min(every, budget - held - others))

    def _check(self, room: _Room, nbytes: int) -> None:
        """Raises BudgetError if a call took more than it may, and parameters on the device are not the reason."""
        if room.held + nbytes <= self._budget:
            return
        if room.held + nbytes - self.session.parameters.resident_nbytes() > self._budget:
            needed = room.held + nbytes
            raise BudgetError(
                f"a call without gradients took {needed} bytes ({gib(needed)}) of the device: {gib(room.held)} that are held "
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
