"""Counts how much of each tier a schedule holds, and for what: the one walk over live bytes that all readers share.

A tier holds its resident homes and its arena at all times. Beside them it holds pooled buffers from their ``alloc`` to
their ``free`` (those that the user receives are never freed), a running kernel's workspace, and the tangents, which the
caller owns throughout the backward. Slots lie within the arena, so they tell what it is used for and add nothing.

``runtime/verify.py`` counts the same bytes again, by a walk of its own, to prove the peaks that are computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mtcompile.runtime.schedule import PHASES, TIERS, Schedule, Tier, aligned, changed, placed

Place = Literal["slot", "pooled", "workspace", "tangent"]


class Change(NamedTuple):
    """``nbytes`` more (or fewer) are held in ``tier`` when the instruction of this index starts or, if ``at_end``, ends.
    ``role`` is the buffer's; empty for workspace."""

    instruction: int
    at_end: bool
    tier: Tier
    place: Place
    role: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that one tier holds beside its resident homes, from instruction ``index`` on. ``slots`` lie in the arena."""

    index: int = -1
    slots: int = 0
    pooled: int = 0
    workspace: int = 0
    tangents: int = 0


def changes(schedule: Schedule) -> Iterator[Change]:
    """Yields every change in list order, which is the order in which one thread would run the instructions."""
    buffers = schedule.buffers
    tangents = sum(b.nbytes for b in buffers.values() if b.role == "tangent" and b.tier == "device")
    for index, instruction in enumerate(schedule.instructions):
        if instruction.op in ("alloc", "free"):
            buffer = buffers[instruction.writes[0]]
            sign = 1 if instruction.op == "alloc" else -1
            place: Place = "slot" if buffer.kind == "placed" else "pooled"
            yield Change(index, False, buffer.tier, place, buffer.role, sign * buffer.nbytes)
        if tangents and instruction.phase == PHASES[1]:
            yield Change(index, False, "device", "tangent", "tangent", tangents)
            tangents = 0
        if instruction.workspace:
            yield Change(index, False, "device", "workspace", "", instruction.workspace)
            yield Change(index, True, "device", "workspace", "", -instruction.workspace)


def walk(schedule: Schedule, tier: Tier = "device") -> Iterator[Usage]:
    """Yields what ``tier`` holds before the first instruction, and then after every change, in list order."""
    usage = Usage()
    yield usage
    fields: Mapping[Place, str] = {"slot": "slots", "pooled": "pooled", "workspace": "workspace", "tangent": "tangents"}
    for change in changes(schedule):
        if change.tier == tier:
            field = fields[change.place]
            usage = changed(usage, index=change.instruction, **{field: getattr(usage, field) + change.nbytes})
            yield usage


def peaks(schedule: Schedule) -> dict[str, int]:
    """Returns the most bytes that each tier in use holds at once."""
    used = {b.tier for b in schedule.buffers.values()} | schedule.arena_nbytes.keys() | schedule.resident_nbytes.keys()
    held = {tier: schedule.resident_nbytes.get(tier, 0) + schedule.arena_nbytes.get(tier, 0) for tier in TIERS}
    most: dict[str, int] = {tier: held[tier] for tier in TIERS if tier in used}
    for change in changes(schedule):
        if change.place != "slot":
            held[change.tier] += change.nbytes
            most[change.tier] = max(most[change.tier], held[change.tier])
    return most


def held_between_phases(schedule: Schedule) -> dict[str, int]:
    """Returns the bytes per tier that one forward holds until its backward, beside what all of them share. Its device slots are
    free by then; its arenas on host and disk are its own."""
    pooled = sum(
        change.nbytes
        for change in changes(schedule)
        if change.place == "pooled" and change.tier == "device" and schedule.instructions[change.instruction].phase == PHASES[0]
    )
    arenas = {tier: schedule.arena_nbytes.get(tier, 0) for tier in ("host", "disk")}
    return {"device": aligned(pooled), **arenas}


def pooled_nbytes(schedule: Schedule, index: int, role: str) -> int:
    """Returns the bytes of one role that the device holds outside of its arena once instruction ``index`` starts: as "param",
    fetched parameters."""
    pooled = (c for c in changes(schedule) if (c.tier, c.place, c.role) == ("device", "pooled", role))
    return sum(change.nbytes for change in pooled if change.instruction <= index)


def allocated_together(schedule: Schedule) -> dict[str, tuple[str, int, int]]:
    """Returns pooled value -> (the first one, its byte, all bytes) of the allocation that it shares with its neighbours in one
    copy to the device, so that they can cross as one. They are freed at the same time, and have no padding between them: the
    bytes that are held at any time are those of single allocations."""
    freed: dict[str, int] = {}  # after how many copies and runs
    work = 0
    for instruction in schedule.instructions:
        work += instruction.op in ("copy", "run")
        if instruction.op == "free":
            freed[instruction.writes[0]] = work
    shared: dict[str, tuple[str, int, int]] = {}
    for instruction in schedule.instructions:
        if instruction.op != "copy" or instruction.queue != "h2d":
            continue
        alike: dict[int | None, list[str]] = {}
        for name in instruction.writes:
            if schedule.buffers[name].kind == "pooled" and schedule.buffers[name].role == "param":
                alike.setdefault(freed.get(name), []).append(name)
        for names in alike.values():
            while names:
                sizes = [schedule.buffers[name].nbytes for name in names]
                count = next((i + 1 for i, nbytes in enumerate(sizes) if nbytes != placed(nbytes)), len(names))
                for i, name in enumerate(names[:count]) if count > 1 else ():
                    shared[name] = names[0], sum(sizes[:i]), sum(sizes[:count])
                names = names[count:]
    return shared


def most_in_slots(schedule: Schedule, tier: Tier, role: str) -> int:
    """Returns the most bytes of a tier's arena that buffers of one role take at once, with their padding."""
    live = most = 0
    for change in changes(schedule):
        if (change.tier, change.place, change.role) == (tier, "slot", role):
            live += placed(change.nbytes, tier) if change.nbytes > 0 else -placed(-change.nbytes, tier)
            most = max(most, live)
    return most


def over_time(schedule: Schedule, times: Mapping[int, tuple[float, float]]) -> list[tuple[float, Change]]:
    """Returns the changes with the time of each, in µs, in order of time.

    ``times``: instruction -> its start and end; changes of instructions without one are left out. Tangents are there from
    the first start of the backward. Changes at the same time keep their list order."""
    backward = [start for index, (start, _) in times.items() if schedule.instructions[index].phase == PHASES[1]]
    timed = [
        (min(backward) if change.place == "tangent" else times[change.instruction][change.at_end], change)
        for change in changes(schedule)
        if (backward if change.place == "tangent" else change.instruction in times)
    ]
    return sorted(timed, key=lambda pair: (pair[0], pair[1].instruction))
