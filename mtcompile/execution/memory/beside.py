"""Plans a step within a device budget that several forwards of it share."""

from __future__ import annotations

import functools
from dataclasses import replace

from mtcompile import cache
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.planner import plan_among
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem, Solved, leaves_room, shortage_beside, shortages

_PARTS = 8  # budgets to try between the smallest that works and all


def plan_beside(known: Candidates, problem: PlanningProblem, policy: str, beside: int) -> Solved:
    """Returns the fastest plan found that leaves room for what ``beside`` more forwards of it hold, and the problem that it
    solves, whose budgets of the device and, where the rest may go to disk, of the host are a part of
    the whole. Raises DoesNotFit. ``known``: of a problem that may differ in limits."""
    candidates, host = Candidates.like(known, problem), problem.budgets.host

    def planned_within(nbytes: int | None) -> Solved:
        part = replace(problem, budgets=replace(problem.budgets, device=nbytes, host=host))
        return part, cache.recalled(part, policy, functools.partial(plan_among, candidates, part.budgets, policy))

    budget = problem.budgets.device
    try:
        whole = planned_within(budget)
    except DoesNotFit as error:
        if not beside or error.tier != "device":
            raise
        raise shortage_beside(problem.budgets, planned_within(error.minimum)[1].schedule, beside) from None
    if leaves_room(problem.budgets, whole[1].schedule, beside):
        return whole
    for _ in range(_PARTS if problem.budgets.disk is not None else 0):
        short = dict(shortages(problem.budgets, whole[1].schedule, beside)).get("host")
        if short is None or host is None or problem.budgets.host is None:
            break
        host -= short - problem.budgets.host
        try:
            whole = planned_within(budget)
        except DoesNotFit:
            raise shortage_beside(problem.budgets, whole[1].schedule, beside) from None
        if leaves_room(problem.budgets, whole[1].schedule, beside):
            return whole
    high = whole[1].schedule.peak_nbytes["device"]
    try:
        low = planned_within(0)[1].schedule.peak_nbytes["device"]
    except DoesNotFit as error:
        if error.tier != "device":
            raise
        low = error.minimum
    tried = [planned_within(low + (high - low) * part // _PARTS) for part in range(_PARTS)]
    if roomy := [each for each in tried if leaves_room(problem.budgets, each[1].schedule, beside)]:
        return min(roomy, key=lambda each: each[1].plan.total_us)
    raise shortage_beside(problem.budgets, tried[0][1].schedule, beside)
