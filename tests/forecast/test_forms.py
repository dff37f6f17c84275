"""The form of a step is the fastest within its budget: more memory is never slower, whatever has to be cut for less."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile.forecast import solve
from mtcompile.models.decoders import Shape, fake
from tests.helpers.stacks import WIDTH, Residual

pytestmark = pytest.mark.slow
BUDGETS = 20
SMALL = Shape(128, 384, 1, 2, 1, 1024, head_dim=64, dtype=torch.float32)


def decoder(batch: int, seq: int) -> Any:
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    return fake(SMALL), {"tokens": tokens, "targets": tokens}


def residual(batch: int, seq: int) -> Any:
    return Residual(layers=2), {"x": torch.randn(batch * seq, WIDTH)}


@pytest.fixture
def forms_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all budgets share what is known of a step's forms, as those of ``solve="memory"`` do."""
    made = dict[tuple[int, int], Any]()
    make = solve.forms_of

    def known(request: Any, batch: int, seq: int) -> Any:
        if (batch, seq) not in made:
            made[batch, seq] = make(request, batch, seq)
        return made[batch, seq]

    monkeypatch.setattr(solve, "forms_of", known)


def is_never_slower_with_more(plan: Callable[[int], mtcompile.Forecast], least: int, times_as_much: float) -> bool:
    """Plans within twenty budgets, from the smallest that fits up. Tells whether no step takes longer than the one
    before, and one is faster."""
    budgets = [int(least * times_as_much ** (number / BUDGETS)) for number in range(BUDGETS)]
    forecasts = [plan(budget) for budget in budgets]
    times = [forecast.step_time_us for forecast in forecasts]
    assert all(forecast.feasible for forecast in forecasts) and not plan(least - 1).feasible
    return times == sorted(times, reverse=True) and times[-1] < times[0]


@pytest.mark.usefixtures("forms_made_once")
@pytest.mark.parametrize(("model", "seq"), [(residual, 64), pytest.param(decoder, 64, marks=pytest.mark.long)])
def test_more_memory_is_never_slower_in_any_form(model: Any, seq: int) -> None:
    """On the device, whose least is what a refusal and ``solve="memory"`` name, and on the host."""
    plan = functools.partial(mtcompile.plan, model, seq=seq)
    solved = plan(solve="memory").solved
    least = plan(memory=1).minimum_device_bytes
    assert solved == {"memory": least}
    assert is_never_slower_with_more(lambda budget: plan(memory=budget), least, 20.0)
    middle = 2 * least
    most = plan(memory=middle).peak_bytes["host"]
    host = next(way for way in plan(memory=middle, host=most // 8).ways_out if way.startswith("host memory of"))
    fewest = int(host.partition("(")[2].partition(" bytes")[0])
    assert is_never_slower_with_more(lambda budget: plan(memory=middle, host=budget), fewest, 1.2 * most / fewest)
