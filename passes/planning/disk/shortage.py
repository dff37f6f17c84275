"""Finds the bytes of the host that a problem lacks, before any search."""

from __future__ import annotations

from mtcompile.passes.analysis.state import param_nbytes, persistent_nbytes
from mtcompile.passes.planning.blocks import decided
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.limits import Limits
from mtcompile.passes.planning.problem import PlanningProblem


def surely_short(problem: PlanningProblem) -> int:
    """Returns the bytes that the host lacks even if the device held nothing but training state."""
    budgets, base = problem.budgets, decided(problem, param_nbytes(problem.step))
    if budgets.host is None or budgets.device is None:
        return 0
    return persistent_nbytes(problem.step, base, budgets)["host"] - budgets.device - budgets.host


def short_of_host(problem: PlanningProblem, known: Candidates) -> int:
    """Returns the bytes that the host lacks for the plan that needs least of it within the device's bytes. ``known``: of the
    same step. 0 where none is found within these."""
    budgets = problem.budgets
    if budgets.host is None or budgets.device is None:
        return 0
    leanest = Candidates.like(known, problem).leanest("host", within := Limits(budgets.device))
    return 0 if within.missing(leanest) else max(0, leanest.peak_bytes["host"] - budgets.host)
