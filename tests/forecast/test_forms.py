"""The form of a step is the fastest within its budget: more memory is never slower, whatever has to be cut for less."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from mtcompile.forecast import solve
from mtcompile.forecast.forms import StepForms
from mtcompile.models.decoders import fake
from mtcompile.models.shapes import Shape
from mtcompile.passes.cuts.form import WHOLE
from mtcompile.passes.planning import search
from mtcompile.passes.step_graph import fragments_of
from tests.helpers.stacks import WIDTH, Residual
from tests.helpers.training import adamw

pytestmark = pytest.mark.slow
VOCABULARY = 512
WEIGHT = 512 << 10  # bytes of the layer of ``First``
SMALL = Shape(128, 384, 1, 2, 1, 1024, head_dim=64, dtype=torch.float32)


class Head(nn.Module):
    """A large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(tokens).tanh()).view(-1, VOCABULARY), tokens.view(-1))


class First(nn.Module):
    """A large layer whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


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


def is_never_slower_with_more(plan: Callable[[int], mtcompile.Forecast], least: int, times_as_much: float, count: int) -> bool:
    """Plans within ``count`` budgets, from the smallest that fits up. Tells whether no step takes longer than the one
    before, and one is faster."""
    budgets = [int(least * times_as_much ** (number / count)) for number in range(count)]
    forecasts = [plan(budget) for budget in budgets]
    times = [forecast.step_time_us for forecast in forecasts]
    assert all(forecast.feasible for forecast in forecasts) and not plan(least - 1).feasible
    return times == sorted(times, reverse=True) and times[-1] < times[0]


@pytest.mark.usefixtures("forms_made_once")
@pytest.mark.parametrize(
    ("model", "seq", "count"),
    [(residual, 64, 8), *(pytest.param(model, 64, 20, marks=pytest.mark.long) for model in (residual, decoder))],
)
def test_more_memory_is_never_slower_in_any_form(model: Any, seq: int, count: int) -> None:
    """On the device, whose least is what a refusal and ``solve="memory"`` name, and on the host."""
    plan = functools.partial(mtcompile.plan, model, seq=seq)
    solved = plan(solve="memory").solved
    least = plan(memory=1).minimum_device_bytes
    assert solved == {"memory": least}
    assert is_never_slower_with_more(lambda budget: plan(memory=budget), least, 20.0, count)
    middle = 2 * least
    most = plan(memory=middle).peak_bytes["host"]
    host = next(way for way in plan(memory=middle, host=most // 8).ways_out if way.startswith("host memory of"))
    fewest = int(host.partition("(")[2].partition(" bytes")[0])
    assert is_never_slower_with_more(lambda budget: plan(memory=middle, host=budget), fewest, 1.2 * most / fewest, count)


@pytest.mark.parametrize(
    ("make", "inputs", "fragments", "memory", "told"),
    [
        (Head, {"tokens": torch.arange(240).view(3, 80)}, None, 1600 << 10, ""),
        (Head, {"tokens": torch.arange(240).view(3, 80)}, None, 800 << 10, "chunks"),
        (lambda: Residual(layers=1), {"x": torch.ones(512, WIDTH)}, None, 1400 << 10, "tiles"),
        (First, {"x": torch.ones(4, 64)}, "exact", WEIGHT // 2, ""),
    ],
    ids=["whole", "chunks", "tiles", "fragments"],
)
def test_compile_takes_the_form_that_plan_predicts(
    make: Any, inputs: Any, fragments: str | None, memory: int, told: str
) -> None:
    forecast = mtcompile.plan(make(), inputs, memory=memory, machine="rtx4090", fragments=fragments)
    model, tiles = make(), "auto" if fragments is None else 1
    options: Any = {"loss_chunks": "auto", "tiles": tiles, "fragments": fragments, "throttle": "rtx4090"}
    compiled = mtcompile.compile(model, memory=memory, optimizer=adamw(model.parameters()), device="cpu", **options)
    loss = compiled(**inputs)
    loss.sum().backward()
    assert forecast.planned is not None and compiled.plan is not None
    assert compiled.plan.total_us == pytest.approx(forecast.step_time_us, rel=0.01)  # bytes are measured, or by shapes
    assert compiled.plan.numerics == forecast.planned.plan.numerics
    assert told in compiled.plan.numerics and ("tiles" in told or "chunks" in told) == ("except" in compiled.plan.numerics)
    assert bool(fragments_of(forecast.planned.step)) == bool(fragments) == any("in fragments" in n for n in compiled.plan.notes)


@pytest.mark.long
def test_of_a_large_step_in_little_memory_more_is_hardly_slower() -> None:
    about: dict[str, Any] = {"precision": "bf16-master32", "update": "backward", "run_ahead": True}
    plans = [mtcompile.plan("qwen2.5-7b", memory=n, machine="rtx4090", batch=32, **about) for n in ("9GiB", "12GiB", "16GiB")]
    for less, more in itertools.pairwise(plans):
        assert more.feasible and more.step_time_us <= 1.02 * less.step_time_us


def test_a_step_has_its_head_whole_where_there_is_room() -> None:
    """Chunks make logits again."""

    def plan(memory: str) -> mtcompile.Forecast:
        tokens = torch.arange(1200).view(3, 400) % VOCABULARY  # 2.3 MiB of logits
        return mtcompile.plan(Head(), {"tokens": tokens}, memory=memory, machine="rtx4090")

    assert "chunks" in plan("4MiB").numerics and "chunks" not in plan("64MiB").numerics


@pytest.mark.parametrize("model", [pytest.param(decoder, marks=pytest.mark.long), residual])
def test_no_form_promises_more_than_the_whole_does_with_no_memory_for_the_work_of_blocks(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this bound, it is known that no other form has to be made."""
    monkeypatch.setitem(
        search.EFFORTS, "normal", search.EFFORTS["normal"]._replace(steps=10**9)
    )  # all that may be faster are made
    made, make = list[StepForms](), solve.forms_of

    def known(request: Any, batch: int, seq: int) -> StepForms:
        made.append(make(request, batch, seq))
        return made[-1]

    monkeypatch.setattr(solve, "forms_of", known)
    least = mtcompile.plan(model, seq=64, memory=1).minimum_device_bytes
    mtcompile.plan(model, seq=64, memory=2 * least)
    whole = made[-1].first.candidates
    forms = [step for step in made[-1].by_form.values() if step is not None and step.form != WHOLE]
    assert len(forms) >= 3
    for device in (least, 2 * least, 4 * least):
        promised = whole.bound_us(device, None, inside=False)
        assert promised <= whole.bound_us(device, None)
        assert all(promised <= step.candidates.bound_us(device, None) * (1 + 1e-9) for step in forms)
    assert whole.bound_us(least, None, inside=False) > whole.bound_us(None, None)


def test_updates_in_the_backward_need_as_much_as_in_a_compiled_step() -> None:
    make, inputs = (lambda: Residual(layers=2)), {"x": torch.ones(4, WIDTH)}
    forecast = mtcompile.plan(make(), inputs, memory="1GiB", machine="rtx4090", update="backward")
    model = make()
    options: Any = {"loss_chunks": "auto", "tiles": "auto", "throttle": "rtx4090", "update": "backward"}
    compiled = mtcompile.compile(model, memory="1GiB", optimizer=adamw(model.parameters()), device="cpu", **options)
    compiled(**inputs).sum().backward()
    assert compiled.plan is not None
    assert forecast.peak_bytes["device"] == compiled.plan.peak_bytes["device"]
