"""Plans that are found quickly: by linear programs, and improved by short climbs."""

from __future__ import annotations

from math import inf

import pytest

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts import quick
from mtcompile.passes.cuts.quick import QuickCandidates
from mtcompile.passes.planning.problem import PlanningProblem
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
        starts = [one.plan for one in candidates._by_linear_programs(device, quick._TIGHT, whole=False)]
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
