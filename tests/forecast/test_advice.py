"""Advice of a plan: every change that it names gains, or makes room, about what it says when it is planned."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.forecast.changes import Work
from mtcompile.forecast.result import Forecast
from mtcompile.models.decoders import fake
from mtcompile.models.shapes import Shape
from mtcompile.passes.analysis.cost import Machine
from tests.helpers.stacks import WIDTH, Residual

# A host, a link and a disk that are slow for its computations.
SLOW = replace(Machine(), flops=1e12, memory_gbps=100.0, issue_us=0.1, h2d_gbps=4.0, d2h_gbps=4.0, host_gbps=20.0)
DECODER = Shape(128, 384, 1, 2, 1, 1024, head_dim=64, dtype=torch.float32)


def residual(batch: int, seq: int) -> Any:
    return Residual(), {"x": torch.randn(batch * seq, WIDTH)}


def decoder(batch: int, seq: int) -> Any:
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    return fake(DECODER), {"tokens": tokens, "targets": tokens}


def planned(model: Any = residual, **options: Any) -> Forecast:
    return mtcompile.plan(model, **{"batch": 2, "seq": 256, "memory": "4MB", "machine": SLOW, **options})


def asked_for(change: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that a change names, as a user would write them."""
    words = re.sub(r"\s*\(.*", "", change)
    if words.startswith("twice the "):
        if "batch" in words:
            return {"batch": 2 * options["batch"], "accumulate": int(words.rpartition("=")[2])}
        return {"memory" if "device" in words else "host": 2 * options["memory" if "device" in words else "host"]}
    pairs = re.findall(r'(\w+)=("[^"]*"|\w*)', words)
    values = {name: value.strip('"') for name, value in pairs}
    return values | {n: int(v) for n, v in values.items() if n == "lora"} | ({"disk": "1GB"} if "disk" in values else {})


@pytest.mark.slow
def test_a_step_that_fits_says_what_would_gain_most() -> None:
    forecast = planned(advise=True)
    assert forecast.feasible and forecast.advice and len(forecast.advice) > 1
    gains = [each.gain for each in forecast.advice]
    assert gains == sorted(gains, reverse=True) and min(gains) >= 0.03
    text = str(forecast)
    told = [*(each.what for each in forecast.advice), *forecast.no_gain]
    levers = ('update="backward"', 'update="backward" with run_ahead=True', "kernels=", "accumulate=", "disk=")
    assert all(sum(lever in what for what in told) == 1 + (lever == levers[0]) for lever in levers)  # each is told
    for each in forecast.advice:
        assert re.search(rf"\+{each.gain:.0%} .* tokens/s  {re.escape(each.what)}$", text, re.M)
        assert each.gain == pytest.approx(each.tokens_per_s / forecast.tokens_per_s - 1)
        assert asked_for(each.what, {"batch": 2, "memory": 4_000_000})  # the user can ask for it


@pytest.mark.slow
def test_exact_kernels_gain_what_chains_move_less() -> None:
    elementwise = replace(Machine(), flops=1e15, memory_gbps=1.0, issue_us=1e-3)

    def gain(model: Any, **options: Any) -> float:
        forecast = planned(model, memory="1GiB", machine=elementwise, advise=True, **options)
        assert forecast.advice is not None
        return next((each.gain for each in forecast.advice if "kernels=" in each.what), 0.0)

    class Chains(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.weight, self.count = nn.Parameter(torch.ones(256, 256)), count

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.weight
            for _ in range(self.count):
                x = x.tanh() * 2.0
            return (x @ self.weight).sum()

    def chains(count: int) -> Any:
        return lambda batch, seq: (Chains(count), {"x": torch.zeros(2048, 256)})

    assert gain(chains(0)) < gain(chains(4)) < gain(chains(16))
    assert gain(chains(16)) > 1  # 32 operations move three to four values each, a chain two or three


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"update": "backward"}, {"host": 9_000_000}], ids=str)
@pytest.mark.parametrize(("model", "memory"), [(residual, 4_000_000), (decoder, 6 << 20)])
def test_what_is_advised_gains_as_much_when_it_is_planned(model: Any, memory: int, options: dict[str, Any]) -> None:
    options = {"batch": 2 if model is residual else 4, "seq": 256 if model is residual else 64, "memory": memory, **options}
    forecast = planned(model, advise=True, **options)
    assert forecast.feasible and forecast.advice is not None and (forecast.advice or options)
    for each in (each for each in forecast.advice if "kernels=" not in each.what):  # which plan does not plan
        again = planned(model, **{**options, **asked_for(each.what, options)})
        if each.at_most:
            assert again.feasible and again.tokens_per_s <= 1.001 * each.tokens_per_s, each
        else:
            assert again.feasible and again.tokens_per_s >= 0.95 * each.tokens_per_s, each


@pytest.mark.slow
def test_a_disk_gains_at_most_what_its_bound_says_and_only_where_the_host_is_short() -> None:
    step: dict[str, Any] = {"batch": 16, "seq": 512, "machine": "rtx4090", "precision": "bf16-master32", "update": "backward"}
    step |= {"memory": "60MiB"}
    free = mtcompile.plan("gpt-11m", advise=True, **step)
    assert "disk= (there is room without one)" in free.no_gain
    step["host"] = int(free.peak_bytes["host"] * 0.8)
    short = mtcompile.plan("gpt-11m", advise=True, **step)
    assert short.feasible and short.advice is not None
    (disk,) = (each for each in short.advice if each.what.startswith("disk="))
    assert disk.at_most and f"≤+{disk.gain:.0%}" in str(short)
    with_disk = mtcompile.plan("gpt-11m", disk="1GB", **step)
    assert 0.99 * short.tokens_per_s <= with_disk.tokens_per_s <= 1.001 * disk.tokens_per_s  # as it is, or 1 % faster


def test_nothing_is_advised_that_gains_nothing() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().sum()

    machine = replace(Machine(), memory_gbps=1e6, issue_us=1e-3)
    forecast = mtcompile.plan(Loss(), {"x": torch.zeros(4096, 64)}, memory="1GiB", machine=machine, advise=True)
    assert forecast.advice == () and "    under +3%: update=" in str(forecast)
    silent = mtcompile.plan(Loss(), {"x": torch.zeros(4096, 64)}, memory="1GiB", machine=machine)
    assert silent.advice is None and "would gain" not in str(silent)


def holds_what_it_says(forecast: Forecast, model: Any, options: dict[str, Any]) -> set[str]:
    """Plans every change that a refusal names, and compares. Returns the kinds of changes."""
    kinds = set()
    for way in forecast.ways_out:
        what, _, figures = way.partition(": ")
        kinds.add(re.sub(r" of .*", "", what))
        if " memory of " in what:
            continue
        again = planned(model, **{**options, **asked_for(what, options)})
        if figures.startswith("fits"):
            assert again.feasible, way
        else:
            found = r"needs (at most )?[\d.]+ \w+ of the host, [\d.]+ \w+ less, but still [\d.]+ \w+ short"
            assert re.fullmatch(rf"{found}|needs at least [\d.]+ \w+ of the host, still at least [\d.]+ \w+ short", figures)
            assert again.feasible or 0 < again.short_bytes < forecast.short_bytes, way
    return kinds


def work(updates: str, update_us: float = 0.0) -> Work:
    """A forward of 10 ms and a backward of 20 ms, both as long as they fetch weights; compute and the other link work less."""
    once = defaultdict(float, {("forward", "h2d"): 10e3, ("backward", "h2d"): 16e3, ("backward", "d2h"): 8e3})
    each = defaultdict(float, {("forward", "compute"): 6e3, ("backward", "compute"): 12e3, ("backward", "h2d"): 4e3})
    shared = {"forward": (1e3, 0.0), "backward": (2e3, 0.5e3)}
    return Work({"forward": 10e3, "backward": 20e3}, once, each, updates, update_us, 25e3, 1e3, shared)


def test_estimates_follow_the_busiest_queue_of_each_phase() -> None:
    step = work("step", update_us=28e3)
    assert step.step_time_us("step") == pytest.approx(58e3)
    assert step.step_time_us("step", 2) == pytest.approx(12e3 + 24e3 + 28e3)  # compute: twice 6 ms, and twice 12 against 16 + 8
    assert step.step_time_us("backward") == pytest.approx(10e3 + 1.03 * (25e3 + 2.5e3))  # the host, with what copies take of it
    assert step.step_time_us("run ahead") == pytest.approx(20e3 + 10e3 + 1e3)  # the host hides behind the whole step
    assert work("backward").step_time_us("run ahead") == pytest.approx(30e3)  # updates on the device are in it already


@pytest.mark.slow
def test_micro_batches_are_advised_only_where_they_can_be_put_together() -> None:
    class Rows(nn.Module):
        def __init__(self, together: bool) -> None:
            super().__init__()
            self.layers, self.together = nn.ModuleList(nn.Linear(512, 512) for _ in range(6)), together

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x.square().mean() if self.together else (x - x.mean(0)).square().mean()

    def advised(together: bool) -> bool:
        model = planned(lambda batch, seq: (Rows(together), {"x": torch.zeros(batch, 512)}), memory="8MB", advise=True)
        assert model.advice is not None
        return any(each.what.startswith("twice the batch") for each in model.advice)

    assert advised(together=True) and not advised(together=False)


TIGHT = {"memory": 3_200_000, "host": 1_500_000}
HELP = {
    *('update="backward"', 'optimizer="adafactor" with update="backward"', "lora=16", 'disk= with update="backward"'),
    *("host memory", "device memory"),
}


@pytest.mark.slow
def test_a_host_that_is_too_small_is_told_what_would_help_there() -> None:
    forecast = planned(**TIGHT)
    assert not forecast.feasible and forecast.short_bytes > 0
    assert {re.sub(r" of .*|: .*", "", way) for way in forecast.ways_out} == HELP
    assert all(re.search(r"[\d.]+ (ms a step|\w+ of the host|\w+ \(\d+ bytes\))", way) for way in forecast.ways_out)
    fitting = [": fits" in way for way in forecast.ways_out if " memory of " not in way]
    assert fitting == sorted(fitting, reverse=True)  # what fits comes first


@pytest.mark.long
def test_what_would_help_a_host_does() -> None:
    assert holds_what_it_says(planned(**TIGHT), residual, TIGHT) == HELP


@pytest.mark.slow
def test_a_change_whose_state_has_no_room_is_told_by_what_it_needs_at_least() -> None:
    options: dict[str, Any] = {"batch": 2, "seq": 256, "memory": "48MiB", "host": 10_000_000, "machine": "rtx4090"}
    forecast = mtcompile.plan("gpt-11m", **options)
    (way,) = (way for way in forecast.ways_out if way.startswith('update="backward": needs at least'))
    least = float(way.split()[4]) * 2**20
    changed = mtcompile.plan("gpt-11m", update="backward", **options)
    assert not changed.feasible and least < options["host"] + changed.short_bytes < 2 * least


@pytest.mark.long
def test_a_disk_helps_a_host_that_is_too_small() -> None:
    options = {"batch": 2, "seq": 256, "memory": "72MiB", "host": "60MiB", "machine": "rtx4090", "precision": "bf16-master32"}
    forecast = planned("gpt-11m", **options)
    assert not forecast.feasible
    assert 'disk= with update="backward"' in holds_what_it_says(forecast, "gpt-11m", options)
