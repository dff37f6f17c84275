"""The ``sim`` device: a virtual clock that predicts how long a schedule takes, from each instruction's ``time_us``."""

from __future__ import annotations

from mtcompile.runtime.schedule import Queue, Schedule
from mtcompile.runtime.trace import Record, Trace


def simulate(schedule: Schedule) -> Trace:
    """When every instruction starts and ends if each runs as soon as it may, taking its ``time_us``.

    An instruction starts when its queue is free, everything it waits for has ended, and the earlier phases have ended.
    Raises ValueError where it would wait for something that never ends, or where a duration is negative.
    """
    ends: list[float] = []
    free_at: dict[Queue, float] = {}
    records: list[Record] = []
    barrier, phase = 0.0, ""
    for index, instruction in enumerate(schedule.instructions):
        if instruction.time_us < 0:
            raise ValueError(f"#{index}: expected a duration of 0 µs or more, found {instruction.time_us}")
        if instruction.phase != phase:
            barrier, phase = max(ends, default=0.0), instruction.phase
        if any(not 0 <= dep < index for dep in instruction.deps):
            raise ValueError(f"#{index}: expected waits for earlier instructions, found {instruction.deps}; derive deps again")
        start = max((barrier, free_at.get(instruction.queue, 0.0), *(ends[dep] for dep in instruction.deps)))
        end = start + instruction.time_us
        ends.append(end)
        free_at[instruction.queue] = end
        records.append(Record(index, instruction.queue, start, end))
    return Trace(tuple(records), "predicted")
