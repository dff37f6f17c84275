"""Plans a forecast's step in one form."""

from __future__ import annotations

from dataclasses import replace

from mtcompile.cache import recalled
from mtcompile.options import FASTEST
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.within import Find, may_fit_without, planned_without, within_disk
from mtcompile.passes.planning.planner import plan_among
from mtcompile.passes.planning.problem import Planned, PlanningProblem, Solved


def fastest(candidates: Candidates, device: int | None, host: int | None) -> Planned:
    """Returns the fastest plan within these bytes; it is cached between runs. Raises DoesNotFit."""
    problem = candidates.problem.within(device, host)
    return within_disk(problem, _finder(candidates, device), known=candidates)[1]


def fastest_without_disk(candidates: Candidates, device: int | None, host: int | None) -> Planned | None:
    """Returns the fastest plan with nothing on disk within these bytes; None where it is sure that there is none. Raises
    DoesNotFit."""
    if not may_fit_without(problem := candidates.problem.within(device, host), candidates):
        return None
    return planned_without(problem, candidates, _finder(candidates, device))[1]


def _finder(candidates: Candidates, device: int | None) -> Find:
    """Returns the function that plans a problem of that step, with some homes on disk or none."""
    searched = candidates

    def find(fixed: PlanningProblem) -> Solved:
        nonlocal searched
        known = searched.problem
        if (fixed.fixed_homes, fixed.budgets.disk) != (known.fixed_homes, known.budgets.disk):
            searched = Candidates.like(candidates, fixed)
        limits = replace(fixed.budgets, device=device)
        return fixed, recalled(fixed, FASTEST, lambda known: plan_among(searched, limits, FASTEST, known))

    return find
