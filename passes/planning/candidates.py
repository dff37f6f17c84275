"""The candidate plans of one step, each evaluated once, and the best of them within given bytes.

Each budget has a search of its own (see ``search.py``), which begins at the same plans for all, and at what the linear program
gives for it. What was evaluated for one budget is not evaluated again for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, get_args

from mtcompile.passes.analysis.state import Budgets, held_nbytes, param_nbytes, streamable
from mtcompile.passes.plan import Certificate, Plan, Updates
from mtcompile.passes.planning.blocks import Block, blocks_of, decided, everything
from mtcompile.passes.planning.climbs.casts import casting, casts
from mtcompile.passes.planning.climbs.climb import Climb, Evaluate, Ways
from mtcompile.passes.planning.climbs.disk import Disk, disk_of
from mtcompile.passes.planning.climbs.moves import moves
from mtcompile.passes.planning.climbs.room import Room, filling, rooms
from mtcompile.passes.planning.climbs.singles import singles
from mtcompile.passes.planning.disk.homes import causes, surely_short
from mtcompile.passes.planning.disk.limits import NotWorthwhile, check_worthwhile
from mtcompile.passes.planning.evaluate import completed, evaluate, identity, judged, shortfall
from mtcompile.passes.planning.figures.evaluator import Evaluator, Figures
from mtcompile.passes.planning.limits import NO_LIMITS, Limits, fits, limits_of, missing_nbytes, order
from mtcompile.passes.planning.linear.relaxation import Bounds, faster_than_resident
from mtcompile.passes.planning.linear.seeds import Rounding, Within
from mtcompile.passes.planning.pace import impatient, paced, with_pace
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, Planned, PlanningProblem, Progress, no_progress
from mtcompile.passes.planning.search import EFFORTS, Effort, cost_of, is_worth, most_evaluations, searched
from mtcompile.passes.planning.starts import least_plan, plans_to_start_from
from mtcompile.passes.rewrites.casts import may_cast
from mtcompile.passes.step_graph import regions
from mtcompile.runtime.schedule import Schedule, Tier

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's from Python 3.11 on

_LEANEST = 0.25  # of the plans that a search evaluates: those evaluated to find the leanest
_TOLD_EACH = 16  # evaluations between two reports of progress
_GROWN = 4  # times that device memory grows by a tenth, for the linear program to give plans


class Candidates:
    """The candidate plans of one step; ``best`` finds the one for a budget."""

    def __init__(self, problem: PlanningProblem, progress: Progress = no_progress) -> None:
        self.problem, self.progress = problem, progress
        self.sizes = param_nbytes(problem.step)
        self.open_params = {b: nbytes for b, nbytes in self.sizes.items() if b not in problem.fixed_homes}
        self.base = replace(decided(problem, self.sizes), narrow=False)
        self.evaluations = self._began = 0
        self._akin: Candidates | None = None  # of a problem whose plans have the same figures
        self._figures: dict[Hashable, Figures] = {}
        self._paces: dict[Hashable, Updates | None] = {}
        self._found: dict[Limits, list[Plan]] = {}  # by searches, the best first

    @classmethod
    def like(cls, known: Candidates, problem: PlanningProblem) -> Self:
        """Returns the candidates of a problem, with all that is ``known`` if it is of one that differs in its limits alone, and
        with what is known of each plan if plans have the same figures there."""
        if problem.differs_in_limits(known.problem):
            candidates = cls.__new__(cls)
            vars(candidates).update(vars(known) | {"problem": problem})
            return candidates
        candidates = cls(problem, known.progress)
        if problem.has_same_figures(known.problem):
            candidates._akin, candidates._figures, candidates._paces = known, known._figures, known._paces
        return candidates

    # ------------------------------------------------------------------------------------------------- figures of plans

    def evaluate(self, plan: Plan) -> Candidate:
        """Returns the plan with its figures, which leave registered passes out: only its schedule includes these. Evaluates it,
        and counts that, unless a plan with the same decisions was evaluated before, which is often so."""
        key = identity(plan)
        if (figures := self._figures.get(key)) is None:
            self.evaluations += 1
            if self.evaluations % _TOLD_EACH == 0:
                self._tell()
            figures = self._figures[key] = self._evaluator.figures(plan)
        return self._evaluator.candidate(plan, figures)

    def _paced(self, plan: Plan, is_lost: Callable[[Plan], bool] = lambda plan: False) -> Candidate:
        """Returns the plan as ``paced`` chooses it; the choice is remembered unless the plan is lost."""
        if (key := identity(plan)) in self._paces:
            return self.evaluate(plan.changed(updates=self._paces[key]))
        candidate = paced(plan, self.evaluate, self._evaluator.due_first, is_lost)
        if not is_lost(candidate.plan):
            self._paces[key] = candidate.plan.updates
        return candidate

    def _within(self, limits: Limits) -> Evaluate:
        """Returns a function that gives a plan its figures, as ``paced`` chooses it unless it is above the limit of the device
        or not faster than another; without gradients that wait on the host if it is above the limit there."""
        device, host = limits.device, limits.host

        def within(plan: Plan, us: float = inf) -> Plan:
            def is_lost(plan: Plan) -> bool:
                return plan.step_time_us >= us or (device is not None and plan.peak_bytes["device"] > device)

            if host is not None:
                patient = self.evaluate(with_pace(plan, True, ())).plan
                if patient.peak_bytes["host"] > host and (less := impatient(patient)) is not None:
                    return self.evaluate(less).plan
            return self._paced(plan, is_lost).plan

        return within

    def planned(self, plan: Plan) -> Planned:
        """Returns the plan with its rewritten step graph and schedule, whether it fits or not."""
        candidate = self.evaluate(plan)
        return completed(self.problem, candidate, candidate.plan.peak_bytes["device"], None)

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.problem, known=self._akin and self._akin._evaluator)

    # ------------------------------------------------------------------------------------------- what a search begins at

    @property
    def effort(self) -> Effort:
        """The costs that a search may have."""
        return EFFORTS[self.problem.effort]

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of the step, and what a plan may decide about each."""
        return blocks_of(self.problem.step, self.problem.machine)

    @cached_property
    def _starts(self) -> list[Plan]:
        """Plans that do not depend on budgets, with their figures."""
        plans = plans_to_start_from(self.problem, self.base, self.blocks, self.open_params)
        return [self._paced(plan).plan for plan in plans]

    @cached_property
    def _seeds(self) -> Within:
        rounding = Rounding(self.blocks, self.sizes, () if self._disk is None else self._disk.order)
        held = held_nbytes(self.problem.step, self.problem.budgets, "host")
        return Within(self._bounds.solve, least_plan(self.base, self.blocks), rounding, held)

    @cached_property
    def _ways(self) -> Ways:
        budgets, blocks, sizes = self.problem.budgets, self.blocks, self.open_params
        held, host = held_nbytes(self.problem.step, budgets, "device"), budgets.host_activations
        streaming = {home: self.sizes[home] for home in streamable(self.problem.step, budgets)}
        kinds = moves(blocks, sizes, host, streaming) + singles(blocks, sizes, host, self.effort.evaluations)
        return Ways(kinds, rooms(blocks, sizes, held, host), filling(sizes, held))

    @cached_property
    def _disk(self) -> Disk | None:
        """The homes and activations that may go to disk; None where none may."""
        return disk_of(self.problem, self.blocks)

    def _ways_with(self, disk: Disk) -> Ways:
        """The ways of climbs that use the disk too, before others: it frees most."""
        (kinds, rooms, fill), first = self._ways, disk.rooms()
        rooms = {"host": [*first["host"], *rooms["host"]], "device": [*rooms["device"], *first["device"]]}
        return Ways([*kinds, *disk.moves()], rooms, fill)

    @cached_property
    def resident(self) -> Candidate:
        """The plan with everything on the device."""
        return self._paced(everything(self.problem.step, self.base, self.open_params))

    @cached_property
    def floor(self) -> int:
        """The lowest peak of the plans that keep least."""
        return min(plan.peak_bytes["device"] for plan in self._starts)

    @cached_property
    def _streamed(self) -> Schedule:
        """A schedule with every home on the host, with casts there."""
        step, base = self.problem.step, replace(self.base, narrow=may_cast(self.problem.step))
        return evaluate(self.problem.as_summarised, POLICIES["megatrain"](step, base, self.open_params)).schedule

    @cached_property
    def _casting(self) -> list[str]:
        """The homes of which the host may cast weights."""
        return casting(self.problem.step, self._streamed) if self._casts else []

    @cached_property
    def _casts(self) -> bool:
        """True if the host may cast anything."""
        return may_cast(self.problem.step) and any(i.work == "convert" for i in self._streamed.instructions)

    # ----------------------------------------------------------------------------------------------------------- bounds

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds(self.problem, self.blocks)

    def certificate(self, device: int | None, host: int | None) -> Certificate | None:
        """Returns how fast any plan within these bytes could be; None where there is none, or where no effort is made for
        it."""
        if not self.effort.bounded:
            return None
        return self._bounds.certificate({"device": device, "host": host, "disk": self.problem.budgets.disk})

    def bound_us(
        self, device: int | None, host: int | None, inside: bool = True, at_home: bool = False, all_plans: bool = False
    ) -> float:
        """The µs of the fastest plan that could be within these bytes; infinite if there can be none. ``inside``: False for any
        form of the step (see ``Relaxation``); ``at_home``: of plans with nothing on disk; ``all_plans``: see ``Bounds``."""
        disk = self.problem.budgets.disk
        limits = {"device": device, "host": host, "disk": disk and (0 if at_home else disk)}
        return self._bounds.us(limits, inside, all_plans)

    @cached_property
    def least_nbytes(self) -> int:
        """About the most device bytes with which no plan fits, by the linear program; never more."""
        nbytes = self._bounds.solve.least_nbytes("device", {"disk": self.problem.budgets.disk})
        return self.floor if nbytes is None else nbytes

    @cached_property
    def resident_may_be_slow(self) -> bool:
        """True if a plan may be faster than the one with everything on the device, however much memory there is."""
        if not self.effort.bounded:
            return False
        return faster_than_resident(self.problem, self._bounds.solve, self.open_params, self.resident.plan.total_us)

    # ----------------------------------------------------------------------------------------------- plans within bytes

    def best(self, device: int | None, host: int | None, known: Plan | None = None) -> Planned:
        """Returns the fastest plan found within these bytes; ``known``, the plan found for the same request before, without a
        search if it still fits. Raises DoesNotFit."""
        problem = self.problem.within(device, host)
        if known is not None and fits((again := self.evaluate(known)).plan, problem.budgets):
            return completed(problem, again, known.minimum_device_bytes, known.certificate)
        if fits((resident := self.resident).plan, problem.budgets) and not self.resident_may_be_slow:
            minimum = min(self.floor, resident.plan.peak_bytes["device"])
            return completed(problem, resident, minimum, self.certificate(device, host))
        candidate = self.evaluate(self._searched(limits := limits_of(problem.budgets))[0])
        if limits.missing(candidate.plan):
            raise self._refusal(limits)
        minimum = min(self.floor, candidate.plan.peak_bytes["device"])
        return completed(problem, candidate, minimum, self.certificate(device, host))

    def _searched(self, limits: Limits) -> list[Plan]:
        """Returns the plans that a search ends at, the best first."""
        if limits not in self._found:
            self._found[limits] = self._search(limits)
        return self._found[limits]

    def _search(self, limits: Limits) -> list[Plan]:
        self._began = self.evaluations
        self._tell()
        if self._disk is None or limits.host is None:
            within = self.problem.within(limits.device, limits.host)
            if surely_short(within) > 0 or self._bound_us(limits) == inf:  # nothing fits
                return [self._least_within(limits)]
            return self._search_among(limits, self._ways, self._starts_within(limits))
        return self._search_with_disk(self._disk, limits)

    def may_gain(self, us: float, expected_us: float) -> bool:
        """Tells whether a search is worth what it costs if its plan may take ``expected_us`` in place of ``us``."""
        cost_us = cost_of(most_evaluations(self.effort, self._regions), self._regions)
        return is_worth(self.effort, cost_us, us, us - expected_us)

    def _tell(self) -> None:
        """Tells how many plans the search has evaluated, of about how many at most."""
        most = round(most_evaluations(self.effort, self._regions))
        self.progress("planning", min(most, self.evaluations - self._began), most)

    def _search_with_disk(self, disk: Disk, limits: Limits) -> list[Plan]:
        """Searches with nothing on disk first, so that a disk that is not needed changes nothing; then with it, if that may be
        worth it. A plan that wears a disk is to gain more than luck."""
        at_home, without = limits._replace(disk=0), list[Plan]()
        if "disk" not in self.problem.fixed_homes.values() and self._bound_us(at_home) < inf:
            without = self._search_among(at_home, self._ways, self._starts_within(at_home))
            if not limits.missing(without[0]) and not self.may_gain(without[0].total_us, self._bound_us(limits)):
                return without
        elif self._bound_us(limits) == inf:  # nothing fits
            return [self._least_within(limits)]
        there = self._search_using(disk, limits, without)
        refused = not limits.missing(there[0]) and not self._is_worthwhile(there[0])
        if refused and disk.activations and disk.order:  # these are written in every step
            others = self._search_using(replace(disk, activations=False), limits, without)
            if not limits.missing(others[0]) and self._is_worthwhile(others[0]):
                there, refused = others, False
        if (
            without
            and not limits.missing(without[0])
            and (refused or there[0].total_us > (1 - self.effort.gain) * without[0].total_us)
        ):
            return [*without, *there]
        return [*there, *without]

    def _search_using(self, disk: Disk, limits: Limits, known: Sequence[Plan]) -> list[Plan]:
        starts = [*known, *self._starts_on_disk(disk, limits, self._within(limits))]
        return self._search_among(limits, self._ways_with(disk), starts)

    def _is_worthwhile(self, plan: Plan) -> bool:
        """Tells whether a plan makes sense with what it has on disk."""
        with contextlib.suppress(NotWorthwhile):
            if plan.peak_bytes.get("disk"):
                check_worthwhile(self.problem, self.planned(plan).plan)
            return True
        return False

    def _starts_within(self, limits: Limits) -> list[Plan]:
        evaluate = self._within(limits)
        starts = [self.resident.plan, *self._starts] if limits.host is None else [evaluate(plan) for plan in self._starts]
        return starts + (self._seeds_near(limits, evaluate) if self.effort.bounded else [])

    def _starts_on_disk(self, disk: Disk, limits: Limits, evaluate: Evaluate) -> list[Plan]:
        """Returns plans that have as much on disk as the host lacks: homes, or activations first."""

        def sent(plan: Plan) -> Plan:
            return self._made_room(plan, disk.rooms(), limits, evaluate)

        within_device = limits._replace(host=None)
        starts = [evaluate(plan) for plan in self._starts]
        starts = [plan for plan in starts if not within_device.missing(plan)] or [*starts, self.leanest()]
        ways = [sent(plan) for plan in starts]
        best = sorted(ways, key=lambda plan: order(plan, limits))[: self.effort.starts]
        ways += [sent(evaluate(disk.most(plan, all_homes, True))) for plan in best for all_homes in (False, True)]
        ways += [sent(evaluate(disk.with_all_activations(plan))) for plan in best]
        if self.effort.bounded:
            ways += self._seeds_near(limits, lambda plan: sent(evaluate(plan)))
        return ways

    def _made_room(self, plan: Plan, rooms: Mapping[str, Sequence[Room]], limits: Limits, evaluate: Evaluate) -> Plan:
        climb = Climb(limits, Ways(rooms=rooms), evaluate, plan)
        climb.make_room()
        return climb.best

    def _search_among(self, limits: Limits, ways: Ways, starts: list[Plan]) -> list[Plan]:
        if all(limits.missing(plan) for plan in starts):
            starts.append(self._least_within(limits))
        about = self.effort, self._regions, lambda: self._bound_us(limits)
        found = searched(starts, limits, ways, self._within(limits), *about)
        return [self._with_casts(found[0], limits), *found] if self._casts else found

    @cached_property
    def _regions(self) -> int:
        return len(regions(self.problem.step))

    def _seeds_near(self, limits: Limits, evaluate: Callable[[Plan], Plan]) -> list[Plan]:
        """Returns plans that the linear program gives for the limits or, where it gives none, for a little more memory: whole
        homes may leave no room where parts of them would."""
        seeds, aim = list[Plan](), limits
        if limits.host is not None:  # whatever rounding needs of the host, that may still be within the limit
            seeds += self._seeds.plans(limits._replace(host=None).nbytes, evaluate)
        for _ in range(_GROWN):
            seeds += self._seeds.plans(aim.nbytes, evaluate)
            if aim.device is None or any(not limits.missing(plan) for plan in seeds):
                break
            aim = aim._replace(device=aim.device + aim.device // 10)
        return seeds

    def _bound_us(self, limits: Limits) -> float:
        return self._bounds.us(limits.nbytes) if self.effort.bounded else 0.0

    def _with_casts(self, plan: Plan, limits: Limits) -> Plan:
        """Returns the plan, or one with casts on the host if that is better within the limits."""
        climb = Climb(limits, Ways([casts(self._casting)]), lambda plan, us=inf: self._paced(plan).plan, plan)
        climb.go_on(inf)
        return climb.best

    def leanest(self, tier: Tier = "device", within: Limits = NO_LIMITS) -> Plan:
        """Returns the plan found that needs least of a tier, within limits on others; above these if none is found."""
        limits, ways = within._replace(least=tier), self._ways
        if limits not in self._found:
            evaluate = self._within(within._replace(host=0) if tier == "host" else within)
            starts = [evaluate(plan) for plan in self._starts]
            if tier != "device" and self._disk is not None and within.disk != 0:
                most = [evaluate(sent) for plan in starts for sent in self._disk.mosts(plan)]
                starts, ways = [*starts, *most], self._ways_with(self._disk)
            if within.device is not None and all(plan.peak_bytes["device"] > within.device for plan in starts):
                starts.append(self.leanest())
            effort = self.effort._replace(evaluations=int(_LEANEST * self.effort.evaluations))
            found = searched(starts, limits, ways, evaluate, effort, self._regions, lambda: 0.0)
            if self._casts:  # not climbed from, as they take long to evaluate
                found += [evaluate(plan.changed(narrow=True)) for plan in (*starts, found[0])]
            self._found[limits] = sorted(found, key=lambda plan: order(plan, limits))
        return self._found[limits][0]

    def _refusal(self, limits: Limits) -> DoesNotFit:
        """Returns the DoesNotFit of limits within which no plan was found: of the first tier that lacks bytes whatever those
        after it have, with those of the plan that needs fewest."""
        known, found = NO_LIMITS, [plan for plans in self._found.values() for plan in plans]
        for tier in get_args(Tier):
            if limits.nbytes[tier] is not None:
                others, known = known, known._replace(**{tier: limits.nbytes[tier]})
                if any(not known.missing(plan) for plan in found):
                    continue
                if missing := known.missing(least := self.leanest(tier, others)):
                    return self._short(self.evaluate(least), next(iter(missing)))
        nearest = self._searched(limits)[0]
        return self._short(self.evaluate(nearest), next(iter(limits.missing(nearest))))

    def _least_within(self, limits: Limits) -> Plan:
        """Returns the plan that needs least of the host within the other limits, or, without a limit on the host, least of the
        device."""
        return self.leanest() if limits.host is None else self.leanest("host", limits._replace(host=None))

    def _short(self, candidate: Candidate, tier: str) -> DoesNotFit:
        error = shortfall(candidate, tier, self.problem.step)
        if self.problem.budgets.disk is not None and tier == "host":
            error.causes = causes(self.problem, candidate.plan, error)
        return error

    def least(self) -> Planned:
        """Returns the plan that needs least device memory, whatever the budgets."""
        return self.planned(self.leanest())

    def others(self, budgets: Budgets, count: int) -> list[Plan]:
        """Returns some of the plans that searches have found: the fastest within the budgets, and the leanest."""
        found = [plan for plans in self._found.values() for plan in plans]
        fitting = sorted((plan for plan in found if fits(plan, budgets)), key=lambda plan: plan.total_us)
        return [*fitting[:count], self.leanest()]

    # ----------------------------------------------------------------------------------------------------------- policies

    def by_policy(self, policy: str, budgets: Budgets) -> Planned:
        """Returns the plan of a fixed policy. Raises DoesNotFit."""
        candidate = judged(self.problem, self.of_policy(policy, budgets))
        peaks = candidate.plan.peak_bytes
        for tier, limit in budgets.nbytes.items():
            if limit is not None and peaks[tier] > limit:
                raise self._short(candidate, tier)
        bound = self.certificate(budgets.device, budgets.host)
        return completed(replace(self.problem, budgets=budgets), candidate, peaks["device"], bound)

    def of_policy(self, policy: str, budgets: Budgets) -> Candidate:
        """Returns a fixed policy's plan with its figures, fit or not; without waiting gradients if that fits better."""
        candidate = self._paced(POLICIES[policy](self.problem.step, self.base, self.open_params))
        if self._casts:
            candidate = self.evaluate(self._with_casts(candidate.plan, limits_of(budgets)))
        if not fits(candidate.plan, budgets) and (less := impatient(candidate.plan)) is not None:
            candidate = min((candidate, self.evaluate(less)), key=lambda one: missing_nbytes(one.plan, budgets))
        if not fits(candidate.plan, budgets) and self._disk is not None:
            limits = limits_of(budgets)
            tried = candidate.plan, *self._disk.mosts(candidate.plan)
            rooms, within = self._disk.rooms(), limits._replace(disk=None)  # else a small disk would be refused as a small host
            sent = (self._made_room(self.evaluate(plan).plan, rooms, within, self._evaluated) for plan in tried)
            candidate = self.evaluate(min(sent, key=lambda plan: (order(plan, within)[0], order(plan, limits))))
        return candidate

    def _evaluated(self, plan: Plan, us: float = inf) -> Plan:
        return self.evaluate(plan).plan
