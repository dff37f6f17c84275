"""A simulator of torch's caching allocator on a GPU: how many bytes it reserves for what a schedule requests.

Written from the documented behaviour (docs.pytorch.org, "CUDA memory management"): requests are rounded to 512 bytes; those up
to 1 MiB share segments of 2 MiB, those up to 10 MiB segments of 20 MiB, larger ones segments rounded to 2 MiB; the smallest
free block that is large enough is taken and split; neighbours that are free are joined. With expandable segments there is one
growing segment for small and one for large requests, with pages of 2 and 20 MiB behind the addresses in use. Where memory is
short, free segments and pages are given back first. On an H200, torch reserved 6 % more in two trainings of a 7B model.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, replace

from mtcompile.runtime.schedule import Buffer, Schedule
from mtcompile.runtime.usage import allocated_together

MIB = 2**20
_ROUND, _SMALL, _LARGE = 512, MIB, 10 * MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _ROUND_SEGMENT = 2 * MIB, 20 * MIB, 2 * MIB
_ADDRESSES = 2**60  # of an expandable segment: far more than there is memory
_STEPS = 2  # of a replay: what the first leaves behind is where the second begins


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


class OutOfMemory(Exception):
    """Raised when a request finds no room within the limit, even after all free pages were given back."""


@dataclass(slots=True, eq=False)
class Block:
    """Bytes of a segment between two neighbours. ``is_small``: of the pool of small requests. ``is_mapped``: False for
    addresses of an expandable segment without memory behind them."""

    segment: int
    offset: int
    nbytes: int
    is_small: bool
    is_free: bool = True
    is_mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    def key(self) -> tuple[int, int, int]:
        return self.nbytes, self.segment, self.offset


class CachingAllocator:
    """Gives and takes back blocks as torch's allocator does on one stream. ``reserved``: bytes of memory behind all segments
    now; ``peak``: the most so far; ``retries``: how often it gave free memory back to find room within ``limit``.

    ``expandable``: whether segments grow."""

    def __init__(self, expandable: bool, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.reserved = self.peak = self.retries = 0
        self._segments = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # mapped, by size
        self._heads: dict[bool, Block] = {}  # the first block of each expandable segment

    def allocate(self, nbytes: int) -> Block:
        """Returns a block of at least ``nbytes``. Raises OutOfMemory."""
        nbytes = max(_ROUND, _up(nbytes, _ROUND))
        is_small = nbytes <= _SMALL
        block = self._best(nbytes, is_small)
        if block is None:
            try:
                block = self._new(nbytes, is_small)
            except OutOfMemory:
                self.retries += 1
                self.release()
                block = self._new(nbytes, is_small)
        block.is_free = False
        rest = block.nbytes - nbytes
        if rest >= _ROUND if is_small or self.expandable else rest > _SMALL:
            self._keep(self._cut(block, nbytes))
        return block

    def free(self, block: Block) -> None:
        """Takes a block back, and joins it with its free neighbours."""
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free and other.is_mapped:
                self._take(other)
                block = _joined(block, other)
        self._keep(block)

    def release(self) -> None:
        """Gives back what holds nothing: whole segments or, of expandable ones, all pages that lie within free blocks."""
        for is_small, free in self._free.items():
            for block in tuple(free):
                if not self.expandable:
                    if block.before is None and block.after is None:
                        self._take(block)
                        self.reserved -= block.nbytes
                    continue
                page = _page(is_small)
                start, end = _up(block.offset, page), (block.offset + block.nbytes) // page * page
                if start < end:
                    self._take(block)
                    self._unmap(block, start, end)
                    self.reserved -= end - start

    # ------------------------------------------------------------------------------------------------------------ segments

    def _best(self, nbytes: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        at = bisect.bisect_left(free, (nbytes, 0, 0), key=Block.key)
        return free.pop(at) if at < len(free) else None

    def _new(self, nbytes: int, is_small: bool) -> Block:
        if self.expandable:
            return self._mapped(nbytes, is_small)
        size = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT if nbytes < _LARGE else _up(nbytes, _ROUND_SEGMENT)
        self._reserve(size)
        self._segments += 1
        return Block(self._segments, 0, size, is_small)

    def _mapped(self, nbytes: int, is_small: bool) -> Block:
        """Returns a free block, at the lowest addresses where there is room, with pages put behind what has none."""
        head = self._heads.setdefault(is_small, Block(int(is_small), 0, _ADDRESSES, is_small, is_mapped=False))
        block, begin = head, head
        while not (block.is_free and not block.is_mapped and _room(begin := _with_free_before(block)) >= nbytes):
            assert block.after is not None, "addresses never end"
            block = block.after
        block = begin
        if block.is_mapped:
            self._take(block)
        else:
            self._map(block, nbytes)
        while block.nbytes < nbytes:
            following = block.after
            assert following is not None
            if following.is_mapped:
                self._take(following)
            else:
                try:
                    self._map(following, nbytes - block.nbytes)
                except OutOfMemory:
                    self._keep(block)
                    raise
            block = _joined(block, following)
        return block

    def _map(self, block: Block, nbytes: int) -> None:
        """Puts pages behind the first ``nbytes`` of a block, or behind all of it; the rest becomes a block of its own."""
        nbytes = min(block.nbytes, _up(nbytes, _page(block.is_small)))
        self._reserve(nbytes)
        if nbytes < block.nbytes:
            self._cut(block, nbytes)
        block.is_mapped = True

    def _unmap(self, block: Block, start: int, end: int) -> None:
        if start > block.offset:
            rest = self._cut(block, start - block.offset)
            self._keep(block)
            block = rest
        if block.nbytes > end - start:
            self._keep(self._cut(block, end - start))
        block.is_mapped = False
        for other in (block.before, block.after):
            if other is not None and not other.is_mapped:
                block = _joined(block, other)

    def _cut(self, block: Block, nbytes: int) -> Block:
        """Cuts a block after ``nbytes``. Returns the rest, which is free."""
        rest = replace(block, offset=block.offset + nbytes, nbytes=block.nbytes - nbytes, is_free=True, before=block)
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, nbytes
        return rest

    def _keep(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], block, key=Block.key)

    def _take(self, block: Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, block.key(), key=Block.key))

    def _reserve(self, nbytes: int) -> None:
        if self.limit is not None and self.reserved + nbytes > self.limit:
            raise OutOfMemory(f"{nbytes} bytes more than {self.reserved} of {self.limit}")
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)


def _joined(block: Block, other: Block) -> Block:
    """Joins neighbours. Returns the first of the two, which is both from now on."""
    first, second = (other, block) if other.offset < block.offset else (block, other)
    first.nbytes += second.nbytes
    first.after, first.is_free = second.after, True
    if second.after is not None:
        second.after.before = first
    return first


def _with_free_before(block: Block) -> Block:
    """Returns the free block right before addresses without memory, or these."""
    return block.before if block.before is not None and block.before.is_free else block


def _room(block: Block) -> int:
    """Returns the bytes from a block on to the next one in use."""
    nbytes, following = 0, block
    while following is not None and following.is_free:
        nbytes += following.nbytes
        following = following.after  # type: ignore[assignment]
    return nbytes


def _page(is_small: bool) -> int:
    return _SMALL_SEGMENT if is_small else _LARGE_SEGMENT


def fits(schedule: Schedule, limit: int, expandable: bool = True) -> bool:
    """Tells whether the allocator finds room for all that a schedule requests within ``limit`` bytes."""
    try:
        _steps(schedule, CachingAllocator(expandable, limit))
    except OutOfMemory:
        return False
    return True


def needed_nbytes(schedule: Schedule, expandable: bool = True) -> int:
    """Returns the fewest bytes, to a page, within which ``fits`` says yes: what may be reserved must be at least that."""
    low, high = schedule.peak_nbytes.get("device", 0) // _LARGE_SEGMENT, reserved_nbytes(schedule, expandable) // MIB // 20 + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(schedule, middle * _LARGE_SEGMENT, expandable) else (middle + 1, high)
    return low * _LARGE_SEGMENT


def reserved_nbytes(schedule: Schedule, expandable: bool = True) -> int:
    """Returns the most bytes that the allocator reserves over steps of a schedule, where nothing else uses it.

    What stays, and the arena, are there first. A kernel's workspace is taken as one block before its results: how its parts
    come and go is not known."""
    allocator = CachingAllocator(expandable)
    _steps(schedule, allocator)
    return allocator.peak


def _steps(schedule: Schedule, allocator: CachingAllocator) -> None:
    homes = [b.nbytes for b in schedule.buffers.values() if b.tier == "device" and b.kind == "home" and not b.version_of]
    for nbytes in (*homes, schedule.resident_nbytes.get("device", 0) - sum(homes), schedule.arena_nbytes.get("device", 0)):
        if nbytes > 0:
            allocator.allocate(nbytes)
    for _ in range(_STEPS):
        _replay(schedule, allocator)


def _replay(schedule: Schedule, allocator: CachingAllocator) -> None:
    live: dict[str, Block] = {}
    together, parts = allocated_together(schedule), Counter[str]()  # parts: of an allocation for several, those in use

    def pooled(names: tuple[str, ...]) -> list[Buffer]:
        buffers = (schedule.buffers[name] for name in names)
        return [buffer for buffer in buffers if buffer.tier == "device" and buffer.kind == "pooled" and not buffer.version_of]

    held: set[str] = set()

    def allocate(buffer: Buffer) -> None:
        if buffer.name in held:
            return
        held.add(buffer.name)
        first, _, nbytes = together.get(buffer.name, (buffer.name, 0, buffer.nbytes))
        parts[first] += 1
        if first not in live:
            live[first] = allocator.allocate(nbytes)

    def free(name: str) -> None:
        first = together[name][0] if name in together else name
        parts[first] -= 1
        if parts[first] == 0:
            allocator.free(live.pop(first))

    for instruction in schedule.instructions:
        if instruction.op == "run":
            workspace = allocator.allocate(instruction.workspace) if instruction.workspace else None
            for buffer in pooled(instruction.writes):
                allocate(buffer)
            if workspace is not None:
                allocator.free(workspace)
        elif instruction.op == "copy":
            for buffer in pooled(instruction.writes):
                allocate(buffer)
        elif instruction.op == "free":
            for buffer in pooled(instruction.writes):
                if buffer.name in held:
                    held.remove(buffer.name)
                    free(buffer.name)
    for block in live.values():  # what the user holds: let go before the next step
        allocator.free(block)
