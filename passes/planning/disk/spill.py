"""Sends homes and activations to disk, as few as the host's budget needs, and chooses among a few ways to by simulated time.

What fits the host does not move, unless a step is faster with more on disk (``more_homes``). Of what may move, equal homes are
spread evenly over the step, so that a read hides behind the blocks in between. Frozen weights go first: they are read every
step and never written. Activations may follow (``activations``), and weights that train, with their state, where updates run in
the backward, a parameter at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from mtcompile.passes.analysis.state import (
    held_nbytes,
    on_disk_nbytes,
    param_nbytes,
    trained_nbytes,
    update_staging_nbytes,
)
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.activations import AHEAD, Find, Roomy, Spilled, with_activations_on_disk, with_more_sets
from mtcompile.passes.planning.disk.limits import NotWorthwhile, check_worthwhile
from mtcompile.passes.planning.disk.more_homes import MORE_OF, with_more_homes
from mtcompile.passes.planning.disk.shortage import short_of_host, surely_short
from mtcompile.passes.planning.disk.spacing import evenly, spaced
from mtcompile.passes.planning.disk.without import may_fit_without, planned_without
from mtcompile.passes.planning.evaluate import completed
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, Planned, PlanningProblem, Solved
from mtcompile.runtime.schedule import MOST_NBYTES

_SHIFTS = 3  # of homes in equal distances, that are tried
# Regions that a read may be ahead of its fetch, and by how many more a fetch may be issued; by whether it is the read.
_WAYS_AHEAD = {False: (AHEAD, (0, -1, 1)), True: ((0,), (0, -1, 1, 2, 4))}
_WORTH = 0.98  # of the time without activations on disk: what a plan that writes them every step may take


def within_disk(
    problem: PlanningProblem,
    find: Find,
    roomy: Roomy = lambda schedule: True,
    homes_move: bool = True,
    known: Candidates | None = None,
) -> Solved:
    """Returns the problem, with the homes on disk that its plan needs there, and its plan. ``find``: plans a problem, whose
    device budget it may lower, or raises DoesNotFit, as this does. ``roomy``: tells whether a schedule leaves enough room for
    others beside it. ``homes_move``: False to raise DoesNotFit where homes do not fit the host, unless some are on disk. Where
    the budgets leave open whether weights on disk are read straight to the device, it plans both. ``known``: of the same
    step."""
    if problem.budgets.disk is None:
        return find(problem)
    known = known or Candidates(problem)
    if problem.budgets.disk_direct is not None:
        return _within_disk(problem, known, find, roomy, homes_move)
    ways = [replace(problem, budgets=replace(problem.budgets, disk_direct=direct)) for direct in (False, True)]
    planned, refused = list[Solved](), list[DoesNotFit]()
    for way in ways:
        try:
            planned.append(_within_disk(way, known, find, roomy, homes_move))
        except DoesNotFit as error:
            refused.append(error)
        if planned and "disk" not in planned[0][0].fixed_homes.values():
            break  # no weights are on disk
    if not planned:
        raise min(refused, key=lambda error: (error.tier != refused[0].tier, error.minimum))
    return min(planned, key=lambda each: each[1].plan.total_us)


def _within_disk(problem: PlanningProblem, known: Candidates, find: Find, roomy: Roomy, homes_move: bool) -> Solved:
    """Plans with any homes on disk. If none fits, plans once more with those on the host whose updates on disk would take more
    of the host than they take there, such as a large embedding's."""
    try:
        return _with_any_on_disk(problem, known, find, roomy, homes_move)
    except DoesNotFit as error:
        if error.tier != "host" or not homes_move or not (dear := _dear(problem)):
            raise
        refused = error
    takes = tuple(home for home in problem.budgets.disk_takes if home not in dear)
    there = {**problem.fixed_homes, **dict.fromkeys(dear, "host")}
    fixed = replace(problem, fixed_homes=there, budgets=replace(problem.budgets, disk_takes=takes))
    try:
        return _with_any_on_disk(fixed, known, find, roomy, homes_move)
    except DoesNotFit as error:
        raise min(refused, error, key=lambda each: (each.tier != "host", each.minimum)) from None


def is_hopeless(problem: PlanningProblem) -> bool:
    """Tells whether the host lacks room even if all homes that may go to disk are there, and the device holds nothing but
    training state."""
    may_move = [] if problem.budgets.disk is None else [home for homes in _may_move(problem) for home in homes]
    return surely_short(_with_homes(problem, may_move)) > 0


def _dear(problem: PlanningProblem) -> list[str]:
    """Returns the homes that train whose updates on disk go through more of the host than is freed: those of the largest
    parameters, as many as leave least on the host once all others are on disk."""
    held, (_, trained) = held_nbytes(problem.step, problem.budgets), _may_move(problem)
    through = {home: update_staging_nbytes(problem.step, _on_disk([home]), problem.budgets) for home in trained}
    order = sorted(trained, key=lambda home: -through[home])
    taken = [sum(held[home] for home in order[:count]) + through[home] for count, home in enumerate(order)]
    return order[: taken.index(min(taken))] if taken else []


def _with_any_on_disk(problem: PlanningProblem, known: Candidates, find: Find, roomy: Roomy, homes_move: bool) -> Solved:
    budgets = problem.budgets
    homes_move = homes_move or "disk" in problem.fixed_homes.values()
    sent: tuple[str, ...] = ()
    frozen, trained = _may_move(problem)
    missing, more, order = 0, 1, [*evenly(frozen), *evenly(trained)]
    searched = False  # with nothing on disk
    least = DoesNotFit("host", MOST_NBYTES, ())  # the refusal with the fewest bytes of the host that work
    refused: PlanningProblem | None = None  # the first that was, with all frozen weights on disk
    while True:
        fixed = _with_homes(problem, sent)
        all_sent = len(sent) == len(order)
        if not all_sent and (short := surely_short(fixed)) > 0:
            if not homes_move:
                raise DoesNotFit("host", (budgets.host or 0) + short, ())
            missing += short
            sent = _more(problem, order, sent, missing)
            continue
        try:
            short = 0 if all_sent else short_of_host(fixed, known)
            if short > 0 and (sent or not may_fit_without(problem, known)):  # no search would find a plan
                raise DoesNotFit("host", (budgets.host or 0) + short, ())
            searched = searched or not sent
            part, planned = find(fixed) if sent else planned_without(fixed, known, find)
            break
        except DoesNotFit as error:
            if error.tier != "host" or budgets.host is None or not homes_move:
                raise
            if error.causes:  # a plan was searched
                least = min(least, error, key=lambda each: each.minimum)
            if refused is None and len(sent) >= len(frozen):
                refused = fixed
            missing += error.minimum - budgets.host
            try:
                if all_sent:
                    raise DoesNotFit("host", error.minimum, _causes(problem, sent, error))
                sent = _more(problem, order, sent, missing, more)
                more *= 2 if error.causes else 1  # a search is worth more than one home
            except DoesNotFit as final:
                spilled = Spilled()
                if refused is not None and not is_hopeless(problem):
                    spilled = with_activations_on_disk(refused, find, roomy, evenly)
                if spilled.fastest is not None:
                    return _judged(*spilled.fastest, problem, known)
                if not searched:  # what is sure is that lean plans do not fit without a disk: a search may find one that does
                    try:
                        return planned_without(problem, known, find)
                    except DoesNotFit as without:
                        least = min(least, without, key=lambda each: each.minimum) if without.tier == "host" else least
                if final.tier != "host":
                    raise
                raise min(final, least, spilled.least, key=lambda each: each.minimum) from None
    fastest = _with_these(problem, known, find, roomy, sent, (part, planned), refused)

    def with_more(there: tuple[str, ...]) -> Solved:
        _check_room(fixed := _with_homes(problem, there))
        return _with_these(problem, known, find, roomy, there, find(fixed))

    more = max(1, len(sent) // MORE_OF) if sent else len(_fewest(problem, order, short))
    return with_more_homes(fastest, order, len(sent), more, with_more)


def _with_these(
    problem: PlanningProblem,
    known: Candidates,
    find: Find,
    roomy: Roomy,
    sent: Sequence[str],
    planned: Solved,
    refused: PlanningProblem | None = None,
) -> Solved:
    """Returns the fastest plan with so many homes on disk, of variants of one that is ``planned``, and with activations there
    too: also beside the homes of a problem that was ``refused`` without these. Raises NotWorthwhile."""
    at_home: Solved | None = None
    worth, bound, fixed = inf, 0.0, _with_homes(problem, sent)
    try:
        varied = replace(problem, budgets=planned[0].budgets)
        at_home = _fastest(*planned, Candidates.like(known, varied), sent, roomy)
        plan = at_home[1].plan
        fixed = _with_homes(problem, [home for home, tier in at_home[0].fixed_homes.items() if tier == "disk"])
        worth, bound = _WORTH * plan.total_us, 0.0 if plan.certificate is None else plan.certificate.bound_us
    except NotWorthwhile as error:
        too_slow = error
    for tried in (refused, fixed) if bound < worth else ():
        if tried is None:
            continue
        faster = with_activations_on_disk(tried, find, roomy, evenly, worth).fastest
        if faster is not None and faster[1].plan.total_us < worth:
            with contextlib.suppress(NotWorthwhile):
                return _judged(*faster, problem, known)
    if at_home is None:
        raise too_slow
    return at_home


def _judged(fixed: PlanningProblem, candidate: Candidate, problem: PlanningProblem, known: Candidates) -> Solved:
    """Returns a plan with activations on disk as it will be run, and the problem that it solves. Raises NotWorthwhile."""
    # On a host that has room for all of it, it would take no longer: so that bound holds here too.
    bound = Candidates.like(known, problem).certificate(problem.budgets.device, None)
    planned = completed(fixed, candidate, candidate.plan.peak_bytes["device"], bound)
    check_worthwhile(fixed, planned.plan)
    return fixed, planned


def _more(
    problem: PlanningProblem, order: Sequence[str], sent: Sequence[str], missing: int, at_least: int = 1
) -> tuple[str, ...]:
    """The first homes that free the ``missing`` bytes of the host, some more than were ``sent``. Raises DoesNotFit if they do
    not fit the disk."""
    homes = tuple(order[: max(len(sent) + at_least, len(_fewest(problem, order, missing + problem.budgets.disk_staging)))])
    _check_room(_with_homes(problem, homes))
    return homes


def _may_move(problem: PlanningProblem) -> tuple[list[str], list[str]]:
    """The homes that may go to disk, in the order of the step: the frozen ones, and those that train."""
    fixed = problem.fixed_homes.keys() - set(problem.budgets.disk_takes)
    free = [h for h in dict.fromkeys(problem.step.meta["homes"].values()) if h not in fixed]
    nbytes = trained_nbytes(problem.step)
    trained = [home for home in free if nbytes.get(home)] if problem.budgets.disk_updates else []
    return [home for home in free if not nbytes.get(home)], trained


def _fewest(problem: PlanningProblem, order: Sequence[str], nbytes: int) -> list[str]:
    """The first homes in ``order`` that free so many bytes together, or all."""
    held, freed, chosen = held_nbytes(problem.step, problem.budgets), 0, list[str]()
    for home in order:
        if freed >= nbytes:
            break
        chosen.append(home)
        freed += held[home]
    return chosen


def _with_homes(problem: PlanningProblem, homes: Sequence[str]) -> PlanningProblem:
    return replace(problem, fixed_homes={**problem.fixed_homes, **dict.fromkeys(homes, "disk")})


def _check_room(problem: PlanningProblem) -> None:
    """Raises DoesNotFit if the homes on disk take more than there may be."""
    sizes = _taken(problem)
    needed, limit = sum(sizes.values()), problem.budgets.disk
    if limit is not None and needed > limit:
        largest = sorted(sizes.items(), key=lambda row: -row[1])[:3]
        raise DoesNotFit("disk", needed, tuple((f"state of {home}", nbytes) for home, nbytes in largest))


def _taken(problem: PlanningProblem) -> dict[str, int]:
    """The bytes that each home on disk takes there."""
    sizes = on_disk_nbytes(problem.step, problem.budgets)
    return {home: sizes[home] for home, tier in problem.fixed_homes.items() if tier == "disk" and home in sizes}


def _on_disk(homes: Sequence[str]) -> Plan:
    return Plan(tuple(Decision("params", home, "disk", 0) for home in homes))


def _causes(problem: PlanningProblem, sent: Sequence[str], error: DoesNotFit) -> tuple[tuple[str, int], ...]:
    """Returns the bytes that the host holds although everything that may go to disk is there, by what holds them."""
    held, trains = held_nbytes(problem.step, problem.budgets), trained_nbytes(problem.step)
    trained = sum(nbytes for home, nbytes in held.items() if trains[home] and home not in sent)
    slots = next((part for part in error.causes if "slots" in part[0]), ("placed slots", 0))
    updates = update_staging_nbytes(problem.step, _on_disk(sent), problem.budgets)
    beside = ("buffers of the disk's requests and updates", problem.budgets.disk_staging + updates)
    trained = min(trained, max(0, error.minimum - beside[1] - slots[1]))  # the others are on the device
    what = "weights that train, with gradients and optimizer state"
    if not problem.budgets.disk_updates:
        way = "an elementwise optimizer, such as AdamW" if problem.budgets.updates else 'update="backward"'
        what += f" (with {way}, they may go to disk)"
    return tuple(part for part in ((what, trained), beside, slots) if part[1])


# ----------------------------------------------------------------------------------------------- how, by simulated time


def _fastest(fixed: PlanningProblem, planned: Planned, candidates: Candidates, sent: Sequence[str], roomy: Roomy) -> Solved:
    """Returns the fastest of the plan and its variants: other homes of the same bytes on disk, and reads further ahead."""
    _check_room(fixed)
    if "disk" not in fixed.fixed_homes.values():
        return fixed, planned
    problem = candidates.problem
    best = fixed, candidates.evaluate(planned.plan)
    choices = [tuple(sent), *_other_choices(problem, sent)]
    for homes in choices:
        varied = _with_homes(problem, homes)
        for ahead, change in product(*_WAYS_AHEAD[planned.plan.disk_direct]):
            lookahead = max(0, planned.plan.lookahead + change)
            plan = replace(planned.plan, disk_lookahead=ahead, lookahead=lookahead)
            candidate = candidates.evaluate(_moved(plan, varied, set(sent) - set(homes)))
            better = fits(candidate.plan, problem.budgets) and candidate.plan.total_us < best[1].plan.total_us
            if better and roomy(candidate.schedule):
                best = varied, candidate
    best = min((best, *_with_more_sets(*best, problem, candidates, roomy)), key=lambda one: one[1].plan.total_us)
    varied, candidate = _on_device(*best, problem, candidates, roomy)
    # The bound is that of any choice of homes on disk.
    bound = None if planned.plan.certificate is None else candidates.certificate(problem.budgets.device, problem.budgets.host)
    minimum = min(planned.plan.minimum_device_bytes, candidate.plan.peak_bytes["device"])
    before, planned = planned, candidates.planned(candidate.plan)
    if not fits(planned.plan, problem.budgets):  # with registered passes, which the variants' figures leave out
        return fixed, before
    planned = replace(planned, plan=replace(planned.plan, minimum_device_bytes=minimum, certificate=bound))
    check_worthwhile(varied, planned.plan)
    return varied, planned


def _with_more_sets(
    fixed: PlanningProblem, candidate: Candidate, problem: PlanningProblem, candidates: Candidates, roomy: Roomy
) -> Iterator[tuple[PlanningProblem, Candidate]]:
    """Yields the plan with more gradients that wait on the host, while it fits."""
    for plan in with_more_sets(candidate.plan):
        tried = candidates.evaluate(plan)
        if not (fits(tried.plan, problem.budgets) and roomy(tried.schedule)):
            return
        yield fixed, tried


def _other_choices(problem: PlanningProblem, sent: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields as many homes of the step as those ``sent``, in equal distances, from one of the last ones on, so that updates on
    disk begin and end early; and the last, and the first, homes that take as many bytes."""
    frozen, trained = _may_move(problem)
    held, limit = held_nbytes(problem.step, problem.budgets), problem.budgets.disk or 0
    nbytes = sum(held[home] for home in sent)
    counts = [(homes, len({*sent}.intersection(homes))) for homes in (frozen, trained)]
    in_distances = [[h for homes, count in counts for h in spaced(homes, count, shift)] for shift in range(_SHIFTS)]
    for order in (*in_distances, [*reversed(frozen), *reversed(trained)], [*frozen, *trained]):
        homes = tuple(_fewest(problem, order, nbytes))
        if sent and sum(_taken(_with_homes(problem, homes)).values()) <= limit:
            yield homes


def _on_device(
    fixed: PlanningProblem, candidate: Candidate, problem: PlanningProblem, candidates: Candidates, roomy: Roomy
) -> tuple[PlanningProblem, Candidate]:
    """Takes to the device as many of the homes on disk as still fit there, if that is faster."""
    trained_first = [home for homes in reversed(_may_move(problem)) for home in evenly(homes)]
    order = [home for home in trained_first if fixed.fixed_homes.get(home) == "disk" and home not in problem.fixed_homes]
    best = fixed, candidate
    low, high = 0, len(order)
    while low < high:  # the most homes that fit
        count = (low + high + 1) // 2
        varied = replace(fixed, fixed_homes={**fixed.fixed_homes, **dict.fromkeys(order[:count], "device")})
        sizes = param_nbytes(problem.step)
        plan = candidate.plan.with_decisions([Decision("params", h, "device", sizes[h]) for h in order[:count]])
        tried = candidates.evaluate(plan)
        if fits(tried.plan, problem.budgets) and roomy(tried.schedule):
            low = count
            best = (varied, tried) if tried.plan.total_us < best[1].plan.total_us else best
        else:
            high = count - 1
    return best


def _moved(plan: Plan, problem: PlanningProblem, back: set[str]) -> Plan:
    """Returns the plan with its homes on disk as ``problem`` says; those that come ``back`` are on the host."""
    sizes = param_nbytes(problem.step)
    there = [Decision("params", h, "disk", sizes[h]) for h, tier in problem.fixed_homes.items() if tier == "disk"]
    at_home = [Decision("params", home, "host", sizes[home]) for home in back]
    return plan.with_decisions([*there, *at_home])
