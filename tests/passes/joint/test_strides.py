"""Where traced strides are not those of the CPU's kernels, the kernels' are planned for, and bits are the plain run's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models


class Dropped(nn.Module):
    """Dropout whose gradient comes in columns."""

    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.before = nn.Linear(32, 64), nn.Linear(64, 32), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(self.before(self.first(x)), 0.5)
        return self.last((dropped.t().contiguous() * 2).t().relu()).square().mean()


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x,
        lambda x: x.view(12, 4, 64).transpose(0, 1).reshape(48, 64),
        lambda x: torch.cat(x.view(48, 2, 32).transpose(0, 1).unbind(), -1),
        lambda x: F.layer_norm(x, (64,)).view(-1).as_strided((48, 64), (64, 1)),
        lambda x: x.chunk(2, -1)[0].repeat(1, 2),
    ],
    ids=["linear", "reshaped", "unbound", "as_strided", "chunked"],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_dropout_whose_gradient_comes_in_columns(before: Callable[[torch.Tensor], torch.Tensor], needs_grad: bool) -> None:
    torch.manual_seed(0)
    assert_plain(Dropped(before), torch.randn(48, 32, requires_grad=needs_grad))


OPERATIONS = {
    "layer_norm": lambda x, y: F.layer_norm(x, (64,)),
    "log_softmax": lambda x, y: F.log_softmax(x, -1),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="none"),
    "hardswish": lambda x, y: F.hardswish(x),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "logaddexp": torch.logaddexp,
    "copysign": torch.copysign,
    "expanded": lambda x, y: x * y.sum(-1, keepdim=True).expand_as(x),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True),
}


class Columns(nn.Module):
    """An operation that takes columns and whose gradient comes in columns."""

    def __init__(self, operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.operation = nn.Linear(32, 64), nn.Linear(64, 32), operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.first(x).t().contiguous() * 2).t()
        made = self.operation(x, x.roll(1, 0))
        return self.last((made.t().contiguous() * 2).t()).square().mean()


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_columns(name: str) -> None:
    torch.manual_seed(0)
    assert_plain(Columns(OPERATIONS[name]), torch.randn(48, 32))


def assert_plain(model: nn.Module, x: torch.Tensor) -> None:
    """Loss and gradients are the plain run's, and strided as its are."""
    results = []
    for run in (model, mtcompile.compile(model)):
        torch.manual_seed(1)
        loss = run(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in [*model.parameters(), x] if p.grad is not None)])
        model.zero_grad()
        x.grad = None
    plain, compiled = results
    assert len(plain) == len(compiled) == 5 + x.requires_grad
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(plain, compiled, strict=True))
