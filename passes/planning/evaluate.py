"""Evaluates one plan: makes its step graph and schedule, and finds the peaks and times by which plans are compared."""

from __future__ import annotations

from dataclasses import replace

from mtcompile.passes import rewrite
from mtcompile.passes.analysis.state import param_nbytes, persistent_nbytes, resident_nbytes, times_us
from mtcompile.passes.lower import lower
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us


def evaluate(problem: PlanningProblem, plan: Plan) -> Planned:
    """Rewrites and lowers the step with ``plan``, and fills in the plan's peaks and predicted times. Leaves linting and
    generating Python code to ``completed``, for the chosen candidate only."""
    step, machine, budgets = problem.step, problem.machine, problem.budgets
    sizes = param_nbytes(step)
    rewritten = rewrite(step, plan, lint=False)
    schedule = lower(rewritten, plan, machine, persistent_nbytes(step, plan, budgets), problem.workspace)
    time_us, exposed = times_us(schedule, machine, sizes, plan, budgets)
    peaks = dict(schedule.peak_nbytes)
    return Planned(replace(plan, step_time_us=time_us, update_us=exposed, peak_bytes=peaks), rewritten, schedule)


def completed(problem: PlanningProblem, planned: Planned, minimum: int) -> Planned:
    """Completes the chosen candidate for its reader and its executor: adds budgets, limits, the limiting resource, and
    ``minimum``, the smallest device budget that works, in bytes."""
    planned.step.graph.lint()
    planned.step.recompile()
    busy: dict[str, float] = {queue: us for queue, us in busy_us(simulate(planned.schedule)).items()}
    busy["update"] = planned.plan.update_us
    limits = problem.budgets.nbytes
    plan = replace(
        planned.plan,
        budget_bytes=limits,
        minimum_device_bytes=minimum,
        state_bytes=sum(resident_nbytes(param_nbytes(problem.step), planned.plan, problem.budgets).values()),
        limiting_resource=max(busy, key=lambda resource: busy[resource]),
    )
    stated = {tier: nbytes for tier, nbytes in limits.items() if nbytes is not None}
    return Planned(plan, planned.step, replace(planned.schedule, budget_nbytes=stated))


def shortfall(planned: Planned, tier: str) -> DoesNotFit:
    """Returns the error to raise if even this candidate needs more of ``tier`` than there is."""
    return DoesNotFit(tier, planned.schedule.peak_nbytes[tier], _largest_parts(planned, tier))


def _largest_parts(planned: Planned, tier: str) -> tuple[tuple[str, int], ...]:
    """Returns the three largest parts of a tier's peak, in bytes."""
    schedule = planned.schedule
    parts = [("placed slots (weights and values in transit)", schedule.arena_nbytes.get(tier, 0))]
    parts.append(("persistent state", schedule.resident_nbytes.get(tier, 0)))
    if tier == "device":
        runs = [i for i in schedule.instructions if i.op == "run"]
        for run in sorted(runs, key=lambda i: -i.workspace)[:2]:
            parts.append((f"workspace of {run.label}", run.workspace))
        pooled = sorted((b for b in schedule.buffers.values() if b.kind == "pooled"), key=lambda b: -b.nbytes)
        parts += [(f"{b.role} {b.name}", b.nbytes) for b in pooled[:2]]
    return tuple(sorted(parts, key=lambda part: -part[1])[:3])
