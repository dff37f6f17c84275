"""Which schedules are really unsafe: every order of events is tried, over memory that remembers what it holds.

An instruction has a start and an end. A queue starts its instructions in list order, one at a time, each when what it
waits for has ended and the earlier phases have ended; nothing else restricts the order. Bytes hold one version of one
value, or garbage. It shares no code with ``runtime/verify`` or ``runtime/deps`` and is exponential in the queues that a
schedule leaves unordered: for some 30 instructions. Larger ones can be sampled.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from mtcompile.runtime.schedule import Buffer, Instruction, Schedule

Content = tuple[str, int] | None  # (value, byte within it), None for garbage
Memory = tuple[Content, ...]
State = tuple[int, int, Memory, frozenset[str]]  # done and running as bit masks, what memory holds, what is allocated
MAX_STATES = 400_000


class Unsafe(Exception):
    """Some order of events goes wrong; the message says how."""


def why_unsafe(schedule: Schedule, walks: int = 0, seed: int = 0) -> str | None:
    """What goes wrong in some execution, or None if no execution goes wrong. RuntimeError if there are too many.

    With ``walks``, for schedules too large to explore: that many random executions are tried instead of all, so that
    None means only that nothing went wrong in these.
    """
    try:
        search = _Search(schedule)
        if not walks:
            search.explore()
        for number in range(walks):
            search.walk(Random(seed + number))
    except Unsafe as unsafe:
        return str(unsafe)
    return None


class _Search:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.instructions = schedule.instructions
        queues = sorted({instruction.queue for instruction in self.instructions})
        self.queues = [[i for i, ins in enumerate(self.instructions) if ins.queue == queue] for queue in queues]
        self.masks = [sum(1 << i for i in queue) for queue in self.queues]
        self.phase_mask: dict[str, int] = {}
        for i, instruction in enumerate(self.instructions):
            self.phase_mask[instruction.phase] = self.phase_mask.get(instruction.phase, 0) | 1 << i
        self._lay_out()
        self.made = {w for ins in self.instructions if ins.op == "run" for w in ins.writes}
        self.made_values = {schedule.buffers[name].value for name in self.made}
        self.written = {name for ins in self.instructions for name in ins.writes}
        self.readers = [0] * len(self.width)  # per cell, the instructions that read it, as a bit mask
        self.writers = [0] * len(self.width)
        for i, ins in enumerate(self.instructions):
            for masks, names in ((self.readers, ins.reads), (self.writers, ins.writes)):
                for cell in {cell for name in names for cell, _ in self.cells[name]}:
                    masks[cell] |= 1 << i

    # memory

    def _lay_out(self) -> None:
        """Cuts memory into cells that no buffer covers partly. ``cells[name]``: (cell, byte in the buffer)."""
        self.cells: dict[str, list[tuple[int, int]]] = {}
        self.lent: list[int] = []  # cells of the device arena
        self.width: list[int] = []
        placed = [b for b in self.schedule.buffers.values() if b.kind == "placed"]
        for tier in {b.tier for b in placed}:
            slots = [(b, b.offset or 0) for b in placed if b.tier == tier]
            marks = sorted({m for b, offset in slots for m in (offset, offset + b.nbytes)})
            base = len(self.width)
            self.width += [end - start for start, end in pairwise(marks)]
            if tier == "device":
                self.lent = list(range(base, len(self.width)))
            for b, offset in slots:
                inside = [k for k, mark in enumerate(marks) if offset <= mark < offset + b.nbytes]
                self.cells[b.name] = [(base + k, marks[k] - offset) for k in inside]
        for b in self.schedule.buffers.values():
            if b.kind != "placed" and not b.version_of:
                self.cells[b.name] = [(len(self.width), 0)]
                self.width.append(b.nbytes)
        for b in self.schedule.buffers.values():
            if b.version_of:
                self.cells[b.name] = self.cells[b.version_of]

    def _holds(self, memory: Memory, buffer: Buffer) -> bool:
        return all(memory[cell] == (buffer.value, at) for cell, at in self.cells[buffer.name])

    def _written_in_step(self, buffer: Buffer) -> bool:
        """Homes that begin the step as garbage: gradients, new versions, and whatever an instruction writes."""
        return (
            buffer.role == "grad"
            or (buffer.role == "buffer" and buffer.value in self.made_values)
            or buffer.name in self.written
        )

    def _first_memory(self) -> Memory:
        cells: list[Content] = [None] * len(self.width)
        for b in self.schedule.buffers.values():
            if b.kind == "home" and b.role != "tangent" and not self._written_in_step(b):
                cells[self.cells[b.name][0][0]] = (b.value, 0)
        return tuple(cells)

    def _rivals(self, i: int) -> int:
        """The instructions that must not run at the same time as ``i``, as a bit mask."""
        mask = 0
        for name in self.instructions[i].reads:
            for cell, _ in self.cells[name]:
                mask |= self.writers[cell]
        for name in self.instructions[i].writes:
            for cell, _ in self.cells[name]:
                mask |= self.writers[cell] | self.readers[cell]
        return mask & ~(1 << i)

    # events

    def explore(self) -> None:
        """Depth first; a state reached twice is explored once."""
        stack = [self._first_state()]
        seen = set(stack)
        while stack:
            state = stack.pop()
            following = [self._after(state, i) for i in self._events(state)]
            if not following:
                self._finish(state)
            for state in following:
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
            if len(seen) > MAX_STATES:
                raise RuntimeError(f"more than {MAX_STATES} states; try `walks`")

    def walk(self, rng: Random) -> None:
        """One execution, in which each queue is as fast or slow as the dice say: the slowest may starve."""
        speed = {ins.queue: 10 ** rng.uniform(-3, 0) for ins in self.instructions}
        state = self._first_state()
        while events := self._events(state):
            weights = [speed[self.instructions[i].queue] for i in events]
            state = self._after(state, rng.choices(events, weights)[0])
        self._finish(state)

    def _first_state(self) -> State:
        memory = self._first_memory()
        if self.instructions:
            memory = self._enter(self.instructions[0].phase, memory)
        return 0, 0, memory, frozenset()

    def _events(self, state: State) -> list[int]:
        """The instructions that can end or start next."""
        done, running, *_ = state
        return self._running(running) + self._startable(done, running)

    def _after(self, state: State, i: int) -> State:
        done, running, memory, allocated = state
        if not running >> i & 1:
            return done, running | 1 << i, *self._start(i, running, memory, allocated)
        memory = self._end(i, memory)
        done |= 1 << i
        phases = list(self.phase_mask)
        mask, following = self.phase_mask[self.instructions[i].phase], phases.index(self.instructions[i].phase) + 1
        if done & mask == mask and following < len(phases):
            memory = self._enter(phases[following], memory)
        return done, running & ~(1 << i), memory, allocated

    def _running(self, running: int) -> list[int]:
        found = []
        while running:
            found.append(running.bit_length() - 1)
            running ^= 1 << found[-1]
        return found

    def _startable(self, done: int, running: int) -> list[int]:
        heads = []
        for mask, queue in zip(self.masks, self.queues):
            ended = (done & mask).bit_count()  # a queue's instructions end in its order
            heads.append(queue[ended] if ended < len(queue) else None)
        return [i for i in heads if i is not None and not running >> i & 1 and self._ready(i, done)]

    def _ready(self, i: int, done: int) -> bool:
        for phase, mask in self.phase_mask.items():  # in the order the phases are listed
            if phase == self.instructions[i].phase:
                break
            if done & mask != mask:
                return False
        return all(done >> d & 1 for d in self.instructions[i].deps)

    def _enter(self, phase: str, memory: Memory) -> Memory:
        """Between phases the device arena is lent to others; tangents arrive with backward."""
        cells = list(memory)
        for cell in self.lent:
            cells[cell] = None
        for b in self.schedule.buffers.values():
            if b.role == "tangent" and b.kind == "home" and phase == "backward" and not self._written_in_step(b):
                cells[self.cells[b.name][0][0]] = (b.value, 0)
        return tuple(cells)

    def _start(self, i: int, running: int, memory: Memory, allocated: frozenset[str]) -> tuple[Memory, frozenset[str]]:
        instruction = self.instructions[i]
        if running and self._rivals(i) & running:
            raise Unsafe(f"#{i} runs at the same time as {self._running(self._rivals(i) & running)}")
        if instruction.op in ("alloc", "free"):
            allocated = self._change(i, instruction, allocated)
        else:
            for name in (*instruction.reads, *instruction.writes):
                if self.schedule.buffers[name].kind != "home" and name not in allocated:
                    raise Unsafe(f"#{i} touches {name}, which is not allocated")
            for name in instruction.reads:
                if not self._holds(memory, self.schedule.buffers[name]):
                    raise Unsafe(f"#{i} reads {name}, which does not hold {self.schedule.buffers[name].value}")
        cells = list(memory)
        for name in instruction.writes:
            for cell, _ in self.cells[name]:
                cells[cell] = None
        self._account(i, running | 1 << i, allocated)
        return tuple(cells), allocated

    def _change(self, i: int, instruction: Instruction, allocated: frozenset[str]) -> frozenset[str]:
        buffer = self.schedule.buffers[instruction.writes[0]]
        if buffer.kind == "home":
            raise Unsafe(f"#{i} manages a home")
        if instruction.op == "free":
            if buffer.name not in allocated or buffer.returned:
                raise Unsafe(f"#{i} frees {buffer.name}, which is not its to free")
            return allocated - {buffer.name}
        if buffer.name in allocated:
            raise Unsafe(f"#{i} allocates {buffer.name} a second time")
        if buffer.offset is not None:
            if not 0 <= buffer.offset <= self.schedule.arena_nbytes.get(buffer.tier, 0) - buffer.nbytes:
                raise Unsafe(f"#{i}: {buffer.name} lies outside its arena")
        return allocated | {buffer.name}

    def _account(self, i: int, running: int, allocated: frozenset[str]) -> None:
        schedule = self.schedule
        pooled = set(allocated)
        workspace = 0
        for j in self._running(running):
            workspace += self.instructions[j].workspace
            if self.instructions[j].op == "free":
                pooled.add(self.instructions[j].writes[0])  # held until the free has ended
        for tier in ("device", "host", "disk"):
            held = schedule.resident_nbytes.get(tier, 0) + schedule.arena_nbytes.get(tier, 0)
            buffers = [schedule.buffers[name] for name in pooled]
            held += sum(b.nbytes for b in buffers if b.kind == "pooled" and b.tier == tier)
            if tier == "device":
                held += workspace
                if self.instructions[i].phase == "backward":
                    held += sum(b.nbytes for b in schedule.buffers.values() if b.role == "tangent" and b.tier == tier)
            for bound in (schedule.peak_nbytes, schedule.budget_nbytes):
                if held > bound.get(tier, held):
                    raise Unsafe(f"#{i}: {held} bytes on tier {tier}, {bound[tier]} are allowed")

    def _end(self, i: int, memory: Memory) -> Memory:
        instruction = self.instructions[i]
        for name in instruction.reads:
            if not self._holds(memory, self.schedule.buffers[name]):
                raise Unsafe(f"{name} changes while #{i} reads it")
        cells = list(memory)
        if instruction.op == "run":
            for name in instruction.writes:
                for cell, at in self.cells[name]:
                    cells[cell] = (self.schedule.buffers[name].value, at)
            for name in instruction.reads[-1:] if instruction.queue == "d2h" else ():  # it may have changed that
                for cell, _ in self.cells[name]:
                    cells[cell] = None
        elif instruction.op == "copy":
            for read, write in zip(instruction.reads, instruction.writes):
                source = self.schedule.buffers[read]
                value = f"{source.value}[{self.schedule.buffers[instruction.ends].value}]" if instruction.ends else source.value
                if instruction.rows and instruction.queue == "h2d":
                    value += f"[rows {' '.join(self.schedule.buffers[index].value for index in instruction.rows)}]"
                for cell, at in self.cells[write]:
                    filled = instruction.rows or at + self.width[cell] <= source.nbytes  # rows and zeros fill any target
                    cells[cell] = (value, at) if filled else None
        return tuple(cells)

    def _finish(self, state: State) -> None:
        done, _, memory, allocated = state
        if done != (1 << len(self.instructions)) - 1:
            raise Unsafe("deadlock")
        for b in self.schedule.buffers.values():
            if b.kind != "home" and not b.returned and b.name in allocated:
                raise Unsafe(f"the next step begins with {b.name} allocated")
            if b.kind != "home" and b.returned and b.name not in allocated:
                raise Unsafe(f"{b.name} is returned, but was never allocated")
            result = b.returned or (b.kind == "home" and self._written_in_step(b))
            if result and not self._holds(memory, b):
                raise Unsafe(f"the step ends and {b.name} does not hold {b.value}")
