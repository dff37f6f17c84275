"""Sends more homes to disk than the host's budget needs, where that makes a step faster.

With the fewest, the host and the device have no room left to fetch ahead, and compute waits for each copy. Where the disk is
not what a step waits for, some more homes there cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem

_FIRST = 11  # one more for so many that are there, then twice as many, and so on
_FAR = 1.05  # times the bound: no more go to disk below, ...
_BUSY = 0.9  # ... nor where the drive is busy for such a share of the step


def with_more_homes(
    fastest: tuple[PlanningProblem, Planned],
    order: Sequence[str],
    counts: tuple[int, int],
    plan: Callable[[tuple[str, ...]], tuple[PlanningProblem, Planned]],
) -> tuple[PlanningProblem, Planned]:
    """Returns the ``fastest`` problem and plan, which has the first so many homes in ``order`` on disk, or those with more
    there, as long as each is faster than the one before. ``counts``: how many these are, and how many more lean plans need
    there; if there are none, and they need none, nothing goes to disk. ``plan``: plans with some homes on disk, or raises
    DoesNotFit."""
    count, more = counts[0], max(counts[0] and 1, counts[0] // _FIRST, counts[1])
    while more and count < len(order) and _may_gain(fastest[1].plan, fastest[0].machine):
        count, more = count + more, 2 * more
        try:
            tried = plan(tuple(order[:count]))
        except DoesNotFit:
            break
        if tried[1].plan.total_us >= fastest[1].plan.total_us:
            break
        fastest = tried
    return fastest


def _may_gain(plan: Plan, machine: Machine) -> bool:
    drive_us = machine.drive_us(plan.disk_read_bytes, plan.disk_write_bytes)
    bound_us = 0.0 if plan.certificate is None else plan.certificate.bound_us
    return plan.total_us > _FAR * bound_us and drive_us < _BUSY * plan.total_us
