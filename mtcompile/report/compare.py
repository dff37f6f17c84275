"""Compares a step as predicted with the same step as it ran: what took longer, and what that cost."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from mtcompile.runtime.schedule import Instruction, Schedule
from mtcompile.runtime.trace import Trace, busy_us, exposed_us, span_us


@dataclass(frozen=True, slots=True)
class Kind:
    """Instructions of one kind on one queue: their microseconds summed. ``worst``: the one that was off most, by
    ``worst_us``."""

    queue: str
    kind: str
    count: int
    predicted_us: float
    measured_us: float
    worst: str
    worst_us: float


@dataclass(frozen=True, slots=True)
class Queue:
    """The microseconds that a queue worked. ``cost_us``: what being slower cost the step, which is how much longer than
    predicted the queue worked while compute was idle (for compute: how much longer it worked)."""

    queue: str
    predicted_us: float
    measured_us: float
    cost_us: float


@dataclass(frozen=True, slots=True)
class Compared:
    """Forward and backward compared. ``predicted_us``, ``measured_us``: how long they took; for a selection of instructions,
    how long these took together, without ``queues``. ``kinds``: those that were off most first."""

    predicted_us: float
    measured_us: float
    kinds: tuple[Kind, ...]
    queues: tuple[Queue, ...]


def compare(schedule: Schedule, predicted: Trace, measured: Trace, only: Set[int] | None = None) -> Compared:
    """Compares two traces of a step's schedule. ``only``: the instructions to look at, by index."""
    ran = {record.index for record in measured.records}
    ran = ran if only is None else ran & only
    one = Trace(tuple(r for r in predicted.records if r.index in ran), "predicted")
    other = Trace(tuple(r for r in measured.records if r.index in ran), "measured")
    times = {r.index: r.end_us - r.start_us for r in one.records}
    groups: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for record in other.records:
        instruction = schedule.instructions[record.index]
        key = instruction.queue, kind_of(instruction, schedule)
        groups.setdefault(key, []).append((record.index, times[record.index], record.end_us - record.start_us))
    kinds = []
    for (queue, kind), rows in groups.items():
        index, _, off = max(((i, p, m - p) for i, p, m in rows), key=lambda row: abs(row[2]))
        worst = f"#{index} {schedule.instructions[index].label}"
        sums = sum(p for _, p, _ in rows), sum(m for _, _, m in rows)
        kinds.append(Kind(queue, kind, len(rows), *sums, worst, off))
    kinds.sort(key=lambda row: -abs(row.measured_us - row.predicted_us))
    if only is not None:
        return Compared(sum(k.predicted_us for k in kinds), sum(k.measured_us for k in kinds), tuple(kinds), ())
    return Compared(span_us(one), span_us(other), tuple(kinds), tuple(_queues(one, other)))


def kind_of(instruction: Instruction, schedule: Schedule) -> str:
    """Describes a copy or run in words: the role of what is copied, or what runs in which phase."""
    if instruction.op == "copy":
        return f"copy {schedule.buffers[instruction.writes[0]].role}"
    if instruction.work == "convert":
        return "cast"
    if instruction.work in ("update", "collective"):
        return instruction.work
    return f"{instruction.phase} with recomputation" if instruction.work == "recompute" else instruction.phase


def _queues(one: Trace, other: Trace) -> list[Queue]:
    predicted = busy_us(one)
    queues = []
    for queue, measured_us in busy_us(other).items():
        predicted_us = predicted.get(queue, 0.0)
        cost = measured_us - predicted_us if queue == "compute" else exposed_us(other, queue) - exposed_us(one, queue)
        queues.append(Queue(queue, predicted_us, measured_us, cost))
    return queues
