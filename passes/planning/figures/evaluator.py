"""Evaluates plans from summaries of their step: the same peaks and times as their schedules, several times faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from mtcompile.passes.analysis.state import Traffic, persistent_of, trained_nbytes, update_figures
from mtcompile.passes.memo import remembered
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.evaluate import evaluate, identity
from mtcompile.passes.planning.figures.compiled import ON_DEVICE, ON_DISK, ON_HOST, CompiledStep, CompiledSteps, Measures
from mtcompile.passes.planning.figures.sketch import Sketches
from mtcompile.passes.planning.figures.summary import Outline, outline_of, summary_of
from mtcompile.passes.planning.pace import Due
from mtcompile.passes.planning.problem import Candidate, PlanningProblem
from mtcompile.passes.rewrites.casts import may_cast


class Figures(NamedTuple):
    """Peaks in bytes by tier, and the µs of forward and backward and of what updates add to them."""

    peak_nbytes: Mapping[str, int]
    step_time_us: float
    update_us: float


class Evaluator:
    """Evaluates plans of one problem. ``known``: of a problem whose plans have the same figures."""

    def __init__(self, problem: PlanningProblem, known: Evaluator | None = None) -> None:
        self.problem = problem
        self._may_cast = may_cast(problem.step)
        self._known = known
        self._sketches: Sketches = Sketches(problem.step) if known is None else known._sketches
        self._summaries: dict[object, CompiledStep] = {} if known is None else known._summaries
        self._compiled: CompiledSteps = _compiled(problem) if known is None else known._compiled
        self._last: tuple[Plan, tuple[Figures, Measures]] | None = None  # the plan evaluated last

    @cached_property
    def _persistent(self) -> Callable[[Plan], dict[str, int]]:
        return persistent_of(self.problem.step, self.problem.budgets)

    @cached_property
    def _outline(self) -> Outline:
        return outline_of(self._sketches.step, self.problem.budgets) if self._known is None else self._known._outline

    def figures(self, plan: Plan) -> Figures:
        """Returns a plan's figures."""
        return self._evaluated(plan)[0]

    def candidate(self, plan: Plan, figures: Figures | None = None) -> Candidate:
        """Returns the plan with its ``figures``, or as they are now. Its schedule is made when it is asked for."""
        peaks, step_time_us, update_us = self.figures(plan) if figures is None else figures
        again = plan.changed(peak_bytes=dict(peaks), step_time_us=step_time_us, update_us=update_us)
        return Candidate(again, lambda: evaluate(self.problem, plan).schedule)

    def due_first(self, plan: Plan) -> Due:
        """Returns a plan's updates on the host in the order in which they are due (see ``pace``)."""
        measures = self._evaluated(plan)[1]
        return Due(measures.due_first(), measures.casts)

    def _summary(self, plan: Plan) -> CompiledStep:
        key: tuple[object, ...] = plan.decisions.recomputed, plan.span
        if self._casting(plan):
            key = *key, plan.decisions.token, plan.wide
        return remembered(self._summaries, key, lambda: self._summarised(plan))

    def _summarised(self, plan: Plan) -> CompiledStep:
        sketch = self._sketches.of(plan)
        outline = self._outline if sketch.graph is self._sketches.step else outline_of(sketch.graph, self.problem.budgets)
        casting = plan if self._casting(plan) else None
        return self._compiled.step(summary_of(sketch, outline, self.problem.machine, self.problem.workspace, casting))

    def _casting(self, plan: Plan) -> bool:
        return plan.narrow and self._may_cast

    def _evaluated(self, plan: Plan) -> tuple[Figures, Measures]:
        if self._last is not None and _same(self._last[0], plan):
            return self._last[1]
        problem, needs = self.problem, self._summary(plan).measures(plan)
        peaks = self._persistent(plan)
        peaks["device"] += needs.arenas[ON_DEVICE] + needs.most
        peaks["host"] += needs.arenas[ON_HOST]
        if spilled := needs.arenas[ON_DISK]:
            peaks["disk"] = peaks.get("disk", 0) + spilled
        spans = needs.alone, needs.backward, needs.period
        trained = trained_nbytes(problem.step)
        traffic = Traffic(needs.copied, needs.drives, needs.collectives)
        times = update_figures(spans, traffic, problem.machine, trained, plan, problem.budgets)
        self._last = plan, (Figures(peaks, *times), needs)
        return self._last[1]


def _compiled(problem: PlanningProblem) -> CompiledSteps:
    return CompiledSteps(problem.machine, int(problem.step.meta.get("hosts", 1)))


def _same(one: Plan, other: Plan) -> bool:
    """Tells whether two plans are one but for their figures."""
    return one.decisions is other.decisions and identity(one) == identity(other)
