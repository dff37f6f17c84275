"""Lays out summaries in tables of numbers, as the C files read them (see compiled.py and c/figures.h).

Regions that summaries share are laid out once, but for the places of operands. Homes and activations have the same number in
all summaries.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import add
from typing import NamedTuple

from mtcompile.passes.memo import remembered
from mtcompile.passes.planning.figures.summary import Leaving, Operand, Region, Summary, Value

_OF_WEIGHTS = 1 | 2 | 4 | 32  # bits of what is decided about weights alone (see compiled.py)
PER_LEAVING, _OF = 20, 7  # numbers of what leaves; the one of the operand that it is of
COLLECTIVES = "", "all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_gather of parts"  # as in c/figures.h
_PER_READ, _WAITS = 7, 5
_PER_VALUE, _CAST = 9, 7


class _Part(NamedTuple):
    """The tables of one region. Readers and groups count from its first ones; ``reads`` and ``leaving`` have no places of
    operands yet, and values none of casts."""

    reads: array[int]
    readers: array[int]
    values: array[int]
    leaving: array[int]


class Layout:
    """The numbers of ``homes``, ``activations`` and names of what is ``leaving``. ``masks``: by home, the bits of decisions
    that say anything about it."""

    def __init__(self) -> None:
        self.homes: dict[str, int] = {}
        self.activations: dict[str, int] = {}
        self.leaving: dict[str, int] = {}
        self.masks: list[int] = []
        self._operands: dict[int, tuple[array[int], dict[Operand, int], Sequence[Operand]]] = {}  # by identity of the last

    def numbered(self) -> tuple[int, ...]:
        """Returns a key that changes with everything that gets a number."""
        return len(self.homes), len(self.activations), len(self.leaving), *self.masks

    def tables(self, summary: Summary) -> Sequence[array[int] | array[float]]:
        """Returns the tables of regions, their µs, reads, readers, operands, values and what is leaving."""
        (operands, places), regions = self._operands_of(summary.operands), summary.regions
        parts, entries = list(map(self._part, regions)), [entry for region in regions for entry in region.leaving]
        about = [r.phase for r in regions], [r.workspace for r in regions], [r.gone for r in regions]
        reads, readers = _places(len(region.reads) for region in regions), _places(len(part.readers) for part in parts)
        values = _places(len(region.activations) + len(region.others) for region in regions)
        others = map(add, values, (*(len(region.activations) for region in regions), 0))
        firsts = reads, readers, values, others, _places(len(region.leaving) for region in regions)
        rows = zip(*((*column, 0) for column in about), *firsts, strict=True)
        making, leaving = _joined(part.values for part in parts), _joined(part.leaving for part in parts)
        reading = _joined(part.reads for part in parts)
        narrow = any(region.narrow for region in regions)
        casts = ((first + i, v.cast) for first, r in zip(values, regions, strict=False) for i, v in enumerate(r.activations))
        for place, (position, operand) in ((place, cast) for place, cast in casts if cast is not None) if narrow else ():
            at = reads[position] + regions[position].reads.index(operand)
            making[_PER_VALUE * place + _CAST], reading[_PER_READ * at + _WAITS] = at, 1
        leaving[_OF::PER_LEAVING] = array("q", [places[entry.of] for entry in entries if entry.of is not None])
        reading[0::_PER_READ] = array("q", [places[operand] for region in regions for operand in region.reads])
        if any(region.ends for region in regions):
            makers = {node: (values[i] + place, i) for i, each in enumerate(regions) for node, place in each.places.items()}
            ends = [makers.get(region.ends.get(operand), (-1, -1)) for region in regions for operand in region.reads]
            reading[1::_PER_READ], reading[2::_PER_READ] = (array("q", column) for column in zip(*ends, strict=True))
        return (
            array("q", chain.from_iterable(rows)),
            array("d", [region.us for region in regions]),
            reading,
            _joined(part.readers for part in parts),
            operands,
            making,
            leaving,
        )

    def _operands_of(self, operands: Sequence[Operand]) -> tuple[array[int], dict[Operand, int]]:
        def laid_out() -> tuple[array[int], dict[Operand, int], Sequence[Operand]]:
            roles, numbers = dict[str, int](), array("q")
            for operand in operands:
                numbers.extend(self._operand(operand, roles))
            return numbers, {operand: place for place, operand in enumerate(operands)}, operands

        return remembered(self._operands, id(operands), laid_out)[:2]

    def _part(self, region: Region) -> _Part:
        if self not in region.memo:
            region.memo[self] = self._laid_out(region)
        part: _Part = region.memo[self]
        return part

    def _laid_out(self, region: Region) -> _Part:
        readers, values, leaving, groups = list[int](), list[int](), list[int](), dict[object, int]()
        for number, value in enumerate(region.activations):
            group = groups.setdefault(number if value.apart else (value.readers, value.returned), number)
            values += _value(value, readers, group, self.activations.setdefault(value.name, len(self.activations)))
        for value in region.others:
            values += _value(value, readers, -1, -1)
        reads = [number for operand in region.reads for number in _read(region, operand)]
        for entry in region.leaving:
            leaving += self._entry(entry, readers)
        return _Part(array("q", reads), array("q", readers), array("q", values), array("q", leaving))

    def _entry(self, entry: Leaving, readers: list[int]) -> Sequence[int]:
        first = len(readers)
        readers += entry.readers
        about = self._home(entry.home), -1, entry.updates
        rows_and_name = entry.crossing, entry.whole, self.leaving.setdefault(entry.name, len(self.leaving))
        sizes = entry.nbytes, entry.slot, *entry.at_home(), first, len(entry.readers)
        over_ranks = entry.count, entry.wide, entry.returned, COLLECTIVES.index(entry.collective), *entry.combined()
        narrow = (0, 0) if entry.narrow is None else (entry.narrow.nbytes, entry.narrow.slot)
        return *sizes, *about, *rows_and_name, *over_ranks, *narrow

    def _operand(self, operand: Operand, roles: dict[str, int]) -> Sequence[int]:
        rows = (-1, 0) if operand.rows is None else (operand.rows.count, operand.rows.nbytes)
        role, home = roles.setdefault(operand.role, len(roles)), self._home(operand.home)
        if operand.weights:
            self.masks[home] = -1
        about = home, role, operand.tier == "device", operand.weights
        sizes, gathered = (operand.nbytes, operand.slot, operand.read_slot), COLLECTIVES.index(operand.gathered)
        return *sizes, *operand.there(), *about, *rows, operand.fragment, gathered, operand.alone

    def _home(self, name: str) -> int:
        if name not in self.homes:
            self.homes[name] = len(self.homes)
            self.masks.append(~_OF_WEIGHTS)
        return self.homes[name]


def _value(value: Value, readers: list[int], group: int, name: int) -> Sequence[int]:
    first = len(readers)
    readers += value.readers
    return value.nbytes, value.slot, first, len(value.readers), value.returned, group, name, -1, value.unmade


def _read(region: Region, operand: Operand) -> Sequence[int]:
    narrow, unread = region.narrow.get(operand), (operand in region.unread) + (operand in region.unfetched)
    return -1, -1, -1, *((0, 0) if narrow is None else (narrow.nbytes, narrow.slot)), 0, unread


def _places(counts: Iterable[int]) -> Sequence[int]:
    """Returns where each of some parts begins, and where the last one ends."""
    return [*accumulate(counts, initial=0)]


def _joined(tables: Iterable[array[int]]) -> array[int]:
    return array("q", b"".join(tables))
