"""The candidate plans of one step: evaluated once and varied by local search, they serve every budget.

The simulator judges candidates. They and their order do not depend on the budget: over (peak, time) they form one frontier,
and a budget takes the last point that fits. So a larger budget is never slower, and the peak grows with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from mtcompile.passes.analysis.state import Budgets, held_nbytes, param_nbytes
from mtcompile.passes.plan import Certificate, Plan, Updates
from mtcompile.passes.planning.climbs.casts import with_casts
from mtcompile.passes.planning.climbs.climb import Climbs, climbs_of
from mtcompile.passes.planning.climbs.hosts import HostClimbs, Pace, host_climbs
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.evaluate import completed, evaluate, faster, identity, judged, shortfall
from mtcompile.passes.planning.figures.evaluator import Evaluator, Figures
from mtcompile.passes.planning.figures.lean import lean_plans, lean_starts, leanest_within, slower_than_some
from mtcompile.passes.planning.figures.stored import SearchedText, searched_from_json
from mtcompile.passes.planning.frontier import (
    Point,
    ample,
    by_time,
    choose,
    fits,
    fits_host,
    frontiers,
    missing_nbytes,
    undominated,
)
from mtcompile.passes.planning.ladders import Block, Ladder, blocks_of, decided, everything, ladders
from mtcompile.passes.planning.linear.relaxation import Bounds, faster_than_resident
from mtcompile.passes.planning.linear.seeds import Number, Rounding, seed_ladders, within_of
from mtcompile.passes.planning.pace import impatient, paced
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, Planned, PlanningProblem, Progress, Store, no_progress
from mtcompile.passes.planning.search import Searching, refine, sample, unseen_neighbours, vary
from mtcompile.passes.rewrites.casts import may_cast
from mtcompile.passes.step_graph import kernel_of, regions
from mtcompile.runtime.schedule import Schedule

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's from Python 3.11 on

# Limits count evaluations, not seconds, so that the same input gives the same plan. One takes time in proportion to regions.
_REGIONS_PER_LADDER = 150  # regions to evaluate per ladder, but ...
_FEWEST_POINTS, MOST_POINTS = 6, 12  # ... at least and at most this many plans
_REFINED, _FEW_REFINED = 100, 50  # plans evaluated between two of a ladder; of steps too large for local search
_SEARCHED, MOST_SEARCHED = 4_000_000, 300  # plans of local search: the first over the square of a step's operations; at most
_FEW_SEARCHED = 30  # fewer are no search of a step, which then has fewer seeds


class _Stale(Exception):
    """Raised when a stored candidate does not have the peaks and times that an evaluation gives now."""


class Candidates:
    """The candidate plans of one step, each evaluated once; ``best`` chooses among them for any budget. ``store``: keeps them
    between runs; it is specific to the sources, step, machine and state, and independent of device and host bytes."""

    def __init__(self, problem: PlanningProblem, progress: Progress = no_progress, store: Store | None = None) -> None:
        self.problem, self.progress, self.store = problem, progress, store
        self.sizes = param_nbytes(problem.step)
        self.open_params = {b: nbytes for b, nbytes in self.sizes.items() if b not in problem.fixed_homes}
        self.base = replace(decided(problem, self.sizes), narrow=False)
        self.evaluations = 0
        self._akin: Candidates | None = None  # of a problem whose plans have the same figures
        self._figures: dict[Hashable, Figures] = {}
        self._paces: dict[Hashable, Updates | None] = {}
        self._points: list[Point] = []
        self._varied_points: list[Point] | None = None
        self._improved: Climbs | None = None
        self._on_hosts: HostClimbs | None = None
        self._climbed: dict[Limits, Plan] = {}  # plans that climbs of earlier runs found
        self._kept, self._text = -1, SearchedText()  # how many climbs are stored; -1: not even points

    @classmethod
    def like(cls, known: Candidates, problem: PlanningProblem, store: Store | None = None) -> Self:
        """Returns the candidates of a problem, with all that is ``known`` if it is of one that differs in its limits alone, and
        with what is known of each plan if plans have the same figures there."""
        if problem.differs_in_limits(known.problem):
            candidates = cls.__new__(cls)
            vars(candidates).update(vars(known) | {"problem": problem, "store": store})
            return candidates
        candidates = cls(problem, known.progress, store)
        if problem.has_same_figures(known.problem):
            candidates._akin, candidates._figures, candidates._paces = known, known._figures, known._paces
        return candidates

    def evaluate(self, plan: Plan) -> Candidate:
        """Returns the plan with its figures, which leave registered passes out: only its schedule includes these. Evaluates it,
        and counts that, unless a plan with the same decisions was evaluated before, which is often so."""
        key = identity(plan)
        if (figures := self._figures.get(key)) is None:
            self.evaluations += 1
            figures = self._figures[key] = self._evaluator.figures(plan)
        return self._evaluator.candidate(plan, figures)

    def _paced(self, plan: Plan) -> Candidate:
        """Returns the plan as ``paced`` chooses it; the choice is remembered."""
        if (key := identity(plan)) in self._paces:
            return self.evaluate(plan.changed(updates=self._paces[key]))
        candidate = paced(plan, self.evaluate, self._evaluator.due_first)
        self._paces[key] = candidate.plan.updates
        return candidate

    def planned(self, plan: Plan) -> Planned:
        """Returns the plan with its rewritten step graph and schedule, whether it fits or not."""
        candidate = self.evaluate(plan)
        return completed(self.problem, candidate, candidate.plan.peak_bytes["device"], None)

    @cached_property
    def ladders(self) -> tuple[Ladder, ...]:
        """Lists of candidates from the floor up: by density, and by linear programs."""
        least, device = self._by_density[0][0], (self.floor, self.resident.plan.peak_bytes["device"])
        about = Rounding(self.blocks, self.sizes), device, list(self.open_params), self._seeds
        return (*self._by_density, *seed_ladders(self._bounds.solve, least, *about))

    @cached_property
    def _by_density(self) -> tuple[Ladder, ...]:
        """If activations may go home, these include every fixed policy's plan, so that no policy beats the search."""
        step, host = self.problem.step, self.problem.budgets.host_activations
        policies = (policy for name, policy in POLICIES.items() if host and name != "resident")
        searched = ladders(self.blocks, self.base, self.problem.machine, self.open_params, host)
        return (*searched, *((policy(step, self.base, self.open_params),) for policy in policies))

    @cached_property
    def floor(self) -> int:
        """The lowest peak of the plans that keep least."""
        return min(self.evaluate(ladder[0]).plan.peak_bytes["device"] for ladder in self._by_density)

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of the step, and what a plan may decide about each."""
        return blocks_of(self.problem.step, self.problem.machine)

    @cached_property
    def _streamed(self) -> Schedule:
        """A schedule with every home on the host, with casts there."""
        step, base = self.problem.step, replace(self.base, narrow=may_cast(self.problem.step))
        return evaluate(self.problem.as_summarised, POLICIES["megatrain"](step, base, self.open_params)).schedule

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.problem, known=self._akin and self._akin._evaluator)

    @cached_property
    def _casts(self) -> bool:
        """True if the host may cast anything."""
        return may_cast(self.problem.step) and any(i.work == "convert" for i in self._streamed.instructions)

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds(self.problem, self.blocks, self._streamed, self.resident)

    def certificate(self, device: int | None, host: int | None, us: float = 0.0) -> Certificate | None:
        return self._bounds.certificate({"device": device, "host": host, "disk": self.problem.budgets.disk}, us)

    def bound_us(self, device: int | None, host: int | None, inside: bool = True) -> float:
        """The µs of the fastest plan that could be within these bytes; infinite if there can be none.
        ``inside``: False for any form of the step (see ``Relaxation``)."""
        return self._bounds.us({"device": device, "host": host, "disk": self.problem.budgets.disk}, inside)

    @cached_property
    def least_nbytes(self) -> int:
        """About the most device bytes with which no plan fits, by the linear program; never more."""
        nbytes = self._bounds.solve.least_nbytes("device", {"disk": self.problem.budgets.disk})
        return self.floor if nbytes is None else nbytes

    @cached_property
    def resident_may_be_slow(self) -> bool:
        """True if a plan may be faster than the one with everything on the device, however much memory there is."""
        return faster_than_resident(self.problem, self._bounds.solve, self.open_params, self.resident.plan.total_us)

    def best(self, device: int | None, host: int | None, known: Plan | None = None) -> Planned:
        """Returns the fastest candidate within these bytes; ``known``, the plan found for the same request before, without a
        search if it still fits. Raises DoesNotFit."""
        problem = self.problem.within(device, host)
        if known is not None and fits((again := self.evaluate(known)).plan, problem.budgets):
            return completed(problem, again, known.minimum_device_bytes, known.certificate)
        if fits((resident := self.resident).plan, problem.budgets) and not self.resident_may_be_slow:  # the floor is reported
            minimum = min(self.floor, resident.plan.peak_bytes["device"])
            return completed(problem, resident, minimum, self.certificate(device, host, resident.plan.total_us))
        return self._searched(lambda: self._chosen(problem))

    def _searched(self, answer: Callable[[], Planned]) -> Planned:
        """Returns an ``answer`` made of what the search has found."""
        if not self._points and not self._recall():
            self._search(self.resident.plan)
        try:
            with contextlib.suppress(_Stale):
                return answer()
            self._search(self.resident.plan)
            return answer()
        finally:
            self._keep()

    def least(self) -> Planned:
        """Returns the plan that needs least device memory, whatever the budgets."""

        def leanest() -> Planned:
            points = [*self._points, *(self._variants if self._casts else [])]
            return self.planned(self._again(min(points, key=lambda point: (point.peak, point.time_us))).plan)

        return self._searched(leanest)

    def others(self, budgets: Budgets, count: int) -> list[Plan]:
        """Returns some of the plans that a search has found: the fastest within the budgets, and the leanest."""
        fitting = sorted((point for point in self._points if fits(point.plan, budgets)), key=by_time)
        leanest = min(self._points, key=lambda point: (point.peak, point.time_us), default=None)
        return [point.plan for point in (*fitting[:count], leanest) if point is not None]

    def needs(self, tier: str, limits: Mapping[str, int]) -> int | None:
        """Returns the fewest bytes of a tier with which some plan keeps to ``limits`` on others, after ``best`` found none."""
        if not self._points:  # there was no search, as no plan can keep to them
            return None
        peaks = [point.plan.peak_bytes for point in (*self._points, *self._variants)]
        return min((p[tier] for p in peaks if all(p[other] <= n for other, n in limits.items())), default=None)

    def by_policy(self, policy: str, budgets: Budgets) -> Planned:
        """Returns the plan of a fixed policy. Raises DoesNotFit."""
        candidate = judged(self.problem, self.of_policy(policy, budgets))
        peaks = candidate.plan.peak_bytes
        for tier, limit in budgets.nbytes.items():
            if limit is not None and peaks[tier] > limit:
                raise shortfall(candidate, tier, self.problem.step)
        bound = self.certificate(budgets.device, budgets.host, candidate.plan.total_us)
        return completed(replace(self.problem, budgets=budgets), candidate, peaks["device"], bound)

    def of_policy(self, policy: str, budgets: Budgets) -> Candidate:
        """Returns a fixed policy's plan with its figures, fit or not; without waiting gradients if that fits better."""
        candidate = self._paced(POLICIES[policy](self.problem.step, self.base, self.open_params))
        candidate = with_casts(self.problem.step, candidate, (), self._paced, budgets) if self._casts else candidate
        if fits(candidate.plan, budgets) or (less := impatient(candidate.plan)) is None:
            return candidate
        return min((candidate, self.evaluate(less)), key=lambda one: missing_nbytes(one.plan, budgets))

    @cached_property
    def resident(self) -> Candidate:
        """The plan with everything on the device."""
        return self._paced(everything(self.problem.step, self.base, self.open_params))

    def _chosen(self, problem: PlanningProblem) -> Planned:
        """Returns the best plan for these budgets, at an evaluated point or between two. Raises DoesNotFit and _Stale."""
        points, candidate = self._fastest(budgets := problem.budgets)
        minimum = min(candidate.plan.peak_bytes["device"], *(point.peak for point in points if fits_host(point, budgets)))
        return completed(problem, candidate, minimum, self.certificate(budgets.device, budgets.host, candidate.plan.total_us))

    def _fastest(self, budgets: Budgets) -> tuple[list[Point], Candidate]:
        """Returns points, and the fastest plan that is made of them; the one without a limit on the host where that fits."""
        if ample(self._points, budgets, self.bound_us):
            points, candidate = self._fastest(replace(budgets, host=None))
            if fits(candidate.plan, budgets):
                return [*points, *self._variants], candidate
        points, candidate, others = self._uncast(budgets)
        if self._casts:
            candidate = with_casts(self.problem.step, candidate, others, self._paced, budgets, partial(self._within, budgets))
        if (less := impatient(candidate.plan)) is not None:  # its gradients do not wait on the host
            candidate = faster(candidate, self.evaluate(less), budgets)
        return points, candidate

    def _uncast(self, budgets: Budgets) -> tuple[list[Point], Candidate, list[Plan]]:
        """Returns points, the fastest plan at or between them or of climbs, before the host casts anything, and all plans of
        climbs that fit. Raises DoesNotFit and _Stale."""
        points, climbs, improved = self._points_for(budgets), self._climbs(), list[Plan]()
        candidate = self._again(min((each for each in points if fits(each.plan, budgets)), key=by_time))

        def fitting(plan: Plan) -> list[Plan]:
            less = impatient(plan) if budgets.host is not None else None
            varied = [plan] if less is None else [plan, self.evaluate(less).plan]
            improved.extend(fit := [one for one in varied if fits(one, budgets) and one.total_us >= plan.total_us])
            return fit

        plan = candidate.plan if climbs is None else climbs.best(budgets.device, candidate.plan, fitting, budgets.host)
        for within in frontiers(self._points) if climbs is None or not climbs.serve_alone(budgets.host) else ():
            between = choose(points, within, lambda plan: self._paced(plan).plan, budgets, plan.total_us)
            plan = min((plan, self._again(between).plan), key=lambda one: one.total_us)
        if climbs is not None and budgets.host is not None:  # none is faster than what needs more of the host: that may fit
            plan = self._climbs_on_hosts(climbs).best(budgets.device, budgets.host, plan)
        return points, candidate if plan is candidate.plan else self.evaluate(plan), improved

    def _within(self, budgets: Budgets, host: int | None) -> Candidate | None:
        """Returns the plan before the host casts anything, with other bytes of the ``host``; None if there is none."""
        with contextlib.suppress(DoesNotFit):
            return self._uncast(replace(budgets, host=host))[1]
        return None

    @property
    def _variants(self) -> list[Point]:
        """Plans that need little of the host; undominated ones without waiting gradients; and the leanest with casts on the
        host. Gradients that wait should slow no plan down: a variant that is faster is left out. It would make larger budgets
        slower, as only host budgets ask for variants."""
        if self._varied_points is None:
            timed = [(point.time_us, impatient(point.plan)) for point in undominated(self._points)]
            varied = [plan for us, less in timed if less and (plan := self.evaluate(less).plan).total_us >= us]
            if self._casts:
                varied.append(self._paced(replace(min(self._points, key=lambda point: point.peak).plan, narrow=True)).plan)
            self._varied_points = [Point(plan, (plan,), 0) for plan in varied]
            lean = lean_plans(lean_starts(self.base, self._by_density), self.open_params)
            self._varied_points += slower_than_some([self.evaluate(plan).plan for plan in lean], self._points)
        return self._varied_points

    def lean(self, device: int | None) -> Iterator[Plan]:
        """Plans with their figures that need little of the host, with as many homes on the device as it has room for."""
        starts = lean_starts(self.base, self._by_density)
        return leanest_within(device, starts, self.open_params, lambda plan: self.evaluate(plan).plan)

    def _again(self, point: Point) -> Candidate:
        """Returns the point with its schedule. Raises _Stale."""
        candidate = self.evaluate(point.plan)
        if (candidate.plan.peak_bytes, candidate.plan.total_us) != (point.plan.peak_bytes, point.time_us):
            raise _Stale
        return candidate

    def _points_for(self, budgets: Budgets) -> list[Point]:
        """Returns the points to choose among. Raises DoesNotFit if none of them fits."""
        points = [*self._points, *(self._variants if budgets.host is not None or self._casts else [])]
        points += slower_than_some([*self.lean(budgets.device)] if budgets.host is not None else [], self._points)
        if budgets.device is not None and (least := min(points, key=lambda point: point.peak)).peak > budgets.device:
            raise shortfall(self._again(least), "device", self.problem.step)
        if not any(fits(point.plan, budgets) for point in points):
            fits_device = (p for p in points if budgets.device is None or p.peak <= budgets.device)
            least = min(fits_device, key=lambda p: p.plan.peak_bytes["host"])
            raise shortfall(self._again(least), "host", self.problem.step)
        return points

    def _recall(self) -> bool:
        """Takes what earlier searches stored. Tells whether there was anything that can be read."""
        text = self.store.read() if self.store else None
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            self._points, self._climbed = searched_from_json(text, self.base, self.ladders) if text else ([], {})
            self._kept = len(self._climbed) if text else -1
        return bool(self._points)

    def _keep(self) -> None:
        """Stores what the search has found, if that is more than was stored before."""
        climbed = self._climbed if self._improved is None else self._improved.plans
        if self.store and self._points and len(climbed) != self._kept:
            self.store.write(self._text(self._points, climbed, self.ladders))
            self._kept = len(climbed)

    def _search(self, resident: Plan) -> None:
        """Evaluates plans spread over every ladder, then varies them by local search."""
        self._improved, self._on_hosts, self._climbed, self._kept, self._varied_points = None, None, {}, -1, None
        self._text = SearchedText()
        for ladder in self._by_density:  # before ``_floor`` asks for figures alone: pacing also needs the schedules
            self._paced(ladder[0])
        per_ladder = min(max(_FEWEST_POINTS, _REGIONS_PER_LADDER // len(regions(self.problem.step))), MOST_POINTS)
        points, searching = [Point(resident, (resident,), 0)], Searching(lambda plan: self._paced(plan).plan, self.progress)
        sample(points, self.ladders, per_ladder, self._most_varied, searching)
        refine(points, min(MOST_SEARCHED, _FEW_REFINED if self._seeds == "fewest" else _REFINED), searching)
        host = self.problem.budgets.host_activations
        vary(points, self._most_varied, unseen_neighbours(points, self.blocks, self.sizes, self.open_params, host), searching)
        self._points = points

    @property
    def _seeds(self) -> Number:
        return "all" if self._most_varied >= _FEW_SEARCHED else "few" if self._most_varied else "fewest"

    @cached_property
    def _most_varied(self) -> int:
        """The number of plans that local search evaluates."""
        operations = sum(len(kernel_of(self.problem.step, region).graph.nodes) for region in regions(self.problem.step))
        return min(MOST_SEARCHED, _SEARCHED // operations**2)

    def _climbs(self) -> Climbs | None:
        """Plans improved by moves that equal parts share; None where steps wait for a disk."""
        if "disk" in self.problem.fixed_homes.values():
            return None
        if self._improved is None:
            held = held_nbytes(self.problem.step, self.problem.budgets)
            seeds = within_of(self._bounds, self._by_density[0][0], Rounding(self.blocks, self.sizes), held)
            about = self.problem, self.blocks, self.open_params, self._points, self.resident.plan.peak_bytes["device"]
            self._improved = climbs_of(*about, lambda plan: self._paced(plan).plan, (self._bounds.next_us, seeds))
            self._improved.plans |= {limits: self.evaluate(plan).plan for limits, plan in self._climbed.items()}
        return self._improved

    def _climbs_on_hosts(self, climbs: Climbs) -> HostClimbs:
        """Plans improved by the same moves within limits on the host."""
        if self._on_hosts is None:
            pace = Pace(lambda plan: self.evaluate(plan).plan, climbs.evaluate)
            self._on_hosts = host_climbs(climbs, [*self._points, *self._variants], climbs.seeds, pace)
        return self._on_hosts
