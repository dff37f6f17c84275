"""The planner's input, a ``PlanningProblem``, and its output, ``Planned`` or ``DoesNotFit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from mtcompile.passes import PIPELINE, Pass, own_passes, pipeline
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.joint.exceptions import Contract
from mtcompile.passes.lower import Workspace
from mtcompile.passes.plan import Plan
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.usage import held_between_phases


@dataclass(frozen=True, slots=True, eq=False)
class PlanningProblem:
    """A step to be planned. ``step``: the step graph before any rewrite. ``workspace``: bytes that a kernel's body needs beside
    its operands. ``fixed_homes``: home tier of each block that is decided already, by the model's first program or by
    tensors of the user's that share its memory. ``numerics``: what holds for its values. ``passes``: those that rewrite it.
    ``effort``: what its search may cost (see ``search.EFFORTS``)."""

    step: fx.GraphModule
    machine: Machine
    budgets: Budgets
    workspace: Workspace = workspace_nbytes
    fixed_homes: Mapping[str, str] = field(default_factory=dict)
    numerics: Contract = field(default_factory=Contract)
    passes: tuple[Pass, ...] = field(default_factory=pipeline)
    effort: str = "normal"

    @property
    def own_passes(self) -> tuple[Pass, ...]:
        """The registered passes; only schedules show what these do."""
        return own_passes(self.passes)

    @property
    def as_summarised(self) -> PlanningProblem:
        """The problem without registered passes, as summaries know it."""
        return replace(self, passes=PIPELINE) if self.own_passes else self

    def within(self, device: int | None, host: int | None) -> PlanningProblem:
        """The problem with other bytes of the device and the host."""
        return replace(self, budgets=replace(self.budgets, device=device, host=host))

    def differs_in_limits(self, other: PlanningProblem) -> bool:
        """Tells whether it differs from another problem at most in the bytes of its device and its host."""
        return self.has_same_figures(other) and self._without_limits() == other._without_limits()

    def has_same_figures(self, other: PlanningProblem) -> bool:
        """Tells whether each plan of another problem has the same peaks and times: limits and fixed homes may differ."""
        return self.step is other.step and self._of_figures() == other._of_figures()

    def _without_limits(self) -> tuple[object, ...]:
        return replace(self.budgets, device=None, host=None), self.fixed_homes, self.numerics, self.effort

    def _of_figures(self) -> tuple[object, ...]:
        disk = None if self.budgets.disk is None else 0
        budgets = replace(self.budgets, device=None, host=None, disk=disk, disk_takes=(), disk_direct=None)
        return self.machine, self.workspace, self.passes, replace(budgets, disk_slowdown=0.0, disk_days=0.0)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with its rewritten step graph and the schedule lowered from it."""

    plan: Plan
    step: fx.GraphModule
    schedule: Schedule


NOTHING: Mapping[str, int] = {"device": 0, "host": 0}  # bytes by tier
Solved = tuple[PlanningProblem, Planned]  # a plan, and the problem that it solves


@dataclass(frozen=True, slots=True)
class Candidate:
    """An evaluated plan, with its peaks and times. ``lowered``: gives the schedule that they are of, without dependencies; it
    may lower the plan again."""

    plan: Plan
    lowered: Callable[[], Schedule]

    @property
    def schedule(self) -> Schedule:
        return self.lowered()


class DoesNotFit(Exception):
    """Raised when even the leanest plan needs more. ``minimum``: the fewest bytes of ``tier`` of a plan that was found; another
    may need less. ``causes``: their largest parts, in bytes."""

    def __init__(self, tier: str, minimum: int, causes: tuple[tuple[str, int], ...]) -> None:
        super().__init__(f"{tier}: needs {minimum}")
        self.tier, self.minimum, self.causes = tier, minimum, causes


def way_to_go(tier: str, minimum: int) -> tuple[int, int]:
    """Orders the refusals of several forms of a step: what lacks a better disk alone has the smallest way to go, and what
    does not fit the device the largest. Of one tier, what needs least of it comes first."""
    return ("disk", "host", "device").index(tier), minimum


def leaves_room(budgets: Budgets, schedule: Schedule, beside: int, more: Mapping[str, int] = NOTHING) -> bool:
    """Tells whether the budgets hold a schedule, and what ``beside`` more forwards of it keep for their backward. ``more``:
    what else is there, by tier."""
    return not shortages(budgets, schedule, beside, more)


def shortages(budgets: Budgets, schedule: Schedule, beside: int, more: Mapping[str, int] = NOTHING) -> list[tuple[str, int]]:
    """Returns the tiers whose budget is too small for that, with the bytes that they would need."""
    needed = {tier: schedule.peak_nbytes.get(tier, 0) + more.get(tier, 0) for tier in budgets.nbytes}
    if beside:  # else spare the walk: each backward beside a waiting forward asks
        held = held_between_phases(schedule)
        needed = {tier: nbytes + beside * held[tier] for tier, nbytes in needed.items()}
    return [(t, nbytes) for t, nbytes in needed.items() if (budget := budgets.nbytes[t]) is not None and nbytes > budget]


def shortage_beside(budgets: Budgets, schedule: Schedule, beside: int) -> DoesNotFit:
    """Returns the refusal of a schedule for which, with what ``beside`` more forwards of it keep, a budget is too small."""
    tier, needed = min(shortages(budgets, schedule, beside), key=lambda shortage: shortage[0] != "device")
    held_nbytes = beside * held_between_phases(schedule)[tier]
    return DoesNotFit(tier, needed, ((f"what {beside} more forwards hold until their backward", held_nbytes),))


Progress = Callable[[str, int, int], None]  # called with (text, done, total); total is 0 where it is unknown


def no_progress(text: str, done: int, total: int) -> None:
    """Ignores progress."""
