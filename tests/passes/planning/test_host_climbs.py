"""Plans within limits on the host: climbs of their own find faster ones, and keep what budgets promise."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from math import inf

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Updates
from mtcompile.passes.planning import candidates as candidates_module
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs import climb, hosts
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from tests.helpers.tracing import traced_case

pytestmark = pytest.mark.slow  # it searches for plans
MACHINE = Machine("slow link", 1e12, 100.0, 2.0, 2.0, issue_us=0.2, host_gbps=20.0)


@pytest.fixture(scope="module")
def problem() -> Iterator[PlanningProblem]:
    """A small step that is planned as large ones are: few plans are searched, and these are climbed from, not as far."""
    with pytest.MonkeyPatch.context() as patch:
        for limit, number in {
            "_FEW_SEARCHED": 1000,
            "MOST_SEARCHED": 2,
            "MOST_POINTS": 3,
            "_FEWEST_POINTS": 3,
            "_REFINED": 9,
        }.items():
            patch.setattr(candidates_module, limit, number)
        patch.setattr(climb, "_MOVES", (20, 14, 14))
        patch.setattr(hosts, "_MOVES", 20)
        yield PlanningProblem(traced_case("gpt2").step, MACHINE, Budgets(updates=Updates(run_ahead=True)))


@pytest.fixture(scope="module")
def asked(problem: PlanningProblem) -> Candidates:
    """What tests ask of it before changes none of its plans, as the first of them shows."""
    return Candidates(problem)


def budgets_of(candidates: Candidates, count: int, shares: Sequence[float] = (0.3,)) -> list[tuple[int, int | None]]:
    """Some device bytes, each with host bytes from the fewest that any plan needs to what the fastest takes."""
    low, high = candidates.floor, candidates.resident.plan.peak_bytes["device"]
    budgets: list[tuple[int, int | None]] = []
    for device in (int(low + share * (high - low)) for share in shares):
        most = candidates.best(device, None).plan.peak_bytes["host"]
        with pytest.raises(DoesNotFit) as refused:
            candidates.best(device, 0)
        fewest = refused.value.minimum
        budgets += [(device, fewest + (most - fewest) * i // (count - 1)) for i in range(count)]
        budgets.append((device, None))
    return budgets


def times(candidates: Candidates, budgets: list[tuple[int, int | None]]) -> dict[tuple[int, int | None], float]:
    """The predicted steps, which are within their budgets and not below their bounds."""
    predicted = {}
    for device, host in budgets:
        plan = candidates.best(device, host).plan
        assert not Limits(device, host).missing(plan)
        assert plan.certificate is None or plan.total_us >= plan.certificate.bound_us * (1 - 1e-9)
        predicted[device, host] = plan.total_us
    return predicted


@pytest.mark.parametrize(("count", "again"), [(3, 3), pytest.param(20, 42, marks=pytest.mark.long)])
def test_more_of_either_tier_is_never_slower_whatever_was_asked_before(
    problem: PlanningProblem, asked: Candidates, count: int, again: int
) -> None:
    budgets = budgets_of(asked, count, (0.3, 0.7))
    predicted = times(asked, budgets)
    for (device, host), us in predicted.items():
        for (more, more_host), other_us in predicted.items():
            if more >= device and (more_host is None or (host is not None and more_host >= host)):
                assert other_us <= us
    shuffled = random.Random(1).sample(budgets, again)
    assert times(Candidates(problem), shuffled) == {budget: predicted[budget] for budget in shuffled}


def test_climbs_within_the_limits_of_both_tiers_find_faster_plans(
    problem: PlanningProblem, asked: Candidates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, a budget takes a plan that was found without a limit on the host, or one that keeps nothing."""
    budgets = budgets_of(asked, 3)
    climbed = times(asked, budgets)
    monkeypatch.setattr(candidates_module.HostClimbs, "best", lambda self, device, host, taken: taken)
    without = times(Candidates(problem), budgets)
    assert all(us <= without[budget] for budget, us in climbed.items())
    assert min(us / without[budget] for budget, us in climbed.items()) < 0.95


def test_bounds_for_many_limits_are_those_for_each(problem: PlanningProblem, asked: Candidates) -> None:
    """Also where there can be no plan, and those for even less memory, for which no program is solved."""
    bounds, (least, most) = asked._bounds, (asked.least_nbytes, asked.resident.plan.peak_bytes["device"])
    hosts = [None, *(int(share * asked.least().plan.peak_bytes["host"]) for share in (1.0, 0.7, 0.3, 0.0))]
    for device, host in itertools.product((most, (least + most) // 2, least, least // 2), hosts):
        expected = asked.bound_us(device, host)
        assert bounds.next_us(device, host) == pytest.approx(expected, rel=1e-9) == bounds.next_us(device, host)
    assert bounds.next_us(least // 4, 0) == inf


def test_a_cache_gives_the_same_plan(problem: PlanningProblem, asked: Candidates) -> None:
    class Memory:
        text: str | None = None

        def read(self) -> str | None:
            return self.text

        def write(self, text: str) -> None:
            self.text = text

    store = Memory()
    device, host = budgets_of(asked, 3)[1]
    plan = Candidates(problem, store=store).best(device, host).plan
    warm = Candidates(problem, store=store)
    assert warm.best(device, host).plan == plan == asked.best(device, host).plan
    assert any(limits.host is not None for limits in warm._climbed) and warm.best(device, None).plan.total_us <= plan.total_us


class Residual(nn.Module):
    """Four linear layers of 1 MiB, each with what comes in added to what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x)) + x
        return x.pow(2).mean()


@pytest.mark.parametrize(
    ("rows", "memory", "options"),
    [
        (256, "9MiB", {"machine": "h100-sxm", "optimizer": "sgd"}),  # was slower
        (512, "9MiB", {"machine": "h100-sxm", "optimizer": "sgd"}),  # was refused
        (512, "12MiB", {"machine": "rtx3090", "precision": "bf16-master32", "update": "backward"}),  # with casts on the host
    ],
)
def test_a_host_with_room_for_the_plan_without_a_limit_gets_it(rows: int, memory: str, options: dict[str, str]) -> None:
    """Where all points of the search that are as fast need more of the host than what climbs make of them."""

    def planned(host: int | None) -> mtcompile.Forecast:
        limits = {"memory": memory, "host": host, "fragments": None}
        return mtcompile.plan(lambda: (Residual(), {"x": torch.ones(rows, 512)}), **limits, **options)

    unlimited = planned(None)
    limited = planned(unlimited.peak_bytes["host"])
    assert limited.feasible and limited.step_time_us <= unlimited.step_time_us
