"""Searched plans as text: the points of a frontier and the plans that climbs found, with their figures, for the next run.

A decision is written once, however many plans make it, so that reading all of them takes less time than to make one anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from mtcompile.passes.plan import Decision, Decisions, Plan, Updates, checked
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.frontier import Point
from mtcompile.passes.planning.ladders import Ladder
from mtcompile.passes.planning.pace import with_pace

T = TypeVar("T")
_DECISION = [field.name for field in fields(Decision)]
_SCALARS = (
    *("lookahead", "span", "pooled", "narrow", "wide", "disk_lookahead", "disk_direct"),
    *("peak_bytes", "step_time_us", "update_us"),
)


class SearchedText:
    """Writes searched plans as text. A search writes often, so each part is made once and kept."""

    def __init__(self) -> None:
        self._decisions: dict[Decision, int] = {}
        self._known: dict[int, tuple[Decision, int]] = {}  # by id; the decision is kept so that its id is not reused
        self._orders: dict[tuple[str, ...], int] = {}
        self._parts: dict[int, tuple[Any, str]] = {}  # by id: the object (kept, as above) and its text

    def __call__(self, points: Sequence[Point], climbs: Mapping[Limits, Plan], ladders: Sequence[Ladder]) -> str:
        """Returns the text of ``points``, with their places on ``ladders``, and of the plans of ``climbs``, by their limits."""
        numbers = {id(ladder): number for number, ladder in enumerate(ladders)}
        of_points = [self._part(p, lambda p: [numbers.get(id(p.ladder)), p.position, *self._row(p.plan)]) for p in points]
        of_climbs = [f"[{json.dumps(limits)}, {self._part(plan, self._row)}]" for limits, plan in climbs.items()]
        decisions = [self._part(decision, attrgetter(*_DECISION)) for decision in self._decisions]
        return f"[{_listed(decisions)}, {json.dumps(list(self._orders))}, {_listed(of_points)}, {_listed(of_climbs)}]"

    def _part(self, written: T, of: Callable[[T], Any]) -> str:
        if (part := self._parts.get(id(written))) is None:
            part = self._parts[id(written)] = written, json.dumps(of(written))
        return part[1]

    def _row(self, plan: Plan) -> list[Any]:
        updates = plan.updates or Updates()
        order = self._orders.setdefault(updates.order, len(self._orders))
        return [list(map(self._number, plan.decisions)), [getattr(plan, name) for name in _SCALARS], updates.patient, order]

    def _number(self, decision: Decision) -> int:
        if (known := self._known.get(id(decision))) is None:
            known = self._known[id(decision)] = decision, self._decisions.setdefault(decision, len(self._decisions))
        return known[1]


def _listed(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def searched_from_json(text: str, base: Plan, ladders: Sequence[Ladder]) -> tuple[list[Point], dict[Limits, Plan]]:
    """Reads what ``SearchedText`` wrote. ``base``: of which all plans of the search are made. Raises ValueError, TypeError,
    LookupError or AttributeError for any text that it did not write for these ladders."""
    table, orders, of_points, of_climbs = json.loads(text)
    decisions = [Decision(**checked(Decision, dict(zip(_DECISION, row, strict=True)))) for row in table]

    def plan(numbers: Sequence[int], scalars: Sequence[Any], patient: bool, order: int) -> Plan:
        about = checked(Plan, dict(zip(_SCALARS, scalars, strict=True)))
        paced = checked(Updates, {"patient": patient, "order": orders[order]})
        return with_pace(replace(base, decisions=Decisions(decisions[number] for number in numbers), **about), **paced)

    points = []
    for number, position, *row in of_points:
        evaluated = plan(*row)
        ladder = (evaluated,) if number is None else ladders[number]
        points.append(Point(evaluated, ladder, range(len(ladder))[position]))
    return points, {Limits(int(device), None if host is None else int(host)): plan(*row) for (device, host), row in of_climbs}
