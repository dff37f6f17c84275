"""Plain steps: training at shapes that have no program, where a planned step has shown that everything fits on the device.

There a plan would change nothing: parameters, activations and gradients stay where they are, and no operation runs twice. So
the step runs in plain PyTorch, at once. What it takes is estimated from planned steps, with a margin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from mtcompile.execution.compiled import PlainGraph
from mtcompile.execution.plain.sizes import CallSize, KnownCalls, tensors_in
from mtcompile.execution.session import Session
from mtcompile.machine.device import allocator_peak
from mtcompile.options import FASTEST, Options

_MARGIN = 1.5  # of what a plain step may take over a planned one of the same size


class PlainSteps:
    """The plain steps of one model. ``run``: runs its forward, with what is at home on the host lent to the device."""

    def __init__(self, session: Session, run: Callable[[nn.Module, Any, Any], Any]) -> None:
        self.session, self.run = session, run
        self._planned, self._measured = KnownCalls(), KnownCalls()

    def note_planned(self, size: CallSize) -> None:
        """Notes the step of that size that has just begun, if everything stays on the device in it."""
        last = self.session.last
        if last is None or last.tangents is None or not last.plan.all_resident or self._planned.has(size):
            return
        self._planned.note(size, last.schedule.peak_nbytes["device"] - last.schedule.resident_nbytes.get("device", 0))

    def room_for(self, model: nn.Module, size: CallSize) -> int | None:
        """Returns the bytes that a plain step of that size takes at most; None if it has a program, or needs one."""
        session, budget = self.session, self.session.options.memory
        planned = self._planned.most(size)
        if planned is None or self._planned.has(size) or budget is None:
            return None
        tiers = session.parameters.tiers_at_home()
        if any(tiers.get(id(parameter)) != "device" for _, parameter in nn.Module.named_parameters(model)):
            return None
        needed = int(_MARGIN * planned)
        return needed if session.resting_nbytes() + needed <= budget else None

    def __call__(self, model: nn.Module, size: CallSize, needed: int, args: Any, kwargs: Any) -> Any:
        """Returns what the forward returns. Its graph counts as ``needed`` bytes until nothing can run its backward."""
        session, budget = self.session, self.session.options.memory
        session.drain()
        if budget is not None and session.held_nbytes() + session.door.sent_nbytes + needed > budget:
            session.arenas.release_device()
        held = session.held_nbytes() + session.door.sent_nbytes
        measuring = allocator_peak(session.device.where) if self._measured.nbytes(size) is None else contextlib.nullcontext()
        with measuring as measured:
            output = self.run(model, args, kwargs)
        graph = PlainGraph(needed)
        session.frames.plain.add(graph)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda gradients: graph and None)  # holds it
        session.note_planned(held + needed)
        if measured is not None and measured.nbytes is not None:
            self._measured.note(size, measured.nbytes)
            session.note_call(held + measured.nbytes)
            if measured.nbytes > needed:  # this model's plans say too little of its plain steps
                self._planned = KnownCalls()
        return output


def may_be_plain(options: Options, has_masters: bool) -> bool:
    """Tells whether plain steps compute what planned ones do, under these options."""
    planned_otherwise = options.updates is not None or has_masters
    planned_otherwise |= (options.accumulate, options.loss_chunks, options.tiles) != (1, 1, 1)
    asked_for = options.policy not in (FASTEST, "resident") or options.fuses or options.throttle is not None
    return not planned_otherwise and not asked_for
