"""Groups decisions for a reader: those that decide the same for the same reason, as for equal blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple, get_args

from mtcompile.passes.plan.decisions import Decision, Kind

_FIGURE = re.compile(r"(?<![\w.])(\d[\d.]*(?:e[+-]?\d+)?) (s|ms|µs|GiB|MiB|KiB|B)\b")
_SIZES = {"s": 1e6, "ms": 1e3, "µs": 1, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_KINDS = get_args(Kind)


class Alike(NamedTuple):
    """``decisions`` of one kind and choice, about these ``subjects``, which keep the same ``values`` of each. ``reason``: of
    all, with the least and the most of each figure."""

    decisions: Sequence[Decision]
    subjects: Sequence[str]
    values: Sequence[str]
    reason: str


def alike(decisions: Sequence[Decision], names: Mapping[str, str]) -> Iterator[Alike]:
    """Yields decisions by kind, grouped where their reasons differ only in figures. ``names``: of values."""
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for d in sorted(decisions, key=lambda each: _KINDS.index(each.kind)):
        form = _FIGURE.sub("", d.reason)
        groups.setdefault((d.kind, d.choice, form, *_within([names.get(v, v) for v in d.values])), []).append(d)
    for (_, _, _, *values), together in groups.items():
        subjects = [names.get(d.subject, d.subject) for d in together]
        yield Alike(together, subjects, values, _joined([d.reason for d in together]))


def _within(names: Sequence[str]) -> Iterator[str]:
    """Yields the names of values within the modules that they share."""
    places = [name.partition("/")[0].split(".") for name in names]
    shared = sum(1 for _ in takewhile(lambda parts: len({*parts}) == 1, zip(*places, strict=False)))
    for name, parts in zip(names, places, strict=True):
        yield "/".join(filter(None, (".".join(parts[shared:]), name.partition("/")[2]))) or name


def _joined(reasons: Sequence[str]) -> str:
    """Makes one sentence of several that differ only in their figures."""
    columns = zip(*(_FIGURE.findall(reason) for reason in reasons), strict=True)
    ranges = []
    for column in columns:
        (low, unit), (high, units) = min(column, key=_size), max(column, key=_size)
        least = low if unit == units else f"{low} {unit}"
        ranges.append(f"{high} {units}" if (low, unit) == (high, units) else f"{least} to {high} {units}")
    figures = iter(ranges)
    return _FIGURE.sub(lambda _: next(figures), reasons[0])


def _size(figure: tuple[str, str]) -> float:
    return float(figure[0]) * _SIZES[figure[1]]
