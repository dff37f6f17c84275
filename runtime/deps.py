"""Dependencies: derived here from what each instruction touches, and written nowhere else.

Two instructions that touch the same bytes, one of them writing, must run in list order (read after write, write after
write, write after read). ``alloc`` and ``free`` count as writes of their buffer, and two placed buffers of one tier
with bytes in common count as one. Most of that order needs no dependency: a queue is first in, first out; a phase starts
when the earlier ones have ended (on the host's queues, when those queues have that they await); and waiting for one instruction
means waiting for everything it waited for. ``derive`` stores only what remains, at most one earlier instruction per other
queue.

``runtime/verify.py`` proves the result without using anything from this file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mtcompile.runtime.schedule import HOST_AWAITS, HOST_QUEUES, PHASES, QUEUES, Instruction, Schedule, with_deps


@dataclass(slots=True)
class _Touched:
    """The instructions that touched some bytes last: the last writer and, since then, the latest reader of each queue.
    ``whole``: these are still all the bytes that it was made for."""

    writer: int = -1
    readers: dict[str, int] = field(default_factory=dict)
    whole: bool = True


class _Arena:
    """The last accesses to every byte of one tier's arena: range k is ``[starts[k], starts[k + 1])``.

    A write makes its range one entry again, so the number of entries stays near the number of live slots.
    """

    __slots__ = ("starts", "touched")

    def __init__(self) -> None:
        self.starts = [0]
        self.touched = [_Touched()]

    def _cut(self, at: int) -> int:
        """Returns the entry that starts at byte ``at``, after splitting the one that holds it if there is none."""
        k = bisect_left(self.starts, at)
        if k == len(self.starts) or self.starts[k] != at:
            before = self.touched[k - 1]
            before.whole = False
            self.starts.insert(k, at)
            self.touched[k - 1 : k] = [_Touched(before.writer, dict(before.readers)) for _ in range(2)]
        return k

    def entries(self, start: int, end: int) -> list[_Touched]:
        first = self._cut(start)
        return self.touched[first : self._cut(end)]

    def merge(self, start: int, end: int) -> _Touched:
        """Makes a range one entry, and returns it."""
        first = self._cut(start)
        last = self._cut(end)
        for entry in self.touched[first:last]:
            entry.whole = False
        merged = _Touched()
        self.starts[first:last] = [start]
        self.touched[first:last] = [merged]
        return merged


class _Memory:
    """The last accesses to all buffers: placed ones by byte, the others by name."""

    __slots__ = ("arenas", "buffers", "last")

    def __init__(self, schedule: Schedule) -> None:
        self.buffers = schedule.buffers
        self.arenas: dict[str, _Arena] = {}
        self.last: dict[str, _Touched] = {}  # by name: the entry for all of a buffer's bytes, as long as it is whole

    def _entries(self, name: str, index: int, written: bool) -> list[_Touched]:
        """Returns what is known of a buffer's bytes. If they are ``written``, they are one entry from then on."""
        buffer = self.buffers.get(name)
        if buffer is None:
            raise ValueError(f"#{index}: expected operands from the buffer table, found {name!r}; add it to the table")
        if buffer.kind != "placed" or buffer.nbytes == 0:  # it shares no bytes with others; a home's versions share theirs
            entry = self.last[name] = self.last.setdefault(buffer.version_of or name, _Touched())
            return [entry]
        if buffer.offset is None or buffer.offset < 0:
            raise ValueError(f"#{index}: expected an offset of 0 or more, found {name} at {buffer.offset}; place it first")
        arena = self.arenas.setdefault(buffer.tier, _Arena())
        entries = arena.entries(buffer.offset, buffer.offset + buffer.nbytes)
        if written:
            self.last[name] = arena.merge(buffer.offset, buffer.offset + buffer.nbytes)
        return entries

    def touch(self, instruction: Instruction, index: int) -> set[int]:
        """Records all its accesses, as instruction ``index``, and returns the earlier ones it must come after."""
        needed: set[int] = set()
        last, queue = self.last, instruction.queue
        for name in instruction.reads:
            entry = last.get(name)
            for touched in (entry,) if entry is not None and entry.whole else self._entries(name, index, False):
                needed.add(touched.writer)
                touched.readers[queue] = index
        for name in instruction.writes:
            entry = last.get(name)
            for touched in (entry,) if entry is not None and entry.whole else self._entries(name, index, True):
                needed.add(touched.writer)
                needed.update(touched.readers.values())
            entry = last[name]
            entry.writer = index
            entry.readers.clear()
        needed.discard(-1)
        needed.discard(index)
        return needed


class Waits(NamedTuple):
    """The instructions that each one waits for: ``deps`` in its own step, ``previous_step_deps`` in the one before."""

    deps: Sequence[tuple[int, ...]]
    previous_step_deps: Sequence[tuple[int, ...]]


def derive(schedule: Schedule) -> Schedule:
    """Returns the schedule with the fewest dependencies that order every two conflicting instructions as listed.

    Ignores dependencies that ``schedule`` has already. Raises ValueError for an operand that is not in the buffer table or has
    no place, and for phases that do not follow each other in the list.
    """
    return with_deps(schedule, *waits(schedule))


def waits(schedule: Schedule) -> Waits:
    """Returns the dependencies that ``derive`` puts into a schedule; for one that runs ahead, also what the next step's forward
    waits for. Raises ValueError as it does."""
    instructions = schedule.instructions
    memory = _Memory(schedule)
    queues = [QUEUES.index(instruction.queue) for instruction in instructions]
    by_host = [QUEUES.index(queue) for queue in HOST_QUEUES]
    completed: list[tuple[int, ...]] = []  # per instruction and queue: the latest one complete when the instruction is
    latest: list[tuple[int, ...]] = []  # the same, by queue, for its latest instruction
    deps: list[tuple[int, ...]] = []
    phase = ""
    for index, instruction in enumerate(instructions):
        if instruction.phase != phase:
            if phase and PHASES.index(instruction.phase) < PHASES.index(phase):
                raise ValueError(
                    f"#{index}: expected the phases one after the other, found {instruction.phase} after {phase}; "
                    "list all instructions of a phase together"
                )
            phase = instruction.phase
            # The barrier: everything so far is complete. For the host's queues only what they await.
            so_far = latest or [(-1,) * len(QUEUES)] * len(QUEUES)
            latest = [(index - 1,) * len(QUEUES)] * len(QUEUES)
            for mine in by_host:
                awaited_too = (index - 1 if queue in HOST_AWAITS else so_far[mine][k] for k, queue in enumerate(QUEUES))
                latest[mine] = tuple(awaited_too)
        queue = queues[index]
        needed = memory.touch(instruction, index)
        clock = latest[queue]
        awaited: list[int] = []
        for earlier in sorted(needed, reverse=True):  # latest first: a later one may imply an earlier one, never back
            if clock[queues[earlier]] < earlier:
                awaited.append(earlier)
                clock = tuple(map(max, clock, completed[earlier]))
        clock = (*clock[:queue], index, *clock[queue + 1 :])
        completed.append(clock)
        latest[queue] = clock
        deps.append(tuple(reversed(awaited)))
    return Waits(deps, _next_forward(schedule, memory, deps, latest) if schedule.run_ahead else [()] * len(deps))


def _next_forward(
    schedule: Schedule, memory: _Memory, deps: list[tuple[int, ...]], latest: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Returns, per instruction, which instructions of the previous step's queue host it must come after.

    All other queues have drained since. Waits that others imply are left out here too."""
    host = QUEUES.index("host")
    others = [clock for queue, clock in enumerate(latest) if queue != host]
    drained = max((clock[host] for clock in others), default=-1)  # of queue host, what was complete when the others were
    start, reached = len(schedule), [drained] * len(QUEUES)
    reached[host] = start - 1  # in its own order
    completed: list[int] = []
    awaited: list[tuple[int, ...]] = []
    for index, instruction in enumerate(schedule.instructions):
        if instruction.phase != PHASES[0]:
            completed.append(-1)
            awaited.append(())
            continue
        needed = memory.touch(instruction, start + index)
        previous = (i for i in needed if 0 <= i < start and schedule.instructions[i].queue == "host")
        queue = QUEUES.index(instruction.queue)
        clock = max((reached[queue], *(completed[dep] for dep in deps[index])))
        last = max(previous, default=-1)
        awaited.append((last,) if last > clock else ())
        reached[queue] = max(clock, last)
        completed.append(reached[queue])
    return awaited
