"""The proof that a schedule is safe, from the schedule alone: it trusts neither the passes that made it nor its deps.

Write ``a ≺ b`` when ``a`` has completed before ``b`` starts in every execution: both are on one queue and ``a`` is listed
first; or ``b`` waits for ``a``; or ``a`` belongs to an earlier phase (for ``b`` on a queue of the host's: and to a queue that
it awaits before it starts a phase, since nothing else has happened for the host); or through a chain of these. ``verify``
proves, and ``ScheduleError.invariant`` names:

- **I0 well formed**: known ops, queues, phases and buffers; the phases one after the other; waits only for earlier
  instructions; ``alloc`` and ``free`` name one buffer, ``copy`` pairs. So ≺ agrees with list order: no deadlock. The next
  version of a home (``version_of``) is itself a home, of the same size, in the same tier, and the only next version, or one of
  two.
- **I1 present**: every buffer that is not a home is allocated once and written once, every home written at most once.
  For every operand read: its producer ≺ the read; for every operand: its alloc ≺ the use ≺ its free. A home that
  nothing writes is valid from the start (a tangent from the start of backward), one that is written only from then on, and
  one with a next version until that is written: no read of it comes later. Of two next versions, a collective makes the
  second of the first, which nothing reads later.
  Copies join the tiers their queue serves, with equal value and size, from one tier to one; of slices and rows, from or to
  the host; kernels use the tier they run on, and updates on the
  host also write over homes on disk. A kernel on h2d brings from the host what it writes on the device; one on d2h writes next
  versions of homes on the host, and nothing else reads its last operand, which it may change.
- **I2 race-free**: two instructions that touch common bytes (one buffer, or placed buffers of one tier that overlap),
  one of them writing (``alloc`` and ``free`` write), are ≺-ordered.
- **I3 fits**: of two placed buffers that overlap, the free of one ≺ the alloc of the other; slots are inside their arena and
  start at multiples of 256 bytes, by which libraries choose kernels, on disk of 4096; per tier
  ``peak(schedule) <= peak_nbytes <= budget_nbytes``.
- **I4 closed**: every alloc has one free, or its buffer is returned; no device slot outlives its phase (arenas are lent in
  between); every gradient and every new version of a module buffer is returned, is written to one home, or is read by one
  kernel that writes next versions of homes (an update) or makes another gradient of it on the host, once; every home of
  either, and every next version, is written. Checked over two steps in a row: a step ends in the state it began in.

A phase may follow a forward of any program over the same host arena, which was dropped while its copies were in flight. I2 is
proven for the phase and these copies together, as if they touched all of that arena.

In a schedule that runs ahead, what queue host has not finished at the end of backward runs beside the next forward. I1 and
I2 are proven for the two together, from the waits of the forward's instructions on the previous step.

The first failure is raised, in the order of the invariants. I0 to I2 are proven here, I3 and I4 in ``verify_memory``. Labels,
blocks and kinds of work are not used. Time grows with instructions x operands x overlaps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from mtcompile.runtime.happens_before import Order
from mtcompile.runtime.schedule import HOST_AWAITS, HOST_QUEUES, PHASES, QUEUES, TIERS, Buffer, Phase, Queue, Schedule, changed
from mtcompile.runtime.verify_facts import INVARIANTS, Before, Facts, Pieces, ScheduleError, error
from mtcompile.runtime.verify_memory import consumed_once, freed, peaks_reached, slots_fit, tiers_fit

__all__ = ["INVARIANTS", "ScheduleError", "peak", "verify"]

# what each queue can copy: tier read -> tier written
COPIES: dict[Queue, tuple[tuple[str, str], ...]] = {
    "compute": (("device", "device"),),
    "h2d": (("host", "device"), ("disk", "device")),
    "d2h": (("device", "host"),),
    "disk_read": (("disk", "host"),),
    "disk_write": (("host", "disk"),),
    "host": (("host", "host"),),
    "network": (),
}
# The tiers whose bytes kernels on a queue may read, and write.
RUNS: dict[Queue, tuple[tuple[str, ...], str]] = {
    "compute": (("device",), "device"),
    "h2d": (("host",), "device"),
    "d2h": (("device", "host"), "host"),
    "host": (("host",), "host"),
    "network": (("host",), "host"),
}


def verify(schedule: Schedule, host_awaits: Collection[Queue] = HOST_AWAITS) -> None:
    """Proves every property in the module's docstring, or raises ScheduleError for the first that fails. ``host_awaits``: as
    the executor does unless said otherwise, the queues whose earlier phases have ended when the host's queues start a phase."""
    _well_formed(schedule)
    facts = Facts(schedule, host_awaits)
    _present(facts)
    _race_free(schedule, facts.before, facts.pieces)
    slots_fit(facts)
    tiers_fit(facts)
    freed(facts)
    consumed_once(facts)
    _after_a_dropped_forward(schedule, host_awaits)
    _runs_ahead(facts)


def peak(schedule: Schedule) -> dict[str, int]:
    """Returns the bytes held at the worst moment, per tier in use: resident + arena + pooled + workspace + tangents."""
    return {tier: nbytes for tier, (nbytes, _) in peaks_reached(schedule).items()}


def _well_formed(schedule: Schedule) -> None:
    def need(condition: bool, index: int | None, message: str, *named: object) -> None:
        if not condition:
            raise error(schedule, "I0", index, message.format(*named))

    for table in (schedule.arena_nbytes, schedule.resident_nbytes, schedule.budget_nbytes, schedule.peak_nbytes):
        for tier, nbytes in table.items():
            need(tier in TIERS and nbytes >= 0, None, "expected bytes per tier of {}, found {}: {}", TIERS, tier, nbytes)
    for name, buffer in schedule.buffers.items():
        need(buffer.name == name, None, "expected buffer {!r} under its own name, found {!r}", name, buffer.name)
        need(buffer.tier in TIERS, None, "expected {} in one of {}, found {!r}", name, TIERS, buffer.tier)
        need(buffer.kind in ("home", "placed", "pooled"), None, "{} is of unknown kind {!r}", name, buffer.kind)
        need(buffer.nbytes >= 0, None, "expected 0 bytes or more for {}, found {}", name, buffer.nbytes)
        placed = buffer.kind == "placed"
        need((buffer.offset is not None) == placed, None, "{}: placed buffers have an offset, others have none", name)
    versions: dict[str, int] = {}
    for name, buffer in ((name, buffer) for name, buffer in schedule.buffers.items() if buffer.version_of):
        need(buffer.version_of in schedule.buffers, None, "{}: version_of {!r} is not in the table", name, buffer.version_of)
        old = schedule.buffers[buffer.version_of]
        alike = (old.kind, old.tier, old.nbytes) == (buffer.kind, buffer.tier, buffer.nbytes)
        need(alike and buffer.kind == "home", None, "expected {} to be a home like its old version, found {}", name, old.name)
        versions[old.name] = versions.get(old.name, 0) + 1
        few = not old.version_of and versions[old.name] <= 2
        need(few, None, "expected one next version of {}, or two, found {} too", old.name, name)
    reached = 0
    for index, instruction in enumerate(schedule.instructions):
        op, reads, writes = instruction.op, instruction.reads, instruction.writes
        need(op in ("alloc", "free", "copy", "run"), index, "unknown op {!r}", op)
        need(instruction.queue in QUEUES, index, "expected a queue of {}, found {!r}", QUEUES, instruction.queue)
        need(instruction.phase in PHASES, index, "expected a phase of {}, found {!r}", PHASES, instruction.phase)
        phase = PHASES.index(instruction.phase)
        need(phase >= reached, index, "expected the phases one after the other, found {} again", instruction.phase)
        reached = phase
        for name in (*reads, *writes):
            need(name in schedule.buffers, index, "expected operands from the buffer table, found {!r}", name)
        for dep in instruction.deps:
            need(0 <= dep < index, index, "expected waits for earlier instructions, found #{}: it would deadlock", dep)
        for dep in instruction.previous_step_deps:
            right = schedule.run_ahead and instruction.phase == PHASES[0] and 0 <= dep < len(schedule)
            right = right and (schedule.instructions[dep].queue, schedule.instructions[dep].phase) == ("host", PHASES[1])
            need(right, index, "expected waits of a forward for queue host of the previous backward, found #{}", dep)
        need(instruction.workspace >= 0, index, "expected 0 bytes of workspace or more, found {}", instruction.workspace)
        if op in ("alloc", "free"):
            need(len(writes) == 1 and not reads, index, "expected {} of one buffer, named in writes", op)
        if op == "copy":
            paired = len(reads) - bool(instruction.ends) - len(instruction.rows)
            need(0 < paired == len(writes), index, "expected pairs, found {} -> {} operands", paired, len(writes))
        last = op == "copy" and instruction.queue == "h2d" and reads[-1:] == (instruction.ends,)
        need(last or not instruction.ends, index, "expected ends as the last read of a copy, found {!r}", instruction.ends)
        last = op == "copy" and instruction.queue in ("h2d", "d2h") and reads[1:] == instruction.rows and not instruction.ends
        need(last or not instruction.rows, index, "expected rows as the last reads of a copy, found {!r}", instruction.rows)


def _present(facts: Facts) -> None:
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
            _kernel_operands(facts, index)
        for buffer in facts.buffers(instruction.reads):
            _readable(facts, index, buffer)
    _not_overtaken(facts)
    for index, instruction in enumerate(schedule.instructions):  # last, since a missing wait shows better above
        if instruction.op in ("copy", "run"):
            for buffer in facts.buffers((*instruction.reads, *instruction.writes)):
                _allocated(facts, index, buffer)


def _kernel_operands(facts: Facts, index: int) -> None:
    instruction = facts.schedule.instructions[index]
    if instruction.queue not in RUNS:
        raise facts.error("I1", index, f"expected kernels on queues {tuple(RUNS)}, found {instruction.queue}")
    readable, writable = RUNS[instruction.queue]
    written = list(facts.buffers(instruction.writes))
    updated = {name for b in written if b.version_of for name in (b.name, b.version_of)}
    for buffers, tiers in ((facts.buffers(instruction.reads), readable), (written, (writable,))):
        for buffer in buffers:
            if buffer.tier == "disk" and instruction.queue == "host" and buffer.name in updated:  # it goes there by itself
                continue
            if buffer.tier not in tiers:
                what = f"expected operands on tier {' or '.join(tiers)}, found {buffer.name} on tier {buffer.tier}"
                raise facts.error("I1", index, f"{what}; copy it first")
    if instruction.queue == "d2h":
        if others := [buffer.name for buffer in written if not buffer.version_of]:
            raise facts.error("I1", index, f"expected next versions of homes from a kernel on d2h, found {others[0]}")
        if readers := [at for name in instruction.reads[-1:] for at in facts.readers[name] if at != index]:
            what = f"expected no other reader of {instruction.reads[-1]}, which this changes, found #{readers[0]}"
            raise facts.error("I1", index, f"{what}; give it a copy of its own")


def _copy_operands(facts: Facts, index: int) -> None:
    instruction = facts.schedule.instructions[index]
    serves = COPIES[instruction.queue]
    ends = facts.schedule.buffers[instruction.ends] if instruction.ends else None
    if ends is not None and ends.tier != "device":
        raise facts.error("I1", index, f"expected ends on tier device, found {ends.name} on tier {ends.tier}")
    first = facts.schedule.buffers[instruction.reads[0]].tier
    for source, target in zip(facts.buffers(instruction.reads), facts.buffers(instruction.writes)):
        pair = f"{source.name} -> {target.name}"
        if (source.tier, target.tier) not in serves:
            expected = " or ".join(f"{a} -> {b}" for a, b in serves)
            what = f"expected {expected} on {instruction.queue}, found {source.tier} -> {target.tier} ({pair})"
            raise facts.error("I1", index, f"{what}; use the queue that serves it")
        if source.tier != first or (source.tier == "disk" and target.tier == "device" and (ends or instruction.rows)):
            wanted = first if source.tier != first else "host, for a part of it"
            raise facts.error("I1", index, f"expected {source.name} on tier {wanted}, found {source.tier}; copy it apart")
        value = source.value if ends is None else f"{source.value}[{ends.value}]"
        if instruction.rows and instruction.queue == "h2d":  # what comes home is whole, with zeros in the other rows
            value += f"[rows {' '.join(facts.schedule.buffers[name].value for name in instruction.rows)}]"
        if value != target.value:
            raise facts.error("I1", index, f"expected equal values, found {value} -> {target.value} ({pair})")
        if instruction.rows:  # one of the two has room for fewer rows, but for all that cross
            need = min(source.nbytes, target.nbytes)
            if instruction.nbytes > need:
                raise facts.error("I1", index, f"expected room for {instruction.nbytes} B of rows, found {need} B ({pair})")
        elif source.nbytes != target.nbytes:
            raise facts.error("I1", index, f"expected equal sizes, found {source.nbytes} -> {target.nbytes} B ({pair})")


def _readable(facts: Facts, index: int, buffer: Buffer) -> None:
    writers = facts.writers[buffer.name]
    if writers:
        if not facts.before(writers[0], index):
            what = f"expected {buffer.name} complete before it is read, found its producer #{writers[0]} unordered"
            raise facts.error("I1", index, f"{what}; wait for #{writers[0]} or list it earlier")
    elif buffer.role == "tangent" and facts.schedule.instructions[index].phase == "forward":
        raise facts.error("I1", index, f"tangent {buffer.name} is read in forward, but it arrives with backward")


def _not_overtaken(facts: Facts) -> None:
    """Checks that no home, and no next version of it, is read once another one has been written over it."""
    first: dict[str, str] = {}  # home -> its next version that is written first
    versions = (name for name, buffer in facts.schedule.buffers.items() if buffer.version_of and facts.writers[name])
    for writer, name in sorted((facts.writers[name][0], name) for name in versions):
        home, instruction = facts.schedule.buffers[name].version_of, facts.schedule.instructions[writer]
        if (before := first.setdefault(home, name)) == name:
            continue
        if instruction.queue != "network" or before not in instruction.reads:
            what = f"expected a collective to make {name} of {before}, the version of {home} before it"
            raise facts.error("I1", writer, f"{what}, found queue {instruction.queue} to read {', '.join(instruction.reads)}")
        if late := [reader for reader in facts.readers[before] if reader > writer]:
            raise facts.error("I1", late[0], f"{before} is read, but #{writer} has written {name} over it; read it before")
    for name, buffer in facts.schedule.buffers.items():
        for writer in facts.writers[name] if buffer.version_of else ():
            late = [reader for reader in facts.readers[buffer.version_of] if reader > writer]
            if late:
                what = f"{buffer.version_of} is read, but #{writer} has written {name} over it"
                raise facts.error("I1", late[0], f"{what}; read it before")


def _allocated(facts: Facts, index: int, buffer: Buffer) -> None:
    if buffer.kind == "home":
        return
    alloc = facts.allocs[buffer.name][0]
    if not facts.before(alloc, index):
        raise facts.error("I1", index, f"{buffer.name} is used, but its alloc #{alloc} need not have happened")
    for free in facts.frees[buffer.name]:
        if not facts.before(index, free):
            raise facts.error("I1", index, f"{buffer.name} is used, but #{free} may have freed it; free it later")


def _race_free(schedule: Schedule, before: Before, pieces: Pieces, where: str = "") -> None:
    """Proves I2. As ≺ agrees with list order and is transitive, comparing each access with the latest ones covers all."""
    wrote: dict[tuple[str, int], int] = {}
    reading: dict[tuple[str, int], dict[str, int]] = {}  # since the last write; the latest of each queue stands for all
    for index, instruction in enumerate(schedule.instructions):
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
            if not before(rival, index):
                names = ", ".join(_common(schedule, rival, index))
                what = f"expected #{rival} complete first, found it unordered: both use {names}; wait for it"
                what += f" ({where})" if where else ""
                raise error(schedule, "I2", index, what)


def _common(schedule: Schedule, a: int, b: int) -> Iterator[str]:
    """Yields the operands through which two instructions meet, for the message."""
    first, second = schedule.instructions[a], schedule.instructions[b]
    for left in dict.fromkeys((*first.reads, *first.writes)):
        for right in dict.fromkeys((*second.reads, *second.writes)):
            meet = schedule.buffers[left].overlaps(schedule.buffers[right])
            if meet and (left in first.writes or right in second.writes):
                yield left if left == right else f"the bytes of {left} and {right}"


def _after_a_dropped_forward(schedule: Schedule, host_awaits: Collection[Queue]) -> None:
    """Proves I2 between each phase and the copies that a forward of any program may have left in flight: they write, and read,
    all of the host arena, and read what is at home there or on disk. Copies to homes are not left: the caller may read these
    at once."""
    for queue, pairs in COPIES.items():
        read, written = ({pair[side] for pair in pairs} - {"device"} for side in (0, 1))
        if queue in host_awaits or not (read or written):  # of all other queues, the earlier phase has ended
            continue
        for index in (index for phase in PHASES for index in _before_the_device(schedule, phase)):
            instruction = schedule.instructions[index]
            for name in (*instruction.reads, *instruction.writes):
                buffer, writes = schedule.buffers[name], name in instruction.writes
                in_arena, at_home = (buffer.tier, buffer.kind) == ("host", "placed"), buffer.kind == "home"
                if (in_arena and "host" in written) or (writes and (in_arena or at_home) and buffer.tier in read):
                    left = f"copies on {queue} that a dropped forward left in flight"
                    what = f"expected {left} complete first, found them unordered: they may use the bytes of {name}"
                    raise error(schedule, "I2", index, f"{what}; wait for them")


def _before_the_device(schedule: Schedule, phase: Phase) -> Iterator[int]:
    """Yields the instructions of a phase that come after none of the device's queues. Those alone await all of the earlier
    phases: what these left, and the host does not await, may still run."""
    after, newest = set[int](), dict[Queue, int]()
    for index, instruction in schedule.phase(phase):
        mine = instruction.queue
        if mine not in HOST_QUEUES or newest.get(mine) in after or not after.isdisjoint(instruction.deps):
            after.add(index)
        else:
            yield index
        newest[mine] = index


def _runs_ahead(facts: Facts) -> None:
    """Proves I1 and I2 between what a backward leaves on queue host and the next forward: the two as one phase, in which
    the forward's waits on the previous step are waits like any others."""
    if not (schedule := facts.schedule).run_ahead:
        return
    last = {each.queue: i for i, each in schedule.phase(PHASES[1]) if each.queue != "host"}
    on_host = (i for i, each in schedule.phase(PHASES[1]) if each.queue == "host")
    unfinished = [i for i in on_host if not any(facts.before(i, other) for other in last.values())]  # the others have drained
    place = {index: position for position, index in enumerate(unfinished)}
    rows = [changed(schedule.instructions[index], phase=PHASES[0], deps=(), previous_step_deps=()) for index in unfinished]
    following = {index: len(unfinished) + position for position, (index, _) in enumerate(schedule.phase(PHASES[0]))}
    for _, instruction in schedule.phase(PHASES[0]):
        waits = [place[dep] for dep in instruction.previous_step_deps if dep in place]
        waits += [following[dep] for dep in instruction.deps]
        rows.append(changed(instruction, deps=tuple(sorted(waits)), previous_step_deps=()))
    together = replace(schedule, instructions=tuple(rows), run_ahead=False)
    where = f"with the previous step, whose queue host comes first (#0 to #{len(unfinished) - 1})"
    _race_free(together, Order(together).before, facts.pieces, where)
