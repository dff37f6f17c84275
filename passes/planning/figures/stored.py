"""Searched plans as text: the points of a frontier and the plans that climbs found, with their figures, for the next run.

A decision is written once, however many plans make it, so that reading all of them takes less time than to make one anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from mtcompile.passes.plan import Decision, Decisions, Plan, Updates, checked
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.frontier import Point
from mtcompile.passes.planning.ladders import Ladder
from mtcompile.passes.planning.pace import with_pace

_DECISION = [field.name for field in fields(Decision)]
_SCALARS = (
    *("lookahead", "span", "pooled", "narrow", "wide", "disk_lookahead", "disk_direct"),
    *("peak_bytes", "step_time_us", "update_us"),
)


def searched_to_json(points: Sequence[Point], climbs: Mapping[Limits, Plan], ladders: Sequence[Ladder]) -> str:
    """Writes ``points``, with their places on ``ladders``, and the plans of ``climbs``, by their limits."""
    numbers = {id(ladder): number for number, ladder in enumerate(ladders)}
    decisions, known, orders = dict[Decision, int](), dict[int, int](), dict[tuple[str, ...], int]()

    def number(decision: Decision) -> int:
        return known.setdefault(id(decision), decisions.setdefault(decision, len(decisions)))

    def row(plan: Plan) -> list[Any]:
        numbered: list[int | None] = list(map(known.get, map(id, plan.decisions)))
        if None in numbered:
            numbered = list(map(number, plan.decisions))
        updates = plan.updates or Updates()
        order = orders.setdefault(updates.order, len(orders))
        return [numbered, [getattr(plan, name) for name in _SCALARS], updates.patient, order]

    of_points = [[numbers.get(id(point.ladder)), point.position, *row(point.plan)] for point in points]
    of_climbs = [[*limits, *row(plan)] for limits, plan in climbs.items()]
    return json.dumps([[*map(attrgetter(*_DECISION), decisions)], list(orders), of_points, of_climbs])


def searched_from_json(text: str, base: Plan, ladders: Sequence[Ladder]) -> tuple[list[Point], dict[Limits, Plan]]:
    """Reads what ``searched_to_json`` wrote. ``base``: of which all plans of the search are made. Raises ValueError, TypeError,
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
    return points, {Limits(int(device), None if host is None else int(host)): plan(*row) for device, host, *row in of_climbs}
