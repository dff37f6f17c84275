"""The proof that a schedule's bytes fit (I3) and that a step gives back what it takes (I4); see ``runtime/verify``."""

from __future__ import annotations

from itertools import pairwise

from mtcompile.runtime.schedule import ALIGNMENT, BLOCK, PLACEMENT, TIERS, Buffer, Instruction, Schedule, gib
from mtcompile.runtime.verify_facts import Facts


def peaks_reached(schedule: Schedule) -> dict[str, tuple[int, int | None]]:
    """Returns, per tier in use, the peak in bytes and the first instruction that reaches it.

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


def slots_fit(facts: Facts) -> None:
    schedule = facts.schedule
    lives: dict[tuple[str, int], list[str]] = {}
    for name in sorted((n for n in facts.allocs if facts.allocs[n]), key=lambda n: facts.allocs[n][0]):
        buffer, index = schedule.buffers[name], facts.allocs[name][0]
        if buffer.offset is None:
            continue
        arena = schedule.arena_nbytes.get(buffer.tier, 0)
        if buffer.offset % (apart := BLOCK if buffer.tier == "disk" else PLACEMENT):
            raise facts.error("I3", index, f"expected offsets in steps of {apart}, found {name} at {buffer.offset}")
        if buffer.offset < 0 or buffer.offset + buffer.nbytes > arena:
            place = f"{name} at {buffer.offset} .. {buffer.offset + buffer.nbytes}"
            raise facts.error("I3", index, f"expected slots within the {buffer.tier} arena of {arena} B, found {place}")
        for piece in facts.pieces[name]:
            lives.setdefault(piece, []).append(name)
    for names in lives.values():
        for earlier, later in pairwise(names):
            index = facts.allocs[later][0]
            if not any(facts.before(free, index) for free in facts.frees[earlier]):
                what = f"{later} overlaps {earlier} in bytes while that may still be live"
                raise facts.error("I3", index, f"{what}; free {earlier} before, or place {later} elsewhere")


def tiers_fit(facts: Facts) -> None:
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
    for tier, (nbytes, at) in peaks_reached(schedule).items():
        planned = schedule.peak_nbytes.get(tier)
        if nbytes > (planned or 0):
            plan = "none" if planned is None else f"{planned} B ({gib(planned)})"
            what = f"expected a planned {tier} peak of at least {nbytes} B ({gib(nbytes)}), found {plan}"
            raise facts.error("I3", at, f"{what}; plan what verify.peak gives, or hold less here")
    for tier, planned in schedule.peak_nbytes.items():
        limit = schedule.budget_nbytes.get(tier)
        if limit is not None and planned > limit:
            what = f"expected a {tier} peak within the limit of {limit} B ({gib(limit)}), found {planned} B"
            raise facts.error("I3", None, f"{what} ({gib(planned)}); plan for less, or raise the limit")


def freed(facts: Facts) -> None:
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
                raise facts.error("I4", index, f"{buffer.name} is returned to the user, but freed here; drop the free")
            elif live.pop(buffer.name, None) is None:
                raise facts.error("I4", index, f"{buffer.name} is freed, but not allocated at this point")
        for name in [name for name in live if schedule.buffers[name].returned]:
            if schedule.buffers[name].kind == "placed":
                raise facts.error("I4", live[name], f"{name} is returned, but a slot is reused; make it pooled")
            del live[name]  # the user owns it from here on


def _converted(instruction: Instruction, written: Buffer) -> bool:
    """Tells whether a kernel of the host makes a gradient, which it can only make of another one; or whether a collective
    makes a gradient or buffer of those of all ranks."""
    roles = ("grad", "buffer") if instruction.queue == "network" else ("grad",)
    return instruction.queue in ("host", "network") and instruction.op == "run" and written.role in roles


def consumed_once(facts: Facts) -> None:
    schedule = facts.schedule
    rows = [(name, b) for name, b in schedule.buffers.items() if b.role in ("grad", "buffer")]
    producer: dict[tuple[str, str], int] = {}  # (value, role) -> the kernel that first makes it; copies make nothing new
    consumers: dict[tuple[str, str], list[int]] = {}
    for name, buffer in rows:
        key, writers = (buffer.value, buffer.role), facts.writers[name]
        if writers and schedule.instructions[writers[0]].op == "run":
            producer[key] = min(producer.get(key, writers[0]), writers[0])
        if buffer.kind == "home" or buffer.returned:
            consumers.setdefault(key, []).extend(writers)
    for name, buffer in rows:
        at = producer.get((buffer.value, buffer.role))
        expected = buffer.role == "grad" or at is not None
        if buffer.kind == "home" and not facts.writers[name] and expected:
            what = f"expected one write of home {name}, found none: it would end the step without {buffer.value}"
            raise facts.error("I4", at, what)
    for name, buffer in schedule.buffers.items():
        if buffer.version_of and not facts.writers[name]:
            raise facts.error("I4", None, f"expected one write of {name}, next version of {buffer.version_of}, found none")
    updates = [
        (index, {(b.value, b.role) for b in facts.buffers(instruction.reads) if b.role in ("grad", "buffer")})
        for index, instruction in enumerate(schedule.instructions)
        if any(
            schedule.buffers[name].version_of or _converted(instruction, schedule.buffers[name]) for name in instruction.writes
        )
    ]
    for index, used in updates:
        for key in used:
            consumers.setdefault(key, []).append(index)
    for (value, role), index in producer.items():
        homes = sorted(consumers.get((value, role), ()))
        if len(homes) != 1:
            ends = ", ".join(f"#{i}" for i in homes) or "none"
            what = f"expected {role} {value} to be returned, written to one home, or used by one update, once; found {ends}"
            raise facts.error("I4", homes[1] if homes else index, what)
