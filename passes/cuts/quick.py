"""A quick answer to a changed planning problem: few plans are evaluated, where a search evaluates hundreds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

from mtcompile.passes.cuts.fastest import operations
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs.climb import ways_of
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.climbs.single import Climb
from mtcompile.passes.planning.evaluate import completed, shortfall
from mtcompile.passes.planning.frontier import fits
from mtcompile.passes.planning.linear.program import Infeasible
from mtcompile.passes.planning.linear.seeds import Rounding, Rule, seed
from mtcompile.passes.planning.pace import impatient
from mtcompile.passes.planning.problem import Candidate, Planned

_SHARES = (0.97, 0.9, 0.8, 0.6)  # of the device budget that linear programs get: rounding may add to what they need
_TIGHT = (1.0, 0.985, 0.97, 0.9, 0.8)  # where the time of one form is compared with that of others
_SLOWER = 1.03  # times the fastest plan that fits: once one takes longer, still fewer bytes are not tried
_AHEAD = (1, 2)  # blocks ahead that their plans fetch
_FAR = 1.1  # times the bound: a plan that takes longer is compared with those of short climbs
_FIRST = 8  # plans of each ladder that are tried where none fits
_CLIMBED = 180  # plans that a short climb evaluates at most
SMALL = 3000  # operations of a step that is searched in about a second


def is_small(candidates: Candidates) -> bool:
    """Tells whether a step is searched in about a second."""
    return operations(candidates) <= SMALL


class QuickCandidates(Candidates):
    """The candidate plans of a changed problem. ``Candidates.best`` may find a faster plan, and takes many times as long."""

    def best(self, device: int | None, host: int | None, known: Plan | None = None) -> Planned:
        """Does as ``Candidates.best``, but refuses a large step without a search, which takes long, where its linear program
        shows that no plan fits, or its leanest plans do not. Those say how many bytes are missing."""
        if known is None and device is not None and self._is_hopeless(device):
            raise shortfall(self._keeping_least, "device", self.problem.step)
        planned = super().best(device, host, known)
        return planned if device is None or host is not None or known is not None else self._or_climbed(planned, device)

    def _or_climbed(self, planned: Planned, device: int) -> Planned:
        """Returns the faster of the ``planned`` step and the plan of short climbs. Tries climbs only if a large step is far
        above its bound: near the fewest bytes that work, a search has few plans to start from."""
        us = self.evaluate(planned.plan).plan.total_us
        if not self._takes_long or not (bound_us := self.bound_us(device, None)) or us <= _FAR * bound_us:
            return planned
        if (plan := self._climbed_in(device)) is None or plan.total_us >= us:
            return planned
        candidate = self.evaluate(plan)
        minimum = min(planned.plan.minimum_device_bytes, candidate.plan.peak_bytes["device"])
        certificate = self.certificate(device, None, candidate.plan.total_us)
        return completed(self.problem.within(device, None), candidate, minimum, certificate)

    def _is_hopeless(self, device: int) -> bool:
        """Tells so whatever was searched before: the same question has one answer."""
        if not self._takes_long:
            return False
        least_fits = self.floor <= device or self._keeping_least.plan.peak_bytes["device"] <= device
        return not least_fits or self.bound_us(device, None) == inf

    @property
    def _takes_long(self) -> bool:
        """True for a large step without a disk: linear programs and short climbs tell what its search would find."""
        return self.problem.budgets.disk is None and not is_small(self)

    @property
    def _keeping_least(self) -> Candidate:
        """The leanest of the plans with which ladders begin. A search of a large step, which does not vary plans, rarely finds
        a leaner one."""
        first = [ladder[place] for ladder in self._by_density for place in range(min(_FIRST, len(ladder)))]
        return self._paced(min((self.evaluate(plan).plan for plan in first), key=lambda plan: plan.peak_bytes["device"]))

    def quickly(self) -> Candidate | None:
        """Returns the fastest plan within the problem's budgets of a few that linear programs give. If none is within them: the
        plan within the device's that needs least of the host, or None if no plan is within it."""
        budgets = self.problem.budgets
        within_device = replace(budgets, host=None)
        candidates = [self.resident] if budgets.device is None else self._by_linear_programs(budgets.device)
        if budgets.host is not None:
            candidates += [self.evaluate(less) for one in candidates if (less := impatient(one.plan)) is not None]
        if fitting := [one for one in candidates if fits(one.plan, budgets)]:
            return min(fitting, key=lambda one: one.plan.total_us)
        within = [one for one in candidates if fits(one.plan, within_device)] or self._leanest_on_device(budgets.device)
        return min(within, key=lambda one: one.plan.peak_bytes["host"], default=None)

    def leanest(self) -> Candidate | None:
        """Returns the plan within the device's bytes that needs least of the host, of a few that need little."""
        budgets = replace(self.problem.budgets, host=None)
        within = [plan for plan in self.lean(budgets.device) if fits(plan, budgets)]
        return self.evaluate(min(within, key=lambda plan: plan.peak_bytes["host"])) if within else None

    def climbed_us(self, device: int) -> float:
        """Returns the µs of the fastest plan within ``device`` bytes, whatever it needs of the host, of a few that linear
        programs give, improved by short climbs. What a search finds is mostly within 2 % of that, and within 10 % where the
        bound is far. Infinite if none fits."""
        return inf if (plan := self._climbed_in(device)) is None else plan.total_us

    def _climbed_in(self, device: int) -> Plan | None:
        """Returns the fastest plan that short climbs find."""
        if device not in self._climbed_plans:
            plans = self._climbed_shortly(device)
            self._climbed_plans[device] = min(plans, key=lambda plan: plan.total_us, default=None)
        return self._climbed_plans[device]

    @cached_property
    def _climbed_plans(self) -> dict[int, Plan | None]:
        return {}

    def _climbed_shortly(self, device: int) -> Iterator[Plan]:
        plans, limits = [one.plan for one in self._near(device)], Limits(device)
        ways = ways_of(self.problem, self.blocks, self.open_params)
        if not (fitting := [plan for plan in plans if not limits.missing(plan)]):
            fitting = [one.plan for one in self._leanest_on_device(device)]
        for plan in {p.lookahead: p for p in sorted(fitting, key=lambda plan: -plan.total_us)}.values():
            climb = Climb(limits, ways, lambda plan: self._paced(plan).plan, plan, _CLIMBED)
            for above in plans if plan not in plans else ():
                climb.is_better(above)
            climb.go_on(_CLIMBED)
            yield climb.best

    def _leanest_on_device(self, device: int | None) -> list[Candidate]:
        """The plans that need least of the device, as far as they are within its bytes."""
        within = replace(self.problem.budgets, device=device, host=None)
        return [one for ladder in self._by_density if fits((one := self.evaluate(ladder[0])).plan, within)]

    def above_us(self, device: int) -> float:
        """Returns the µs of the fastest plan that linear programs give for ``device`` bytes, though it may need more of these:
        what does is hardly slower. Infinite if they give none."""
        return min((one.plan.total_us for one in self._near(device)), default=inf)

    def _near(self, device: int) -> list[Candidate]:
        return self._by_linear_programs(device, _TIGHT, whole=False, slower=_SLOWER)

    def _by_linear_programs(
        self, device: int, shares: Sequence[float] = _SHARES, whole: bool = True, slower: float = inf
    ) -> list[Candidate]:
        """Plans for shares of ``device`` bytes, the largest first. ``whole``: with the leanest one where a program has no
        solution. ``slower``: once a plan takes so many times as long as one that fits, lower shares are left out."""
        if fits(self.resident.plan, replace(self.problem.budgets, host=None)):
            return [self.resident]
        limits, rounding, plans = Limits(device), Rounding(self.blocks, self.sizes), list[Candidate]()
        for ahead in _AHEAD:
            fastest_us = inf
            for one in map(self._paced, self._by_shares(device, ahead, shares, whole, rounding)):
                plans.append(one)
                if one.plan.total_us > slower * fastest_us:
                    break
                if not limits.missing(one.plan):
                    fastest_us = min(fastest_us, one.plan.total_us)
        return plans

    def _by_shares(self, device: int, ahead: int, shares: Sequence[float], whole: bool, rounding: Rounding) -> Iterator[Plan]:
        first = next(iter(self.open_params), None)
        decided = {} if first is None else {first: True}  # it is updated last and read first: compute would wait for it
        base, optimum = replace(self._by_density[0][0], lookahead=ahead, pooled=True), None
        for share in shares:
            limits = {"device": int(share * device), "host": None}
            try:
                optimum = self._bounds.solve(limits, decided, ahead, optimum)
            except Infeasible:  # and so is every lower share
                if whole:
                    yield base
                return
            yield seed(self._bounds.solve, limits, base, rounding, Rule(decided), optimum)
