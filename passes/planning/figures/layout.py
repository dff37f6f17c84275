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

from mtcompile.passes.planning.figures.summary import Leaving, Operand, Region, Summary, Value

_OF_WEIGHTS = 1 | 2 | 4  # bits of what is decided about weights alone (see compiled.py)
_PER_VALUE, _PER_LEAVING, _OF = 7, 11, 7  # numbers; the one of the operand that something leaving is of
_MOST_OPERANDS = 16  # tables that are remembered


class Tables(NamedTuple):
    """The ``arrays`` of regions, their µs, reads, readers, operands, values and what is leaving. ``leaving``: the names of the
    last ones."""

    arrays: Sequence[array[int] | array[float]]
    leaving: Sequence[str]


class _Part(NamedTuple):
    """The tables of one region. Readers and groups count from its first ones."""

    about: tuple[int, int]  # phase, bytes of workspace
    us: float
    readers: array[int]
    values: array[int]
    activations: int  # the number of the first values
    leaving: array[int]
    names: Sequence[str]  # of what leaves
    of: Sequence[Operand]  # whose places its tables have in each summary


class Layout:
    """The numbers of ``homes`` and ``activations``. ``masks``: by home, the bits of decisions that say anything about it."""

    def __init__(self) -> None:
        self.homes: dict[str, int] = {}
        self.activations: dict[str, int] = {}
        self.masks: list[int] = []
        self._operands: dict[int, tuple[array[int], dict[Operand, int], Sequence[Operand]]] = {}  # by identity of the last

    def numbered(self) -> tuple[int, ...]:
        """Returns a key that changes with every home and activation that gets a number."""
        return len(self.homes), len(self.activations), *self.masks

    def tables(self, summary: Summary) -> Tables:
        operands, places = self._operands_of(summary.operands)
        parts = [self._part(region) for region in summary.regions]
        phases, workspaces = zip(*(part.about for part in parts), strict=True) if parts else ((), ())
        reads = _places(len(region.reads) for region in summary.regions)
        readers = _places(len(part.readers) for part in parts)
        values = _places(len(part.values) // _PER_VALUE for part in parts)
        others = map(add, values, (*(part.activations for part in parts), 0))
        leaving = _places(len(part.names) for part in parts)
        rows = zip((*phases, 0), (*workspaces, 0), reads, readers, values, others, leaving, strict=True)
        regions, us = array("q", chain.from_iterable(rows)), array("d", [part.us for part in parts])
        read = array("q", [places[operand] for region in summary.regions for operand in region.reads])
        made, gone = _joined(part.values for part in parts), _joined(part.leaving for part in parts)
        gone[_OF::_PER_LEAVING] = array("q", [places[operand] for part in parts for operand in part.of])
        reading = read, _joined(part.readers for part in parts), operands
        return Tables((regions, us, *reading, made, gone), [name for part in parts for name in part.names])

    def _operands_of(self, operands: Sequence[Operand]) -> tuple[array[int], dict[Operand, int]]:
        if id(operands) not in self._operands:
            if len(self._operands) >= _MOST_OPERANDS:
                del self._operands[next(iter(self._operands))]
            roles, numbers = dict[str, int](), array("q")
            for operand in operands:
                numbers.extend(self._operand(operand, roles))
            self._operands[id(operands)] = numbers, {operand: place for place, operand in enumerate(operands)}, operands
        return self._operands[id(operands)][:2]

    def _part(self, region: Region) -> _Part:
        if self not in region.memo:
            region.memo[self] = self._laid_out(region)
        part: _Part = region.memo[self]
        return part

    def _laid_out(self, region: Region) -> _Part:
        readers, values, leaving, groups = list[int](), list[int](), list[int](), dict[object, int]()
        for number, value in enumerate(region.activations):
            group = groups.setdefault((value.readers, value.returned), number)
            values += _value(value, readers, group, self.activations.setdefault(value.name, len(self.activations)))
        for value in region.others:
            values += _value(value, readers, -1, -1)
        for entry in region.leaving:
            leaving += self._entry(entry, readers)
        of = [entry.of for entry in region.leaving if entry.of is not None]
        made = array("q", values), len(region.activations), array("q", leaving), [entry.name for entry in region.leaving], of
        return _Part((region.phase, region.workspace), region.us, array("q", readers), *made)

    def _entry(self, entry: Leaving, readers: list[int]) -> Sequence[int]:
        first = len(readers)
        readers += entry.readers
        about = self._home(entry.home), -1, entry.updates
        return entry.nbytes, entry.slot, *entry.at_home(), first, len(entry.readers), *about, entry.crossing, entry.whole

    def _operand(self, operand: Operand, roles: dict[str, int]) -> Sequence[int]:
        rows = (-1, 0) if operand.rows is None else (operand.rows.count, operand.rows.nbytes)
        role, home = roles.setdefault(operand.role, len(roles)), self._home(operand.home)
        if operand.weights:
            self.masks[home] = -1
        about = home, role, operand.tier == "device", operand.weights
        return operand.nbytes, operand.read_slot, *operand.there(), *about, *rows, operand.fragment

    def _home(self, name: str) -> int:
        if name not in self.homes:
            self.homes[name] = len(self.homes)
            self.masks.append(~_OF_WEIGHTS)
        return self.homes[name]


def _value(value: Value, readers: list[int], group: int, name: int) -> Sequence[int]:
    first = len(readers)
    readers += value.readers
    return value.nbytes, value.slot, first, len(value.readers), value.returned, group, name


def _places(counts: Iterable[int]) -> Sequence[int]:
    """Returns where each of some parts begins, and where the last one ends."""
    return [*accumulate(counts, initial=0)]


def _joined(tables: Iterable[array[int]]) -> array[int]:
    return array("q", b"".join(tables))
