"""Gives placed buffers their offsets: two slots share bytes only when their lives do not overlap."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtcompile.runtime.schedule import Buffer, Instruction, placed


def assign_offsets(
    instructions: Sequence[Instruction], buffers: Mapping[str, Buffer]
) -> tuple[dict[str, Buffer], dict[str, int]]:
    """Returns all buffers, the placed ones with an offset in their tier's arena, and the size of each arena in bytes.

    Buffers are placed largest first, each at the lowest offset that is free during its whole life (by list order), which is
    deterministic.
    """
    start: dict[str, int] = {}
    end: dict[str, int] = {}
    for position, instruction in enumerate(instructions):
        if instruction.op == "alloc":
            start[instruction.writes[0]] = position
        elif instruction.op == "free":
            end[instruction.writes[0]] = position
    slots = sorted((b for b in buffers.values() if b.kind == "placed"), key=lambda b: (-b.nbytes, start[b.name], b.name))
    arenas = {"device": 0, "host": 0}
    located: dict[str, Buffer] = {}
    rows: dict[str, list[tuple[int, int, int, int]]] = {"device": [], "host": []}  # offset, end offset, start, end
    for buffer in slots:
        first, last = start[buffer.name], end.get(buffer.name, len(instructions))
        size = placed(buffer.nbytes)
        offset = 0
        for low, high, other_first, other_last in rows[buffer.tier]:
            if other_first <= last and first <= other_last:
                if offset + size <= low:
                    break
                offset = max(offset, high)
        insort(rows[buffer.tier], (offset, offset + size, first, last))
        arenas[buffer.tier] = max(arenas[buffer.tier], offset + size)
        located[buffer.name] = replace(buffer, offset=offset)
    return {name: located.get(name, buffer) for name, buffer in buffers.items()}, arenas
