"""A layer larger than the device's memory trains in fragments: the bits that the contract says, within the planned bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from mtcompile import compiler
from mtcompile.execution.memory.fragment_figures import streaming
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.cuts.fragments.cut import UNCUT
from tests.helpers.training import adamw, same, train

WEIGHT = 512 * 1024  # bytes


class Wide(nn.Module):
    """A first layer whose input needs no gradient, and a second one whose input gets one, each of ``WEIGHT`` bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 2048), nn.Linear(2048, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


class First(Wide):
    """The first layer alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


class Head(Wide):
    """A small first layer, and a large one whose input gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 2048)


def trained(kind: type[Wide], memory: int, **options: Any) -> tuple[Any, list[Any], list[Any]]:
    """A model trained in fragments, what it computed, and what plain PyTorch does."""
    data = {"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(1))}
    plain, model = kind(), kind()
    reference, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    options = {"policy": "offload-all", **options}  # without a search
    compiled = mtcompile.compile(model, memory=memory, optimizer=optimizer, device="cpu", **options)
    return compiled, train(compiled, optimizer, data), train(plain, reference, data)


def test_a_layer_larger_than_the_device_trains_with_the_same_bits() -> None:
    with pytest.raises(mtcompile.BudgetError):
        trained(First, WEIGHT // 2, fragments=None)
    compiled, fragments, plain = trained(First, WEIGHT // 2)  # by default: nothing fits without
    assert same(fragments, plain)
    report = compiled.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= WEIGHT // 2
    (note,) = (note for note in compiled.plan.notes if "first.weight in " in note)
    assert "more than there is" in note
    assert streaming(compiled.schedule).staging_nbytes < WEIGHT // 2
    x = torch.randn(7, 64)
    with torch.no_grad():  # a plan of its own
        assert torch.equal(compiled(x), F.linear(x, compiled.first.weight, compiled.first.bias).square().mean())
    assert compiled.memory_report()["peak_device_bytes"] <= WEIGHT // 2


@pytest.mark.slow
def test_a_host_without_room_for_a_whole_gradient_trains_in_fragments() -> None:
    """By default, as beside a device that is too small; a forecast says the same."""
    backward: dict[str, Any] = {"update": "backward", "host": 4 * WEIGHT + WEIGHT // 2}  # for the weights and AdamW's state
    with pytest.raises(mtcompile.BudgetError, match="smallest host"):
        trained(First, 6 * WEIGHT, fragments=None, **backward)
    compiled, fragments, plain = trained(First, 6 * WEIGHT, **backward)
    count = len([*compiled.parameters()])
    assert same([[row[0], *row[-count:]] for row in fragments[:-1]], [[row[0], *row[-count:]] for row in plain[:-1]])
    report = compiled.memory_report()
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"] <= backward["host"]
    assert mtcompile.plan(First(), {"x": torch.randn(4, 64)}, memory=6 * WEIGHT, machine="rtx4090", **backward).feasible


@pytest.mark.slow
def test_a_weight_whose_input_gets_a_gradient_is_made_whole_again() -> None:
    slow = Machine("slow link", flops=1e10, memory_gbps=2.0, h2d_gbps=0.025, d2h_gbps=0.025, host_gbps=0.2, issue_us=20.0)
    compiled, fragments, plain = trained(Head, 3 * WEIGHT, fragments="exact", throttle=slow)
    assert same(fragments, plain)
    assert any("second.weight in " in note for note in compiled.plan.notes)
    assert any(
        note.startswith("whole for its input's gradient: second.weight, up to 512.00 KiB") for note in compiled.plan.notes
    )
    assert "summed over fragments" not in compiled.plan.numerics
    report = compiled.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 3 * WEIGHT


@pytest.mark.long
def test_split_sums_are_near_and_said() -> None:
    with pytest.raises(mtcompile.BudgetError):
        trained(Wide, WEIGHT // 2, fragments="exact")
    compiled, fragments, plain = trained(Wide, WEIGHT // 2, fragments="split")
    assert "second.weight in " in compiled.plan.numerics
    assert torch.equal(fragments[0][0], plain[0][0])  # the first loss
    for one, other in zip(fragments[0][1:4], plain[0][1:4], strict=True):  # the first gradients
        torch.testing.assert_close(one, other)


CASES: list[dict[str, Any]] = [
    {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)},
    {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True), "run_ahead": True},
    {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)},
    {"precision": "bf16-master32"},
]


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[1:])])
def test_fragments_are_updated_one_by_one_as_a_whole(case: dict[str, Any]) -> None:
    case = {"optimizer": adamw, **case}
    make_optimizer, options = case.pop("optimizer"), {"policy": "offload-all", "device": "cpu", **case}
    states = []
    for memory, more in ((4 * WEIGHT, {}), (WEIGHT // 2, {"fragments": "exact"})):
        model = First()
        optimizer = make_optimizer(model.parameters())
        compiled = mtcompile.compile(model, memory=memory, optimizer=optimizer, update="backward", **options, **more)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(model.first.weight.dtype)
        log = train(compiled, optimizer, {"x": x})
        entries = optimizer.state_dict()["state"]
        state = [entries[i][key] for i in sorted(entries) for key in sorted(entries[i])]
        states.append([*log, [value for value in state if isinstance(value, torch.Tensor)]])
    assert same(*states)


def test_an_optimizer_that_looks_at_whole_weights_is_refused() -> None:
    model = First()
    optimizer = torch.optim.Adafactor(model.parameters())
    options = {"memory": WEIGHT // 2, "policy": "offload-all", "fragments": "exact", "update": "backward", "device": "cpu"}
    compiled = mtcompile.compile(model, optimizer=optimizer, **options)
    with pytest.raises(mtcompile.StepError, match="fragments"):
        compiled(torch.randn(4, 64))


def test_weights_that_fit_are_not_cut_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    forms, plain = [], compiler.rewrite_joint
    monkeypatch.setattr(compiler, "rewrite_joint", lambda *args: (forms.append(args[3]), plain(*args))[1])
    compiled, _, _ = trained(First, 4 * WEIGHT)
    assert [form.cut for form in forms] == [UNCUT] and not compiled.plan.notes


def test_by_default_an_optimizer_that_looks_at_whole_weights_keeps_them_whole() -> None:
    model = First()
    optimizer = torch.optim.Adafactor(model.parameters())
    options = {"memory": WEIGHT // 2, "policy": "offload-all", "update": "backward", "device": "cpu"}
    with pytest.raises(mtcompile.BudgetError):
        mtcompile.compile(model, optimizer=optimizer, **options)(torch.randn(4, 64))


@pytest.mark.long
def test_a_search_finds_fragments_too() -> None:
    _, fragments, plain = trained(First, WEIGHT // 2, fragments="exact", policy="fastest")
    assert same(fragments, plain)


@pytest.mark.long
def test_micro_batches_in_fragments() -> None:
    _, fragments, _ = trained(First, WEIGHT // 2, fragments="exact", accumulate=2)
    _, whole, _ = trained(First, 8 * WEIGHT, accumulate=2)
    assert same(fragments, whole)


def test_options_that_fragments_cannot_honour_are_refused() -> None:
    for options in ({"fragments": "rows"}, {"fragments": "exact", "update": "backward", "max_grad_norm": 1.0}):
        with pytest.raises(ValueError, match="fragments"):
            mtcompile.compile(Wide(), **options)


@pytest.mark.long
def test_a_forecast_cuts_weights_too() -> None:
    options: dict[str, Any] = {"memory": WEIGHT // 2, "optimizer": "sgd", "machine": "rtx4090"}
    data = {"x": torch.randn(4, 64)}
    assert not mtcompile.plan(First(), data, fragments=None, **options).feasible
    forecast = mtcompile.plan(First(), data, **options)
    assert forecast.feasible
    assert forecast.peak_bytes["device"] <= WEIGHT // 2
    assert forecast.parameters == sum(p.numel() for p in First().first.parameters())
    assert mtcompile.plan(First(), data, fragments="exact", gpus=2, **options).feasible
    for more in ({"solve": "memory"}, {"gpus": 2, "update": "backward"}, {"hosts": 2}):
        with pytest.raises(ValueError, match="fragments"):
            mtcompile.plan(First(), data, fragments="exact", **more, **options)


class Tied(Wide):
    """A large first layer, and an embedding whose weight a head reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(4, device=x.device)
        return self.first(x).square().mean() + F.linear(self.table(ids), self.table.weight).square().mean()


class Others(Wide):
    """A large first layer, and weights as large that no linear layer multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ParameterList(torch.randn(4, 64, 1024) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).square().mean()
        for other in self.others:
            y = y + torch.einsum("bn,knm->kbm", x, other).square().mean()
        return y


@pytest.mark.slow
@pytest.mark.parametrize("memory", [6 * WEIGHT, WEIGHT // 2])
def test_a_forecast_says_which_weights_stay_whole_whether_it_fits_or_not(memory: int) -> None:
    forecast = mtcompile.plan(Others(), {"x": torch.randn(4, 64)}, memory=memory, fragments="exact", machine="rtx4090")
    assert forecast.feasible == (memory > WEIGHT)
    told = [note for note in forecast.notes if note.startswith("whole: ")]
    assert [note.partition(";")[0] for note in told[:3]] == [f"whole: others.{index}" for index in range(3)]
    assert "bmm" in told[0] and "linear layers" in told[0] and told[3] == "whole: 2 more large weights, such as others.3"
    assert all(note in str(forecast) for note in told)


@pytest.mark.slow
def test_the_plan_says_why_a_tied_weight_stays_whole_and_a_refusal_what_keeps_all_whole() -> None:
    compiled, fragments, plain = trained(Tied, 6 * WEIGHT, fragments="exact")
    assert same(fragments, plain)
    (why,) = (note for note in compiled.plan.notes if note.startswith("whole: "))
    assert why.startswith("whole: table.weight; an embedding reads it too")
    assert compiled.explain("table.weight").notes == (why,) and why in str(compiled.explain("table"))
    assert [note[:12] for note in compiled.explain("first.weight").notes] == ["in fragments"]
    forecast = mtcompile.plan(Tied(), {"x": torch.randn(4, 64)}, memory=6 * WEIGHT, fragments="exact", machine="rtx4090")
    assert why in forecast.notes and why in str(forecast)
    with pytest.raises(mtcompile.BudgetError, match=r'leave out max_grad_norm=.*fragments="auto" keeps weights whole'):
        trained(First, WEIGHT // 2, update="backward", max_grad_norm=1.0)
