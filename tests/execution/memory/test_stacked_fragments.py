"""The weights of all experts in one parameter train in fragments below its own size, with the bits of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.helpers.training import adamw, same, train

EXPERTS, WIDTH, WIDE = 16, 32, 128
WEIGHT = EXPERTS * WIDTH * WIDE * 4  # bytes


class Experts(nn.Module):
    """Every expert sees every token, weighted by a router. The input of both products needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDE) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embed(x))
        shares = self.router(x).softmax(-1)
        hidden = torch.relu(torch.bmm(x.expand(EXPERTS, -1, -1), self.up))
        made = torch.bmm(hidden, self.down)
        return (made * shares.t().unsqueeze(-1)).sum(0).square().mean()


def trained(memory: int, **options: Any) -> tuple[list[Any], list[Any], Any]:
    data = {"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))}
    plain, model = Experts(), Experts()
    reference, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    compiled = mtcompile.compile(model, memory=memory, optimizer=optimizer, device="cpu", policy="offload-all", **options)
    log = train(compiled, optimizer, data)
    if "update" in options:  # there are no gradients to compare
        log = [[row[0], *row[-6:]] for row in log[:-1]]
        return log, [[row[0], *row[-6:]] for row in train(plain, reference, data)[:-1]], compiled
    return log, train(plain, reference, data), compiled


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param({"update": "backward"}, marks=pytest.mark.long)])
def test_experts_larger_than_the_device_train_with_the_same_bits(options: dict[str, Any]) -> None:
    memory = int(WEIGHT * 0.9)
    with pytest.raises(mtcompile.BudgetError):
        trained(memory, fragments=None, **options)
    fragments, plain, compiled = trained(memory, fragments="exact", **options)
    assert same(fragments, plain)
    report = compiled.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= memory
    assert any("up in " in note for note in compiled.plan.notes)
