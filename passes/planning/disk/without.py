"""Plans a step that has a disk without it: first, where that may fit, so that a disk that is not needed changes nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.activations import Find
from mtcompile.passes.planning.disk.shortage import surely_short
from mtcompile.passes.planning.problem import PlanningProblem, Solved


def may_fit_without(problem: PlanningProblem, known: Candidates, inside: bool = True) -> bool:
    """Tells whether a plan may be within the budgets with nothing on disk, by its linear program: lean plans may not, and
    others are. ``inside``: False for a plan of any form (see ``Relaxation``)."""
    if "disk" in problem.fixed_homes.values() or surely_short(problem) > 0:
        return False
    budgets = replace(problem.budgets, disk=None)
    return Candidates.like(known, replace(problem, budgets=budgets)).bound_us(budgets.device, budgets.host, inside) < inf


def planned_without(problem: PlanningProblem, known: Candidates, find: Find) -> Solved:
    """Returns the plan that ``find`` finds where there is no disk, and the problem that it solves, which has one. Plans a
    problem with homes on disk as it is. Raises DoesNotFit."""
    if "disk" in problem.fixed_homes.values():
        return find(problem)
    budgets = problem.budgets
    part, without = find(replace(problem, budgets=replace(budgets, disk=None)))
    part = replace(part, budgets=replace(part.budgets, disk=budgets.disk, disk_direct=bool(budgets.disk_direct)))
    candidates = Candidates.like(known, part)
    planned = candidates.planned(without.plan)
    bound = None if without.plan.certificate is None else candidates.certificate(part.budgets.device, part.budgets.host)
    plan = replace(planned.plan, minimum_device_bytes=without.plan.minimum_device_bytes, certificate=bound)
    return part, replace(planned, plan=plan)
