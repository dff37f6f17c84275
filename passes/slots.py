"""Gives placed buffers their offsets: two slots share bytes only when their lives do not overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtcompile.runtime.schedule import TIERS, Buffer, Instruction, placed, used_by_disk


def assign_offsets(
    instructions: Sequence[Instruction], buffers: Mapping[str, Buffer]
) -> tuple[dict[str, Buffer], dict[str, int]]:
    """Returns all buffers, the placed ones with an offset in their tier's arena, and the size of each arena in bytes.

    Slots are placed largest first, each at the lowest offset that is free during its whole life (by list order), which is
    deterministic. Those on the host that a disk reads or writes begin where it does so without a copy.
    """
    slots, by_disk = slots_of(instructions, buffers), used_by_disk(instructions)
    start = {i.writes[0]: position for position, i in enumerate(instructions) if i.op == "alloc"}
    rooms = {name: _room(buffers[name], name in by_disk) for names in slots.values() for name in names}
    nbytes = {first: sum(rooms[name] for name in names) for first, names in slots.items()}
    ranges: dict[str, tuple[int, int]] = {}  # offset and end offset of each slot that has its place
    arenas = {"device": 0, "host": 0, **{b.tier: 0 for b in buffers.values() if b.kind == "placed"}}
    located: dict[str, Buffer] = {}
    beside = _beside(instructions, buffers, slots)
    for slot in sorted(slots, key=lambda name: (-nbytes[name], start[name], name)):
        size, offset, tier = nbytes[slot], 0, buffers[slot].tier
        for low, high in sorted([ranges[other] for other in beside[slot] if other in ranges]):
            if offset + size <= low:
                break
            offset = max(offset, placed(high, tier, by_disk=True) if slot in by_disk else high)
        ranges[slot] = offset, offset + size
        arenas[tier] = max(arenas[tier], offset + size)
        for name in slots[slot]:
            located[name] = _at(buffers[name], offset)
            offset += rooms[name]
    return {name: located.get(name, buffer) for name, buffer in buffers.items()}, arenas


def slots_of(instructions: Sequence[Instruction], buffers: Mapping[str, Buffer]) -> dict[str, list[str]]:
    """Returns the placed buffers of each slot, by the first of them. Buffers that the same copies and runs touch have the same
    lifetime, so they lie one behind the other in one slot."""
    touching: dict[str, list[int]] = {name: [] for name, buffer in buffers.items() if buffer.kind == "placed"}
    for position, instruction in enumerate(instructions):
        if instruction.op != "alloc" and instruction.op != "free":
            for name in (*instruction.reads, *instruction.writes):
                if name in touching:
                    touching[name].append(position)
    slots: dict[str, list[str]] = {}
    first_of: dict[tuple[str, str, tuple[int, ...]], str] = {}
    for name, positions in touching.items():
        first = first_of.setdefault((buffers[name].tier, buffers[name].role, tuple(positions)), name)
        slots.setdefault(first, []).append(name)
    return slots


def _beside(
    instructions: Sequence[Instruction], buffers: Mapping[str, Buffer], slots: Mapping[str, object]
) -> dict[str, list[str]]:
    """Returns, for each slot, the slots of its tier whose lives have an instruction in common with its own."""
    beside: dict[str, list[str]] = {}
    live: dict[str, dict[str, None]] = {tier: {} for tier in TIERS}
    for instruction in instructions:
        if instruction.op == "alloc" or instruction.op == "free":
            name = instruction.writes[0]
            if name in slots:
                others = live[buffers[name].tier]
                if instruction.op == "free":
                    del others[name]
                else:
                    beside[name] = list(others)
                    for other in others:
                        beside[other].append(name)
                    others[name] = None
    return beside


def _room(buffer: Buffer, by_disk: bool) -> int:
    """The bytes from the start of a buffer to where the next one may start."""
    return placed(buffer.nbytes, buffer.tier, by_disk)


def _at(b: Buffer, offset: int) -> Buffer:
    return Buffer(b.name, b.value, b.tier, b.kind, b.nbytes, b.role, offset, b.returned, b.version_of)
