"""The facts that the proof of a schedule reads from it (order, accesses, overlapping bytes), and the error it raises."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from mtcompile.runtime.happens_before import Order
from mtcompile.runtime.schedule import HOST_AWAITS, TIERS, Buffer, Queue, Schedule, instruction_text

INVARIANTS = {"I0": "well formed", "I1": "present", "I2": "race-free", "I3": "fits", "I4": "closed"}
CONTEXT_LINES = 10

Before = Callable[[int, int], bool]  # before(a, b): a ≺ b
Pieces = Mapping[str, Sequence[tuple[str, int]]]  # by buffer (see ``segments``)


class ScheduleError(ValueError):
    """Raised for an unsafe schedule: ``invariant`` ("I0" to "I4") fails at instruction ``index`` (None: in the tables)."""

    def __init__(self, message: str, invariant: str, index: int | None) -> None:
        super().__init__(message, invariant, index)
        self.invariant = invariant
        self.index = index

    def __str__(self) -> str:
        return str(self.args[0])


class Facts:
    """Answers what the checks ask: ≺, which instructions allocate, free, write and read each buffer, in list order, and the
    pieces that buffers share."""

    __slots__ = ("allocs", "before", "frees", "pieces", "readers", "schedule", "writers")

    def __init__(self, schedule: Schedule, host_awaits: Collection[Queue] = HOST_AWAITS) -> None:
        self.schedule = schedule
        tables: list[dict[str, list[int]]] = [{name: [] for name in schedule.buffers} for _ in range(4)]
        self.allocs, self.frees, self.writers, self.readers = tables
        self.before: Before = Order(schedule, host_awaits).before
        self.pieces: Pieces = segments(schedule)
        for index, instruction in enumerate(schedule.instructions):
            table = {"alloc": self.allocs, "free": self.frees}.get(instruction.op, self.writers)
            for name in instruction.writes:
                table[name].append(index)
            for name in instruction.reads:
                self.readers[name].append(index)

    def buffers(self, names: tuple[str, ...]) -> Iterator[Buffer]:
        return (self.schedule.buffers[name] for name in names)

    def error(self, invariant: str, index: int | None, message: str) -> ScheduleError:
        return error(self.schedule, invariant, index, message)


def error(schedule: Schedule, invariant: str, index: int | None, message: str) -> ScheduleError:
    """Returns the error, with the instructions around ``index``."""
    where = "in the tables" if index is None else f"at #{index}"
    lines = [f"{invariant} {INVARIANTS[invariant]}, {where}: {message}"]
    if index is not None:
        first = max(0, min(index - CONTEXT_LINES // 2, len(schedule) - CONTEXT_LINES))
        for i, instruction in enumerate(schedule.instructions[first : first + CONTEXT_LINES], first):
            try:
                text = instruction_text(instruction, schedule.buffers)
            except (KeyError, IndexError, ValueError):  # not well formed, which is what the message says
                text = repr(instruction)
            lines.append(f"{'>' if i == index else ' '} {i:5d} {text}")
    return ScheduleError("\n".join(lines), invariant, index)


def segments(schedule: Schedule) -> dict[str, list[tuple[str, int]]]:
    """Splits each buffer's bytes into pieces, such that two buffers overlap exactly when they share a piece.

    A piece is a stretch of an arena between two neighbouring slot ends, or a whole buffer under its own name.
    """
    ends: dict[str, list[int]] = {}
    placed = [(b, b.offset) for b in schedule.buffers.values() if b.offset is not None]
    for tier in TIERS:
        ends[tier] = sorted({end for b, offset in placed if b.tier == tier for end in (offset, offset + b.nbytes)})
    pieces = {name: [(b.version_of or name, -1)] for name, b in schedule.buffers.items()}
    for b, offset in placed:
        tier_ends = ends[b.tier]
        first, last = bisect_left(tier_ends, offset), bisect_left(tier_ends, offset + b.nbytes)
        if last > first:
            pieces[b.name] = [(b.tier, tier_ends[k]) for k in range(first, last)]
    return pieces
