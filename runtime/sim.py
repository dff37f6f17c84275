"""The ``sim`` device: a virtual clock that predicts how long a schedule takes, from each instruction's ``time_us``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mtcompile.runtime.deps import Waits
from mtcompile.runtime.schedule import PHASES, Instruction, Queue, Schedule
from mtcompile.runtime.trace import Record, Trace


def simulate(schedule: Schedule, previous: Trace | None = None) -> Trace:
    """Predicts when every instruction starts and ends if each runs as soon as it may and takes its ``time_us``.

    An instruction starts when its queue is free, everything it waits for has ended, and the earlier phases have ended.
    ``previous``: the previous step's trace, for a schedule that runs ahead. This step starts when all queues but host have
    drained there. Raises ValueError where an instruction would wait for ever, or where a duration is negative.
    """
    late = {} if previous is None else _late_us(schedule, [record.end_us for record in previous.records])
    rows = zip(schedule.instructions, *clock(schedule, late), strict=True)
    records = (Record(index, i.queue, start, end) for index, (i, start, end) in enumerate(rows))
    return Trace(tuple(records), "predicted")


def clock(
    schedule: Schedule,
    late: Mapping[int, float] = MappingProxyType({}),
    waits: Waits | None = None,
    durations: Sequence[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Returns the start and the end of every instruction, in µs. ``late``: ends of the previous step's instructions that are
    still to come, by index. ``waits`` and ``durations`` (µs): in place of those in the schedule."""
    starts: list[float] = []
    ends: list[float] = []
    free_at: dict[Queue, float] = {"host": max(late.values(), default=0.0)}
    barrier, phase, last = 0.0, "", 0.0
    for index, instruction in enumerate(schedule.instructions):
        duration, queue = instruction.time_us if durations is None else durations[index], instruction.queue
        if duration < 0:
            raise ValueError(f"#{index}: expected a duration of 0 µs or more, found {duration}")
        if instruction.phase != phase:
            barrier = last if phase == "" else max(last, free_at["host"])
            phase = instruction.phase
        start = free_at.get(queue, 0.0)
        if start < barrier:
            start = barrier
        deps = instruction.deps if waits is None else waits.deps[index]
        for dep in deps:
            if not 0 <= dep < index:
                raise ValueError(f"#{index}: expected waits for earlier instructions, found {deps}; derive deps again")
            if start < ends[dep]:
                start = ends[dep]
        if late:
            for dep in instruction.previous_step_deps if waits is None else waits.previous_step_deps[index]:
                start = max(start, late.get(dep, 0.0))
        end = free_at[queue] = start + duration
        if last < end:
            last = end
        starts.append(start)
        ends.append(end)
    return starts, ends


def period_us(schedule: Schedule, waits: Waits | None = None) -> float:
    """Predicts the µs from one step's start to the next one's, in a long sequence of steps. The next step's forward drains
    what a step leaves to it, so all steps from the second one on take the same time. ``waits``: in place of those in it."""
    _, ends = clock(schedule, waits=waits)
    if not schedule.run_ahead:
        return max(ends, default=0.0)
    _, ends = clock(schedule, _late_us(schedule, ends), waits)
    return _drained_us(schedule, ends)


def _late_us(schedule: Schedule, ends: Sequence[float]) -> dict[int, float]:
    """Returns when, in µs of the next step, the instructions end that this one leaves to it."""
    if not schedule.run_ahead:
        return {}
    ready = _drained_us(schedule, ends)
    return {i: end - ready for i, end in enumerate(ends) if _may_be_late(schedule.instructions[i])}


def _drained_us(schedule: Schedule, ends: Sequence[float]) -> float:
    """Returns when, in µs, the step after one that runs ahead may start."""
    return max((end for i, end in zip(schedule.instructions, ends, strict=True) if not _may_be_late(i)), default=0.0)


def _may_be_late(instruction: Instruction) -> bool:
    return instruction.queue == "host" and instruction.phase == PHASES[1]
