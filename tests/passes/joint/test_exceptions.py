"""The contract names the parameters and operations whose gradients may be rounded otherwise, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtcompile.passes.joint.exceptions import exceptions
from tests.helpers.tracing import trace

pytestmark = pytest.mark.slow  # it compiles many models


class Repeated(nn.Module):
    """One layer used three times, one used once, and one whose result is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.single, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale + 0.0
        x = self.single(self.shared(torch.tanh(self.shared(torch.tanh(self.shared(x))))))
        return (x * scale + scale).square().sum()


def test_parameters_that_are_used_several_times() -> None:
    (sentence,) = exceptions(trace(Repeated(), {"x": torch.randn(4, 8)}).joint)
    assert "shared.weight (3 uses), shared.bias (3 uses)" in sentence
    assert "single" not in sentence and "scale" not in sentence


def test_parameters_that_autocast_casts_at_each_use() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, sentence = exceptions(trace(Repeated(), {"x": torch.randn(4, 8)}).joint)
    assert "shared.weight (to bfloat16), shared.bias (to bfloat16)" in sentence and "single" not in sentence


class Product(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8).requires_grad_(not frozen), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(self.inner(x))
        return self.last(x.cumprod(1) + x.prod(0)).sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_operations_whose_plain_backward_looks_at_values(frozen: bool) -> None:
    sentences = exceptions(trace(Product(frozen), {"x": torch.randn(4, 8)}).joint)
    assert [s.partition(":")[0] for s in sentences] == ([] if frozen else ["the gradient of cumprod, prod"])


def test_a_model_without_exceptions_has_none() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).sum()

    assert exceptions(trace(Loss(), {"x": torch.randn(4, 8)}).joint) == []
