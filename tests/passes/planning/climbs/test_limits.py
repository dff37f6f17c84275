"""Tests of the limits within which climbs look for plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning import candidates as candidates_module
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs import climb as climb_module
from mtcompile.passes.planning.climbs.climb import Climbs
from mtcompile.passes.planning.climbs.limits import Limits, apart, limits_in_between, parts_of
from mtcompile.passes.planning.climbs.single import Climb, Ways
from mtcompile.passes.planning.limits import Point
from mtcompile.passes.planning.problem import PlanningProblem
from tests.passes.planning.drawn_plans import MACHINES, WAYS, crossing


def test_limits_in_between_are_near_to_the_one_that_each_follows() -> None:
    limits = [1000, 1030, 1060, 1500, 1501]
    following = limits_in_between(limits, 1600)
    assert not following.keys() & set(limits)
    assert all(1000 < limit <= 1600 and limit > below for limit, below in following.items())
    assert set(following.values()) <= {*limits, *following}
    assert max(following) == 1600
    rising = sorted((*limits, *following))
    assert max(high - low for low, high in itertools.pairwise(rising)) <= (1500 - 1060) / 4
    assert limits_in_between(limits, 1501) == {limit: below for limit, below in following.items() if limit < 1501}


@pytest.mark.slow
def test_more_memory_between_two_limits_is_used_and_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, fewer in {"MOST_SEARCHED": 2, "MOST_POINTS": 2, "_FEWEST_POINTS": 2, "_REFINED": 5}.items():
        monkeypatch.setattr(candidates_module, limit, fewer)
    monkeypatch.setattr(climb_module, "_PATIENT_REGIONS", 1)  # as of a large step
    problem = PlanningProblem(crossing(), MACHINES[1], Budgets(updates=WAYS["behind the forward"]))

    def times_us(shares: Sequence[float]) -> list[float]:
        candidates = Candidates(problem)
        low, high = candidates.floor, candidates.resident.plan.peak_bytes["device"]
        budgets = [int(low + share * (high - low - 1)) for share in shares]
        plans = [candidates.best(budget, None).plan for budget in budgets]
        assert all(plan.peak_bytes["device"] <= budget for plan, budget in zip(plans, budgets, strict=True))
        return [plan.total_us for plan in plans]

    rising = [0.75, 0.83, 0.9, 0.97]
    times = times_us(rising)
    assert times == sorted(times, reverse=True)
    assert times_us(rising[::-1]) == times[::-1]
    monkeypatch.setattr(climb_module, "limits_in_between", lambda limits, highest: {})
    without = times_us(rising)
    assert all(after <= before for after, before in zip(times, without, strict=True)) and times != without


def test_limits_are_finer_where_the_bound_falls_steeply_and_the_same_whatever_was_asked_before() -> None:
    assert [parts_of(1000.0, 1000.0), parts_of(1020.0, 1000.0), parts_of(inf, 1000.0), parts_of(0.0, 0.0)] == [1, 1, 1, 1]
    assert parts_of(1070.0, 1000.0) == 5 and parts_of(5000.0, 1000.0) == 8
    ways: Any = None

    def climbs() -> Climbs:
        bounds = {1000: 1070.0, 2000: 1000.0, 3000: 990.0}
        return Climbs([], [1000, 2000], {3000: 2000}, ways, lambda plan: plan, lambda device, host: bounds[device], ways)

    def falling(some: Climbs, device: int | None) -> list[int]:
        return list(some._falling(device, lambda limit: True))

    finer = [1800, 1600, 1400, 1200, 1000]
    assert list(climbs()._falling(None, lambda limit: limit == 3000)) == [3000]  # no bounds are asked for where none begins
    once = climbs()
    assert falling(once, 1500) == finer[2:] and falling(once, 2999) == [2000, *finer]
    assert falling(climbs(), 2999) == [2000, *finer] and falling(climbs(), None) == [3000, 2000, *finer]
    assert falling(once, 999) == [] and once._following[1800] == 1600 and once._following[1200] == 1000


@pytest.mark.parametrize(
    ("times", "bounds", "climbed"),
    [
        ({1000: 60.0, 2000: 130.0, 3000: 125.0, 4000: 120.0}, (100.0, 100.0, 100.0, 100.0), [4000, 3000, 2000, 1000]),
        ({1000: 60.0, 2000: 130.0, 3000: 125.0, 4000: 120.0}, (113.0, 112.0, 111.0, 100.0), [4000, 3000]),
        ({1000: 60.0, 2000: 130.0, 3000: 112.0, 4000: 120.0}, (108.0, 105.0, 104.0, 100.0), [4000, 3000, 2000]),
        ({1000: 120.0, 2000: 130.0, 3000: 125.0, 4000: 120.0}, (119.9, 119.9, 119.9, 119.9), [4000]),
        ({1000: 60.0, 2000: 130.0, 3000: 125.0, 4000: 120.0}, (0.0, 0.0, 0.0, 0.0), [4000, 3000, 2000, 1000]),
    ],
    ids=["memory gains nothing", "memory gains much", "a faster plan at a lower limit", "near the bound", "no bound is known"],
)
def test_limits_whose_plans_would_have_to_be_much_nearer_to_their_bounds_are_left_out(
    times: dict[int, float], bounds: Sequence[float], climbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan taken, 120, is 20 % above the bound of the highest limit. Another may be nearer by 0.6 of that and 0.4 %, and so
    be 7.6 % above its own: above 111, that is less than 120; above 112, it is more."""
    by_limit = dict(zip(times, bounds, strict=True))
    monkeypatch.setattr(climb_module, "parts_of", lambda low, high: 1)
    assert limits_asked(times, {}, lambda device, host: by_limit[device], monkeypatch) == climbed


@pytest.mark.parametrize(
    ("begun_us", "climbed"), [(102.0, [2000, 1000, 1500]), (105.0, [2000]), (107.0, [2000, 1000, 1500])], ids=str
)
def test_limits_that_follow_are_left_out_as_that_where_they_begin_except_where_the_bound_falls_steeply(
    begun_us: float, climbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {1000: 112.0, 1500: 110.5, 2000: 110.0}
    bounds = {1000: begun_us, 1500: 100.5, 2000: 100.0}
    monkeypatch.setattr(climb_module, "parts_of", lambda low, high: 1)
    assert limits_asked(times, {1500: 1000}, lambda device, host: bounds[device], monkeypatch) == climbed


@pytest.mark.parametrize(("steep", "climbed"), [(0.0, [2000, 1000]), (20.0, [2000, 1000, 1500])], ids=["flat", "steep"])
def test_limits_in_between_are_left_out_where_memory_is_worth_little(
    steep: float, climbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the bound falls by as much as plans would have to get faster."""
    times = {1000: 130.0, 1500: 110.0, 2000: 110.0}
    bounds = {1000: 100.0 + steep, 1500: 100.0, 2000: 100.0}
    monkeypatch.setattr(climb_module, "parts_of", lambda low, high: 1)
    assert limits_asked(times, {1500: 1000}, lambda device, host: bounds[device], monkeypatch) == climbed


@pytest.mark.parametrize(("climbed_us", "polishes"), [(120.0, True), (131.9, True), (132.1, False)])
def test_a_plan_is_polished_only_where_that_may_make_it_about_as_fast_as_the_fastest(
    climbed_us: float, polishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That does not go 0.3 of the way to the bound, 100 µs: from 132.1 to 122.47, which is more than 1.02 times 120."""
    polished: list[int] = []
    climbed = {1000: climbed_us, 2000: 121.0}
    monkeypatch.setattr(Climbs, "_climbed", lambda self, limit: Plan(step_time_us=climbed[limit]))
    monkeypatch.setattr(
        Climbs, "_plan", lambda self, limit: (polished.append(limit), Plan(step_time_us=climbed[limit] - 1.0))[1]
    )
    ways: Any = None
    climbs = Climbs([], [1000, 2000], {}, ways, lambda plan: plan, lambda device, host: 100.0, ways)
    best = climbs.best(None, Plan(step_time_us=150.0), lambda plan: [plan])
    assert best.total_us == min(120.0, climbed_us - 1.0) and polished == [2000, *([1000] if polishes else [])]


def test_a_slower_plan_leads_on_to_the_next_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The climb from the frontier ends at 120 µs, that from a seed at 119.5: with more memory, at 100 and at 118."""
    ends = {1000: {150.0: 120.0, 130.0: 119.5}, 1500: {120.0: 100.0, 119.5: 118.0}}

    def go_on(climb: Climb, most: int) -> None:
        ended_us = ends[climb.limits.device].get(climb.best.total_us, climb.best.total_us)
        climb.best = plan_of(ended_us)

    def plan_of(us: float) -> Plan:
        return Plan(step_time_us=us, peak_bytes={"device": 900})

    monkeypatch.setattr(Climb, "go_on", go_on)
    start = plan_of(150.0)
    seeds: Any = SimpleNamespace(plans=lambda limits, evaluate, most_us: [plan_of(130.0)])
    ways = Ways([], {}, lambda plan, unused: iter(()))

    def fastest_us(bound_us: float, device: int) -> float:
        about = ways, lambda plan: plan, lambda device, host: bound_us, seeds
        return (
            Climbs([Point(start, (start,), 0)], [1000], {1500: 1000}, *about).best(device, start, lambda plan: [plan]).total_us
        )

    assert fastest_us(90.0, 1000) == 119.5 and fastest_us(90.0, 1500) == 100.0
    assert fastest_us(119.5, 1000) == 120.0  # so near the bound that there are no seeds


@pytest.mark.parametrize(
    ("seeded_us", "first_us", "differ", "most"),
    [
        (103.1, 102.0, False, [30.0, 30.0]),
        (103.3, 102.0, False, [30.0]),
        (130.0, 103.1, False, [30.0, 30.0]),
        (130.0, 102.0, True, [30.0, 30.0]),
    ],
    ids=["near", "much farther from the bound", "both are far", "blocks differ"],
)
def test_climbs_from_seeds_end_early_where_they_are_much_farther_above_the_bound(
    seeded_us: float, first_us: float, differ: bool, most: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = list[float]()
    monkeypatch.setattr(Climb, "go_on", lambda climb, most: evaluated.append(most))
    seed = Plan(step_time_us=seeded_us, peak_bytes={"device": 900})
    seeds: Any = SimpleNamespace(plans=lambda limits, evaluate, most_us: [seed])
    ways = Ways([], {}, lambda plan, unused: iter(()), patience=2, differ=differ)
    climbs = Climbs([], [1000], {1500: 1000}, ways, lambda plan: plan, lambda device, host: 100.0, seeds)
    first = Climb(Limits(1000), ways, climbs.evaluate, Plan(step_time_us=first_us, peak_bytes={"device": 900}))
    seeded = climbs._from_seeds(first)
    assert evaluated == most and bool(seeded) == (len(most) > 1)
    if seeded:
        slower = 1.01 * first_us < seeded_us
        assert climbs._to_go_on([first], seeded) == [first, *([] if slower and not differ else seeded)]


def test_climbs_of_large_steps_with_equal_blocks_go_by_the_fastest_seeds_and_without_kicks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those of others. A seed that is far slower than the best plan is not made for fewer bytes."""
    monkeypatch.setattr(Climb, "go_on", lambda climb, most: None)
    most, kicked = list[float](), list[Plan]()

    def seeds(limits: object, evaluate: object, most_us: float) -> list[Plan]:
        most.append(most_us)
        return [Plan(step_time_us=us, lookahead=ahead, peak_bytes={"device": 900}) for us, ahead in ((104.0, 1), (107.0, 2))]

    def ended(following: dict[int, int], equal: bool) -> tuple[int, int]:
        some: Any = SimpleNamespace(plans=seeds)
        ways = Ways([], {}, lambda plan, unused: iter(()), kicks=lambda plan: kicked.append(plan) or [], equal=equal)
        climbs = Climbs([], [1000], following, ways, lambda plan: plan, lambda device, host: 100.0, some)
        first = Climb(Limits(1000), ways, climbs.evaluate, Plan(step_time_us=104.0, peak_bytes={"device": 900}))
        kicked.clear()
        assert climbs._kicked(first) is first
        return len(climbs._from_seeds(first)), len(kicked)

    assert ended({1500: 1000}, True) == (1, 0) and most == [1.05 * 104.0]
    assert ended({1500: 1000}, False) == (2, 1) and ended({}, True) == (2, 1) and most[1:] == [inf, inf]


def test_plans_between_those_of_the_frontier_are_looked_at_unless_climbs_of_a_large_step_serve_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, looked = PlanningProblem(crossing(), MACHINES[1], Budgets(updates=WAYS["behind the forward"])), list[Budgets]()
    choose = candidates_module.choose

    def counted(points: Any, within: Any, evaluate: Any, budgets: Budgets, us: float) -> Point:
        looked.append(budgets)
        return choose(points, within, evaluate, budgets, us)

    monkeypatch.setattr(candidates_module, "choose", counted)
    for regions, alone in ((1, True), (10_000, False)):
        monkeypatch.setattr(climb_module, "_PATIENT_REGIONS", regions)
        candidates = Candidates(problem)
        device = (candidates.floor + candidates.resident.plan.peak_bytes["device"]) // 2
        host = candidates.best(device, None).plan.peak_bytes["host"]
        assert bool(looked) != alone
        looked.clear()
        candidates.best(device, host - 1)
        assert looked
        looked.clear()


def limits_asked(
    times: Mapping[int, float],
    following: Mapping[int, int],
    bound: Callable[[int, int | None], float],
    monkeypatch: pytest.MonkeyPatch,
) -> list[int]:
    """Returns the limits whose plans, which take these ``times`` in µs, are asked for, in the order of the first asking."""
    asked: dict[int, Plan] = {}
    for what in ("_climbed", "_plan"):  # polishing gains nothing
        monkeypatch.setattr(Climbs, what, lambda self, limit: asked.setdefault(limit, Plan(step_time_us=times[limit])))
    ways: Any = None
    bases = [limit for limit in times if limit not in following]
    climbs = Climbs([], bases, following, ways, lambda plan: plan, bound, ways)
    best = climbs.best(None, Plan(step_time_us=150.0), lambda plan: [plan])
    assert best.total_us == min(times[limit] for limit in asked)
    return list(asked)


def test_limits_that_are_apart_differ_in_memory_or_in_their_bound_and_do_not_depend_on_higher_ones() -> None:
    bounds = {100: inf, 101: 50.0, 102: 49.5, 103: 48.0, 130: 48.0, 140: 48.0, 150: 47.9, 190: 47.8}
    limits = list(bounds)
    assert apart(limits, bounds.__getitem__) == [100, 101, 103, 140, 190]
    assert all(
        apart(limits[:count], bounds.__getitem__) == [each for each in (100, 101, 103, 140, 190) if each in limits[:count]]
        for count in range(len(limits))
    )
