"""In which order the host updates parameters whose gradients arrive faster than it can update them.

While a backward runs, it takes gradients as they arrive. What it has not begun when the backward ends is due in the order in
which the next forward needs the parameters. An update begins as soon as its gradients are there, wherever it is listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import Candidate
from mtcompile.runtime.deps import waits
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.sim import clock

_NEAR = (-4, -2, -1, 1, 2, 4)  # how far from the number that begins too late others are tried


def paced(plan: Plan, evaluate: Callable[[Plan], Candidate]) -> Candidate:
    """Evaluates a plan, and again with those updates late that would begin too late; returns the faster."""
    candidate = evaluate(plan)
    if not _may_be_late(plan) or not (late := _begun_too_late(candidate.schedule)):
        return candidate
    return min(candidate, evaluate(_with_late(plan, late)), key=lambda one: one.plan.total_us)


def nearby(candidate: Candidate) -> list[Plan]:
    """Plans with a few more or fewer late updates, and with shares of all of them late."""
    if not _may_be_late(candidate.plan):
        return []
    assert candidate.plan.updates is not None
    behind = candidate.plan.updates.behind
    most = sum(i.work == "update" and i.queue == "host" for i in candidate.schedule.instructions)
    counts = {behind + more for more in _NEAR} | {most // part for part in (1, 2, 3, 4, 8)} | {0}
    return [_with_late(candidate.plan, count) for count in sorted(counts) if 0 <= count <= most and count != behind]


def impatient(plan: Plan) -> Plan | None:
    """The plan whose gradients do not wait on the host for long; None if they do not as it is."""
    updates = plan.updates
    return replace(plan, updates=replace(updates, waiting=0, behind=0)) if updates is not None and updates.waiting else None


def _may_be_late(plan: Plan) -> bool:
    return plan.updates is not None and plan.updates.run_ahead and not plan.updates.held


def _with_late(plan: Plan, count: int) -> Plan:
    assert plan.updates is not None
    return replace(plan, updates=replace(plan.updates, behind=count))


def _begun_too_late(schedule: Schedule) -> int:
    """How many updates on the host begin after the backward's last kernel has ended."""
    rows = list(zip(*clock(schedule, waits=waits(schedule)), schedule.instructions, strict=True))
    ended = max((end for _, end, i in rows if i.op == "run" and i.queue == "compute"), default=0.0)
    return sum(start >= ended for start, _, i in rows if i.work == "update" and i.queue == "host")
