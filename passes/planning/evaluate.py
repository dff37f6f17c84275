"""Evaluates one plan: rewrites its step graph, lowers it, and finds the peaks and times by which plans are compared."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from torch import fx

from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.fetches import fetches, is_resident
from mtcompile.passes.analysis.names import value_names
from mtcompile.passes.analysis.state import Budgets, drive_nbytes, persistent_nbytes, state_by_tier, times_us, trained_nbytes
from mtcompile.passes.lower import lower_without_deps
from mtcompile.passes.plan import Certificate, Plan
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, Planned, PlanningProblem
from mtcompile.passes.planning.reasons import with_reasons
from mtcompile.passes.registered import blaming, names_of
from mtcompile.runtime.deps import Waits, derive, waits
from mtcompile.runtime.schedule import Queue, Schedule, gib
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Trace, busy_us, exposed_us, time_of

_FAR = 0.1  # above its bound: then a plan says what it waits for
_WAITS: Mapping[Queue, str] = {"h2d": "copies to it", "d2h": "copies from it", "disk_read": "reads from disk"}


def evaluate(problem: PlanningProblem, plan: Plan) -> Candidate:
    """Fills in a plan's peaks and predicted times, by its schedule. Searches take them from summaries (see ``figures``). Raises
    PassFailed for an error in a registered pass."""
    schedule = _lowered(problem, rewrite(problem.step, plan, passes=problem.passes), plan)
    with blaming(problem.own_passes, "made a step whose schedule has no order"):
        return Candidate(_with_figures(problem, plan, schedule, waits(schedule)), lambda: schedule)


def judged(problem: PlanningProblem, candidate: Candidate) -> Candidate:
    """Returns a candidate with the figures of its schedule. With registered passes, these differ from the figures that a
    search has."""
    return evaluate(problem, candidate.plan) if problem.own_passes else candidate


def identity(plan: Plan) -> Hashable:
    """A key that is equal for plans with equal figures: of all that they decide, in any order, without reasons."""
    about = plan.lookahead, plan.span, plan.pooled, plan.updates, plan.narrow, plan.wide, plan.disk_lookahead, plan.disk_direct
    return plan.decisions.identity, *about


def faster(candidate: Candidate, other: Candidate, budgets: Budgets) -> Candidate:
    """Returns the other candidate if it is within the budgets and no slower; else the first one."""
    return other if fits(other.plan, budgets) and other.plan.total_us <= candidate.plan.total_us else candidate


def completed(problem: PlanningProblem, candidate: Candidate, minimum: int, certificate: Certificate | None) -> Planned:
    """Returns the chosen candidate with its rewritten step graph, and with budgets, limits, the limiting resource, ``minimum``,
    the smallest device budget that works, in bytes, and its certificate. With registered passes, its figures are those of its
    schedule, and there is no certificate, which would know nothing of them. Raises PassFailed."""
    own, step = problem.own_passes, rewrite(problem.step, candidate.plan, passes=problem.passes)
    schedule = _lowered(problem, step, candidate.plan)
    with blaming(own, "made a step whose schedule has no order"):
        schedule = derive(schedule)
    plan = _with_figures(problem, candidate.plan, schedule, None)
    if plan != candidate.plan and not own:
        raise AssertionError(f"expected the figures that the plan was chosen by, found others:\n{candidate.plan}\n{plan}")
    trace = simulate(schedule)
    busy: dict[str, float] = {queue: us for queue, us in busy_us(trace).items()}
    busy["update"] = plan.update_us
    busy["disk"] = problem.machine.drive_us(*drive_nbytes(schedule, plan))
    limits, rows = problem.budgets.nbytes, problem.step.meta["rows"]
    plan = replace(
        _with_traffic(plan, schedule, problem.machine),
        budget_bytes=limits,
        minimum_device_bytes=minimum,
        state_bytes=sum(state_by_tier(problem.step, candidate.plan, problem.budgets).values()),
        certificate=None if own else certificate,
        limiting_resource=max(busy, key=lambda resource: busy[resource]),
    )
    told = [f"{name}: the device holds the rows that a batch names, at most {r.count} of {r.rows}" for name, r in rows.items()]
    told += [f"rewritten by {names_of(own)}, registered by you: a bound, which does not know that, is left out"] if own else []
    plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *told, *_far_from_bound(plan, trace)))))
    plan = replace(plan, **dict(zip(("fetched", "copies"), fetches(step, schedule), strict=True)))
    plan = with_reasons(problem, replace(plan, all_resident=is_resident(schedule)), step, schedule, trace)
    stated = {tier: nbytes for tier, nbytes in limits.items() if nbytes is not None}
    return Planned(plan, step, replace(schedule, budget_nbytes=stated))


def _far_from_bound(plan: Plan, trace: Trace) -> Iterator[str]:
    """Says why a plan is far above its bound, by what the device waits for in it. ``trace``: of its schedule."""
    if plan.certificate is not None and (gap := plan.certificate.gap(plan.total_us)) > _FAR:
        waits = {words: exposed_us(trace, queue) for queue, words in _WAITS.items()} | {"updates": plan.update_us}
        longest = sorted(((us, words) for words, us in waits.items() if round(us)), reverse=True)
        told = ", ".join(f"{time_of(us)} for {words}" for us, words in longest) or "for nothing"
        least = f"the least device memory that works is at most {gib(plan.minimum_device_bytes)}"
        why = "the bound lets all work overlap, and counts memory only where it must be in use"
        yield f"the step is {gap:.0%} above its bound: {why}; in this plan the device waits {told}; {least}"


def _with_traffic(plan: Plan, schedule: Schedule, machine: Machine) -> Plan:
    """Returns the plan with the bytes that a step moves from and to a disk, and what these writes do to it."""
    read, written = drive_nbytes(schedule, plan)
    if not read and not written:
        return plan
    per_day = written * 86_400e6 / plan.total_us if plan.total_us else 0.0
    days = machine.disk_rated_nbytes / per_day if per_day and machine.disk_rated_nbytes else None
    return replace(plan, disk_read_bytes=read, disk_write_bytes=written, disk_days=days)


def _with_figures(problem: PlanningProblem, plan: Plan, schedule: Schedule, waiting: Waits | None) -> Plan:
    """Returns the plan with its peaks and predicted times. ``waiting``: what instructions wait for; None: their deps."""
    time_us, exposed = times_us(schedule, waiting, problem.machine, trained_nbytes(problem.step), plan, problem.budgets)
    return replace(plan, step_time_us=time_us, update_us=exposed, peak_bytes=dict(schedule.peak_nbytes))


def _lowered(problem: PlanningProblem, step: fx.GraphModule, plan: Plan) -> Schedule:
    persistent = persistent_nbytes(problem.step, plan, problem.budgets)
    with blaming(problem.own_passes, "made a step that cannot be lowered to a schedule"):
        return lower_without_deps(step, plan, problem.machine, persistent, problem.workspace)


def shortfall(candidate: Candidate, tier: str, step: fx.GraphModule) -> DoesNotFit:
    """Returns the error to raise if even this candidate needs more of ``tier`` than there is, by its schedule. ``step``: before
    any rewrite."""
    schedule = candidate.schedule
    return DoesNotFit(tier, schedule.peak_nbytes[tier], _largest_parts(schedule, tier, value_names(step)))


def _largest_parts(schedule: Schedule, tier: str, names: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Returns the three largest parts of a tier's peak, in bytes."""
    parts = [("placed slots (weights and values in transit)", schedule.arena_nbytes.get(tier, 0))]
    parts.append(("persistent state", schedule.resident_nbytes.get(tier, 0)))
    if tier == "device":
        runs = [i for i in schedule.instructions if i.op == "run"]
        for run in sorted(runs, key=lambda i: -i.workspace)[:2]:
            parts.append((f"workspace of {run.label}", run.workspace))
        pooled = sorted((b for b in schedule.buffers.values() if b.kind == "pooled"), key=lambda b: -b.nbytes)
        parts += [(f"{b.role} {names.get(b.value, b.name)}", b.nbytes) for b in pooled[:2]]
    return tuple(sorted(parts, key=lambda part: -part[1])[:3])
