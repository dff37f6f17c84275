"""Tests of the plans that linear programs seed, and of the optima at which these programs begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.linear.program import Infeasible
from mtcompile.passes.planning.linear.relaxation import Chain
from mtcompile.passes.planning.linear.seeds import Within
from mtcompile.passes.planning.problem import PlanningProblem
from tests.passes.planning.drawn_plans import MACHINES, WAYS, crossing


def test_each_optimum_of_a_chain_begins_at_the_one_before_and_is_made_once() -> None:
    made: list[tuple[int, object]] = []

    def solve(limits: dict[str, int], like: object) -> Any:
        if limits["device"] < 250:
            raise Infeasible
        made.append((limits["device"], like))
        return str(limits["device"])

    chain = Chain(solve, 1000)
    assert chain.above(600) == "714" and made == [(1000, None), (714, "1000")]
    assert chain.above(1000) == chain.above(5000) == chain.above(715) == "1000" and len(made) == 2
    assert chain.above(510) == "510" and chain.above(511) == "714"
    assert chain.above(300) == "364" and chain.above(1) == chain.above(0) == "260"
    assert [like for _, like in made] == [None, "1000", "714", "510", "364"]
    assert chain.near({"device": 600, "host": None, "disk": None}) == "714"
    assert chain.near({"device": 600, "host": 600}) is chain.near({"device": None, "host": None}) is None

    def never(limits: object, like: object) -> Any:
        raise Infeasible

    assert Chain(never, 1000).above(500) is None and Chain(solve, 0).above(0) is None


@pytest.mark.parametrize(
    ("host", "most_us", "made"),
    [
        (None, 50.0, [(1, 100), (1, 70), (2, 70), (3, 70)]),
        (None, 5.0, [(1, 100), (2, 70), (3, 70)]),
        (1000, 50.0, [(1, 100), (1, 70), (2, 100), (2, 70), (3, 100), (3, 70)]),
    ],
    ids=["the first one tells", "one that is too slow is not made for fewer", "not with a limit on the host"],
)
def test_seeds_leave_free_what_the_first_one_needed(
    host: int | None, most_us: float, made: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan takes 30 bytes more than it was made for."""
    asked: list[tuple[int, int]] = []

    def rounded(self: Within, limits: dict[str, int], base: Plan, optimum: object) -> Plan:
        asked.append((base.lookahead, limits["device"]))
        return base.changed(step_time_us=10.0, peak_bytes={"device": limits["device"] + 30, "host": 0})

    monkeypatch.setattr(Within, "_rounded", rounded)
    some: Any = SimpleNamespace(near=lambda limits: None)
    solve: Any = lambda limits, ahead, like: None  # noqa: E731
    rounding: Any = None
    seeds = Within(solve, some, Plan(), rounding, {})
    plans = list(seeds.plans({"device": 100, "host": host}, lambda plan: plan, most_us))
    assert asked == made and [plan.lookahead for plan in plans] == [ahead for ahead, _ in made]


@pytest.mark.long
def test_certificates_are_the_same_whatever_was_asked_before() -> None:
    problem = PlanningProblem(crossing(), MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    first = Candidates(problem)
    low, high = first.floor, first.resident.plan.peak_bytes["device"]
    budgets = [low + (high - low) * part // 8 for part in (1, 3, 5, 7)]
    rising = [first.certificate(budget, None) for budget in budgets]
    falling = Candidates(problem)
    assert [falling.certificate(budget, None) for budget in budgets[::-1]] == rising[::-1]
    assert all(one is not None for one in rising)
