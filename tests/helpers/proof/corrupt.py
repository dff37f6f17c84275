"""Corruptions of a schedule: one small change each, of the kinds a faulty pass would make. Most are unsafe, not all.

Every corruption keeps the dependencies of the instructions it does not touch, and none asks ``derive`` for new ones: a
faulty pass is caught by the proof, not repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from mtcompile.runtime.schedule import ALIGNMENT, Buffer, Instruction, Schedule

Site = Callable[[], Schedule]  # makes one mutant
Item = tuple[int | None, Instruction]  # (index in the original, or None for a new one; instruction with original deps)


def mutants(schedule: Schedule, seed: int, per_kind: int = 8) -> Iterator[tuple[str, Schedule]]:
    """Up to ``per_kind`` mutants of every kind, named, the same ones for the same seed."""
    rng = Random(seed)
    for kind, sites in KINDS.items():
        found = list(sites(schedule, rng))
        for number, site in enumerate(rng.sample(found, min(per_kind, len(found)))):
            yield f"{kind} {number}", site()


# edits


def _relist(schedule: Schedule, items: list[Item]) -> Schedule:
    """The instructions in the order of ``items``. Whoever waited for a dropped instruction waits for what that came
    after (its queue's previous instruction and its own deps); waits that would point forward are dropped."""
    place = {old: new for new, (old, _) in enumerate(items) if old is not None}

    def resolve(old: int) -> set[int]:
        if old in place:
            return {place[old]}
        gone = schedule.instructions[old]
        previous = [j for j in range(old) if schedule.instructions[j].queue == gone.queue]
        return {new for d in (*previous[-1:], *gone.deps) for new in resolve(d)}

    rows = []
    for new, (_, instruction) in enumerate(items):
        deps = {d for old in instruction.deps for d in resolve(old) if d < new}
        rows.append(replace(instruction, deps=tuple(sorted(deps))))
    return replace(schedule, instructions=tuple(rows))


def _items(schedule: Schedule) -> list[Item]:
    return list(enumerate(schedule.instructions))


def _drop(schedule: Schedule, i: int) -> Schedule:
    items = _items(schedule)
    del items[i]
    return _relist(schedule, items)


def _move(schedule: Schedule, i: int, to: int, **changes: Any) -> Schedule:
    """Instruction ``i``, changed, stands before the instruction now at ``to`` (``len(schedule)``: at the end)."""
    items = _items(schedule)
    old, instruction = items.pop(i)
    items.insert(to - (to > i), (old, replace(instruction, **changes)))
    return _relist(schedule, items)


def _insert(schedule: Schedule, at: int, instruction: Instruction) -> Schedule:
    items = _items(schedule)
    items.insert(at, (None, instruction))
    return _relist(schedule, items)


def _edit(schedule: Schedule, i: int, **changes: Any) -> Schedule:
    rows = list(schedule.instructions)
    rows[i] = replace(rows[i], **changes)
    return replace(schedule, instructions=tuple(rows))


def _edit_buffer(schedule: Schedule, name: str, **changes: Any) -> Schedule:
    buffers = dict(schedule.buffers)
    buffers[name] = replace(buffers[name], **changes)
    return replace(schedule, buffers=buffers)


def _less(table: Mapping[str, int], tier: str) -> dict[str, int]:
    return {**table, tier: table[tier] - ALIGNMENT}


def _where(schedule: Schedule, *ops: str) -> list[tuple[int, Instruction]]:
    return [(i, ins) for i, ins in enumerate(schedule.instructions) if ins.op in ops]


def _previous(schedule: Schedule, i: int) -> int | None:
    """The instruction before ``i`` on its queue and in its phase."""
    me = schedule.instructions[i]
    for j in range(i - 1, -1, -1):
        if schedule.instructions[j].phase != me.phase:
            return None
        if schedule.instructions[j].queue == me.queue:
            return j
    return None


def _users(schedule: Schedule, name: str) -> list[int]:
    return [i for i, ins in _where(schedule, "copy", "run") if name in ins.reads or name in ins.writes]


def _other(schedule: Schedule, buffer: Buffer, rng: Random, **same: Any) -> Buffer | None:
    """Some other buffer of the same tier and size with another value."""
    fits = [
        b for b in schedule.buffers.values() if b.tier == buffer.tier and b.nbytes == buffer.nbytes and b.value != buffer.value
    ]
    fits = [b for b in fits if all(getattr(b, key) == value for key, value in same.items())]
    return rng.choice(fits) if fits else None


# kinds: each yields the places where it applies


def drop_a_dep(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in enumerate(s.instructions):
        for dep in ins.deps:
            yield partial(_edit, s, i, deps=tuple(d for d in ins.deps if d != dep))


def drop_all_deps(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_edit, s, i, deps=()) for i, ins in enumerate(s.instructions) if ins.deps)


def wait_for_the_one_before(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in enumerate(s.instructions):
        for dep in ins.deps:
            earlier = _previous(s, dep)
            rest = [d for d in ins.deps if d != dep] + [d for d in (earlier,) if d is not None]
            yield partial(_edit, s, i, deps=tuple(sorted(set(rest))))


def wait_one_too_late(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in enumerate(s.instructions):
        before = _previous(s, i)
        if before is not None and s.instructions[before].deps:
            deps = tuple(sorted({*ins.deps, *s.instructions[before].deps}))
            yield partial(_edit, _edit(s, before, deps=()), i, deps=deps)


def swap_neighbours(s: Schedule, rng: Random) -> Iterator[Site]:
    for i in range(len(s)):
        before = _previous(s, i)
        if before is not None:

            def site(i: int = i, before: int = before) -> Schedule:
                items = _items(s)
                items[i], items[before] = items[before], items[i]
                return _relist(s, items)

            yield site


def free_earlier(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "free"):
        users = [j for j in _users(s, ins.writes[0]) if j < i and s.instructions[j].phase == ins.phase]
        if users:
            yield partial(_move, s, i, users[-1])


def free_without_waiting(s: Schedule, rng: Random) -> Iterator[Site]:
    """Right after the last use in the list, but on a queue that does not wait for it."""
    for i, ins in _where(s, "free"):
        users = [j for j in _users(s, ins.writes[0]) if j < i and s.instructions[j].phase == ins.phase]
        queues = sorted({other.queue for other in s.instructions} - {ins.queue})
        if users and queues:
            yield partial(_move, s, i, users[-1] + 1, queue=rng.choice(queues), deps=())


def drop_a_free(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_drop, s, i) for i, _ in _where(s, "free"))


def drop_a_copy(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_drop, s, i) for i, _ in _where(s, "copy"))


def drop_a_run(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_drop, s, i) for i, _ in _where(s, "run"))


def drop_an_alloc(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(_drop, s, i) for i, _ in _where(s, "alloc"))


def alloc_too_late(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "alloc"):
        users = _users(s, ins.writes[0])
        if users:
            yield partial(_move, s, i, users[0] + 1)


def alloc_on_another_queue(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "alloc"):
        for queue in sorted({other.queue for other in s.instructions} - {ins.queue}):
            yield partial(_edit, s, i, queue=queue, deps=())


def work_on_another_queue(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "copy", "run"):
        for queue in sorted({other.queue for other in s.instructions} - {ins.queue}):
            deps = tuple(d for d in ins.deps if s.instructions[d].queue != queue)
            yield partial(_edit, s, i, queue=queue, deps=deps)


def double_free(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "free"):
        yield partial(_insert, s, i + 1, replace(ins, deps=()))


def free_what_is_returned(s: Schedule, rng: Random) -> Iterator[Site]:
    for b in s.buffers.values():
        users = _users(s, b.name)
        if users and (b.returned or b.kind == "home"):
            last = s.instructions[users[-1]]
            free = Instruction("free", last.queue, last.phase, writes=(b.name,))
            yield partial(_insert, s, users[-1] + 1, free)


def duplicate_a_gradient(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "copy"):
        target = s.buffers[ins.writes[0]]
        if target.kind == "home" and target.role in ("grad", "buffer"):
            yield partial(_insert, s, i + 1, replace(ins, deps=()))

            def site(i: int = i, ins: Instruction = ins, target: Buffer = target) -> Schedule:
                second = replace(target, name=f"{target.name}.second")
                extended = replace(s, buffers={**s.buffers, second.name: second})
                return _insert(extended, i + 1, replace(ins, deps=(), writes=(second.name, *ins.writes[1:])))

            yield site


def copy_another_source(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "copy"):
        other = _other(s, s.buffers[ins.reads[0]], rng)
        if other is not None:
            yield partial(_edit, s, i, reads=(other.name, *ins.reads[1:]))


def copy_to_another_home(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "copy"):
        target = s.buffers[ins.writes[0]]
        other = _other(s, target, rng, kind="home")
        if target.kind == "home" and other is not None:
            yield partial(_edit, s, i, writes=(other.name, *ins.writes[1:]))


def read_another_value(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "run"):
        for k, name in enumerate(ins.reads):
            other = _other(s, s.buffers[name], rng)
            if other is not None:
                yield partial(_edit, s, i, reads=(*ins.reads[:k], other.name, *ins.reads[k + 1 :]))


def write_another_buffer(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in _where(s, "run"):
        other = _other(s, s.buffers[ins.writes[0]], rng) if ins.writes else None
        if other is not None:
            yield partial(_edit, s, i, writes=(other.name, *ins.writes[1:]))


def shift_an_offset(s: Schedule, rng: Random) -> Iterator[Site]:
    for b in s.buffers.values():
        if b.offset is not None:
            for offset in (b.offset - ALIGNMENT, b.offset + ALIGNMENT, b.offset + ALIGNMENT // 2):
                yield partial(_edit_buffer, s, b.name, offset=offset)


def take_anothers_offset(s: Schedule, rng: Random) -> Iterator[Site]:
    for b in s.buffers.values():
        same_tier = [o.offset for o in s.buffers.values() if o.tier == b.tier and o.offset != b.offset]
        others = sorted({offset for offset in same_tier if offset is not None})
        if b.offset is not None and others:
            yield partial(_edit_buffer, s, b.name, offset=rng.choice(others))


def shrink_an_arena(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(replace, s, arena_nbytes=_less(s.arena_nbytes, t)) for t, n in s.arena_nbytes.items() if n)


def lower_a_peak(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(replace, s, peak_nbytes=_less(s.peak_nbytes, t)) for t, n in s.peak_nbytes.items() if n)


def shrink_a_limit(s: Schedule, rng: Random) -> Iterator[Site]:
    return (partial(replace, s, budget_nbytes=_less(s.budget_nbytes, t)) for t, n in s.budget_nbytes.items() if n)


def need_more_workspace(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, _ in _where(s, "run"):
        yield partial(_edit, s, i, workspace=s.peak_nbytes.get("device", 0) + ALIGNMENT)


def grow_a_pooled_value(s: Schedule, rng: Random) -> Iterator[Site]:
    for b in s.buffers.values():
        if b.kind == "pooled":
            yield partial(_edit_buffer, s, b.name, nbytes=b.nbytes + s.peak_nbytes.get(b.tier, 0))


def keep_a_slot_into_backward(s: Schedule, rng: Random) -> Iterator[Site]:
    starts = [i for i in range(1, len(s)) if s.instructions[i].phase != s.instructions[i - 1].phase]
    for i, _ in _where(s, "free"):
        if starts and i < starts[0]:
            yield partial(_move, s, i, starts[0], phase="backward", deps=())


def use_in_the_other_phase(s: Schedule, rng: Random) -> Iterator[Site]:
    starts = [i for i in range(1, len(s)) if s.instructions[i].phase != s.instructions[i - 1].phase]
    for i, _ in _where(s, "copy", "run"):
        if starts and i >= starts[0]:
            yield partial(_move, s, i, starts[0], phase="forward")


def deadlock(s: Schedule, rng: Random) -> Iterator[Site]:
    for i, ins in enumerate(s.instructions):
        for dep in ins.deps:
            yield partial(_edit, s, dep, deps=(*s.instructions[dep].deps, i))


_FUNCTIONS: tuple[Callable[[Schedule, Random], Iterator[Site]], ...] = (
    drop_a_dep,
    drop_all_deps,
    wait_for_the_one_before,
    wait_one_too_late,
    swap_neighbours,
    free_earlier,
    free_without_waiting,
    drop_a_free,
    drop_a_copy,
    drop_a_run,
    drop_an_alloc,
    alloc_too_late,
    alloc_on_another_queue,
    work_on_another_queue,
    double_free,
    free_what_is_returned,
    duplicate_a_gradient,
    copy_another_source,
    copy_to_another_home,
    read_another_value,
    write_another_buffer,
    shift_an_offset,
    take_anothers_offset,
    shrink_an_arena,
    lower_a_peak,
    shrink_a_limit,
    need_more_workspace,
    grow_a_pooled_value,
    keep_a_slot_into_backward,
    use_in_the_other_phase,
    deadlock,
)
KINDS = {function.__name__: function for function in _FUNCTIONS}
