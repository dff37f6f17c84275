"""Traces say what ran when: one type for what the ``sim`` device predicts and other devices measure. Times are in µs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mtcompile.runtime.schedule import QUEUES, Instruction, Queue, Schedule

Interval = tuple[float, float]
Moments = dict[int, Interval]  # when each instruction starts and ends


@dataclass(frozen=True, slots=True)
class Record:
    """Instruction ``index`` of the schedule held ``queue`` from ``start_us`` to ``end_us`` after the step's start. ``share``:
    the share of its bytes that a copy of slices moved."""

    index: int
    queue: Queue
    start_us: float
    end_us: float
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One record per instruction that ran. ``source`` says whether a model or a clock gave the times."""

    records: tuple[Record, ...]
    source: Literal["predicted", "measured"]

    def __str__(self) -> str:
        span, busy = span_us(self), busy_us(self)
        lines = [f"# {self.source}: {len(self.records)} instructions in {span / 1000:.3f} ms"]
        for queue, us in busy.items():
            share = 100 * us / span if span else 0.0
            exposed = "" if queue == "compute" else f", {exposed_us(self, queue) / 1000:.3f} ms while compute is idle"
            lines.append(f"{queue:10s} busy {us / 1000:.3f} ms ({share:.0f}%){exposed}")
        return "\n".join(lines)


def takes_time(instruction: Instruction) -> bool:
    return instruction.op in ("copy", "run")


def moments(schedule: Schedule, trace: Trace, every: bool = False) -> Moments:
    """Returns index -> (start, end) in µs for every instruction of the phases that ran. Allocations and frees, which no clock
    records, are placed by the order of their queue and by their dependencies. ``every``: so is all that did not run."""
    recorded = {record.index: (record.start_us, record.end_us) for record in trace.records}
    phases = {schedule.instructions[index].phase for index in recorded}
    when: Moments = {}
    free_at: dict[str, float] = {}
    barrier, latest, phase = 0.0, 0.0, ""
    for index, instruction in enumerate(schedule.instructions):
        if not every and (instruction.phase not in phases or (takes_time(instruction) and index not in recorded)):
            continue
        if instruction.phase != phase:
            barrier, phase = latest, instruction.phase
        ends = (when[dep][1] for dep in instruction.deps if dep in when)
        ready = max((barrier, free_at.get(instruction.queue, 0.0), *ends))
        when[index] = recorded.get(index, (ready, ready))
        latest = max(latest, when[index][1])
        free_at[instruction.queue] = max(when[index][1], free_at.get(instruction.queue, 0.0))
    return when


def span_us(trace: Trace) -> float:
    """Returns the µs from the first start to the last end; 0 for an empty trace."""
    if not trace.records:
        return 0.0
    return max(record.end_us for record in trace.records) - min(record.start_us for record in trace.records)


def moved_nbytes(schedule: Schedule, trace: Trace, queue: Queue) -> int:
    """Returns the bytes that the copies of a queue moved: all that the schedule says, but for copies of slices."""
    copies = [(r, schedule.instructions[r.index]) for r in trace.records if r.queue == queue]
    return sum(round(record.share * copy.nbytes) for record, copy in copies if copy.op == "copy")


def busy_us(trace: Trace) -> dict[Queue, float]:
    """Returns for how many µs each queue that ran something was busy. Records that overlap in time count once."""
    used = {record.queue for record in trace.records}
    return {queue: _length(_intervals(trace, queue)) for queue in QUEUES if queue in used}


def exposed_us(trace: Trace, queue: Queue) -> float:
    """Returns for how many µs ``queue`` was busy while compute was idle, which is what its work adds to the step."""
    compute, other = _intervals(trace, "compute"), _intervals(trace, queue)
    return _length(_union([*compute, *other])) - _length(compute)


def shifted(records: Iterable[Record], by_us: float) -> list[Record]:
    """Returns the records ``by_us`` later. This puts a phase, with a clock of its own, after the phase before it."""
    return [Record(r.index, r.queue, r.start_us + by_us, r.end_us + by_us, r.share) for r in records]


def time_of(us: float) -> str:
    """Writes microseconds for a reader."""
    return f"{us / 1e6:.2f} s" if us >= 999_500 else f"{us / 1e3:.3g} ms"


def _intervals(trace: Trace, queue: Queue) -> list[Interval]:
    return _union((record.start_us, record.end_us) for record in trace.records if record.queue == queue)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges stretches of time into disjoint ones, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)
