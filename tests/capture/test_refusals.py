"""What cannot be captured is refused before anything ran, in one sentence, with the user's own line and what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.capture.refusals import not_captured, place_in
from tests.helpers.training import compiled_whole, equal_to_plain


class Hard(torch.autograd.Function):
    """A function whose only output needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = (x > 0).float()
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function
        self.table = nn.Embedding(8, 8, max_norm=1.0)

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> Any:
        return self.function(self, self.linear(x), **others)


def inverted(model: Model, h: torch.Tensor) -> torch.Tensor:
    window = torch.ones(8)
    return torch.istft(torch.stft(h.flatten(), 8, return_complex=True, window=window), 8, window=window).sum()


def set_mask(model: Model, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[h < 0] *= 0.5
    return h.sum()


def raising(model: Model, h: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not this time")


DATA = "do not depend on what tensors hold|expected static shapes"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "item": (lambda model, h: (h * h.detach().abs().max().item()).sum(), DATA),
    "boolean mask": (lambda model, h: h[h > 0].sum(), DATA),
    "assignment to a mask": (set_mask, DATA),
    "unique": (lambda model, h: h.sum() + torch.unique(h.detach().long()).numel(), DATA),
    "inside an operation": (inverted, r"DataDependent(.|\n)*do not depend on what tensors hold"),
    "constructor": (
        lambda model, h: (h * torch.FloatTensor(np.arange(8.0))).sum(),
        r"fit together.*torch\.tensor\(values, dtype",
    ),
    "number of the inputs": (lambda model, h, y: h.sum() * y.sum().item(), DATA),
    "branch": (lambda model, h: h.sum() if h.sum() > 0 else -h.sum(), DATA),
    "not differentiable": (lambda model, h: (h * Hard.apply(h)).sum(), "compile the submodules"),
    "shapes": (lambda model, h: h @ torch.ones(9, 2), r"\[4, 8\] X \[9, 2\]"),
    "user's error": (raising, "not this time"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_names_the_line_and_what_to_do(reason: str) -> None:
    function, words = REFUSED[reason]
    with pytest.raises(mtcompile.CaptureError, match=words) as refusal:
        others = {"y": torch.rand(2)} if "y" in function.__code__.co_varnames else {}
        compiled_whole(Model(function))(torch.ones(4, 8), **others)
    line = function.__code__.co_firstlineno
    places = [f"test_refusals.py:{number} in " for number in range(line, line + 5)]
    assert any(place in str(refusal.value) for place in places)
    assert refusal.value.__cause__ is None and refusal.value.__suppress_context__


@pytest.mark.parametrize("kind", [ValueError, KeyError, NotImplementedError])
def test_the_exception_of_a_forward_is_caught_as_what_it_is(kind: type[Exception]) -> None:
    def raising(model: Model, h: torch.Tensor) -> torch.Tensor:
        raise kind("not this time")

    with pytest.raises(kind, match=r"not this time[\s\S]*\n  the forward raises this by itself") as refusal:
        compiled_whole(Model(raising))(torch.ones(4, 8))
    assert isinstance(refusal.value, mtcompile.CaptureError)
    assert str(copy.copy(refusal.value)) == str(refusal.value)


def test_the_original_error_is_chained_for_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DEBUG", "1")
    with pytest.raises(mtcompile.CaptureError) as refusal:
        compiled_whole(Model(REFUSED["branch"][0]))(torch.ones(4, 8))
    assert refusal.value.__cause__ is not None


def test_what_fails_in_planning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise AssertionError("a mistake of the planner's")

    monkeypatch.setattr("mtcompile.compiler.fastest_form", failing)
    with pytest.raises(mtcompile.CaptureError, match=r"AssertionError: a mistake(.|\n)*MT_DEBUG=1") as refusal:
        mtcompile.compile(Model(lambda model, h: h.sum()), memory="1GiB")(torch.ones(4, 8))
    assert "test_refusals.py" in str(refusal.value)


def changes(model: Model, h: torch.Tensor, y: torch.Tensor, z: torch.Tensor | float = 1.0) -> torch.Tensor:
    y.add_(1)
    return (h * y * z).sum()


IN_PLACE: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], dict[str, torch.Tensor]], str]] = {
    "parameter": (
        lambda model, h: h.sum() + model.table(torch.arange(4)).sum(),
        lambda rows: {},
        "table.weight in place.*max_norm",
    ),
    "overlapping inputs": (changes, lambda rows: {"y": rows[1:], "z": rows[:4]}, "shares memory with another tensor"),
    "expanded": (changes, lambda rows: {"y": rows[:1].expand(4, 8)}, "one place in memory"),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_changes_in_place_that_cannot_be_kept_are_refused(kind: str) -> None:
    function, others, words = IN_PLACE[kind]
    rows = torch.zeros(5, 8)
    with pytest.raises(mtcompile.CaptureError, match=words):
        mtcompile.compile(Model(function), memory="1GiB")(torch.ones(4, 8), **others(rows))
    assert not rows.any()


class Sharing(nn.Module):
    """A model with a buffer that is a view of a parameter, and a parameter without a gradient."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.query, self.key, self.function = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), function
        self.register_buffer("row", self.query.weight.data[0])

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.query(x), x)


def momentum(model: Sharing, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for query, key in zip(model.query.parameters(), model.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        return (h * model.key(x)).sum()


def scaled(model: Sharing, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.row.mul_(0.9)
    return h.sum()


MEMORY: dict[str, tuple[Callable[..., Any], str]] = {
    "replaced": (momentum, r"the parameter key.weight other memory(.|\n)*test_refusals.py:.*key.data = (.|\n)*outside forward"),
    "shared": (scaled, r"row shares memory with another(.|\n)*test_refusals.py:.*row.mul_(.|\n)*clone"),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_that_a_graph_cannot_change_is_named(kind: str) -> None:
    function, words = MEMORY[kind]
    model = Sharing(function)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(mtcompile.CaptureError, match=words):
        mtcompile.compile(model, memory="1GiB")(torch.ones(4, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_inputs_with_gaps_may_be_changed_and_overlapping_ones_read() -> None:
    torch.manual_seed(0)
    wide, rows = torch.randn(4, 16), torch.randn(5, 8)
    assert equal_to_plain(Model(changes), {"x": torch.randn(4, 8), "y": wide[:, ::2]})
    assert equal_to_plain(Model(lambda model, h, y: (h * y).sum()), {"x": rows[:4], "y": rows[1:]})


def test_numbers_for_a_log_are_a_plain_runs() -> None:
    class Logged(Model):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            h = self.linear(x)
            loss = h.pow(2).sum()
            return {"loss": loss, "log": loss.item(), "wide": h.double().sum().item()}

    torch.manual_seed(0)
    x, model = torch.randn(4, 8), Logged(changes)
    expected = model(x)
    output = mtcompile.compile(model, memory="1GiB")(x)
    assert {name: output[name] for name in ("log", "wide")} == {n: expected[n] for n in ("log", "wide")}
    assert torch.equal(output["loss"], expected["loss"])


def test_the_users_line_is_the_last_that_is_not_of_a_library() -> None:
    report = (
        'reason\n  File "/home/me/train.py", line 3, in step\n    model(x)\n'
        '  File "/home/me/model.py", line 7, in forward\n    y = x.item()\n'
        '  File "/venv/torch/nn/modules/module.py", line 9, in call\n    run()\n'
    )
    assert place_in(report) == "\n  at /home/me/model.py:7 in forward: y = x.item()"
    assert "not among them" in str(not_captured(ValueError("not among them")))
    assert place_in("no line") == ""
    without_source = 'from user code:\n   File "<string>", line 9, in forward\n\nSet TORCHDYNAMO_VERBOSE=1 for the rest'
    assert place_in(without_source) == "\n  at <string>:9 in forward"
