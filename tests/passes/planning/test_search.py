"""The search: which plans it climbs from, how far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

import pytest

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.climbs.climb import Ways
from mtcompile.passes.planning.climbs.move import FIRST, Moved
from mtcompile.passes.planning.climbs.room import Room
from mtcompile.passes.planning.limits import Limits, order
from mtcompile.passes.planning.search import EFFORTS, Effort, searched

_LIMITS = Limits(10)


def _up(plan: Plan) -> Iterator[Moved]:
    """Each has a name of its own, so that it is made once and not 2, 4, ... times at once."""
    yield Moved(plan.span, FIRST, partial(plan.changed, span=plan.span + 1))


def _evaluated(plan: Plan) -> Plan:
    """Each move saves a µs. What is fetched ahead saves more, and needs 8 bytes each."""
    return plan.changed(
        step_time_us=1000.0 - plan.span - 100.0 * plan.lookahead, peak_bytes={"device": 8 * plan.lookahead, "host": 0}
    )


def _search(starts: list[Plan], effort: Effort, bound_us: float = 0.0, room: Room | None = None) -> tuple[list[Plan], int]:
    """Returns the plans that a search ends at, and how many it evaluated."""
    evaluated = list[Plan]()

    def evaluate(plan: Plan, us: float = inf) -> Plan:
        evaluated.append(plan)
        return _evaluated(plan)

    ways = Ways([_up], {"device": [room] if room else []}, lambda plan, unused: iter(()))
    found = searched(map(_evaluated, starts), _LIMITS, ways, evaluate, effort, 1, lambda: bound_us)
    return found, len(evaluated)


def test_efforts_rise() -> None:
    quick, normal, thorough = (EFFORTS[name] for name in ("quick", "normal", "thorough"))
    for less, more in ((quick, normal), (normal, thorough)):
        assert less.starts < more.starts and less.evaluations < more.evaluations
        assert less.steps < more.steps and less.gain >= more.gain
    assert not quick.bounded and normal.bounded and thorough.bounded


@pytest.mark.parametrize("evaluations", [30, 300])
def test_the_better_half_of_the_climbs_goes_on(evaluations: int) -> None:
    starts = [Plan(span=10 * number) for number in range(6)]
    found, count = _search(starts, Effort(4, evaluations, True, 1000, 0.0))
    assert len(found) == 4 and evaluations / 2 < count < evaluations * 3 // 2
    assert found == sorted(found, key=lambda plan: order(plan, _LIMITS))
    spans = [plan.span for plan in found]
    assert spans[0] - 50 > spans[1] - 40 > spans[2] - 30 > 0  # how far each has come


def test_it_ends_where_no_more_can_be_gained_than_it_costs() -> None:
    start = _evaluated(Plan(span=5))
    for bound_us, steps, gain, goes_on in (
        *((0.0, 1000, 0.0, True), (994.9, 50, 0.0, False), (994.9, 1000, 0.0, True), (995.0, 10**6, 0.0, False)),
        *((980.0, 1000, 0.01, True), (990.0, 10**6, 0.01, False)),
    ):
        found, count = _search([start], Effort(4, 100, True, steps, gain), bound_us)
        assert (count > 0) == goes_on == (found[0].span > start.span)
    little, much = (_search([start], Effort(4, 100, True, 1000, 0.0), bound_us)[1] for bound_us in (994.9, 0.0))
    assert little < much


def _without_fetches(most: int) -> Callable[[Plan, Plan, int], Plan | None]:
    return lambda plan, before, missing: plan.changed(lookahead=1) if missing <= most else None


def test_a_start_above_the_limits_gets_room_if_it_is_faster_than_those_within() -> None:
    effort = Effort(2, 0, True, 1000, 0.0)
    within, above = Plan(span=3), Plan(lookahead=2)
    found, count = _search([within, above], effort, room=_without_fetches(6))
    assert count == 1 and [(plan.span, plan.lookahead) for plan in found] == [(0, 1), (3, 0)]
    found, _ = _search([within, above], effort, room=_without_fetches(5))  # it cannot make enough
    assert [(plan.span, plan.lookahead) for plan in found] == [(3, 0), (0, 2)]
    found, count = _search([Plan(span=300), above], effort, room=_without_fetches(6))
    assert count == 0 and [plan.span for plan in found] == [300]


def test_plans_above_limits_come_by_what_is_missing_and_those_within_by_what_is_asked() -> None:
    def plan(device: int, host: int, us: float = 1.0) -> Plan:
        return Plan(step_time_us=us, peak_bytes={"device": device, "host": host})

    few, fewer, fits, faster = plan(12, 3), plan(11, 9), plan(10, 9, 3.0), plan(9, 9, 2.0)
    assert sorted([fits, few, faster, fewer], key=lambda p: order(p, Limits(10, 9))) == [faster, fits, fewer, few]
    on_host = Limits(10, least="host")  # however fast they are, and never above the device's bytes
    assert sorted([few, fits, fewer, lean := plan(10, 8, 9.0)], key=lambda p: order(p, on_host)) == [lean, fits, fewer, few]
