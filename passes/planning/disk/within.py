"""Plans a step that may have a disk: the third tier of its search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.homes import surely_short
from mtcompile.passes.planning.disk.limits import check_worthwhile
from mtcompile.passes.planning.problem import PlanningProblem, Solved

Find = Callable[[PlanningProblem], Solved]


def within_disk(problem: PlanningProblem, find: Find, homes_move: bool = True, known: Candidates | None = None) -> Solved:
    """Returns the problem, with the homes on disk that its plan has there, and its plan. ``find``: plans a problem, whose
    device budget it may lower, or raises DoesNotFit, as this does. ``homes_move``: False to plan with nothing on disk, unless
    some homes are. ``known``: of the same step. Raises NotWorthwhile."""
    if problem.budgets.disk is None:
        return find(problem)
    if not homes_move and "disk" not in problem.fixed_homes.values():
        return planned_without(problem, known or Candidates(problem), find)
    part, planned = find(problem)
    there = {home: "disk" for home, d in planned.plan.decisions.of_kind("params").items() if d.choice == "disk"}
    budgets = replace(part.budgets, disk_direct=planned.plan.disk_direct)
    part = replace(part, fixed_homes={**part.fixed_homes, **there}, budgets=budgets)
    if planned.plan.peak_bytes.get("disk"):
        check_worthwhile(part, planned.plan)
    return part, planned


def may_fit_without(problem: PlanningProblem, known: Candidates, inside: bool = True) -> bool:
    """Tells whether a plan may be within the budgets with nothing on disk, by its linear program: lean plans may not, and
    others are. ``inside``: False for a plan of any form (see ``Relaxation``)."""
    if "disk" in problem.fixed_homes.values() or surely_short(problem) > 0:
        return False
    return known.bound_us(problem.budgets.device, problem.budgets.host, inside, at_home=True) < inf


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
