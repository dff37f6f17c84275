"""The ``sim`` device: a virtual clock that predicts how long a schedule takes, from each instruction's ``time_us``."""

from __future__ import annotations

from mtcompile.runtime.schedule import PHASES, Queue, Schedule
from mtcompile.runtime.trace import Record, Trace


def simulate(schedule: Schedule, previous: Trace | None = None) -> Trace:
    """Predicts when every instruction starts and ends if each runs as soon as it may and takes its ``time_us``.

    An instruction starts when its queue is free, everything it waits for has ended, and the earlier phases have ended.
    ``previous``: the previous step's trace, for a schedule that runs ahead. This step starts when all queues but host have
    drained there. Raises ValueError where an instruction would wait for ever, or where a duration is negative.
    """
    late: dict[int, float] = {}
    if previous is not None and schedule.run_ahead:
        ready = _drained_us(schedule, previous)
        late = {r.index: r.end_us - ready for r in previous.records if _may_be_late(schedule, r.index)}
    ends: list[float] = []
    free_at: dict[Queue, float] = {"host": max(late.values(), default=0.0)}
    records: list[Record] = []
    barrier, phase = 0.0, ""
    for index, instruction in enumerate(schedule.instructions):
        if instruction.time_us < 0:
            raise ValueError(f"#{index}: expected a duration of 0 µs or more, found {instruction.time_us}")
        if instruction.phase != phase:
            barrier = max(ends, default=0.0) if phase == "" else max((*ends, free_at["host"]))
            phase = instruction.phase
        if any(not 0 <= dep < index for dep in instruction.deps):
            raise ValueError(f"#{index}: expected waits for earlier instructions, found {instruction.deps}; derive deps again")
        waits = (*(ends[dep] for dep in instruction.deps), *(late.get(dep, 0.0) for dep in instruction.previous_step_deps))
        start = max((barrier, free_at.get(instruction.queue, 0.0), *waits))
        end = start + instruction.time_us
        ends.append(end)
        free_at[instruction.queue] = end
        records.append(Record(index, instruction.queue, start, end))
    return Trace(tuple(records), "predicted")


def period_us(schedule: Schedule) -> float:
    """Predicts the µs from one step's start to the next one's, in a long sequence of steps. The next step's forward drains
    what a step leaves to it, so all steps from the second one on take the same time."""
    first = simulate(schedule)
    if not schedule.run_ahead:
        return max((record.end_us for record in first.records), default=0.0)
    return _drained_us(schedule, simulate(schedule, first))


def _drained_us(schedule: Schedule, trace: Trace) -> float:
    """Returns when, in µs, the next step may start."""
    return max((r.end_us for r in trace.records if not _may_be_late(schedule, r.index)), default=0.0)


def _may_be_late(schedule: Schedule, index: int) -> bool:
    instruction = schedule.instructions[index]
    return schedule.run_ahead and (instruction.queue, instruction.phase) == ("host", PHASES[1])
