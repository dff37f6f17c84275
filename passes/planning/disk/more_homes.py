"""Sends more homes to disk than the host's budget needs, where that makes a step faster.

With the fewest, the host and the device have no room left to fetch ahead, and compute waits for each copy. Where the disk is
not what a step waits for, some more homes there cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem, Solved

MORE_OF = 11  # homes on disk: one more for so many is tried first
_FAR = 1.05  # times the bound: no more go to disk below, ...
_BUSY = 0.9  # ... nor where the drive is busy for such a share of the step


def with_more_homes(
    fastest: Solved,
    order: Sequence[str],
    count: int,
    more: int,
    plan: Callable[[tuple[str, ...]], Solved],
) -> Solved:
    """Returns the ``fastest`` problem and plan, with the first ``count`` homes in ``order`` on disk, or those with ``more``
    there, then with twice as many more, and so on, as long as each is faster than the one before. ``plan``: plans with some
    homes on disk, or raises DoesNotFit."""
    while more and count < len(order) and may_gain(*fastest):
        count, more = count + more, 2 * more
        try:
            tried = plan(tuple(order[:count]))
        except DoesNotFit:
            break
        if tried[1].plan.total_us >= fastest[1].plan.total_us:
            break
        fastest = tried
    return fastest


def may_gain(problem: PlanningProblem, planned: Planned) -> bool:
    """Tells whether a plan may be faster with more homes on disk: if it is far from its bound, and the drive is not busy."""
    plan = planned.plan
    drive_us = problem.machine.drive_us(plan.disk_read_bytes, plan.disk_write_bytes)
    bound_us = 0.0 if plan.certificate is None else plan.certificate.bound_us
    return plan.total_us > _FAR * bound_us and drive_us < _BUSY * plan.total_us
