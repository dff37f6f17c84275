"""Plans that are found quickly: by linear programs, and improved by short climbs."""

from __future__ import annotations

from math import inf

import pytest

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts import quick
from mtcompile.passes.cuts.quick import QuickCandidates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from tests.passes.planning.drawn_plans import BOUNDED, SLOW

SHARES = (0.0, 0.2, 0.5, 0.8)  # of what lies between the floor and the peak of the plan with everything on the device


def candidates_of(step: str, machine: Machine) -> QuickCandidates:
    return QuickCandidates(PlanningProblem(BOUNDED[step](), machine, Budgets()))


def budgets_between(candidates: QuickCandidates) -> list[int]:
    low, high = candidates.floor, candidates.resident.plan.peak_bytes["device"]
    return [int(low + share * (high - low)) for share in SHARES]


@pytest.mark.parametrize("machine", [Machine(), SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("step", ["crossing", "skips"])
def test_short_climbs_find_plans_within_the_budget(step: str, machine: Machine) -> None:
    """Between the bound and what they start from; and no slower than the fastest of these."""
    candidates, faster = candidates_of(step, machine), 0
    for device in budgets_between(candidates):
        us, plans = candidates.climbed_us(device), [*candidates._climbed_shortly(device)]
        assert us == min(plan.total_us for plan in plans) < inf
        assert all(plan.peak_bytes["device"] <= device for plan in plans)
        assert us >= candidates.bound_us(device, None) * (1 - 1e-9)
        starts = [one.plan for one in candidates._near(device)]
        fitting = [plan.total_us for plan in starts if plan.peak_bytes["device"] <= device]
        assert us <= min(fitting, default=inf)
        faster += us < min(fitting, default=inf)
    assert faster, "expected short climbs to find something faster than linear programs give"


def test_short_climbs_find_the_same_whatever_was_asked_before() -> None:
    once = candidates_of("skips", SLOW)
    devices = budgets_between(once)
    found = [once.climbed_us(device) for device in devices]
    for device, us in reversed([*zip(devices, found, strict=True)]):
        assert candidates_of("skips", SLOW).climbed_us(device) == us == once.climbed_us(device)


def test_short_climbs_below_the_floor_find_nothing() -> None:
    candidates = candidates_of("crossing", Machine())
    assert candidates.climbed_us(1) == inf


@pytest.mark.parametrize("step", ["crossing", "skips"])
def test_a_large_step_without_a_plan_is_refused_without_a_search(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to be missing is enough, and a search finds no plan with much less; one that is asked for afterwards
    is made all the same."""
    searched = candidates_of(step, SLOW)
    with pytest.raises(DoesNotFit) as by_search:
        searched.best(1, None)
    assert searched._points, "expected a small step to be searched"
    monkeypatch.setattr(quick, "SMALL", 0)
    large = candidates_of(step, SLOW)
    with pytest.raises(DoesNotFit) as refused:
        large.best(1, None)
    assert not large._points and large.needs("host", {"device": 1}) is None
    assert refused.value.tier == "device" and refused.value.causes
    assert by_search.value.minimum <= refused.value.minimum <= 1.1 * by_search.value.minimum
    planned = large.best(refused.value.minimum, None)
    assert large._points and planned.plan.peak_bytes["device"] <= refused.value.minimum
    assert large.least().plan.peak_bytes["device"] <= refused.value.minimum
    with pytest.raises(DoesNotFit) as again:
        large.best(1, None)
    assert again.value.minimum == refused.value.minimum and again.value.causes == refused.value.causes


def test_a_large_step_is_searched_only_if_its_leanest_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the linear program says that a plan fits."""
    monkeypatch.setattr(quick, "SMALL", 0)
    candidates = candidates_of("skips", SLOW)
    monkeypatch.setattr(candidates, "bound_us", lambda *_: 1.0)
    with pytest.raises(DoesNotFit) as refused:
        candidates.best(1, None)
    assert not candidates._points
    with pytest.raises(DoesNotFit):
        candidates.best(refused.value.minimum - 1, None)
    assert not candidates._points
    assert candidates.best(refused.value.minimum, None).plan.peak_bytes["device"] <= refused.value.minimum
    assert candidates._points


def test_a_plan_of_short_climbs_replaces_a_slower_one_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SMALL", 0)
    device = budgets_between(candidates_of("skips", SLOW))[1]
    candidates = candidates_of("skips", SLOW)
    monkeypatch.setattr(Candidates, "best", lambda self, device, host, known: self.planned(self._keeping_least.plan))
    slow_us = candidates._keeping_least.plan.total_us
    assert candidates.climbed_us(device) < slow_us
    planned = candidates.best(device, None)
    assert planned.plan.total_us == candidates.climbed_us(device) and planned.plan.peak_bytes["device"] <= device
    monkeypatch.setattr(quick, "_FAR", 1e9)
    assert candidates.best(device, None).plan.total_us == slow_us


def test_a_known_plan_needs_no_linear_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SMALL", 0)
    device = budgets_between(candidates_of("skips", SLOW))[1]
    known = candidates_of("skips", SLOW).best(device, None).plan
    candidates = candidates_of("skips", SLOW)
    assert candidates.best(device, None, known).plan.total_us == known.total_us
    assert not candidates._points and "_bounds" not in vars(candidates), "expected only the known plan to be evaluated"
