"""Climbs: the best plans up to limits, by climbs (see ``single.py``) from the frontier's plans and from seeds."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

from mtcompile.passes.analysis.state import held_nbytes
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.climbs.kicks import are_equal, differ, kicks
from mtcompile.passes.planning.climbs.limits import STEEP, Limits, apart, limits_between, limits_in_between, parts_of
from mtcompile.passes.planning.climbs.moves import moves
from mtcompile.passes.planning.climbs.polish import is_worth_polishing, polish_of
from mtcompile.passes.planning.climbs.room import filling, rooms
from mtcompile.passes.planning.climbs.single import Climb, Ways
from mtcompile.passes.planning.frontier import Point, may_end_within, pareto
from mtcompile.passes.planning.ladders import Block
from mtcompile.passes.planning.linear.seeds import Within
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import regions

_STARTS, _MOVES = (1.0, 0.9, 0.8), (30, 18, 18)  # of a limit: where climbs to it start; plans that they evaluate at first
_MOVES_BETWEEN = 12  # plans evaluated from one limit to the next, where these are near to each other
_PATIENCE, _PATIENT_REGIONS = 4, 150  # times as many plans for small steps, at most, and that times their regions
_DIFFERING = 4 / 3  # times as many plans where most blocks differ
_NEAR_BOUND = 1.02  # times the bound: kicks gain little below
_KICKED = 2  # how often climbs go on from kicks, at most
_MANY, _FAR, _MANY_FAR = 3, 1.05, 30  # times as many plans, in the end, where few moves are shared; and above so far a bound
_SEEDED = 1.012  # times the bound: climbs begin at seeds, too, above
_NEAR_FASTEST = 1.02  # times the fastest seed: from slower ones, climbs to limits that others follow lead to no faster plan
_HOPELESS = 1.05  # times the best plan: seeds that need more than a limit, and take so long, are not made for fewer bytes
_SHORT, _PROMISING = 0.5, 1.6  # of a climb from a seed: it ends there if it is so much farther above the bound than the other
_FAR_SEEDED = 1.03  # times the bound: not where the other one is above
_LEADS_ON = 1.01  # times the fastest plan: a slower one does not lead farther
_FASTER = 0.999  # times the plan taken: less is not worth a climb
# A plan of a lower limit is seldom nearer to its bound than the plan taken is to that of the highest limit by more than this,
# and this share of the latter; by a larger share where steps are small.
_NEARER, _NEARER_SHARE, _NEARER_SHARE_SMALL = 0.004, 0.4, 0.6
_MUCH_SLOWER = 1.02  # times the plan taken: a plan that takes so long becomes no faster one with a little more memory
_TELLING = 1.35  # times its bound: plans farther above tell nothing of those of other limits
_MUCH = 0.985  # times what a climb to a lower limit ends at: then a plan is polished anew
_BOUND_FALLS = 0.985  # times the bound of a lower limit: then moves from its plan may not lead far enough
_POLISHED = 0.3  # of the way to the bound: polishing does not get as far
# Times the plan taken: if climbs to a lower limit end above that, still lower limits are left out. Only if the plan taken is so
# many times its bound, as nearer plans differ by chance.
_NO_FARTHER, _FAR_ABOVE = 1.003, 1.04
_GAIN = 1.5  # times what the bound falls by: what climbs to limits in between may gain


def climbs_of(
    problem: PlanningProblem,
    blocks: Sequence[Block],
    sizes: Mapping[str, int],
    points: Sequence[Point],
    resident: int,
    evaluate: Callable[[Plan], Plan],
    by_program: tuple[Callable[[int, int | None], float], Within],
) -> Climbs:
    """Returns the climbs of a problem. ``sizes``: bytes of the homes whose tier is open; ``resident``: the peak of the plan
    with everything on the device; ``by_program``: ``bound`` and ``seeds``, for which, as for the others, see ``Climbs``."""
    ways, frontier = ways_of(problem, blocks, sizes), pareto(points)
    highest = frontier[-1].peak, *([resident] if differ(blocks) else [])
    # Climbs of a small step evaluate many plans up to each limit, and need none in between.
    small = _PATIENT_REGIONS // len(regions(problem.step)) >= _PATIENCE
    limits = limits_between(frontier[0].peak, highest, problem.machine.device_nbytes, small)
    following = {} if small else limits_in_between(limits, max(highest))
    return Climbs(frontier, limits, following, ways, evaluate, *by_program)


def ways_of(problem: PlanningProblem, blocks: Sequence[Block], sizes: Mapping[str, int]) -> Ways:
    """Returns the ways of climbs of a problem. ``sizes``: as for ``climbs_of``."""
    host, held, count = problem.budgets.host_activations, held_nbytes(problem.step, problem.budgets), len(regions(problem.step))
    patience = max(1, min(_PATIENCE, _PATIENT_REGIONS // count)) * (_DIFFERING if differ(blocks) else 1)
    in_room = rooms(blocks, sizes, held, host), filling(sizes, held)
    others = patience, kicks(blocks, sizes), differ(blocks), polish_of(blocks, sizes, host, count), are_equal(blocks)
    return Ways(moves(blocks, sizes, host), *in_room, *others)


class Climbs:
    """The best plans with a peak up to each of ``limits``: the frontier's, improved by moves; and up to each limit that is
    ``following`` another: the plan of that one, improved. Each is a climb of its own, made when some budget may take it, and
    the same whatever was asked before. ``evaluate``: gives a plan its figures. ``bound``: the fewest µs of any plan up to
    limits on the device and the host; not less for lower ones. ``seeds``: gives more plans to start from where others end far
    above it."""

    def __init__(
        self,
        frontier: Sequence[Point],
        limits: Sequence[int],
        following: Mapping[int, int],
        ways: Ways,
        evaluate: Callable[[Plan], Plan],
        bound: Callable[[int, int | None], float],
        seeds: Within,
    ) -> None:
        self.frontier, self.limits, self.ways, self.evaluate, self.bound = frontier, limits, ways, evaluate, bound
        self.seeds, self._following, self._rising = seeds, dict(following), sorted((*limits, *following))
        self._finer: dict[int, Sequence[int]] = {}  # limits between one and the next, where the bound falls steeply
        self._ended: dict[int, Sequence[Plan]] = {}
        self._others_follow = bool(following)
        self.plans: dict[Limits, Plan] = {}  # with those within limits on the host (see ``hosts``)

    def best(self, device: int | None, taken: Plan, fitting: Callable[[Plan], Iterable[Plan]], host: int | None = None) -> Plan:
        """Returns the fastest plan of all limits within ``device`` bytes; ``taken`` if none is faster. ``fitting``: gives what
        may be taken of a plan, within ``host`` bytes. Climbs do not go to limits below which no plan can be much faster, or
        where plans of other limits suggest that none is, nor to those where they begin far above the ``host`` bytes."""

        @functools.cache  # asked for each limit and its neighbours
        def begins(limit: int) -> bool:
            if host is None or any(fitting(start := self.reached(limit))):
                return True
            return may_end_within(start, host, lambda: self.bound(limit, host))

        highest_us: float | None = None  # the bound of the highest limit
        ended_us: dict[int, float] = {}  # of the fastest plans so far, by the limit where climbs to them begin
        for limit in self._falling(device, begins):
            if (bound_us := self.bound(limit, host)) >= _FASTER * taken.total_us:
                break
            begun = self._begun_at(limit)
            lower_us = [us for other, us in ended_us.items() if other != begun][1:]
            if highest_us and self._lead_no_farther(lower_us, taken.total_us, highest_us):
                break
            if highest_us is None:
                highest_us = bound_us
            elif self._needs_too_good_a_plan(taken.total_us, self._begun_us(limit, host), highest_us):
                if limit in self._following:  # where it begins is asked last
                    continue
                break
            little = self._gains_little(limit, taken.total_us)
            ended = self._plan_if(begun if little else limit, taken.total_us)
            ended_us[begun] = min(ended.total_us, ended_us.get(begun, inf))
            if not little:
                taken = min((taken, *fitting(ended)), key=_us)
        return taken

    @property
    def _goes_by_seeds(self) -> bool:
        """True for large steps of equal blocks."""
        return self._others_follow and self.ways.equal

    def serve_alone(self, host: int | None) -> bool:
        """Tells whether plans between the frontier's are not worth a look: climbs of large steps, without a limit on the
        ``host``, seldom end above these, and then by little."""
        return self._others_follow and host is None

    def _lead_no_farther(self, lower_us: Sequence[float], us: float, highest_us: float) -> bool:
        """Tells whether still lower limits are left out: a plan of some ``us`` is far above the bound of the highest limit,
        ``highest_us``, and the last lower ones to which climbs went, with ``lower_us``, gave only slower plans."""
        is_far = self._others_follow and us > _FAR_ABOVE * highest_us
        return is_far and bool(lower_us) and lower_us[-1] > _NO_FARTHER * us

    def _begun_at(self, limit: int) -> int:
        """Returns the last limit up to one that follows none, where climbs to it begin."""
        return self.limits[bisect_right(self.limits, limit) - 1]

    def _begun_us(self, limit: int, host: int | None) -> float:
        """Returns the bound where climbs to a limit begin; its own where that is much lower: then the other tells nothing."""
        begun_us, bound_us = self.bound(self._begun_at(limit), host), self.bound(limit, host)
        return bound_us if begun_us > STEEP * bound_us else begun_us

    def _needs_too_good_a_plan(self, us: float, bound_us: float, highest_us: float) -> bool:
        """Tells whether a plan that is faster than some ``us`` would have to be much nearer to the bound of its limit,
        ``bound_us``, than these are to that of the highest one, ``highest_us``."""
        if not highest_us:  # no bound is known
            return False
        share = _NEARER_SHARE if self._others_follow else _NEARER_SHARE_SMALL
        gap = us / highest_us - 1
        return us < (1 + (1 - share) * gap - _NEARER) * bound_us

    def _falling(self, device: int | None, begins: Callable[[int], bool]) -> Iterator[int]:
        """Yields the limits within ``device`` bytes to which climbs may begin, the largest first, with more of them where
        little memory makes plans much faster."""
        for low, high in reversed([*itertools.pairwise(self._rising), (self._rising[-1], None)]):
            if device is None or low <= device:
                finer = self._between(low, high) if high is not None and (begins(low) or begins(high)) else []
                yield from (each for each in (*reversed(finer), low) if (device is None or each <= device) and begins(each))

    def _gains_little(self, limit: int, us: float) -> bool:
        """Tells whether the plan of a limit that follows others is likely to take more than some ``us``: it begins at that of
        the last limit below that follows none, and by the bounds, memory up to the next such limit gains too little."""
        if limit not in self._following or (place := bisect_left(self.limits, limit)) == len(self.limits):
            return False
        low, high = self.limits[place - 1 : place + 1]
        us += _GAIN * (self.bound(low, None) - self.bound(high, None))
        # Far above its bound, a plan tells nothing of others.
        return _MUCH_SLOWER * us < self._plan_if(low, us).total_us < _TELLING * self.bound(low, None)

    def _between(self, low: int, high: int) -> Sequence[int]:
        if low not in self._finer:
            parts = parts_of(self.bound(low, None), self.bound(high, None))
            limits = self._finer[low] = [low + (high - low) * part // parts for part in range(1, parts)]
            self._following |= dict(zip(limits, (low, *limits), strict=False))
        return self._finer[low]

    def reached(self, limit: int) -> Plan:
        """Returns the frontier's last plan up to a limit."""
        return next(point.plan for point in reversed(self.frontier) if point.peak <= limit)

    def _plan_if(self, limit: int, us: float) -> Plan:
        """Returns the plan of a limit; as it is before it is polished where that leaves it much slower than some ``us``."""
        if Limits(limit) in self.plans:
            return self.plans[Limits(limit)]
        climbed, bound_us = self._climbed(limit), self.bound(limit, None)
        least_us = climbed.total_us - _POLISHED * (climbed.total_us - bound_us)
        return climbed if _MUCH_SLOWER * us < least_us and climbed.total_us < _TELLING * bound_us else self._plan(limit)

    def _plan(self, limit: int) -> Plan:
        if (limits := Limits(limit)) not in self.plans:
            self.plans[limits] = self._polished(limits)
        return self.plans[limits]

    def _polished(self, limits: Limits) -> Plan:
        plan, bound_us = self._climbed(limits.device), self.bound(*limits)
        if self.ways.polish is None or not is_worth_polishing(plan, bound_us):
            return plan
        if (serving := self._polished_for(limits.device)) != limits.device:
            climb = Climb(limits, self.ways, self.evaluate, min(plan, self._plan(serving), key=_us))
            climb.go_on(_MOVES_BETWEEN * self.ways.patience)
            return climb.best
        place = bisect_left(self.limits, limits.device)
        starts = plan, *map(self._climbed, self.limits[max(0, place - 1) : place])  # the next limit below may lead farther
        climb = Climb(limits, self.ways, self.evaluate, min(starts, key=_us))
        self.ways.polish(climb, bound_us)
        return climb.best

    def _polished_for(self, device: int) -> int:
        """Returns the limit whose polished plan serves one, too: the next lower one that is apart from others, or to which
        climbs gain much. Polishing takes long, and often little changes from one limit to the next."""
        place = bisect_right(self.limits, device)
        if device in self._following:
            lower = self._begun_at(device)
            return device if self._climbed(device).total_us <= _MUCH * self._plan(lower).total_us else lower
        first = max(i for i, limit in enumerate(self.limits[:place]) if limit in self._apart)
        serving = self.limits[first]
        for limit in self.limits[first + 1 : place]:
            if self._climbed(limit).total_us <= _MUCH * self._climbed(serving).total_us:
                serving = limit
        return serving

    @functools.cached_property
    def _apart(self) -> set[int]:
        return {*apart(self.limits, lambda limit: self.bound(limit, None))}

    def _climbed(self, limit: int) -> Plan:
        """Returns the fastest plan at which climbs to a limit end, before it is polished."""
        return min(self._ends(limit), key=_us)

    def _ends(self, limit: int) -> Sequence[Plan]:
        """Returns the plans at which climbs to a limit end: from plans of lower limits and, where others follow, from seeds.
        The slower one may lead farther with more memory."""
        if limit not in self._ended:
            below, limits = self._following.get(limit), Limits(limit)
            climbs = self._from_frontier(limits) if below is None else self._from_next_lower(limits, below)
            self._ended[limit] = [climb.best for climb in climbs]
        return self._ended[limit]

    def _from_next_lower(self, limits: Limits, below: int) -> Sequence[Climb]:
        """Climbs from the plans of a limit a little ``below``, which are never faster; from the polished one only where that
        limit follows none, as moves lead less far from there. From seeds, too, where the bound falls from the last limit below
        that follows none: few moves do not lead as far."""
        starts = self._ends(below)
        if below not in self._following:
            starts = [self._plan(below) if start is self._climbed(below) else start for start in starts]
        climbs = [Climb(limits, self.ways, self.evaluate, start) for start in starts]
        for climb in climbs:
            climb.go_on(_MOVES_BETWEEN * self.ways.patience)
        falls = self.bound(*limits) <= _BOUND_FALLS * self.bound(self._begun_at(limits.device), None)
        return self._to_go_on(climbs, self._from_seeds(min(climbs, key=_ended_us)) if falls else [])

    def _from_frontier(self, limits: Limits) -> Sequence[Climb]:
        shares = _STARTS if self.ways.differ or not self._others_follow else _STARTS[:1]  # seeds serve large steps as well
        starts = [self.reached(max(self.limits[0], int(limits.device * share))) for share in shares]
        climbs = [Climb(limits, self.ways, self.evaluate, start) for start in {id(start): start for start in starts}.values()]
        for climb, most in zip(climbs, _MOVES, strict=False):
            climb.go_on(most * self.ways.patience)
        best = min(climbs, key=_ended_us)
        climbs = self._to_go_on([best], self._from_seeds(best))
        many = _MANY if self.ways.differ else 1
        for climb in climbs:
            climb.go_on(_MOVES[0] * self.ways.patience * many)  # one that began lower may be on its way
        best = self._kicked(fastest := min(climbs, key=_ended_us))
        if best.best.total_us > _FAR * self.bound(*limits) and self.ways.differ:
            best.go_on(_MOVES[0] * self.ways.patience * _MANY_FAR)
        return [best if climb is fastest else climb for climb in climbs]

    def _to_go_on(self, climbs: Sequence[Climb], seeded: Sequence[Climb]) -> list[Climb]:
        """Returns the climbs to go on with: for limits that others follow, the first and the fastest of the others, but none
        that ended much slower."""
        first, *others = *climbs, *seeded
        fastest = min((first, *others), key=_ended_us)
        if not self._others_follow:
            return [fastest]
        both = [first, *([min(others, key=_ended_us)] if others else [])]
        return [climb for climb in both if self.ways.differ or _ended_us(climb) <= _LEADS_ON * _ended_us(fastest)]

    def _from_seeds(self, best: Climb) -> list[Climb]:
        """Returns climbs from seeds, where the best of the others ends far above its bound: from the fastest seed for each
        number of blocks ahead."""
        if best.best.total_us <= _SEEDED * self.bound(*best.limits):
            return []
        most_us = _HOPELESS * best.best.total_us if self._goes_by_seeds else inf
        plans = self.seeds.plans(best.limits._asdict(), self.evaluate, most_us)
        within = sorted((plan for plan in plans if not best.limits.missing(plan)), key=lambda plan: -plan.total_us)
        if self._goes_by_seeds:
            within = [plan for plan in within if plan.total_us <= _NEAR_FASTEST * within[-1].total_us]
        fastest = {plan.lookahead: plan for plan in within}.values()
        climbs = [Climb(best.limits, self.ways, self.evaluate, plan) for plan in fastest]
        for most in (_SHORT, 1 - _SHORT):
            for climb in climbs:
                climb.go_on(most * _MOVES[0] * self.ways.patience)
            climbs = [climb for climb in climbs if self._may_catch_up(climb, best)]
        return climbs

    def _may_catch_up(self, climb: Climb, best: Climb) -> bool:
        """Tells whether a climb, so far, is not much farther above the bound than another one, or that is far above it, too."""
        bound_us = self.bound(*best.limits)
        far = self.ways.differ or best.best.total_us > _FAR_SEEDED * bound_us
        return far or _ended_us(climb) - bound_us < _PROMISING * (_ended_us(best) - bound_us)

    def _kicked(self, best: Climb) -> Climb:
        """Climbs on from where a climb ended, after each kick, and once more from the best of these if that helped."""
        if self._goes_by_seeds:  # these lead as far
            return best
        for _ in range(_KICKED if best.best.total_us > _NEAR_BOUND * self.bound(*best.limits) else 0):
            ended = best.best
            for plan in self.ways.kicks(ended) if self.ways.kicks is not None else ():
                anew = Climb(best.limits, self.ways, self.evaluate, ended.changed(step_time_us=inf), _MOVES[-1])
                if anew.is_better(plan):
                    anew.go_on(_MOVES[-1] * self.ways.patience)
                    best = min((best, anew), key=_ended_us)
            if best.best is ended:
                break
        return best


def _us(plan: Plan) -> float:
    return plan.total_us


def _ended_us(climb: Climb) -> float:
    return climb.best.total_us
