"""The lifetimes of buffers: when each is freed, where slots lie in their arenas, and the peaks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

from mtcompile.passes.planning.figures.moves import COMPUTE, D2H, POOLED, Buffer, Call
from mtcompile.runtime import schedule

Touched = tuple[list[int], list[int], list[int]]  # of ranges in order: first bytes, ends, and the buffers that had them last


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """Lifetimes. ``freed``: by call, the buffers that are freed behind it, each with the place of its last user. ``after``:
    buffer in a slot -> those that had its bytes before; ``across``: the same for slots of the forward, of the step before.
    ``arenas``: bytes by kind; ``most``: bytes of the allocator and workspace, at most at once."""

    freed: Sequence[Sequence[tuple[int, int]]]
    after: dict[int, list[int]]
    across: dict[int, list[int]]
    arenas: list[int]
    most: int


def lives_of(calls: Sequence[Call], buffers: Sequence[Buffer], lookahead: int, tangents: int) -> Lives:
    """Works out lifetimes as ``lower`` does, offsets as ``slots`` does, and peaks as ``usage`` does."""
    freed = _freed(calls, buffers, lookahead)
    live = most = 0
    backward = False
    placed: list[tuple[int, bool]] = []  # buffers in slots as they come and go
    start: dict[int, int] = {}
    until_backward = 0
    for place, call in enumerate(calls):
        if call.phase and not backward:
            live, backward, until_backward = live + tangents, True, len(placed)
        for name in call.writes:
            kind, nbytes = buffers[name][:2]
            if kind == POOLED:
                live += nbytes
            else:
                start[name] = len(placed)
                placed.append((name, True))
        most = max(most, live + call.workspace)
        for name, _ in freed[place]:
            kind, nbytes = buffers[name][:2]
            if kind == POOLED:
                live -= nbytes
            else:
                placed.append((name, False))
    if not backward:
        until_backward = len(placed)
    arenas, ranges = _offsets(placed, start, buffers)
    after: dict[int, list[int]] = {}
    across: dict[int, list[int]] = {}
    touched: list[Touched] = [([], [], []) for _ in arenas]
    for name, begins in placed:
        if begins:
            after[name] = _take(touched[buffers[name].kind], *ranges[name], name)
    for name, begins in placed[:until_backward]:
        if begins:
            across[name] = _take(touched[buffers[name].kind], *ranges[name], -1 - name)
    return Lives(freed, after, across, arenas, most)


def _freed(calls: Sequence[Call], buffers: Sequence[Buffer], lookahead: int) -> list[list[tuple[int, int]]]:
    """Returns the buffers that are freed behind each call: after the last use; those that are copied home no sooner than as
    many regions later as fetches are ahead, or, early ones, before the next region."""
    last: dict[int, int] = {}
    for place, call in enumerate(calls):
        last.update(dict.fromkeys(call.reads, place))
        last.update(dict.fromkeys(call.writes, place))
    ending: dict[int, list[int]] = {}
    for name, place in last.items():
        if not buffers[name].returned:
            ending.setdefault(place, []).append(name)
    freed: list[list[tuple[int, int]]] = []
    deferred: list[tuple[int, int, int]] = []
    copied: dict[int, int] = {}
    early: set[int] = set()
    ran, count = 0, len(calls)
    for place, call in enumerate(calls):
        here: list[tuple[int, int]] = []
        if call.queue == D2H and call.early:
            early.update(call.reads)
        elif call.queue == D2H:
            for name in call.reads:
                copied[name] = ran
        elif call.queue == COMPUTE:
            ran += 1
            if deferred:
                here += [(name, user) for due, name, user in deferred if due <= ran]
                deferred = [each for each in deferred if each[0] > ran]
        for name in ending.get(place, ()):
            if name in early:
                deferred.append((ran, name, place))
            elif lookahead and name in copied and copied[name] + lookahead > ran and buffers[name].kind == POOLED:
                deferred.append((copied[name] + lookahead, name, place))
            else:
                here.append((name, place))
        if deferred and (place + 1 == count or calls[place + 1].phase != call.phase):
            here += [(name, user) for _, name, user in deferred]
            deferred = []
        elif early and deferred and calls[place + 1].queue == COMPUTE:
            here += [(name, user) for due, name, user in deferred if due <= ran]
            deferred = [each for each in deferred if each[0] > ran]
        freed.append(here)
    return freed


def _offsets(
    placed: Sequence[tuple[int, bool]], start: dict[int, int], buffers: Sequence[Buffer]
) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Returns the bytes of each arena by kind, and the bytes of each slot: largest first, at the lowest place that is free."""
    until = {name: place for place, (name, begins) in enumerate(placed) if not begins}
    arenas, ranges = [0, 0, 0], dict[int, tuple[int, int]]()
    located: list[list[tuple[int, int, int, int]]] = [[], [], []]  # by kind: bytes and life of slots, by rising bytes
    for name in sorted(start, key=lambda name: (-buffers[name].nbytes, start[name])):
        kind, size, _, by_disk = buffers[name]
        offset, begins, ends = 0, start[name], until[name]
        for low, high, first, last in located[kind]:
            if first < ends and begins < last:
                if offset + size <= low:
                    break
                if high > offset:
                    offset = schedule.placed(high, by_disk=True) if by_disk else high
        ranges[name] = offset, offset + size
        insort(located[kind], (offset, offset + size, begins, ends))
        arenas[kind] = max(arenas[kind], offset + size)
    return arenas, ranges


def _take(touched: Touched, low: int, high: int, name: int) -> list[int]:
    """Gives bytes to a buffer. Returns the buffers that had any of them."""
    if low == high:
        return []
    starts, ends, names = touched
    first, last = bisect_right(ends, low), bisect_left(starts, high)
    before = names[first:last]
    new = [(low, high, name)]
    if first < last:
        if starts[first] < low:
            new.insert(0, (starts[first], low, names[first]))
        if high < ends[last - 1]:
            new.append((high, ends[last - 1], names[last - 1]))
    starts[first:last], ends[first:last], names[first:last] = (list(column) for column in zip(*new, strict=True))
    return before
