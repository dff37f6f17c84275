"""Sends homes to disk, as few as the host's budget needs, and chooses among a few ways to by simulated time.

What fits the host does not move. Of what may move, equal homes are spread evenly over the step, so that a read hides behind the
blocks in between. Only frozen weights move: they are read every step and never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mtcompile.passes.analysis.state import on_disk_nbytes, param_nbytes
from mtcompile.passes.draft import draft_of
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.evaluate import completed, evaluate
from mtcompile.passes.planning.frontier import fits
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, Planned, PlanningProblem
from mtcompile.runtime.schedule import gib

_AHEAD = (0, 1, 2, 4, 8)  # regions that a read may be ahead of its prefetch
Find = Callable[[PlanningProblem], Planned]


def within_disk(problem: PlanningProblem, find: Find) -> tuple[PlanningProblem, Planned]:
    """Returns the problem, with the homes on disk that its plan needs there, and its plan. ``find``: plans a problem, or raises
    DoesNotFit, as this does."""
    budgets = problem.budgets
    if budgets.disk is None:
        return problem, find(problem)
    sent: tuple[str, ...] = ()
    missing, order = 0, _evenly(_may_move(problem))
    while True:
        fixed = _with_homes(problem, sent)
        try:
            return _fastest(fixed, find(fixed), problem, sent)
        except DoesNotFit as error:
            if error.tier != "host" or budgets.host is None:
                raise
            missing += error.minimum - budgets.host
        more = _fewest(problem, order, missing + budgets.disk_staging)
        if len(more) <= len(sent):
            if len(sent) == len(order):
                raise DoesNotFit("host", missing + budgets.host, _causes(problem, sent))
            more = order[: len(sent) + 1]
        sent = tuple(more)
        _check_room(problem, sent)


def _may_move(problem: PlanningProblem) -> list[str]:
    """The homes that may go to disk, in the order of the step."""
    homes = dict.fromkeys(problem.step.meta["homes"].values())
    frozen = problem.step.meta.get("frozen", ())
    return [home for home in homes if home in frozen and home not in problem.fixed_homes]


def _evenly(homes: Sequence[str]) -> list[str]:
    """The same homes, so that any first few of them are spread evenly over the step."""

    def halves(low: int, high: int) -> Iterator[list[int]]:
        level = [(low, high)]
        while level:
            middles = [(a + b) // 2 for a, b in level]
            yield middles
            level = [part for (a, b), m in zip(level, middles) for part in ((a, m), (m + 1, b)) if part[0] < part[1]]

    return [homes[index] for level in halves(0, len(homes)) for index in level] if homes else []


def _fewest(problem: PlanningProblem, order: Sequence[str], nbytes: int) -> list[str]:
    """The first homes in ``order`` that free so many bytes together, or all."""
    sizes, freed, chosen = param_nbytes(problem.step), 0, []
    for home in order:
        if freed >= nbytes:
            break
        chosen.append(home)
        freed += sizes[home]
    return chosen


def _with_homes(problem: PlanningProblem, homes: Sequence[str]) -> PlanningProblem:
    return replace(problem, fixed_homes={**problem.fixed_homes, **dict.fromkeys(homes, "disk")})


def _check_room(problem: PlanningProblem, homes: Sequence[str]) -> None:
    sizes, limit = on_disk_nbytes(problem.step), problem.budgets.disk
    there = [home for home, tier in problem.fixed_homes.items() if tier == "disk" and home in sizes]
    needed = sum(sizes[home] for home in (*there, *homes))
    if limit is not None and needed > limit:
        largest = sorted(homes, key=lambda home: -sizes[home])[:3]
        raise DoesNotFit("disk", needed, tuple((f"weights of {home}", sizes[home]) for home in largest))


def _causes(problem: PlanningProblem, sent: Sequence[str]) -> tuple[tuple[str, int], ...]:
    sizes = param_nbytes(problem.step)
    frozen, copies = problem.step.meta.get("frozen", ()), problem.budgets.copies
    trained = int(sum(nbytes * copies for home, nbytes in sizes.items() if home not in frozen))
    return (
        ("weights that train, with gradients and optimizer state, which stay off the disk", trained),
        ("buffers of requests to the disk", problem.budgets.disk_staging),
    )


# ----------------------------------------------------------------------------------------------- how, by simulated time


def _fastest(
    fixed: PlanningProblem, planned: Planned, problem: PlanningProblem, sent: Sequence[str]
) -> tuple[PlanningProblem, Planned]:
    """Returns the fastest of the plan and its variants: other homes of the same bytes on disk, and reads further ahead."""
    on_disk = [home for home, tier in fixed.fixed_homes.items() if tier == "disk"]
    if not on_disk:
        return fixed, planned
    best = fixed, Candidate(planned.plan, lambda: planned.schedule)
    draft = draft_of(problem.step)
    choices = [tuple(sent), *_other_choices(problem, sent)]
    for homes in choices:
        varied = _with_homes(problem, homes)
        for ahead in _AHEAD:
            plan = _moved(replace(planned.plan, disk_lookahead=ahead), varied, set(sent) - set(homes))
            candidate = evaluate(varied, draft, plan)
            if fits(candidate.plan, problem.budgets) and candidate.plan.total_us < best[1].plan.total_us:
                best = varied, candidate
    varied, candidate = _on_device(*best, problem, sent)
    reasons = _with_reasons(candidate.plan)
    final = Candidate(reasons, candidate.lowered)
    minimum = min(planned.plan.minimum_device_bytes, candidate.plan.peak_bytes["device"])
    return varied, completed(varied, final, minimum, planned.plan.certificate)


def _other_choices(problem: PlanningProblem, sent: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The last, and the first, homes of the step that take as many bytes as those ``sent``."""
    sizes, may_move = param_nbytes(problem.step), _may_move(problem)
    nbytes = sum(sizes[home] for home in sent)
    limit = problem.budgets.disk or 0
    for order in (list(reversed(may_move)), may_move):
        homes = tuple(_fewest(problem, order, nbytes))
        if sent and sum(on_disk_nbytes(problem.step)[home] for home in homes) <= limit:
            yield homes


def _on_device(
    fixed: PlanningProblem, candidate: Candidate, problem: PlanningProblem, sent: Sequence[str]
) -> tuple[PlanningProblem, Candidate]:
    """Takes to the device as many of the homes on disk as still fit there, if that is faster."""
    order = [home for home in _evenly(_may_move(problem)) if fixed.fixed_homes.get(home) == "disk"]
    draft, best = draft_of(problem.step), (fixed, candidate)
    low, high = 0, len(order)
    while low < high:  # the most homes that fit
        count = (low + high + 1) // 2
        varied = replace(fixed, fixed_homes={**fixed.fixed_homes, **dict.fromkeys(order[:count], "device")})
        plan = candidate.plan
        for home in order[:count]:
            nbytes = param_nbytes(problem.step)[home]
            plan = plan.with_decision(Decision("params", home, "device", nbytes, "the device has room for it"))
        tried = evaluate(varied, draft, plan)
        if fits(tried.plan, problem.budgets):
            low = count
            best = (varied, tried) if tried.plan.total_us < best[1].plan.total_us else best
        else:
            high = count - 1
    return best


def _moved(plan: Plan, problem: PlanningProblem, back: set[str]) -> Plan:
    """Returns the plan with its homes on disk as ``problem`` says; those that come ``back`` are on the host."""
    decisions = []
    for decision in plan.decisions:
        if decision.kind == "params" and problem.fixed_homes.get(decision.subject) == "disk":
            decision = replace(decision, choice="disk")
        elif decision.kind == "params" and decision.subject in back:
            decision = replace(decision, choice="host", reason="the host has room for it")
        decisions.append(decision)
    return replace(plan, decisions=tuple(decisions))


def _with_reasons(plan: Plan) -> Plan:
    host = plan.peak_bytes.get("host", 0)
    why = f"frozen, and the host holds {gib(host)} without it: read {plan.disk_lookahead} region(s) before it is fetched"
    decisions = (replace(d, reason=why) if d.kind == "params" and d.choice == "disk" else d for d in plan.decisions)
    return replace(plan, decisions=tuple(decisions))
