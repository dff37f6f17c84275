"""Where traced strides are not those of the CPU's kernels, the kernels' are planned for, and bits are the plain run's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile


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
    model, x = Dropped(before), torch.randn(48, 32, requires_grad=needs_grad)
    results = []
    for run in (model, mtcompile.compile(model)):
        torch.manual_seed(1)
        loss = run(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in [*model.parameters(), x] if p.grad is not None)])
        model.zero_grad()
        x.grad = None
    plain, compiled = results
    assert len(plain) == len(compiled) == 5 + needs_grad
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(plain, compiled, strict=True))
