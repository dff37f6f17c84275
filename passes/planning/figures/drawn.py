"""The regions of a sketch, without what nothing reads.

Plans that a search evaluates one after the other differ in a few blocks. So what each region makes, and which regions read it,
is kept up to date: only regions that changed, and those whose values they read, are looked at again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from mtcompile.passes.memo import remembered
from mtcompile.passes.rewrites.trim import trimmed


class Again:
    """Stands for a value that a region makes again for later ones."""

    __slots__ = ("meta",)

    def __init__(self, value: fx.Node) -> None:
        self.meta = value.meta


@dataclass(slots=True, eq=False)
class Drawn:
    """A region: its kernel, what it reads, and the values that it makes. ``renamed``: these have other names than in the step,
    so that no decision is about them. Sketches share regions that are alike. ``placed``: it by the readers of what it makes;
    ``memo``: what else is known of it."""

    phase: str
    kernel: fx.GraphModule
    reads: Sequence[Any]
    makes: Sequence[Any]
    renamed: bool = False
    placed: dict[tuple[tuple[int, ...], ...], Placed] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)
    read_once: frozenset[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.read_once = frozenset(self.reads)

    def reading(self, reads: Sequence[Any]) -> Drawn:
        """Returns the region with other operands."""
        key = "reading", *map(id, reads)
        if key not in self.memo:
            self.memo[key] = Drawn(self.phase, self.kernel, reads, self.makes, self.renamed), reads  # these keep their ids
        drawn: Drawn = self.memo[key][0]
        return drawn

    def trimmed(self, step: fx.GraphModule, positions: tuple[int, ...]) -> Drawn | None:
        """Returns what is left of the region if it makes no more than the values at ``positions``; None if nothing is left."""
        key = "trimmed", positions
        if key not in self.memo:
            drawn = None
            if (less := trimmed(step, self.kernel, positions)) is not None:
                makes = [self.makes[position] for position in positions]
                drawn = Drawn(self.phase, less[0], [self.reads[position] for position in less[1]], makes, self.renamed)
            self.memo[key] = drawn
        left: Drawn | None = self.memo[key]
        return left


@dataclass(slots=True, eq=False)
class Placed:
    """A region of a sketch. ``readers``: by value that it makes, the positions of the regions that read it. ``memo``: what is
    known of it; ``last``: what was asked of it last, with the answer."""

    region: Drawn
    readers: Sequence[tuple[int, ...]]
    memo: dict[Any, Any] = field(default_factory=dict)
    last: tuple[object, Any] = (None, None)


def placed(region: Drawn, readers: Mapping[Any, tuple[int, ...]]) -> Placed:
    """Returns a region with the ``readers`` of what it makes: the same one for the same readers."""
    key = tuple([readers.get(value, ()) for value in region.makes])
    return remembered(region.placed, key, lambda: Placed(region, key))


def all_placed(regions: Sequence[Drawn]) -> tuple[list[Placed], dict[Any, tuple[int, ...]]]:
    """Returns the regions with the readers of what they make, and the readers of all values."""
    reading: dict[Any, list[int]] = {}
    for position, region in enumerate(regions):
        for value in region.read_once:
            reading.setdefault(value, []).append(position)
    readers = {value: tuple(positions) for value, positions in reading.items()}
    return [placed(region, readers) for region in regions], readers


class Trimmed:
    """Regions without what nothing reads: those of the last ``update``. ``step``: theirs; ``outputs``: values that
    leave it."""

    def __init__(self, step: fx.GraphModule, outputs: Collection[Any]) -> None:
        self.step, self.outputs = step, outputs
        self._drawn: list[Drawn | None] = []  # the regions of the last update, and what is left of each
        self._left: list[Drawn | None] = []
        self._maker: dict[Any, int] = {}  # values -> the place of the region that makes them
        self._reading: dict[Any, set[int]] = {}  # values -> the places of the regions that read them
        self._placed: list[Placed | None] = []
        self._position: list[int] = []  # place -> position among those that are left
        self.readers: dict[Any, tuple[int, ...]] = {}

    def update(self, drawn: Sequence[Drawn]) -> list[Placed]:
        """Returns what is left of regions in their order, and sets ``readers`` of all values."""
        before, self._drawn = self._drawn, [None] * len(drawn)  # where this is interrupted, nothing is known
        if None in before or len(before) != len(drawn):
            before, self._left, self._placed = [None] * len(drawn), [None] * len(drawn), [None] * len(drawn)
            self._position, self._reading, self.readers = [], {}, {}
        places, values = self._trim(drawn, before)
        self._number(places, values)
        for place in places:
            region = self._left[place]
            self._placed[place] = None if region is None else placed(region, self.readers)
        self._drawn = list(drawn)
        return [each for each in self._placed if each is not None]

    def _trim(self, drawn: Sequence[Drawn], before: Sequence[Drawn | None]) -> tuple[set[int], set[Any]]:
        """Trims regions again from the last to the first, as far as need be: those that are not as ``before``, and those whose
        values they read. Returns the places of these, and the values whose readers changed."""
        waiting, places, values = list[int](), set[int](), set[Any]()
        for place, (region, known) in enumerate(zip(drawn, before, strict=True)):
            if region is not known:
                waiting.append(-place)
                self._maker.update(dict.fromkeys(region.makes, place))
        heapq.heapify(waiting)
        while waiting:
            if (place := -heapq.heappop(waiting)) in places:
                continue
            places.add(place)
            region, more = drawn[place], self._left[place]
            used = [i for i, value in enumerate(region.makes) if self._reading.get(value) or value in self.outputs]
            self._left[place] = less = region.trimmed(self.step, tuple(used))
            if less is more:
                continue
            read, read_before = (frozenset[Any]() if each is None else each.read_once for each in (less, more))
            for value in read ^ read_before:
                reading = self._reading.setdefault(value, set())
                (reading.add if value in read else reading.discard)(place)
                values.add(value)
                if value in self._maker:
                    heapq.heappush(waiting, -self._maker[value])
        return places, values

    def _number(self, places: set[int], values: Iterable[Any]) -> None:
        """Sets the readers of ``values``, or, where regions went or came, of all: adds to ``places`` then."""
        position, count = list[int](), 0
        for region in self._left:
            position.append(count)
            count += region is not None
        if position != self._position:
            self._position, values = position, self._reading
            places.update(range(len(position)))
        for value in values:
            self.readers[value] = tuple(sorted(position[place] for place in self._reading[value]))
