"""Climbs under limits on the device and on the host.

Without a limit on the host, a plan sends there whatever has no room on the device. With one, it recomputes more or has fewer
homes there, and no plan that was found without one does. So plans are searched for within pairs of limits:

    host   |      x      x      x      A budget takes the best plan of all pairs below it and to the left of it. Those whose
           |      x      x      x      bounds are not below the best one so far are never looked into.
           +------------------- device
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.climbs.climb import Climbs
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.climbs.single import Climb
from mtcompile.passes.planning.frontier import Point
from mtcompile.passes.planning.linear.seeds import Within
from mtcompile.passes.planning.pace import impatient, with_pace

_LEVELS = 20  # limits on the host
_APART = 1.08  # a limit on the device over the next lower one, at least; all those of climbs would take twice as long
_ABOVE = 3  # of the limits on the device: each of so many also with the next limit above a budget of the host
_MOVES, _ROOMS = 45, 16  # plans that a climb evaluates, and those that make room for its start


@dataclass(frozen=True, slots=True)
class Pace:
    """Two ways to give a plan its figures: at its own pace (``evaluate``), and at that which is fastest (``paced``)."""

    evaluate: Callable[[Plan], Plan]
    paced: Callable[[Plan], Plan]

    def within(self, plan: Plan, host: int | None) -> Plan:
        """Returns the plan with its figures; without gradients that wait on the host if it is above a limit there."""
        patient = self.evaluate(with_pace(plan, True, ()))
        if host is not None and patient.peak_bytes["host"] > host and (less := impatient(patient)) is not None:
            return self.evaluate(less)
        return self.paced(plan)


def host_climbs(climbs: Climbs, points: Sequence[Point], seeds: Within, pace: Pace) -> HostClimbs:
    """Returns climbs from ``points`` and ``seeds``. Their limits on the host lie between the fewest bytes that a point needs
    there on this device, and the most that the frontier does."""
    low = min(point.plan.peak_bytes["host"] for point in points if point.peak <= climbs.limits[-1])
    high = max(low, *(point.plan.peak_bytes["host"] for point in climbs.frontier))
    hosts = sorted({low + (high - low) * i // (_LEVELS - 1) for i in range(_LEVELS)})

    def starts(limits: Limits) -> Iterator[Plan]:
        fitting = [point.plan for point in points if not limits.missing(point.plan)]
        yield from sorted(fitting, key=lambda plan: plan.total_us)[:1]
        yield from seeds.plans(limits._asdict(), lambda plan: pace.within(plan, limits.host))

    return HostClimbs(climbs, _apart(climbs.limits), hosts, starts, pace)


def _apart(limits: Sequence[int]) -> list[int]:
    """Returns the two largest of the limits, which most budgets are near to, and lower ones that are far enough apart."""
    chosen = list(limits[-2:])
    for limit in reversed(limits[:-2]):
        if limit * _APART <= chosen[0]:
            chosen.insert(0, limit)
    return chosen


@dataclass(slots=True, eq=False)
class HostClimbs:
    """The best plans within each pair of limits on the device (``devices``) and on the host (``hosts``). Each has a climb of
    its own, made when some budget may take its plan, and the same whatever was asked before. None is faster than the best that
    ``climbs`` has up to the same limit on the device: more memory on the host never makes a step slower. ``starts``: gives
    plans to start from, with their figures, within limits or a little above them."""

    climbs: Climbs
    devices: Sequence[int]
    hosts: Sequence[int]
    starts: Callable[[Limits], Iterable[Plan]]
    pace: Pace
    _too_low: set[Limits] = field(default_factory=set)  # within which no plan is
    _unlimited: dict[int, float] = field(default_factory=dict)

    def best(self, device: int | None, host: int, taken: Plan) -> Plan:
        """Returns the fastest plan of all pairs within these bytes; ``taken`` if none is faster. Plans of some pairs within a
        little more of the host may need no more than there is, too."""
        column = (len(self.devices) if device is None else bisect_right(self.devices, device)) - 1
        row, bound = bisect_right(self.hosts, host) - 1, self.climbs.bound
        if column < 0 or row < 0:
            return taken
        limit = self.devices[column]
        if Limits(limit) in self.climbs.plans and self._unlimited_us(limit) >= taken.total_us:
            return taken
        above = [(each, row + 1) for each in range(column, -1, -1) if row + 1 < len(self.hosts) and each % _ABOVE == 0]
        seen, highest = {(column, row), *above}, row
        waiting = [(bound(self.devices[column], self.hosts[row]), (column, row)) for column, row in seen]  # lowest bound first
        heapq.heapify(waiting)
        while waiting:
            bound_us, (column, row) = heapq.heappop(waiting)
            if bound_us >= taken.total_us:
                break
            plan = self._plan(Limits(self.devices[column], self.hosts[row]))
            if plan is not None and plan.peak_bytes["host"] <= host:
                taken = min(taken, plan, key=lambda one: one.total_us)
            for lower in ((column - 1, row), (column, row - 1)) if row <= highest else ():
                if min(lower) >= 0 and lower not in seen:
                    seen.add(lower)
                    heapq.heappush(waiting, (bound(self.devices[lower[0]], self.hosts[lower[1]]), lower))
        return taken

    def _plan(self, limits: Limits) -> Plan | None:
        plans = self.climbs.plans
        if limits not in plans and limits not in self._too_low:
            if (plan := self._climbed(limits)) is None:
                self._too_low.add(limits)
            else:
                plans[limits] = plan
        return plans.get(limits)

    def _climbed(self, limits: Limits) -> Plan | None:
        """Climbs from the fastest of all starts that are within the limits once room is made for them."""
        ways, best = self.climbs.ways, list[Climb]()

        def allowed(plan: Plan) -> Plan:
            return self._allowed(plan, limits)

        for start in self.starts(limits):
            climb = Climb(limits, ways, allowed, replace(start, step_time_us=inf), _ROOMS)
            if climb.is_better(start):
                best = [min((*best, climb), key=lambda climb: climb.best.total_us)]
        for climb in best:
            climb.go_on(_MOVES * ways.patience)
        return best[0].best if best else None

    def _allowed(self, plan: Plan, limits: Limits) -> Plan:
        """Returns the plan with its figures, as if it took for ever if it is faster than without a limit on the host."""
        evaluated = self.pace.within(plan, limits.host)
        if limits.missing(evaluated) or evaluated.total_us >= self.climbs.reached(limits.device).total_us:
            return evaluated
        allowed = evaluated.total_us >= self._unlimited_us(limits.device)
        return evaluated if allowed else replace(evaluated, step_time_us=inf)

    def _unlimited_us(self, device: int) -> float:
        """The µs of the fastest plan up to a limit on the device that was found without one on the host."""
        if device not in self._unlimited:
            best = self.climbs.best(device, self.climbs.reached(device), lambda plan: [plan])
            self._unlimited[device] = best.total_us
        return self._unlimited[device]
