"""The rows of the linear program that say how long queues take, and what waits for what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from mtcompile.passes.analysis.state import trained_nbytes
from mtcompile.passes.planning.linear.program import Work, added
from mtcompile.passes.planning.linear.terms import Load, Terms
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import kernel_of
from mtcompile.runtime.schedule import PHASES

_HOME_AND_UPDATED = (("d2h", "backward"), ("host", "backward"))  # queues and phases that a home's gradients go through
_MOST_PLACES = 16  # blocks before and behind which work is counted


def take_time(problem: PlanningProblem, terms: Terms) -> None:
    """Adds the rows."""
    step, machine, budgets = problem.step, problem.machine, problem.budgets
    program, time, span, away = terms.program, terms.time, terms.span, terms.away
    for region, needs in terms.needs.items():
        phase, block = region.meta["phase"], region.meta["block"]
        saved_us = terms.by_share({home: -us for home, us in needs.casts_us(machine).items()})
        terms.loads["compute", phase].append(Load(block, block, saved_us, needs.us(kernel_of(step, region), machine)))
    for phase in PHASES:
        program.takes({span[phase]: 1.0}, {"link": terms.work("d2h", phase)})
        program.takes({span[phase]: 1.0}, {"link": terms.work("h2d", phase)})
        program.takes({span[phase]: 1.0}, {"compute": terms.work("compute", phase), "link": terms.work("exposed", phase)})
        if ("casts", phase) in terms.loads:
            program.takes({span[phase]: 1.0}, {"host": terms.work("casts", phase)})
        if terms.on_disk:
            program.takes({span[phase]: 1.0}, {"disk": terms.work("disk_read", phase)})
    copied = {phase: program.summed(nbytes, 1 << 30) for phase, nbytes in terms.copied.items()}
    contention = added(*({v: machine.contention_us(1) * n for v, n in copied[phase].items()} for phase in PHASES))
    both = added({span["forward"]: 1.0, span["backward"]: 1.0}, contention)
    sizes = trained_nbytes(step)
    checked = budgets.updates is not None and budgets.updates.checked
    updates_us = {v: machine.update_us(sizes[h], 0, budgets.state_copies, checked) for h, v in away.items()}
    shared = {phase: {v: n / machine.host_gbps / 1e3 for v, n in copied[phase].items()} for phase in PHASES}
    if budgets.updates is None:
        on_device = {h: machine.update_us(0, n, budgets.state_copies) for h, n in sizes.items()}
        more = {v: -on_device[h] for h, v in away.items()}
        program.takes({time: 1.0}, {"host": (added(updates_us, more), sum(on_device.values()))}, both)
    else:
        program.takes({time: 1.0}, {}, both)
        traffic, until = added(updates_us, shared["backward"]), {time: 1.0, span["forward"]: -1.0}
        if budgets.updates.run_ahead:
            traffic, until = added(traffic, shared["forward"]), {time: 1.0}
            program.takes({time: 1.0}, _with_casts(terms, PHASES), contention)
        else:
            program.takes({span["backward"]: 1.0}, _with_casts(terms, PHASES[1:]))
        program.takes(until, {"host": (traffic, 0.0)}, contention)
        if terms.on_disk:
            read = [terms.work("disk_read", phase) for phase in (PHASES if budgets.updates.run_ahead else PHASES[1:])]
            program.takes(until, {"disk": _sum(terms.work("drive", "backward"), *read)}, contention)
    first = max(terms.backwards, default=0)
    turn = terms.work("h2d", "backward", first)[0]  # what compute waits for at the start of the backward
    places = _places(terms)
    loads = [way for way in terms.loads if way[0] != "casts"]
    for (queue, phase), place in itertools.product(loads, reversed(places)):  # each sum has that of the next place
        terms.work(queue, phase, place + 1)
        terms.work(queue, phase, place)
    for place in places:
        _before_and_behind(problem, terms, place, turn, contention)


def _with_casts(terms: Terms, phases: Iterable[str]) -> dict[str, Work]:
    """Returns the updates on the host, with what it casts in these phases."""
    updates = terms.updates()
    casts = [terms.work("casts", phase) for phase in phases if ("casts", phase) in terms.loads]
    return updates | {"host": _sum(updates["host"], *casts)} if casts else updates


def _before_and_behind(
    problem: PlanningProblem, terms: Terms, place: int, turn: Mapping[int, float], contention: Mapping[int, float]
) -> None:
    """Adds the rows that say what one queue must do before another starts a block, or can do only after another has finished
    it."""
    program, time, span, updates = terms.program, terms.time, terms.span, problem.budgets.updates
    forward, backward = {span["forward"]: 1.0}, {span["backward"]: 1.0}
    forward_from, forward_until = terms.work("compute", "forward", place), terms.work("compute", "forward", 0, place)
    whole = len(terms.backwards.get(place, ())) <= 1
    backward_from = terms.work("compute", "backward", place if whole else place + 1)
    backward_until = terms.work("compute", "backward", 0, place if whole else place - 1)
    idle_from = terms.work("exposed", "backward", place if whole else place + 1)
    idle_until = terms.work("exposed", "backward", 0, place if whole else place - 1)
    program.takes(forward, {"link": terms.work("h2d", "forward", 0, place), "compute": forward_from})
    program.takes(forward, {"link": terms.work("d2h", "forward", place), "compute": forward_until})
    link = _sum(terms.work("h2d", "backward", place), idle_until)
    program.takes(backward, {"link": link, "compute": backward_until})
    link = _sum(terms.work("d2h", "backward", 0, place), idle_from)
    program.takes(backward, {"link": link, "compute": backward_from}, turn)
    homes = [variable for home, variable in terms.away.items() if terms.blocks[home] == (place, place)]  # this block's own
    if updates is not None and updates.run_ahead:
        outside = _sum(forward_from, backward_from)
        updated = terms.updates(0, place)
        program.takes({time: 1.0}, {**updated, "link": idle_from, "compute": outside}, turn, contention)
        # After the last of these updates, in the order of the blocks; of several homes in one block, any may be the last.
        fetched = terms.work("h2d", "forward", place if len(homes) <= 1 else place + 1)
        link = _sum(fetched, idle_from)
        program.takes({time: 1.0}, {**updated, "link": link, "compute": backward_from}, turn, contention)
        for home in homes:
            chain = _chain(terms, home, (*_HOME_AND_UPDATED, ("h2d", "forward")))
            program.takes({time: 1.0}, {"link": idle_from, "compute": outside}, chain, turn, contention)
    elif updates is not None:
        program.takes(backward, {**terms.updates(0, place), "link": idle_from, "compute": backward_from}, turn)
        for home in homes:
            program.takes(backward, {"link": idle_from, "compute": backward_from}, _chain(terms, home, _HOME_AND_UPDATED), turn)


def _chain(terms: Terms, home: int, ways: Sequence[tuple[str, str]]) -> dict[int, float]:
    """The µs that a home (its variable) takes on queues one after the other, such as its gradients' copy and their update."""
    return added(*(load.us for way in ways for load in terms.loads[way] if home in load.us))


def _sum(*works: Work) -> Work:
    return added(*(us for us, _ in works)), sum(fixed for _, fixed in works)


def _places(terms: Terms) -> Sequence[int]:
    """Blocks spread over all of them, with the first and the last."""
    blocks = sorted({region.meta["block"] for region in terms.needs})
    last = len(blocks) - 1
    count = min(len(blocks), _MOST_PLACES)
    return sorted({blocks[round(i * last / max(1, count - 1))] for i in range(count)})
