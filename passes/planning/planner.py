"""The planner: finds, among the candidate plans, the fastest whose lowered schedule fits.

``make_plan(problem) -> Planned`` is the interface; ``Candidates`` keeps evaluated plans for the next budget.
"""

from __future__ import annotations

from dataclasses import replace

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import held_nbytes
from mtcompile.passes.lower import Workspace, lower
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates, Store
from mtcompile.passes.planning.evaluate import completed
from mtcompile.passes.planning.frontier import fits
from mtcompile.passes.planning.ladders import everything
from mtcompile.passes.planning.problem import Planned, PlanningProblem


def make_plan(
    problem: PlanningProblem, policy: str = "fastest", known: Plan | None = None, store: Store | None = None
) -> Planned:
    """Returns the fastest plan that fits, or that of a fixed ``policy``, with its rewritten graph and schedule (deps derived,
    not yet proven). ``known``: as for ``Candidates.best``. ``store``: as for ``Candidates``. Raises DoesNotFit."""
    candidates, budgets = Candidates(problem, store=store), problem.budgets
    if policy != "fastest":
        return candidates.by_policy(policy, budgets)
    return candidates.best(budgets.device, budgets.host, known)


def resident_plan(problem: PlanningProblem) -> Planned | None:
    """Returns the plan with everything on the device and nothing recomputed except what is free in fused kernels; None if it
    does not fit."""
    candidates = Candidates(problem)
    plan = everything(problem.step, candidates.base, candidates.open_params, fused=True)
    if any(plan.params(block) != "device" for block in candidates.sizes):
        return None
    planned = candidates.evaluate(plan)
    if not fits(planned.plan, problem.budgets):
        return None
    return completed(problem, planned, planned.plan.peak_bytes["device"], None)


def may_be_resident(problem: PlanningProblem) -> bool:
    """Says whether the training state alone fits on the device."""
    budgets = problem.budgets
    return budgets.device is None or sum(held_nbytes(problem.step, budgets).values()) <= budgets.device


def relowered(planned: Planned, machine: Machine, workspace: Workspace, held: int = 0) -> Planned:
    """Lowers the same plan for other kernels. ``workspace``: bytes that these need beside their operands. ``held``: device
    bytes that they keep from call to call."""
    resident = dict(planned.schedule.resident_nbytes)
    resident["device"] = resident.get("device", 0) + held
    schedule = lower(planned.step, planned.plan, machine, resident, workspace)
    return Planned(replace(planned.plan, peak_bytes=dict(schedule.peak_nbytes)), planned.step, schedule)
