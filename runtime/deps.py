"""Dependencies: derived here from what each instruction touches, and written nowhere else.

Two instructions that touch the same bytes, one of them writing, must run in list order (read after write, write after
write, write after read). ``alloc`` and ``free`` count as writes of their buffer, and two placed buffers of one tier
with bytes in common count as one. Most of that order needs no dependency: a queue is first in, first out; a phase starts
when the earlier ones have ended (on queue host, when those queues have that it awaits); and waiting for one instruction
means waiting for everything it waited for. ``derive`` stores only what remains, at most one earlier instruction per other
queue.

``runtime/verify.py`` proves the result without using anything from this file.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from mtcompile.runtime.schedule import HOST_AWAITS, PHASES, QUEUES, Instruction, Schedule, with_deps


@dataclass(slots=True)
class _Touched:
    """The instructions that touched some bytes last: the last writer and, since then, the latest reader of each queue."""

    writer: int = -1
    readers: dict[str, int] = field(default_factory=dict)


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
            self.starts.insert(k, at)
            self.touched.insert(k, _Touched(before.writer, dict(before.readers)))
        return k

    def entries(self, start: int, end: int) -> list[_Touched]:
        first = self._cut(start)
        return self.touched[first : self._cut(end)]

    def merge(self, start: int, end: int, touched: _Touched) -> None:
        first = self._cut(start)
        last = self._cut(end)
        self.starts[first:last] = [start]
        self.touched[first:last] = [touched]


class _Memory:
    """The last accesses to all buffers: placed ones by byte, the others by name."""

    __slots__ = ("arenas", "named", "schedule")

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.arenas: dict[str, _Arena] = {}
        self.named: dict[str, _Touched] = {}

    def _bytes(self, name: str, index: int) -> tuple[_Arena, int, int] | None:
        """Returns the arena, start and end of a placed buffer; None for one that shares no bytes with others."""
        buffer = self.schedule.buffers.get(name)
        if buffer is None:
            raise ValueError(f"#{index}: expected operands from the buffer table, found {name!r}; add it to the table")
        if buffer.kind != "placed" or buffer.nbytes == 0:
            return None
        if buffer.offset is None or buffer.offset < 0:
            raise ValueError(f"#{index}: expected an offset of 0 or more, found {name} at {buffer.offset}; place it first")
        return self.arenas.setdefault(buffer.tier, _Arena()), buffer.offset, buffer.offset + buffer.nbytes

    def _own(self, name: str) -> str:
        """Returns the one name under which a home's bytes are known, whichever version they hold."""
        return self.schedule.buffers[name].version_of or name

    def read(self, name: str, index: int, queue: str) -> set[int]:
        """Records a read and returns the instructions it must come after."""
        place = self._bytes(name, index)
        entries = place[0].entries(*place[1:]) if place else [self.named.setdefault(self._own(name), _Touched())]
        for entry in entries:
            entry.readers[queue] = index
        return {entry.writer for entry in entries}

    def write(self, name: str, index: int) -> set[int]:
        """Records a write and returns the instructions it must come after."""
        place = self._bytes(name, index)
        if place is None:
            name = self._own(name)
            entries = [self.named.get(name, _Touched())]
            self.named[name] = _Touched(index)
        else:
            entries = place[0].entries(*place[1:])
            place[0].merge(*place[1:], _Touched(index))
        return {i for entry in entries for i in (entry.writer, *entry.readers.values())}

    def touch(self, instruction: Instruction, index: int) -> set[int]:
        """Records all its accesses, as instruction ``index``, and returns the earlier ones it must come after."""
        needed: set[int] = set()
        for name in instruction.reads:
            needed |= self.read(name, index, instruction.queue)
        for name in instruction.writes:
            needed |= self.write(name, index)
        return needed - {-1, index}


def derive(schedule: Schedule) -> Schedule:
    """Returns the schedule with the fewest dependencies that order every two conflicting instructions as listed.

    For a schedule that runs ahead, derives also what the next step's forward waits for. Ignores dependencies that
    ``schedule`` has already. Raises ValueError for an operand that is not in the buffer table or has no place, and for
    phases that do not follow each other in the list.
    """
    instructions = schedule.instructions
    memory = _Memory(schedule)
    queues = [QUEUES.index(instruction.queue) for instruction in instructions]
    host = QUEUES.index("host")
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
            # The barrier: everything so far is complete. For queue host only what it awaits.
            so_far = latest[host] if latest else (-1,) * len(QUEUES)
            latest = [(index - 1,) * len(QUEUES)] * len(QUEUES)
            latest[host] = tuple(index - 1 if queue in HOST_AWAITS else so_far[k] for k, queue in enumerate(QUEUES))
        queue = queues[index]
        needed = memory.touch(instruction, index)
        clock = latest[queue]
        waits: list[int] = []
        for earlier in sorted(needed, reverse=True):  # latest first: a later one may imply an earlier one, never back
            if clock[queues[earlier]] < earlier:
                waits.append(earlier)
                clock = tuple(map(max, clock, completed[earlier]))
        clock = (*clock[:queue], index, *clock[queue + 1 :])
        completed.append(clock)
        latest[queue] = clock
        deps.append(tuple(reversed(waits)))
    next_step = _next_forward(schedule, memory, deps, latest) if schedule.run_ahead else None
    return with_deps(schedule, deps, next_step)


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
    waits: list[tuple[int, ...]] = []
    for index, instruction in enumerate(schedule.instructions):
        if instruction.phase != PHASES[0]:
            completed.append(-1)
            waits.append(())
            continue
        needed = memory.touch(instruction, start + index)
        previous = (i for i in needed if 0 <= i < start and schedule.instructions[i].queue == "host")
        queue = QUEUES.index(instruction.queue)
        clock = max((reached[queue], *(completed[dep] for dep in deps[index])))
        last = max(previous, default=-1)
        waits.append((last,) if last > clock else ())
        reached[queue] = max(clock, last)
        completed.append(reached[queue])
    return waits
