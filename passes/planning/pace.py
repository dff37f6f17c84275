"""Chooses the order of updates on the host, so that gradients and the next forward wait less.

An update may begin when its gradients are on the host, and is due when the next forward fetches the parameters. Of those that
may begin, the host takes the one that is due first (earliest due date first), so that few updates are late.

Patient updates come behind all other work of the host. That is no loss where there is none; but where the host casts what
arrives, none begins before the last gradient has been cast. Impatient ones come between the casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import Candidate

_EXPOSED = 0.005  # of a step: updates that add less than this to it need no other order


class Due(NamedTuple):
    """The ``order`` in which updates on the host are due, and whether the host ``casts`` anything beside them."""

    order: tuple[str, ...]
    casts: bool


def paced(
    plan: Plan,
    evaluate: Callable[[Plan], Candidate],
    due_first: Callable[[Plan], Due],
    is_lost: Callable[[Plan], bool] = lambda plan: False,
) -> Candidate:
    """Evaluates a plan with patient updates as gradients arrive. If they add to the step, also in the order in which they are
    due, and without waiting gradients where the host casts as well. Returns the fastest; of equal ones, that which needs
    least of the host. ``due_first``: gives that order; ``is_lost``: tells that none of a plan's orders makes it of use."""
    if plan.updates is None or plan.updates.held or plan.updates.in_turn:
        return evaluate(plan)
    candidate = evaluate(with_pace(plan, True, ()))
    if candidate.plan.update_us < _EXPOSED * candidate.plan.step_time_us or is_lost(candidate.plan):
        return candidate
    tried, (order, casts) = [candidate], due_first(candidate.plan)
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
