"""Lazy modules get their values in the first compiled call, from the random numbers that a plain run draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import torch_private

pytestmark = pytest.mark.slow  # it compiles many models

X = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)


def convolutional() -> nn.Module:
    layers = (nn.LazyConv2d(5, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(7), nn.Tanh(), nn.LazyLinear(2))
    return nn.Sequential(*layers)


def dropout_behind() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LazyConv2d(5, 3), nn.Flatten(), nn.LazyLinear(7), nn.Dropout())


class Noted(nn.Module):
    """A model that counts its calls and has a lazy module that the first of them does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.LazyLinear(4), nn.LazyLinear(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h: Tensor = self.first(x)
        return self.second(h) if self.calls > 1 else h


def trained(make: Callable[[], nn.Module], compiled: bool, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    """A model after two steps with AdamW; its losses, parameters, buffers, and the state of the generator."""
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if compiled:
        mtcompile.compile(model, memory="1GiB", optimizer=optimizer, **options)
    losses, x = [], X.bfloat16() if "precision" in options else X
    for _ in range(2):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [*losses, *model.state_dict().values(), torch.get_rng_state()]


def equal(expected: list[Tensor], results: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))


@pytest.mark.parametrize("make", [convolutional, dropout_behind, Noted, lambda: nn.LazyConvTranspose2d(5, 3)])
def test_bits_and_generator_are_a_plain_runs(make: Callable[[], nn.Module]) -> None:
    (plain, expected), (compiled, results) = trained(make, False), trained(make, True)
    assert equal(expected, results)
    assert [type(module) for module in plain.children()] == [type(module) for module in compiled.children()]
    assert isinstance(compiled, type(plain))
    assert not torch_private.lazy_modules(compiled)
    assert getattr(plain, "calls", 0) == getattr(compiled, "calls", 0)


@pytest.mark.parametrize("options", [{"update": "backward"}, {"accumulate": 2}, {"precision": "bf16-master32"}])
def test_options_meet_parameters_that_are_not_there_yet(options: dict[str, Any]) -> None:
    def initialized() -> nn.Module:
        model = dropout_behind().eval()
        model(X)
        return model.train()

    model, results = trained(dropout_behind, True, **options)
    assert model.memory_report()["state_bytes"] > 0  # type: ignore[operator]
    _, expected = trained(initialized, True, **options)
    assert equal(expected, results)


def test_random_numbers_between_are_refused_and_nothing_has_changed() -> None:
    model = mtcompile.compile(nn.Sequential(nn.LazyConv2d(5, 3), nn.Dropout(), nn.Flatten(), nn.LazyLinear(7)), memory="1GiB")
    state, report = torch.get_rng_state(), model.memory_report()
    with pytest.raises(mtcompile.CaptureError, match=r"(?s)draws random .* before it initializes 3.*call the plain model once"):
        model(X)
    assert report["state_bytes"] == 0
    assert torch.equal(state, torch.get_rng_state())
    assert list(torch_private.lazy_modules(model).values()) == ["0", "3"]
    assert all(nn.parameter.is_lazy(parameter) for parameter in model.parameters())
    assert [len(model[i]._forward_pre_hooks) for i in (0, 3)] == [1, 1]
    model.eval()(X)
    assert not torch_private.lazy_modules(model)


def test_a_budget_that_is_too_small_leaves_the_model_uninitialized() -> None:
    model, state = mtcompile.compile(convolutional(), memory=64), torch.get_rng_state()
    with pytest.raises(mtcompile.BudgetError):
        model(X)
    assert len(torch_private.lazy_modules(model)) == 4
    assert torch.equal(state, torch.get_rng_state())


def test_values_that_depend_on_the_input_are_refused() -> None:
    class Scaled(nn.LazyLinear):
        def initialize_parameters(self, input: Tensor) -> None:  # type: ignore[override]
            super().initialize_parameters(input)
            with torch.no_grad():
                self.weight.mul_(float(input.std()))

    model = mtcompile.compile(nn.Sequential(nn.Flatten(), Scaled(2)), memory="1GiB")
    with pytest.raises(mtcompile.CaptureError, match="1 could not be initialized from shapes"):
        model(X)
    assert list(torch_private.lazy_modules(model).values()) == ["1"]


def test_parameters_that_no_lazy_module_has_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.UninitializedParameter()
    with pytest.raises(mtcompile.CaptureError, match="weight is not initialized yet"):
        mtcompile.compile(model, memory="1GiB")(torch.ones(2, 2))
