"""Gives placed buffers their offsets: two slots share bytes only when their lives do not overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtcompile.runtime.schedule import TIERS, Buffer, Instruction, placed


def assign_offsets(
    instructions: Sequence[Instruction], buffers: Mapping[str, Buffer]
) -> tuple[dict[str, Buffer], dict[str, int]]:
    """Returns all buffers, the placed ones with an offset in their tier's arena, and the size of each arena in bytes.

    Buffers are placed largest first, each at the lowest offset that is free during its whole life (by list order), which is
    deterministic.
    """
    start = {i.writes[0]: position for position, i in enumerate(instructions) if i.op == "alloc"}
    ranges: dict[str, tuple[int, int]] = {}  # offset and end offset of each buffer that has its place
    slots = sorted((b for b in buffers.values() if b.kind == "placed"), key=lambda b: (-b.nbytes, start[b.name], b.name))
    arenas = {"device": 0, "host": 0}
    located: dict[str, Buffer] = {}
    beside = _beside(instructions, buffers)
    for buffer in slots:
        size = placed(buffer.nbytes)
        offset = 0
        for low, high in sorted(ranges[other] for other in beside[buffer.name] if other in ranges):
            if offset + size <= low:
                break
            offset = max(offset, high)
        ranges[buffer.name] = offset, offset + size
        arenas[buffer.tier] = max(arenas[buffer.tier], offset + size)
        located[buffer.name] = _at(buffer, offset)
    return {name: located.get(name, buffer) for name, buffer in buffers.items()}, arenas


def _beside(instructions: Sequence[Instruction], buffers: Mapping[str, Buffer]) -> dict[str, list[str]]:
    """Returns, for each placed buffer, those of its tier whose lives have an instruction in common with its own."""
    beside: dict[str, list[str]] = {}
    live: dict[str, dict[str, None]] = {tier: {} for tier in TIERS}
    for instruction in instructions:
        if instruction.op == "alloc" or instruction.op == "free":
            name = instruction.writes[0]
            if buffers[name].kind == "placed":
                others = live[buffers[name].tier]
                if instruction.op == "free":
                    del others[name]
                else:
                    beside[name] = list(others)
                    for other in others:
                        beside[other].append(name)
                    others[name] = None
    return beside


def _at(b: Buffer, offset: int) -> Buffer:
    return Buffer(b.name, b.value, b.tier, b.kind, b.nbytes, b.role, offset, b.returned, b.version_of)
