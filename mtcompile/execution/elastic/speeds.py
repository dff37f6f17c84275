"""The speeds of the last steps of each program, as a machine that plans can be made for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mtcompile.execution.calibration import TimedPhase, as_measured, medians
from mtcompile.execution.compiled import CompiledStep
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.evaluate import identity
from mtcompile.runtime.trace import Trace

WINDOW = 3  # steps whose medians count
_MOST_PROGRAMS, _MOST_PLANS = 8, 4


@dataclass(slots=True)
class Recent:
    """The last steps of one program. ``scale``: by queue, measured time over formula when plans were compared last; None before
    that. ``skipped``: whether its first step has been left out, in which kernels are run for the first time. ``earlier``: the
    plans that it had before."""

    compiled: CompiledStep
    traces: deque[Trace] = field(default_factory=lambda: deque(maxlen=WINDOW))
    scale: Mapping[str, float] | None = None
    skipped: bool = False
    earlier: tuple[Plan, ...] = ()


class Speeds:
    """Measured times, over formulas for ``base``: the newest of everything that has run."""

    def __init__(self, base: Machine) -> None:
        self.base = replace(base, measured=None)
        self._times: dict[str, Mapping[str, tuple[float, float]]] = {}
        self._recent: dict[int, Recent] = {}

    def add(self, compiled: CompiledStep, trace: Trace) -> Recent | None:
        """Adds a step as it ran. Returns the program's last steps once there are enough of them."""
        recent = self._recent.setdefault(id(compiled), Recent(compiled))
        if not recent.skipped:
            recent.skipped = True
            return None
        recent.traces.append(trace)
        while len(self._recent) > _MOST_PROGRAMS:
            del self._recent[next(iter(self._recent))]
        return recent if len(recent.traces) == WINDOW else None

    def replaced(self, recent: Recent, new: CompiledStep) -> None:
        """Takes note that a program goes on by another plan."""
        self._recent.pop(id(recent.compiled), None)
        others = (plan for plan in recent.earlier if identity(plan) != identity(new.plan))
        self._recent[id(new)] = Recent(new, earlier=(*others, recent.compiled.plan)[-_MOST_PLANS:])

    def now(self, recent: Recent) -> Machine:
        """Returns the machine as the last steps of a program measured it; the rest is as it was measured before."""
        timed: list[TimedPhase] = [(recent.compiled, "forward", list(trace.records)) for trace in recent.traces]
        newest = medians(timed, self.base)
        for queue, pairs in newest.items():
            self._times[queue] = {**self._times.get(queue, {}), **pairs}
        # A queue's factor is that of the last steps alone: older times of other copies may be of another speed.
        latest = as_measured(self.base, newest)
        every = as_measured(self.base, self._times)
        assert every.measured is not None and latest.measured is not None
        scale = {**every.measured.scale, **latest.measured.scale}
        return replace(every, name=f"{self.base.name}, as measured", measured=replace(every.measured, scale=scale))


class Drift(NamedTuple):
    """A queue's speed that is not the one that plans were compared for: its times are ``factor`` times what they were."""

    queue: str = ""
    factor: float = 1.0

    @property
    def far(self) -> float:
        """How far it is, in either direction: 1 for no drift."""
        return max(self.factor, 1 / self.factor)

    def __str__(self) -> str:
        return f"{self.queue} takes {self.factor:.2g} times as long as planned for"


def drift_of(recent: Recent, machine: Machine) -> Drift:
    """Returns the largest drift of any queue."""
    planned_for = recent.compiled.problem.machine
    measured = machine.measured.scale if machine.measured is not None else {}
    drifts = [Drift()]
    for queue, factor in measured.items():
        before = recent.scale.get(queue, 1.0) if recent.scale is not None else planned_for.scale(queue)
        drifts.append(Drift(queue, factor / before))
    return max(drifts, key=lambda drift: drift.far)
