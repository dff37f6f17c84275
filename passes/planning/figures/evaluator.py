"""Evaluates plans from summaries of their step: the same peaks and times as their schedules, several times faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from torch import fx

from mtcompile.passes.analysis.state import Traffic, persistent_of, trained_nbytes, update_figures
from mtcompile.passes.memo import remembered
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.evaluate import identity
from mtcompile.passes.planning.figures.compiled import ON_DEVICE, ON_HOST, CompiledStep, CompiledSteps, Measures
from mtcompile.passes.planning.figures.sketch import Sketches
from mtcompile.passes.planning.figures.summary import Outline, Unsupported, outline_of, summary_of
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import ranks_of

_MOST_SUMMARIES = 256  # that are remembered


class Figures(NamedTuple):
    """Peaks in bytes by tier, and the µs of forward and backward and of what updates add to them."""

    peak_nbytes: Mapping[str, int]
    step_time_us: float
    update_us: float


class Evaluator:
    """Evaluates plans of one problem. ``draft``: of its step. ``casts``: whether the host may cast anything. ``known``: of a
    problem whose plans have the same figures."""

    def __init__(
        self,
        problem: PlanningProblem,
        draft: fx.GraphModule,
        casts: bool,
        known: Evaluator | None = None,
    ) -> None:
        self.problem = problem
        self._casts = casts
        step, updates = problem.step, problem.budgets.updates
        self.able = not (step.meta.get("sliced") or ranks_of(step) != 1)
        self.able = self.able and not (updates is not None and updates.held)
        self._known = known
        self._sketches: Sketches = Sketches(draft) if known is None else known._sketches
        self._summaries: dict[object, CompiledStep] = {} if known is None else known._summaries
        self._compiled: CompiledSteps = CompiledSteps(problem.machine) if known is None else known._compiled
        self._last: tuple[Plan, tuple[Figures, Measures]] | None = None  # the plan evaluated last

    @cached_property
    def _persistent(self) -> Callable[[Plan], dict[str, int]]:
        return persistent_of(self.problem.step, self.problem.budgets)

    @cached_property
    def _outline(self) -> Outline:
        return outline_of(self._sketches.draft) if self._known is None else self._known._outline

    def figures(self, plan: Plan) -> Figures | None:
        """Returns a plan's figures; None where only its schedule tells them."""
        return self._evaluated(plan)[0] if self._supports(plan) else None

    def due_first(self, plan: Plan) -> tuple[str, ...] | None:
        """Returns a plan's updates on the host in the order in which they are due (see ``pace``); None as ``figures``."""
        if not self._supports(plan):
            return None
        return self._evaluated(plan)[1].due_first()

    def _supports(self, plan: Plan) -> bool:
        if not self.able or (self._casts and plan.narrow) or (plan.updates is not None and plan.updates.held):
            return False
        on_disk = () if self.problem.budgets.disk is None else (d for d in plan.decisions if d.choice == "disk")
        if any(decision.kind == "activation" for decision in on_disk):
            return False
        try:
            self._summary(plan)
        except Unsupported:
            self.able = False
        return self.able

    def _summary(self, plan: Plan) -> CompiledStep:
        key = plan.decisions.recomputed, plan.span
        return remembered(self._summaries, key, _MOST_SUMMARIES, lambda: self._summarised(plan))

    def _summarised(self, plan: Plan) -> CompiledStep:
        sketch = self._sketches.of(plan)
        outline = self._outline if sketch.graph is self._sketches.draft else outline_of(sketch.graph)
        return self._compiled.step(summary_of(sketch, outline, self.problem.machine, self.problem.workspace))

    def _evaluated(self, plan: Plan) -> tuple[Figures, Measures]:
        if self._last is not None and _same(self._last[0], plan):
            return self._last[1]
        problem, needs = self.problem, self._summary(plan).measures(plan)
        peaks = self._persistent(plan)
        peaks["device"] += needs.arenas[ON_DEVICE] + needs.most
        peaks["host"] += needs.arenas[ON_HOST]
        spans = needs.alone, needs.backward, needs.period
        trained = trained_nbytes(problem.step)
        times = update_figures(spans, Traffic(needs.copied, needs.drives), problem.machine, trained, plan, problem.budgets)
        self._last = plan, (Figures(peaks, *times), needs)
        return self._last[1]


def _same(one: Plan, other: Plan) -> bool:
    """Tells whether two plans are one but for their figures."""
    return one.decisions is other.decisions and identity(one) == identity(other)
