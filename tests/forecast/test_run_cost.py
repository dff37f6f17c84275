"""What a run costs, by its plan: days, energy, and writes to a drive."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import mtcompile
from mtcompile.forecast.run_cost import run_cost
from mtcompile.machine.presets import PRESETS
from mtcompile.passes.plan import Certificate
from mtcompile.sizes import parse_tokens


def test_days_energy_and_writes_are_those_of_all_steps() -> None:
    machine = replace(PRESETS["rtx4090"], watts=500.0, disk_rated_nbytes=10**15)
    cost = run_cost(86_400_001, 1000, 1e6, 10**9, machine, devices=2)
    assert cost.days == pytest.approx(1 + 1 / 86_400)  # a step that is begun is whole
    assert cost.kwh == pytest.approx(24 * cost.days) and cost.disk_write_bytes == 86_401 * 10**9
    assert cost.rated_share == pytest.approx(0.086401)
    assert str(cost) == "1 days, at most 24 kWh, host not counted, 86.4 TB written to the drive, 8.6% of what it is rated for"
    lasts = [str(run_cost(n, 1, 1e6, 0, machine)).partition(",")[0] for n in (2, 90, 7200)]
    assert lasts == ["2.00 s", "1.5 minutes", "2 hours"]
    unknown = run_cost(1000, 1000, 1e6, 10**9, replace(machine, watts=0.0, disk_rated_nbytes=0))
    assert unknown.kwh is None and unknown.rated_share is None
    assert "energy not known" in str(unknown) and "rated for is not known" in str(unknown)


def test_tokens_are_read_as_people_write_them() -> None:
    found = [parse_tokens(count) for count in ("1B", "1.5m", "2 T", 1000, "20k", None)]
    assert found == [10**9, 1_500_000, 2 * 10**12, 1000, 20_000, None]
    for wrong in ("", "0", "B", "-1", "1BB", "1GiB", "inf", 10**30):
        with pytest.raises(ValueError, match="expected a number of tokens"):
            parse_tokens(wrong)


def test_a_plan_and_what_would_gain_say_what_the_run_costs() -> None:
    forecast = mtcompile.plan("gpt-11m", seq=256, machine="rtx4090", memory="100MiB", tokens="1B", advise=True)
    assert forecast.run is not None and forecast.advice
    assert forecast.run.days == pytest.approx(1e9 / forecast.tokens_per_s / 86_400, rel=1e-3)
    assert forecast.run.kwh == pytest.approx(forecast.run.days * 24 * 0.45)
    assert f"1,000,000,000 tokens: {forecast.run}" in str(forecast)
    for advice in forecast.advice:
        assert advice.run is not None and advice.run.days < forecast.run.days and str(advice.run) in str(forecast)
    assert json.loads(forecast.to_json())["run"]["tokens"] == 10**9


def test_a_refusal_says_it_of_each_way_out_that_has_a_time() -> None:
    forecast = mtcompile.plan("gpt-11m", seq=256, machine="rtx4090", memory="5MiB", tokens="1B")
    assert not forecast.feasible and forecast.run is None
    assert "; the run: " in next(way for way in forecast.ways_out if "a step then" in way)


def test_far_from_the_bound_a_plan_says_that_the_bound_says_little() -> None:
    bound = Certificate(100.0)
    assert bound.of(110.0).startswith("within 10.0% of the bound: no plan")
    assert bound.of(285.4).startswith("2.9 times the bound: the bound says little here: no plan")
