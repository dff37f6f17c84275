"""Corruptions of what a schedule says: its buffer table, its totals and the figures of its instructions.

Each is made as by a lowering that got one thing wrong and everything after it right: where a change calls for it, waits are
derived and peaks computed anew, so that nothing but the one thing is left to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from mtcompile.runtime.deps import derive
from mtcompile.runtime.schedule import ALIGNMENT, Buffer, Instruction, Schedule
from mtcompile.runtime.usage import peaks

Site = Callable[[], Schedule]


def mutants(schedule: Schedule, seed: int, per_kind: int = 4) -> Iterator[tuple[str, Schedule]]:
    """Up to ``per_kind`` mutants of every kind, named, the same ones for the same seed."""
    rng = Random(seed)
    for kind, sites in KINDS.items():
        candidates = list(sites(schedule, rng))
        for site in rng.sample(candidates, min(per_kind, len(candidates))):
            yield kind, site()


# edits


def _completed(schedule: Schedule) -> Schedule:
    """With waits and peaks as a lowering would go on to make them."""
    schedule = derive(schedule)
    return replace(schedule, peak_nbytes=peaks(schedule))


def _buffers(schedule: Schedule, *changed: Buffer) -> Schedule:
    return _completed(replace(schedule, buffers={**schedule.buffers, **{buffer.name: buffer for buffer in changed}}))


def _row(schedule: Schedule, index: int, **changes: Any) -> Schedule:
    rows = list(schedule.instructions)
    rows[index] = replace(rows[index], **changes)
    return _completed(replace(schedule, instructions=tuple(rows)))


def _renamed(schedule: Schedule, names: dict[str, str]) -> tuple[Instruction, ...]:
    """The instructions with other operands."""
    rows = []
    for i in schedule.instructions:
        reads, writes = (tuple(names.get(name, name) for name in each) for each in (i.reads, i.writes))
        rows.append(replace(i, reads=reads, writes=writes))
    return tuple(rows)


def _of_kind(schedule: Schedule, *kinds: str) -> list[Buffer]:
    return [buffer for buffer in schedule.buffers.values() if buffer.kind in kinds]


def _work(schedule: Schedule, *ops: str) -> list[tuple[int, Instruction]]:
    return [(index, i) for index, i in enumerate(schedule.instructions) if i.op in ops]


def _pairs(rows: list[Buffer], rng: Random) -> Iterator[tuple[Buffer, Buffer]]:
    """Two of the same place and size."""
    for one in rows:
        alike = [b for b in rows if (b.tier, b.nbytes, b.kind) == (one.tier, one.nbytes, one.kind) and b.name > one.name]
        if alike:
            yield one, rng.choice(alike)


# kinds: each yields the places where it applies


def exchange_homes(s: Schedule, rng: Random) -> Iterator[Site]:
    """Two homes change places, in the table and in all instructions: only the executor, which binds by name, differs."""

    def site(one: Buffer, other: Buffer) -> Schedule:
        rows = _renamed(s, {one.name: other.name, other.name: one.name})
        swapped = replace(one, name=other.name), replace(other, name=one.name)
        versions = [replace(b, version_of={one.name: other.name, other.name: one.name}.get(b.version_of, b.version_of))
                    for b in s.buffers.values() if b.version_of]  # fmt: skip
        return _buffers(replace(s, instructions=rows), *versions, *swapped)

    for pair in _pairs([b for b in _of_kind(s, "home") if not b.version_of], rng):
        yield partial(site, *pair)


def exchange_values(s: Schedule, rng: Random) -> Iterator[Site]:
    """Two buffers' values are exchanged, in the table alone."""
    for one, other in _pairs(_of_kind(s, "home", "placed", "pooled"), rng):
        if one.value != other.value:
            yield partial(_buffers, s, replace(one, value=other.value), replace(other, value=one.value))


def shrink_a_value(s: Schedule, rng: Random) -> Iterator[Site]:
    """Every buffer of a value is smaller than its tensor; copies of it agree."""
    for value in dict.fromkeys(b.value for b in s.buffers.values() if b.nbytes):
        own = [b for b in s.buffers.values() if b.value == value]
        bases = {b.version_of for b in own} | {b.name for b in own}
        own = [b for b in s.buffers.values() if b.name in bases or b.version_of in bases]
        for nbytes in (own[0].nbytes - ALIGNMENT, own[0].nbytes // 2 // ALIGNMENT * ALIGNMENT):
            yield partial(_buffers, s, *(replace(b, nbytes=nbytes) for b in own))


def shrink_a_buffer(s: Schedule, rng: Random) -> Iterator[Site]:
    for b in s.buffers.values():
        if b.nbytes:
            yield partial(_buffers, s, replace(b, nbytes=b.nbytes - ALIGNMENT))


def grow_a_buffer(s: Schedule, rng: Random) -> Iterator[Site]:
    for b in _of_kind(s, "home", "pooled"):
        yield partial(_buffers, s, replace(b, nbytes=b.nbytes + ALIGNMENT))


def move_to_disk(s: Schedule, rng: Random) -> Iterator[Site]:
    """Host buffers of a value are said to be on the disk, and their copies go over its queues."""
    queues = {"h2d": "disk_read", "d2h": "disk_write"}

    def site(names: set[str]) -> Schedule:
        rows = []
        for i in s.instructions:
            if {*i.reads, *i.writes} & names and i.queue in queues:
                i = replace(i, queue=queues[i.queue])
            rows.append(i)
        moved = [replace(s.buffers[name], tier="disk") for name in names]
        return _buffers(replace(s, instructions=tuple(rows)), *moved)

    for value in dict.fromkeys(b.value for b in s.buffers.values() if b.tier == "host"):
        yield partial(site, {b.name for b in s.buffers.values() if (b.tier, b.value) == ("host", value)})


def move_to_another_tier(s: Schedule, rng: Random) -> Iterator[Site]:
    for b in s.buffers.values():
        yield partial(_buffers, s, replace(b, tier="host" if b.tier == "device" else "device"))


def placed_turned_pooled(s: Schedule, rng: Random) -> Iterator[Site]:
    def site(b: Buffer) -> Schedule:
        rows = [replace(i, queue="compute") if i.op in ("alloc", "free") and b.name in i.writes else i for i in s.instructions]
        return _buffers(replace(s, instructions=tuple(rows)), replace(b, kind="pooled", offset=None))

    return (partial(site, b) for b in _of_kind(s, "placed"))


def pooled_turned_placed(s: Schedule, rng: Random) -> Iterator[Site]:
    """At the end of its arena, which grows."""

    def site(b: Buffer) -> Schedule:
        end = s.arena_nbytes.get(b.tier, 0)
        arenas = {**s.arena_nbytes, b.tier: end + b.nbytes}
        return _buffers(replace(s, arena_nbytes=arenas), replace(b, kind="placed", offset=end))

    return (partial(site, b) for b in _of_kind(s, "pooled") if not b.returned)


def keep_what_leaves(s: Schedule, rng: Random) -> Iterator[Site]:
    """An output that no longer leaves: it is freed after its last use."""

    def site(b: Buffer) -> Schedule:
        last = max(index for index, i in enumerate(s.instructions) if b.name in (*i.reads, *i.writes))
        free = Instruction("free", "compute", s.instructions[last].phase, writes=(b.name,), block=s.instructions[last].block)
        rows = (*s.instructions[: last + 1], free, *s.instructions[last + 1 :])
        return _buffers(replace(s, instructions=rows), replace(b, returned=False))

    return (partial(site, b) for b in s.buffers.values() if b.returned)


def let_leave(s: Schedule, rng: Random) -> Iterator[Site]:
    """A value within the step is never freed, as if it were the user's."""

    def site(b: Buffer) -> Schedule:
        rows = tuple(i for i in s.instructions if not (i.op == "free" and i.writes == (b.name,)))
        return _buffers(replace(s, instructions=rows), replace(b, returned=True))

    return (partial(site, b) for b in _of_kind(s, "pooled") if not b.returned)


def home_turned_slot(s: Schedule, rng: Random) -> Iterator[Site]:
    """What should arrive at home lands in the arena and is freed there."""

    def site(b: Buffer) -> Schedule:
        rows: list[Instruction] = []
        last = max(index for index, i in enumerate(s.instructions) if b.name in (*i.reads, *i.writes))
        for index, i in enumerate(s.instructions):
            if b.name in i.writes:
                rows.append(Instruction("alloc", i.queue, i.phase, writes=(b.name,), block=i.block))
            rows.append(i)
            if index == last:
                rows.append(Instruction("free", i.queue, i.phase, writes=(b.name,), block=i.block))
        end = s.arena_nbytes.get("host", 0)
        arenas = {**s.arena_nbytes, "host": end + b.nbytes}
        slot = replace(b, kind="placed", offset=end)
        return _buffers(replace(s, instructions=tuple(rows), arena_nbytes=arenas), slot)

    written = {name for i in s.instructions for name in i.writes}
    return (partial(site, b) for b in _of_kind(s, "home") if b.name in written and not b.version_of and b.tier == "host")


def change_a_role(s: Schedule, rng: Random) -> Iterator[Site]:
    """Of a value, in all of its buffers."""
    roles = ("param", "grad", "state", "activation", "input", "output", "buffer", "constant", "tangent", "rng")
    for value in dict.fromkeys(b.value for b in s.buffers.values()):
        own = [b for b in s.buffers.values() if b.value == value]
        role: Any = rng.choice([role for role in roles if role != own[0].role])
        yield partial(_buffers, s, *(replace(b, role=role) for b in own))


def forget_a_version(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_buffers, s, replace(b, version_of="")) for b in s.buffers.values() if b.version_of)


def exchange_versions(s: Schedule, rng: Random) -> Iterator[Site]:
    """Two updates write over each other's parameter."""
    for one, other in _pairs([b for b in s.buffers.values() if b.version_of], rng):
        yield partial(_buffers, s, replace(one, version_of=other.version_of), replace(other, version_of=one.version_of))


def use_another_name(s: Schedule, rng: Random) -> Iterator[Site]:
    """A kernel reads another buffer of the same place and size, of whatever value; the table says that it is the right one."""
    for index, i in _work(s, "run"):
        for place, name in enumerate(i.reads):
            own = s.buffers[name]
            alike = [
                b for b in s.buffers.values() if (b.tier, b.nbytes, b.kind) == (own.tier, own.nbytes, "home") and b.name != name
            ]
            if alike and own.kind == "home":
                other = rng.choice(alike)
                reads = (*i.reads[:place], other.name, *i.reads[place + 1 :])
                yield partial(_row, _buffers(s, replace(other, value=own.value)), index, reads=reads)


def exchange_operands(s: Schedule, rng: Random) -> Iterator[Site]:
    for index, i in _work(s, "run"):
        alike = [
            (a, b)
            for a in range(len(i.reads))
            for b in range(a)
            if s.buffers[i.reads[a]].nbytes == s.buffers[i.reads[b]].nbytes and i.reads[a] != i.reads[b]
        ]
        if alike:
            a, b = rng.choice(alike)
            reads = list(i.reads)
            reads[a], reads[b] = reads[b], reads[a]
            yield partial(_row, s, index, reads=tuple(reads))


def exchange_results(s: Schedule, rng: Random) -> Iterator[Site]:
    for index, i in _work(s, "run"):
        if len(i.writes) > 1:
            a, b = rng.sample(range(len(i.writes)), 2)
            writes = list(i.writes)
            writes[a], writes[b] = writes[b], writes[a]
            yield partial(_row, s, index, writes=tuple(writes))


def forget_an_operand(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_row, s, index, reads=i.reads[1:]) for index, i in _work(s, "run") if i.reads)


def call_another_kernel(s: Schedule, rng: Random) -> Iterator[Site]:
    kernels = sorted({i.kernel for _, i in _work(s, "run")})
    for index, i in _work(s, "run"):
        yield partial(_row, s, index, kernel=rng.choice([kernel for kernel in kernels if kernel != i.kernel]))


def change_a_phase(s: Schedule, rng: Random) -> Iterator[Site]:
    """The last of the forward come with the backward, or the first of the backward with the forward."""
    first = next((index for index, i in enumerate(s.instructions) if i.phase == "backward"), None)

    def site(low: int, high: int, phase: Any) -> Schedule:
        rows = [replace(i, phase=phase) if low <= index < high else i for index, i in enumerate(s.instructions)]
        return _completed(replace(s, instructions=tuple(rows)))

    for count in (1, 2, 4, 8, 16):
        if first is not None:
            yield partial(site, first - count, first, "backward")
            yield partial(site, first, first + count, "forward")


def shrink_a_workspace(s: Schedule, rng: Random) -> Iterator[Site]:
    for index, i in _work(s, "run"):
        if i.workspace:
            for nbytes in (0, i.workspace // 2):
                yield partial(_row, s, index, workspace=nbytes)


def shrink_what_is_resident(s: Schedule, rng: Random) -> Iterator[Site]:
    for tier, nbytes in s.resident_nbytes.items():
        for less in (ALIGNMENT, nbytes // 2, nbytes):
            if 0 < less <= nbytes:
                yield lambda t=tier, n=nbytes - less: _completed(replace(s, resident_nbytes={**s.resident_nbytes, t: n}))


def raise_a_limit(s: Schedule, rng: Random) -> Iterator[Site]:
    for tier, nbytes in s.budget_nbytes.items():
        yield partial(replace, s, budget_nbytes={**s.budget_nbytes, tier: nbytes + ALIGNMENT})
        yield partial(replace, s, budget_nbytes={t: n for t, n in s.budget_nbytes.items() if t != tier})


def grow_a_total(s: Schedule, rng: Random) -> Iterator[Site]:
    for table in ("arena_nbytes", "resident_nbytes", "peak_nbytes"):
        for tier, nbytes in getattr(s, table).items():
            changed: Any = {table: {**getattr(s, table), tier: nbytes + ALIGNMENT}}
            yield partial(replace, s, **changed)


def turn_run_ahead(s: Schedule, rng: Random) -> Iterator[Site]:
    yield lambda: _completed(replace(s, run_ahead=not s.run_ahead))


def change_copied_bytes(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_row, s, index, nbytes=i.nbytes - ALIGNMENT) for index, i in _work(s, "copy") if i.nbytes)


def change_what_it_is_for(s: Schedule, rng: Random) -> Iterator[Site]:
    for index, i in _work(s, "copy", "run"):
        yield partial(_row, s, index, **rng.choice([{"block": "nowhere"}, {"work": ""}, {"label": f"{i.label}_too"}]))


_FUNCTIONS: tuple[Callable[[Schedule, Random], Iterator[Site]], ...] = (
    exchange_homes, exchange_values, shrink_a_value, shrink_a_buffer, grow_a_buffer, move_to_disk, move_to_another_tier,
    placed_turned_pooled, pooled_turned_placed, keep_what_leaves, let_leave, home_turned_slot, change_a_role, forget_a_version,
    exchange_versions, use_another_name, exchange_operands, exchange_results, forget_an_operand, call_another_kernel,
    change_a_phase, shrink_a_workspace, shrink_what_is_resident, raise_a_limit, grow_a_total, turn_run_ahead,
    change_copied_bytes, change_what_it_is_for,
)  # fmt: skip
KINDS = {function.__name__: function for function in _FUNCTIONS}
