"""The proof that a schedule is safe, from the schedule alone: it trusts neither the passes that made it nor its deps.

Write ``a ≺ b`` when ``a`` has completed before ``b`` starts in every execution: both are on one queue and ``a`` is
listed first; or ``b`` waits for ``a``; or ``a`` belongs to an earlier phase; or through a chain of these. ``verify``
proves, and ``ScheduleError.invariant`` names:

- **I0 well formed**: known ops, queues, phases and buffers; the phases one after the other; waits only for earlier
  instructions; ``alloc`` and ``free`` name one buffer, ``copy`` pairs. So ≺ agrees with list order: no deadlock. A buffer
  that lies ``over`` another is a home as that is, of its size and in its tier, and the only one over it.
- **I1 present**: every buffer that is not a home is allocated once and written once, every home written at most once.
  For every operand read: its producer ≺ the read; for every operand: its alloc ≺ the use ≺ its free. A home that
  nothing writes is valid from the start (a tangent from the start of backward), one that is written only from then on, and
  one that another lies over until that is written: no read of it comes later.
  Copies join the tiers their queue serves, with equal value and size; kernels use the tier they run on.
- **I2 race-free**: two instructions that touch common bytes (one buffer, or placed buffers of one tier that overlap),
  one of them writing (``alloc`` and ``free`` write), are ≺-ordered.
- **I3 fits**: of two placed buffers that overlap, the free of one ≺ the alloc of the other; slots are aligned and
  inside their arena; per tier ``peak(schedule) <= peak_nbytes <= limit_nbytes``.
- **I4 closed**: every alloc has one free, or its buffer leaves; no device slot outlives its phase (arenas are lent in
  between); every gradient and every new version of a module buffer leaves, is written to one home, or is read by one
  kernel that writes over homes (an update) or makes another gradient of it on the host, once; every home of either, and
  every home over another, is written. Checked over two steps in a row: a step ends in the state it began in.

A schedule that runs ahead has what is left of queue host at the end of backward running beside the next forward: I1 and I2
are proven for these too, by the waits that the forward's instructions have on the step before.

The first failure is raised, in the order of the invariants. Time grows with instructions x operands x overlaps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from mtcompile.runtime.happens_before import Order
from mtcompile.runtime.schedule import ALIGNMENT, PHASES, QUEUES, TIERS, Buffer, Instruction, Schedule, gib, instruction_text

INVARIANTS = {"I0": "well formed", "I1": "present", "I2": "race-free", "I3": "fits", "I4": "closed"}

# what each queue can copy: tier read -> tier written
COPIES: dict[str, tuple[tuple[str, str], ...]] = {
    "compute": (("device", "device"),),
    "h2d": (("host", "device"),),
    "d2h": (("device", "host"),),
    "disk_read": (("disk", "host"), ("disk", "device")),
    "disk_write": (("host", "disk"), ("device", "disk")),
    "host": (("host", "host"),),
}
RUNS = {"compute": "device", "host": "host"}  # the tier whose bytes kernels on a queue may touch
CONTEXT_LINES = 10


class ScheduleError(ValueError):
    """An unsafe schedule: ``invariant`` ("I0" … "I4") fails at instruction ``index`` (None: in the tables)."""

    def __init__(self, message: str, invariant: str, index: int | None) -> None:
        super().__init__(message, invariant, index)
        self.invariant = invariant
        self.index = index

    def __str__(self) -> str:
        return str(self.args[0])


def verify(schedule: Schedule) -> None:
    """Returns if every property in the module's docstring holds, else raises ScheduleError for the first that fails."""
    _well_formed(schedule)
    facts = _Facts(schedule)
    _present(facts)
    _race_free(facts)
    _slots_fit(facts)
    _tiers_fit(facts)
    _closed(facts)
    _consumed_once(facts)
    _runs_ahead(schedule)


def peak(schedule: Schedule) -> dict[str, int]:
    """Bytes held at the worst moment, per tier in use: resident + arena + pooled values + workspace + tangents."""
    return {tier: nbytes for tier, (nbytes, _) in _peaks(schedule).items()}


def _peaks(schedule: Schedule) -> dict[str, tuple[int, int | None]]:
    """Per tier in use, the peak in bytes and the first instruction that reaches it.

    Pooled values are allocated and freed on queue compute alone, so list order is the order they come and go in.
    """
    live = {tier: schedule.resident_nbytes.get(tier, 0) + schedule.arena_nbytes.get(tier, 0) for tier in TIERS}
    most: dict[str, tuple[int, int | None]] = {tier: (nbytes, None) for tier, nbytes in live.items()}
    tangents = sum(b.nbytes for b in schedule.buffers.values() if b.role == "tangent" and b.tier == "device")
    for index, instruction in enumerate(schedule.instructions):
        buffer = schedule.buffers[instruction.writes[0]] if instruction.op in ("alloc", "free") else None
        if buffer and buffer.kind == "pooled" and instruction.op == "alloc":
            live[buffer.tier] += buffer.nbytes
        for tier in TIERS:
            besides = instruction.workspace + (tangents if instruction.phase == "backward" else 0)
            held = live[tier] + (besides if tier == "device" else 0)
            if held > most[tier][0]:
                most[tier] = held, index
        if buffer and buffer.kind == "pooled" and instruction.op == "free":
            live[buffer.tier] -= buffer.nbytes
    used = {b.tier for b in schedule.buffers.values()} | schedule.arena_nbytes.keys() | schedule.resident_nbytes.keys()
    return {tier: most[tier] for tier in TIERS if tier in used}


class _Facts:
    """What the checks ask: ≺, and which instructions allocate, free, write and read each buffer, in list order."""

    __slots__ = ("allocs", "before", "frees", "readers", "schedule", "writers")

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        tables: list[dict[str, list[int]]] = [{name: [] for name in schedule.buffers} for _ in range(4)]
        self.allocs, self.frees, self.writers, self.readers = tables
        self.before = Order(schedule).before  # before(a, b): a ≺ b
        for index, instruction in enumerate(schedule.instructions):
            table = {"alloc": self.allocs, "free": self.frees}.get(instruction.op, self.writers)
            for name in instruction.writes:
                table[name].append(index)
            for name in instruction.reads:
                self.readers[name].append(index)

    def buffers(self, names: tuple[str, ...]) -> Iterator[Buffer]:
        return (self.schedule.buffers[name] for name in names)

    def error(self, invariant: str, index: int | None, message: str) -> ScheduleError:
        return _error(self.schedule, invariant, index, message)


def _error(schedule: Schedule, invariant: str, index: int | None, message: str) -> ScheduleError:
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


def _well_formed(schedule: Schedule) -> None:
    def need(condition: bool, index: int | None, message: str) -> None:
        if not condition:
            raise _error(schedule, "I0", index, message)

    for table in (schedule.arena_nbytes, schedule.resident_nbytes, schedule.limit_nbytes, schedule.peak_nbytes):
        for tier, nbytes in table.items():
            need(tier in TIERS and nbytes >= 0, None, f"expected bytes per tier of {TIERS}, found {tier}: {nbytes}")
    for name, buffer in schedule.buffers.items():
        need(buffer.name == name, None, f"expected buffer {name!r} under its own name, found {buffer.name!r}")
        need(buffer.tier in TIERS, None, f"expected {name} in one of {TIERS}, found {buffer.tier!r}")
        need(buffer.kind in ("home", "placed", "pooled"), None, f"{name} is of unknown kind {buffer.kind!r}")
        need(buffer.nbytes >= 0, None, f"expected 0 bytes or more for {name}, found {buffer.nbytes}")
        placed = buffer.kind == "placed"
        need((buffer.offset is not None) == placed, None, f"{name}: placed buffers have an offset, others have none")
    covered: set[str] = set()
    for name, buffer in ((name, buffer) for name, buffer in schedule.buffers.items() if buffer.version_of):
        need(
            buffer.version_of in schedule.buffers,
            None,
            f"expected {name} over a buffer of the table, found {buffer.version_of!r}",
        )
        below = schedule.buffers[buffer.version_of]
        alike = (below.kind, below.tier, below.nbytes) == (buffer.kind, buffer.tier, buffer.nbytes)
        need(alike and buffer.kind == "home", None, f"expected {name} over a home as it is one, found {below.name}")
        need(
            not below.version_of and below.name not in covered, None, f"expected one buffer over {below.name}, found {name} too"
        )
        covered.add(below.name)
    reached = 0
    for index, instruction in enumerate(schedule.instructions):
        op, reads, writes = instruction.op, instruction.reads, instruction.writes
        need(op in ("alloc", "free", "copy", "run"), index, f"unknown op {op!r}")
        need(instruction.queue in QUEUES, index, f"expected a queue of {QUEUES}, found {instruction.queue!r}")
        need(instruction.phase in PHASES, index, f"expected a phase of {PHASES}, found {instruction.phase!r}")
        phase = PHASES.index(instruction.phase)
        need(phase >= reached, index, f"expected the phases one after the other, found {instruction.phase} again")
        reached = phase
        for name in (*reads, *writes):
            need(name in schedule.buffers, index, f"expected operands from the buffer table, found {name!r}")
        for dep in instruction.deps:
            need(0 <= dep < index, index, f"expected waits for earlier instructions, found #{dep}: it would deadlock")
        for dep in instruction.previous_step_deps:
            right = schedule.run_ahead and instruction.phase == PHASES[0] and 0 <= dep < len(schedule)
            right = right and (schedule.instructions[dep].queue, schedule.instructions[dep].phase) == ("host", PHASES[1])
            need(right, index, f"expected a forward to wait for queue host of the backward before it, found #{dep}")
        need(instruction.workspace >= 0, index, f"expected 0 bytes of workspace or more, found {instruction.workspace}")
        if op in ("alloc", "free"):
            need(len(writes) == 1 and not reads, index, f"expected {op} of one buffer, named in writes")
        if op == "copy":
            need(0 < len(reads) == len(writes), index, f"expected pairs, found {len(reads)} -> {len(writes)} operands")


def _present(facts: _Facts) -> None:
    schedule = facts.schedule
    for name, buffer in schedule.buffers.items():
        writers, allocs = facts.writers[name], facts.allocs[name]
        if len(writers) > 1:
            raise facts.error("I1", writers[1], f"{name} is written again (first at #{writers[0]}); use a new name")
        if buffer.kind == "home":
            continue
        if len(allocs) > 1:
            raise facts.error("I1", allocs[1], f"{name} is allocated again (first at #{allocs[0]}); use a new name")
        if not allocs:
            index = min((*writers, *facts.readers[name], *facts.frees[name]), default=None)
            raise facts.error("I1", index, f"expected one alloc of {name}, found none")
        if not writers:
            raise facts.error("I1", allocs[0], f"expected one instruction that writes {name}, found none")
    for index, instruction in enumerate(schedule.instructions):
        if instruction.op == "copy":
            _copy_operands(facts, index)
        elif instruction.op == "run":
            tier = RUNS.get(instruction.queue)
            if tier is None:
                raise facts.error("I1", index, f"expected kernels on queues {tuple(RUNS)}, found {instruction.queue}")
            for buffer in facts.buffers((*instruction.reads, *instruction.writes)):
                if buffer.tier != tier:
                    found = f"{buffer.name} is on tier {buffer.tier}; copy it first"
                    raise facts.error("I1", index, f"expected operands on tier {tier}, found {found}")
        for buffer in facts.buffers(instruction.reads):
            _readable(facts, index, buffer)
    _not_overtaken(facts)
    for index, instruction in enumerate(schedule.instructions):  # last, since a missing wait shows better above
        if instruction.op in ("copy", "run"):
            for buffer in facts.buffers((*instruction.reads, *instruction.writes)):
                _allocated(facts, index, buffer)


def _copy_operands(facts: _Facts, index: int) -> None:
    instruction = facts.schedule.instructions[index]
    serves = COPIES[instruction.queue]
    for source, target in zip(facts.buffers(instruction.reads), facts.buffers(instruction.writes)):
        pair = f"{source.name} -> {target.name}"
        if (source.tier, target.tier) not in serves:
            expected = " or ".join(f"{a} -> {b}" for a, b in serves)
            found = f"{source.tier} -> {target.tier} ({pair}); use the queue that serves it"
            raise facts.error("I1", index, f"expected {expected} on {instruction.queue}, found {found}")
        if source.value != target.value:
            raise facts.error("I1", index, f"expected equal values, found {source.value} -> {target.value} ({pair})")
        if source.nbytes != target.nbytes:
            raise facts.error("I1", index, f"expected equal sizes, found {source.nbytes} -> {target.nbytes} B ({pair})")


def _readable(facts: _Facts, index: int, buffer: Buffer) -> None:
    writers = facts.writers[buffer.name]
    if writers:
        if not facts.before(writers[0], index):
            what = f"expected {buffer.name} complete before it is read, found its producer #{writers[0]} unordered"
            raise facts.error("I1", index, f"{what}; wait for #{writers[0]} or list it earlier")
    elif buffer.role == "tangent" and facts.schedule.instructions[index].phase == "forward":
        raise facts.error("I1", index, f"tangent {buffer.name} is read in forward, but it arrives with backward")


def _not_overtaken(facts: _Facts) -> None:
    """No home is read once another lies over it."""
    for name, buffer in facts.schedule.buffers.items():
        for writer in facts.writers[name] if buffer.version_of else ():
            late = [reader for reader in facts.readers[buffer.version_of] if reader > writer]
            if late:
                raise facts.error(
                    "I1", late[0], f"{buffer.version_of} is read, but #{writer} has written {name} over it; read before"
                )


def _allocated(facts: _Facts, index: int, buffer: Buffer) -> None:
    if buffer.kind == "home":
        return
    alloc = facts.allocs[buffer.name][0]
    if not facts.before(alloc, index):
        raise facts.error("I1", index, f"{buffer.name} is used, but its alloc #{alloc} need not have happened")
    for free in facts.frees[buffer.name]:
        if not facts.before(index, free):
            raise facts.error("I1", index, f"{buffer.name} is used, but #{free} may have freed it; free it later")


def _segments(schedule: Schedule) -> dict[str, list[tuple[str, int]]]:
    """Each buffer's bytes as pieces such that two buffers overlap exactly when they share a piece.

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


def _race_free(facts: _Facts, where: str = "") -> None:
    """≺ agrees with list order and is transitive, so comparing each access with the latest ones covers all pairs."""
    pieces = _segments(facts.schedule)
    wrote: dict[tuple[str, int], int] = {}
    reading: dict[tuple[str, int], dict[str, int]] = {}  # since the last write; the latest of each queue stands for all
    for index, instruction in enumerate(facts.schedule.instructions):
        rivals: set[int] = set()
        for name in instruction.reads:
            for piece in pieces[name]:
                rivals.add(wrote.get(piece, -1))
                reading.setdefault(piece, {})[instruction.queue] = index
        for name in instruction.writes:
            for piece in pieces[name]:
                rivals.add(wrote.get(piece, -1))
                rivals.update(reading.pop(piece, {}).values())
                wrote[piece] = index
        for rival in sorted(rivals - {-1, index}):
            if not facts.before(rival, index):
                names = ", ".join(_common(facts.schedule, rival, index))
                what = f"expected #{rival} complete first, found it unordered: both use {names}; wait for it"
                what += f" ({where})" if where else ""
                raise facts.error("I2", index, what)


def _common(schedule: Schedule, a: int, b: int) -> Iterator[str]:
    """The operands through which two instructions meet, for the message."""
    first, second = schedule.instructions[a], schedule.instructions[b]
    for left in dict.fromkeys((*first.reads, *first.writes)):
        for right in dict.fromkeys((*second.reads, *second.writes)):
            meet = schedule.buffers[left].overlaps(schedule.buffers[right])
            if meet and (left in first.writes or right in second.writes):
                yield left if left == right else f"the bytes of {left} and {right}"


def _slots_fit(facts: _Facts) -> None:
    schedule = facts.schedule
    lives: dict[tuple[str, int], list[str]] = {}
    pieces = _segments(schedule)
    for name in sorted((n for n in facts.allocs if facts.allocs[n]), key=lambda n: facts.allocs[n][0]):
        buffer, index = schedule.buffers[name], facts.allocs[name][0]
        if buffer.offset is None:
            continue
        arena = schedule.arena_nbytes.get(buffer.tier, 0)
        if buffer.offset % ALIGNMENT:
            raise facts.error("I3", index, f"expected offsets in steps of {ALIGNMENT}, found {name} at {buffer.offset}")
        if buffer.offset < 0 or buffer.offset + buffer.nbytes > arena:
            found = f"{name} at {buffer.offset} .. {buffer.offset + buffer.nbytes}"
            raise facts.error("I3", index, f"expected slots within the {buffer.tier} arena of {arena} B, found {found}")
        for piece in pieces[name]:
            lives.setdefault(piece, []).append(name)
    for names in lives.values():
        for earlier, later in pairwise(names):
            index = facts.allocs[later][0]
            if not any(facts.before(free, index) for free in facts.frees[earlier]):
                what = f"{later} overlaps {earlier} in bytes while that may still be live"
                raise facts.error("I3", index, f"{what}; free {earlier} before, or place {later} elsewhere")


def _tiers_fit(facts: _Facts) -> None:
    schedule = facts.schedule
    for index, instruction in enumerate(schedule.instructions):
        if instruction.workspace and instruction.queue != "compute":
            raise facts.error("I3", index, "expected workspace on queue compute only: elsewhere the peak is not exact")
        if instruction.op not in ("alloc", "free") or schedule.buffers[instruction.writes[0]].kind != "pooled":
            continue
        buffer = schedule.buffers[instruction.writes[0]]
        if instruction.queue != "compute":
            what = f"expected {instruction.op} of pooled {buffer.name} on queue compute, found {instruction.queue}"
            raise facts.error("I3", index, f"{what}: the sum of pooled bytes is exact only in one queue's order")
        if buffer.nbytes % ALIGNMENT:
            what = f"expected pooled sizes in steps of {ALIGNMENT} bytes, found {buffer.name} of {buffer.nbytes}"
            raise facts.error("I3", index, f"{what}; use schedule.aligned")
    for tier, (nbytes, at) in _peaks(schedule).items():
        planned = schedule.peak_nbytes.get(tier)
        if nbytes > (planned or 0):
            found = "none" if planned is None else f"{planned} B ({gib(planned)})"
            what = f"expected a planned {tier} peak of at least {nbytes} B ({gib(nbytes)}), found {found}"
            raise facts.error("I3", at, f"{what}; plan what verify.peak gives, or hold less here")
    for tier, planned in schedule.peak_nbytes.items():
        limit = schedule.limit_nbytes.get(tier)
        if limit is not None and planned > limit:
            what = f"expected a {tier} peak within the limit of {limit} B ({gib(limit)}), found {planned} B"
            raise facts.error("I3", None, f"{what} ({gib(planned)}); plan for less, or raise the limit")


def _closed(facts: _Facts) -> None:
    schedule = facts.schedule
    live: dict[str, int] = {}  # buffer -> its alloc
    for step in ("step", "second step"):
        for index, instruction in enumerate(schedule.instructions):
            if index and instruction.phase != schedule.instructions[index - 1].phase:
                for name, alloc in live.items():
                    if schedule.buffers[name].kind == "placed" and schedule.buffers[name].tier == "device":
                        what = f"device slot {name} lives across the phases, but arenas are lent in between"
                        raise facts.error("I4", alloc, f"{what}; free it in the same phase")
            if instruction.op not in ("alloc", "free"):
                continue
            buffer = schedule.buffers[instruction.writes[0]]
            if buffer.kind == "home":
                what = f"home {buffer.name} exists before and after the step; drop this {instruction.op}"
                raise facts.error("I4", index, what)
            if instruction.op == "alloc":
                if buffer.name in live:
                    raise facts.error("I4", index, f"{buffer.name} is never freed: the {step} finds it allocated")
                live[buffer.name] = index
            elif buffer.returned:
                raise facts.error("I4", index, f"{buffer.name} leaves with the user, but is freed here; drop the free")
            elif live.pop(buffer.name, None) is None:
                raise facts.error("I4", index, f"{buffer.name} is freed, but not allocated at this point")
        for name in [name for name in live if schedule.buffers[name].returned]:
            if schedule.buffers[name].kind == "placed":
                raise facts.error("I4", live[name], f"{name} leaves, but a slot is reused; make it pooled")
            del live[name]  # the user's from here on


def _converted(instruction: Instruction, written: Buffer) -> bool:
    """Whether it is a gradient that a kernel of the host makes: of another one, as nothing else is there."""
    return instruction.queue == "host" and instruction.op == "run" and written.role == "grad"


def _consumed_once(facts: _Facts) -> None:
    schedule = facts.schedule
    rows = [(name, b) for name, b in schedule.buffers.items() if b.role in ("grad", "buffer")]
    made: dict[tuple[str, str], int] = {}  # (value, role) -> the kernel that first makes it; copies make nothing new
    taken: dict[tuple[str, str], list[int]] = {}
    for name, buffer in rows:
        key, writers = (buffer.value, buffer.role), facts.writers[name]
        if writers and schedule.instructions[writers[0]].op == "run":
            made[key] = min(made.get(key, writers[0]), writers[0])
        if buffer.kind == "home" or buffer.returned:
            taken.setdefault(key, []).extend(writers)
    for name, buffer in rows:
        at = made.get((buffer.value, buffer.role))
        expected = buffer.role == "grad" or at is not None
        if buffer.kind == "home" and not facts.writers[name] and expected:
            what = f"expected one write of home {name}, found none: it would end the step without {buffer.value}"
            raise facts.error("I4", at, what)
    for name, buffer in facts.schedule.buffers.items():
        if buffer.version_of and not facts.writers[name]:
            raise facts.error("I4", None, f"expected one write of {name} over {buffer.version_of}, found none")
    updates = [
        (index, {schedule.buffers[name].value for name in instruction.reads if schedule.buffers[name].role == "grad"})
        for index, instruction in enumerate(schedule.instructions)
        if any(
            schedule.buffers[name].version_of or _converted(instruction, schedule.buffers[name]) for name in instruction.writes
        )
    ]
    for index, values in updates:
        for value in values:
            taken.setdefault((value, "grad"), []).append(index)
    for (value, role), index in made.items():
        homes = sorted(taken.get((value, role), ()))
        if len(homes) != 1:
            found = ", ".join(f"#{i}" for i in homes) or "none"
            what = f"expected {role} {value} to leave, to be written to one home, or to update a parameter, once; found {found}"
            raise facts.error("I4", homes[1] if homes else index, what)


def _runs_ahead(schedule: Schedule) -> None:
    """I1 and I2 between what a backward leaves on queue host and the next forward: the two as one phase, in which the
    forward's waits on the step before are waits like others."""
    if not schedule.run_ahead:
        return
    before = Order(schedule).before
    last = {each.queue: i for i, each in schedule.phase(PHASES[1]) if each.queue != "host"}
    mine = (i for i, each in schedule.phase(PHASES[1]) if each.queue == "host")
    behind = [i for i in mine if not any(before(i, other) for other in last.values())]  # the others have drained
    place = {index: position for position, index in enumerate(behind)}
    rows = [replace(schedule.instructions[index], phase=PHASES[0], deps=(), previous_step_deps=()) for index in behind]
    left = len(rows)
    following = {index: left + position for position, (index, _) in enumerate(schedule.phase(PHASES[0]))}
    for _, instruction in schedule.phase(PHASES[0]):
        waits = (
            *(place[dep] for dep in instruction.previous_step_deps if dep in place),
            *(following[dep] for dep in instruction.deps),
        )
        rows.append(replace(instruction, deps=tuple(sorted(waits)), previous_step_deps=()))
    facts = _Facts(replace(schedule, instructions=tuple(rows), run_ahead=False))
    _race_free(facts, f"with the step before, whose queue host comes first (#0 to #{left - 1})")
