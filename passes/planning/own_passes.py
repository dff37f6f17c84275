"""Plans a step with registered passes; only schedules show what these do.

    budgets ──► search, by summaries without the passes ──► its best plan and the leanest ──► their schedules with the passes
       ▲                                                                                             │
       └─────────────────────── once more, by the bytes that the passes add or save ◄────────────────┘

A search is as good as its summaries are accurate. What passes do to all plans alike changes no choice, except by the bytes
that they add or save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.evaluate import completed, evaluate, shortfall
from mtcompile.passes.planning.limits import fits, missing_nbytes
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, Planned, PlanningProblem
from mtcompile.passes.registered import names_of


def plan_by_schedules(candidates: Candidates, budgets: Budgets, known: Plan | None = None) -> Planned:
    """Returns the plan whose schedule is the fastest within the budgets, of those that searches without the registered passes
    find. ``known``: as for ``Candidates.best``. Raises DoesNotFit and PassFailed."""
    problem = candidates.problem.within(budgets.device, budgets.host)
    if known is not None and fits((again := evaluate(problem, known)).plan, problem.budgets):
        return completed(problem, again, known.minimum_device_bytes, None)
    judged, added = list[Candidate](), dict[str, int]()
    for count in range(2):
        candidates.progress(f"planning with {names_of(problem.own_passes)}, by schedules", count, 2)
        within = _less(problem.budgets, added)
        try:
            planned = candidates.best(within.device, within.host)
        except DoesNotFit as error:
            if count == 0 and error.minimum > (problem.budgets.nbytes[error.tier] or 0):
                raise _with_what_passes_add(error, problem, added) from None
            break
        judged.append(Candidate(planned.plan, lambda schedule=planned.schedule: schedule))
        added = _added(candidates, planned.plan)
    judged.append(evaluate(problem, candidates.leanest()))
    fitting = [each for each in judged if fits(each.plan, problem.budgets)]
    if not fitting:
        leanest = min(judged, key=lambda each: missing_nbytes(each.plan, problem.budgets))
        limits = [(tier, n) for tier, n in problem.budgets.nbytes.items() if n is not None]
        error = shortfall(leanest, next(tier for tier, n in limits if leanest.plan.peak_bytes[tier] > n), problem.step)
        raise _with_what_passes_add(error, problem, _added(candidates, leanest.plan))
    best = min(fitting, key=lambda each: each.plan.total_us)
    minimum = min(each.plan.peak_bytes["device"] for each in fitting)
    return completed(problem, best, minimum, None)


def _less(budgets: Budgets, added: Mapping[str, int]) -> Budgets:
    """Returns the budgets less the bytes that passes add to those that a search knows."""
    left = {tier: n if n is None else max(0, n - added.get(tier, 0)) for tier, n in budgets.nbytes.items()}
    return replace(budgets, device=left["device"], host=left["host"])


def _added(candidates: Candidates, plan: Plan) -> dict[str, int]:
    """Returns the bytes by which a plan's peaks, by its schedule, are above those that a search knows."""
    known = candidates.evaluate(plan).plan.peak_bytes
    return {tier: plan.peak_bytes[tier] - known[tier] for tier in ("device", "host")}


def _with_what_passes_add(error: DoesNotFit, problem: PlanningProblem, added: Mapping[str, int]) -> DoesNotFit:
    """Returns the error, whose causes begin with the bytes that the passes add, if any."""
    if (nbytes := added.get(error.tier, 0)) > 0:
        error.causes = ((f"what {names_of(problem.own_passes)} adds, which you registered", nbytes), *error.causes[:-1])
    return error
