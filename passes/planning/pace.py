"""Chooses the order of updates on the host, so that gradients and the next forward wait less.

An update may begin when its gradients are on the host, and is due when the next forward fetches the parameters. Of those that
may begin, the host takes the one that is due first (earliest due date first), so that few updates are late.

Patient updates come behind all other work of the host. That is no loss where there is none; but where the host casts what
arrives, none begins before the last gradient has been cast. Impatient ones come between the casts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import Candidate
from mtcompile.runtime.deps import waits
from mtcompile.runtime.schedule import PHASES, Schedule
from mtcompile.runtime.sim import clock

_EXPOSED = 0.005  # of a step: updates that add less than this to it need no other order


class Due(NamedTuple):
    """The ``order`` in which updates on the host are due, and whether the host ``casts`` anything beside them."""

    order: tuple[str, ...]
    casts: bool


Arriving = list[tuple[float, int, float, str]]  # when an update's gradients are there, when it is due, its µs, its name


def paced(
    plan: Plan,
    evaluate: Callable[[Plan], Candidate],
    due_first: Callable[[Plan], Due | None] = lambda plan: None,
) -> Candidate:
    """Evaluates a plan with patient updates as gradients arrive. If they add to the step, also in the order in which they are
    due, and without waiting gradients where the host casts as well. Returns the fastest; of equal ones, that which needs
    least of the host. ``due_first``: gives that order; None: only the schedule tells."""
    if plan.updates is None or plan.updates.held or plan.updates.in_turn:
        return evaluate(plan)
    candidate = evaluate(with_pace(plan, True, ()))
    if candidate.plan.update_us < _EXPOSED * candidate.plan.step_time_us:
        return candidate
    tried, (order, casts) = [candidate], due_first(candidate.plan) or _due_first(candidate.schedule)
    if plan.updates.run_ahead and order:
        tried.insert(0, evaluate(with_pace(plan, True, order)))
    if casts:
        tried.append(evaluate(with_pace(plan, False, ())))
    return min(tried, key=lambda one: (one.plan.total_us, one.plan.peak_bytes["host"]))


def impatient(plan: Plan) -> Plan | None:
    """Returns the plan without waiting gradients; None if it has no updates or is not patient."""
    return with_pace(plan, False, ()) if plan.updates is not None and plan.updates.patient else None


def with_pace(plan: Plan, patient: bool, order: tuple[str, ...]) -> Plan:
    """Returns the plan with that patience and that order of its updates; as it is if it has none."""
    updates = plan.updates
    if updates is None or (updates.patient, updates.order) == (patient and not updates.in_turn, order):
        return plan
    return plan.changed(updates=replace(updates, patient=patient and not updates.in_turn, order=order))


def _due_first(schedule: Schedule) -> Due:
    """Returns the updates on the host, earliest due date first, each by its first parameter."""
    derived = waits(schedule)
    _, ends = clock(schedule, waits=derived)
    due: dict[str, int] = {}  # home -> the first instruction of a forward that reads it
    arriving: Arriving = []
    for index, instruction in enumerate(schedule.instructions):
        if instruction.phase == PHASES[0]:
            due |= {name: index for name in instruction.reads if name not in due}
        elif instruction.work == "update" and instruction.queue == "host":
            there = max((ends[dep] for dep in derived.deps[index]), default=0.0)
            homes = [schedule.buffers[name].version_of for name in instruction.writes]
            last = len(schedule)
            arriving.append((there, min(due.get(home, last) for home in homes), instruction.time_us, homes[0]))
    casts = any(i.work == "convert" and i.phase == PHASES[1] for i in schedule.instructions)
    return Due(earliest_due(arriving), casts)


def earliest_due(arriving: Arriving) -> tuple[str, ...]:
    """Returns updates in the order in which the host takes them: of those whose gradients are there, the one due first."""
    order, waiting, now = list[str](), list[tuple[int, float, str]](), 0.0
    arriving.sort(reverse=True)
    while arriving or waiting:
        if not waiting:
            now = max(now, arriving[-1][0])
        while arriving and arriving[-1][0] <= now:
            heapq.heappush(waiting, arriving.pop()[1:])
        _, time_us, name = heapq.heappop(waiting)
        now += time_us
        order.append(name)
    return tuple(order)
