"""Sends activations that wait on the host on to the disk: as few as the host's budget needs, those that wait longest first.

A value that the first blocks save is written early in the forward and read late in the backward, so both hide behind what runs
in between. Two orders are tried, with several depths of staging; the simulator judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.evaluate import shortfall
from mtcompile.passes.planning.figures.evaluator import Evaluator
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.pace import impatient
from mtcompile.passes.planning.problem import Candidate, DoesNotFit, Planned, PlanningProblem, Solved
from mtcompile.runtime.schedule import MOST_NBYTES, Schedule
from mtcompile.runtime.sim import clock

Find = Callable[[PlanningProblem], Solved]
Roomy = Callable[[Schedule], bool]
Evenly = Callable[[Sequence[str]], list[str]]
Serves = Callable[[Candidate], bool]
AHEAD = (0, 1, 2, 4, 8)  # regions that a read may be ahead of its prefetch
SETS = (3, 4, 6, 8)  # of slots for gradients that go home


@dataclass(frozen=True, slots=True)
class Waiting:
    """A value that waits on the host for ``idle_us`` between its copies there and back."""

    value: str
    nbytes: int
    idle_us: float


def waiting_on_host(schedule: Schedule) -> list[Waiting]:
    """Returns the activations that wait on the host, in the order in which they are made."""
    starts, ends = clock(schedule)
    arrived: dict[str, float] = {}  # buffer on the host -> when it is there
    waiting: dict[str, Waiting] = {}
    for index, each in enumerate(schedule.instructions):
        if each.work == "offload" and schedule.buffers[each.reads[0]].role == "activation":
            arrived |= dict.fromkeys(each.writes, ends[index])
        elif each.work == "prefetch":
            for name in arrived.keys() & set(each.reads):
                buffer = schedule.buffers[name]
                waiting.setdefault(name, Waiting(buffer.value, buffer.nbytes, starts[index] - arrived[name]))
    return [waiting[name] for name in arrived if name in waiting]


class Spilled(NamedTuple):
    """The gain of activations on disk. ``fastest``: the fastest plan found that keeps to all budgets, and the problem that it
    solves; None if there is none. ``least``: the refusal by the one that needs the fewest bytes of the host, of those tried
    that keep to the other budgets."""

    fastest: tuple[PlanningProblem, Candidate] | None = None
    least: DoesNotFit = DoesNotFit("host", MOST_NBYTES, ())


def with_activations_on_disk(
    problem: PlanningProblem, find: Find, roomy: Roomy, evenly: Evenly, below_us: float = inf
) -> Spilled:
    """Returns plans with activations on disk. ``find``: plans a problem, or raises DoesNotFit; it is asked for plans that take
    more of the host than there is, whose activations then go on to the disk. ``evenly``: orders values so that any first few
    are spread evenly. ``below_us``: plans that take longer are of no use."""
    limit = problem.budgets.host
    if limit is None or not problem.budgets.host_activations:
        return Spilled()
    fastest: tuple[PlanningProblem, Candidate] | None = None
    least, host = DoesNotFit("host", MOST_NBYTES, ()), None
    for _ in range(2):  # a host without limit, and one half way to it
        try:
            part, planned = find(replace(problem, budgets=replace(problem.budgets, host=host)))
        except DoesNotFit:
            break
        part = replace(part, budgets=replace(part.budgets, host=limit))
        if planned.plan.total_us >= below_us or (fits(planned.plan, part.budgets) and roomy(planned.schedule)):
            break

        def serves(candidate: Candidate, budgets: Budgets = part.budgets) -> bool:
            return fits(candidate.plan, budgets) and roomy(candidate.schedule)

        for candidate in _spilled(part, planned, evenly, serves):
            if candidate.plan.peak_bytes["host"] < least.minimum and fits(candidate.plan, replace(part.budgets, host=None)):
                least = shortfall(candidate, "host", problem.step)
            if serves(candidate) and (fastest is None or candidate.plan.total_us < fastest[1].plan.total_us):
                fastest = part, candidate
        host = (limit + planned.plan.peak_bytes["host"]) // 2
        if host <= limit:
            break
    return Spilled(fastest, least)


def _spilled(problem: PlanningProblem, planned: Planned, evenly: Evenly, serves: Serves) -> Iterator[Candidate]:
    """Yields the plan with activations on disk in a few ways, each with as few as the budgets need, or all of them."""
    evaluator = Evaluator(problem)
    by_value = {each.value: each for each in waiting_on_host(planned.schedule)}
    if not by_value:
        return
    longest_first = sorted(by_value.values(), key=lambda each: -each.idle_us)
    start = replace(planned.plan, disk_lookahead=0)  # with the least staging
    first = _fewest(evaluator, start, longest_first, serves)
    yield first
    if not serves(first) and (less := impatient(start)) is not None:
        start, first = less, _fewest(evaluator, less, longest_first, serves)
        yield first
    if not serves(first):  # though all of it is on disk
        return
    tried = [first]
    for ahead in AHEAD[1:]:
        tried.append(_fewest(evaluator, replace(start, disk_lookahead=ahead), longest_first, serves))
        yield tried[-1]
    best = min(filter(serves, tried), key=lambda one: one.plan.total_us)
    plan = replace(start, disk_lookahead=best.plan.disk_lookahead)
    spread = _fewest(evaluator, plan, [by_value[value] for value in evenly(list(by_value))], serves)
    yield spread
    for more in with_more_sets(plan):
        candidate = _fewest(evaluator, more, longest_first, serves)
        if candidate.plan.total_us >= best.plan.total_us or not serves(candidate):
            return
        yield (best := candidate)


def with_more_sets(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with more sets of slots for gradients that go home: an update of what is on disk may take as long as
    several blocks, which would wait for it."""
    updates, homes = plan.updates, (d for d in plan.decisions if d.kind == "params")
    if updates is None or updates.held or updates.patient or all(d.choice != "disk" for d in homes):
        return
    for sets in SETS:
        yield replace(plan, updates=replace(updates, sets=sets))


def _fewest(evaluator: Evaluator, plan: Plan, order: Sequence[Waiting], serves: Serves) -> Candidate:
    """Returns the plan with the fewest first values of ``order`` on disk that ``serves``; with all if none does."""

    def on_disk(count: int) -> Candidate:
        chosen = {each.value: each for each in order[:count]}
        others = (d for d in plan.decisions if d.kind != "activation" or d.subject not in chosen)
        moved = (Decision("activation", each.value, "disk", each.nbytes) for each in chosen.values())
        return evaluator.candidate(replace(plan, decisions=(*others, *moved)))

    low, high, best = 0, len(order), on_disk(len(order))
    while low + 1 < high and serves(best):
        middle = (low + high) // 2
        candidate = on_disk(middle)
        if serves(candidate):
            high, best = middle, candidate
        else:
            low = middle
    return best


def without_disk(plan: Plan) -> Plan:
    """Returns the plan with all that it keeps on disk on the host."""
    return replace(plan, decisions=tuple(replace(d, choice="host") if d.choice == "disk" else d for d in plan.decisions))
