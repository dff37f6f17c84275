"""The times of a plan, by a clock over its calls: the same as ``sim`` and ``state.times_us`` find for its schedule.

The files in c/ do the same (see compiled.py) some thirty times as fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.figures.lives import Lives, lives_of
from mtcompile.passes.planning.figures.moves import COMPUTE, HOST, POOLED, Buffer, Call, Moves
from mtcompile.passes.planning.figures.summary import Summary
from mtcompile.passes.planning.pace import Arriving, earliest_due


@dataclass(slots=True, eq=False)
class Late:
    """The remains of a step, in µs of the next one: when the host is free, when inputs have their new versions, and when
    bytes of slots are free."""

    host: float = 0.0
    inputs: dict[int, float] = field(default_factory=dict)
    slots: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Clock:
    """The moments of a step, in µs: its ``end`` and that of all queues but host's (``drained``); where the ``backward``
    begins; ``arrived``: by update on the host, when its operands are there; ``late``: what it leaves to the next step."""

    end: float
    drained: float
    backward: float
    arrived: dict[int, float]
    late: Late


def clock(calls: Sequence[Call], buffers: Sequence[Buffer], lives: Lives, late: Late | None, updates: bool = True) -> Clock:
    """Runs the calls, each as soon as it may. ``late``: what the step before has left; ``updates``: False if these take no
    time."""
    free = [0.0, 0.0, 0.0, 0.0 if late is None else late.host, 0.0]
    ready = [0.0] * len(buffers)  # when a buffer is written
    touched = [0.0] * len(buffers)  # when its last user has ended; of slots, in the end, when they are free
    written: dict[int, float] = {}
    read: dict[int, float] = {}
    versions = dict[int, float]() if late is None else late.inputs
    phase, barrier, backward, end, drained = 0, 0.0, -1.0, 0.0, 0.0
    slots: dict[int, float] = {}
    arrived: dict[int, float] = {}
    for place, call in enumerate(calls):
        queue = call.queue
        if call.phase != phase:
            phase = 1
            backward = barrier = max(end, free[HOST])
            free = [max(barrier, each) for each in free]
        begin = free[queue]
        for name in call.writes:
            if buffers[name].kind == POOLED:
                if free[COMPUTE] > begin:
                    begin = free[COMPUTE]
            else:
                for other in lives.after[name]:
                    if touched[other] > begin:
                        begin = touched[other]
                if late is not None and not phase:
                    for other in lives.across[name]:
                        if other >= 0 and late.slots.get(other, 0.0) > begin:
                            begin = late.slots[other]
        there = 0.0
        for name in call.reads:
            if ready[name] > there:
                there = ready[name]
        for number in call.inputs:
            if written.get(number, 0.0) > there:
                there = written[number]
            if not phase and versions.get(number, 0.0) > there:
                there = versions[number]
        for number in call.updated:
            if read.get(number, 0.0) > there:
                there = read[number]
        if queue == HOST:
            arrived[place] = there
        if there > begin:
            begin = there
        finish = begin + (call.us if updates or not call.update else 0.0)
        free[queue] = finish
        for name in call.writes:
            ready[name] = touched[name] = finish
        for name in call.reads:
            if finish > touched[name]:
                touched[name] = finish
        for number in call.inputs:
            if finish > read.get(number, 0.0):
                read[number] = finish
        for number in call.updated:
            written[number] = finish
        if finish > end:
            end = finish
        if queue != HOST and finish > drained:
            drained = finish
        for name, user in lives.freed[place]:
            if buffers[name].kind == POOLED:
                if touched[name] > free[COMPUTE]:
                    free[COMPUTE] = touched[name]
            else:
                on = calls[user].queue
                if touched[name] > free[on]:
                    free[on] = touched[name]
                touched[name] = free[on]
                if on == HOST and phase:
                    slots[name] = free[on]
    if backward < 0:
        backward = end
    on_host = {number for call in calls if call.queue == HOST for number in call.updated}
    left = Late(
        max(0.0, free[HOST] - drained),
        {number: us - drained for number, us in written.items() if number in on_host},
        {name: us - drained for name, us in slots.items()},
    )
    return Clock(end, drained, backward, arrived, left)


@dataclass(frozen=True, slots=True, eq=False)
class Measures:
    """The needs of a plan's calls, and the time that they take: bytes of the ``arenas`` by kind and of all else on the device,
    at ``most``; µs of forward and backward and of the ``backward``, both as if updates took no time, and from one step to the
    next (``period``); bytes that are ``copied``, and that are read from disk and written there (``drives``), both in a step and
    in its backward; ``due_first``: the updates on the host in the order in which they are due (see ``pace``)."""

    arenas: Sequence[int]
    most: int
    alone: float
    backward: float
    period: float
    copied: tuple[int, int]
    drives: tuple[tuple[int, int], tuple[int, int]]
    due_first: Callable[[], tuple[str, ...]]


def measures(summary: Summary, plan: Plan, machine: Machine) -> Measures:
    """Works out the measures of a plan. ``summary``: of the step as the plan recomputes it."""
    moves = Moves(summary, plan, machine)
    calls, buffers = moves.calls, moves.buffers
    lives = lives_of(calls, buffers, plan.lookahead, summary.tangents)
    first = clock(calls, buffers, lives, None)
    without = first if plan.updates is None else clock(calls, buffers, lives, None, updates=False)
    period = first.end
    if plan.updates is not None and plan.updates.run_ahead:
        period = clock(calls, buffers, lives, first.late).drained
    backward = [call for call in calls if call.phase]
    copied, in_backward = (sum([call.copied for call in some]) for some in (calls, backward))
    drive, drive_in_backward = (
        (sum([call.drive[0] for call in some]), sum([call.drive[1] for call in some])) for some in (calls, backward)
    )
    spans = without.end, without.end - without.backward, period
    totals = (copied, in_backward), (drive, drive_in_backward)
    return Measures(lives.arenas, lives.most, *spans, *totals, lambda: earliest_due(_arriving(calls, first)))


def _arriving(calls: Sequence[Call], times: Clock) -> Arriving:
    due: dict[int, int] = {}  # input -> the first call of the forward that reads it
    arriving: Arriving = []
    for place, call in enumerate(calls):
        if not call.phase:
            for number in call.inputs:
                due.setdefault(number, place)
        elif call.queue == HOST:
            first = min(due.get(number, len(calls)) for number in call.updated)
            arriving.append((times.arrived[place], first, call.us, call.update))
    return arriving
