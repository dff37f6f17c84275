"""Fragments are taken where they are faster, not only where nothing else fits: more memory is not predicted to be slower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from mtcompile.passes.analysis.cost import Machine
from tests.helpers.training import adamw, same, train

pytestmark = pytest.mark.slow
LARGE = (1571 << 10, 8192 << 10)
SLOW = Machine("a slow link", flops=1e11, memory_gbps=20.0, h2d_gbps=1.0, d2h_gbps=1.0, issue_us=1.0, host_gbps=20.0)
TOLERATED = 1.05  # forms that gain less are not compared


class Unequal(nn.Module):
    """One layer is much larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(96, 384), nn.Linear(384, 384), nn.Linear(384, 96)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return F.cross_entropy(self.layers[-1](x), y)


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(48, 96, generator=generator), "y": torch.randint(0, 96, (48,), generator=generator)}


def compiled(memory: int, host: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = Unequal()
    optimizer = adamw(model.parameters())
    return mtcompile.compile(model, memory=memory, host=host, optimizer=optimizer, device="cpu", **options), optimizer


@pytest.mark.parametrize(("update", "host"), [("step", 3673 << 10), ("backward", 3072 << 10)])
def test_a_larger_budget_is_not_slower_whatever_is_cut(update: str, host: int) -> None:
    """With ``host`` bytes, whole weights have no room or are slower."""
    times = []
    for memory, nbytes in ((LARGE[0], host), LARGE):
        model, _ = compiled(memory, nbytes, update=update)
        model(**data())
        times.append(model.plan.total_us)
    assert times[1] <= TOLERATED * times[0]


def test_fragments_that_are_faster_train_with_the_bits_of_plain_pytorch() -> None:
    plain = Unequal()
    expected = train(plain, adamw(plain.parameters()), data())
    tight: Any = {"memory": 1_500_000, "host": LARGE[1], "update": "step", "throttle": SLOW}
    model, optimizer = compiled(**tight)
    assert same(train(model, optimizer, data()), expected)
    assert any(note.startswith("in fragments") for note in model.plan.notes)
    whole, _ = compiled(**tight, fragments=None)
    whole(**data())
    assert model.plan.total_us < whole.plan.total_us


def test_a_refusal_names_a_host_that_works_in_some_form() -> None:
    """It is less than whole weights need."""

    def refused(**options: Any) -> int:
        with pytest.raises(mtcompile.BudgetError) as refusal:
            compiled(1400 << 10, 1 << 10, update="backward", **options)[0](**data())
        assert refusal.value.tier == "host"
        return refusal.value.minimum_bytes

    smallest = refused()
    assert smallest < refused(fragments=None)
    model, _ = compiled(1400 << 10, smallest, update="backward")
    model(**data())
    assert model.plan.peak_bytes["host"] <= smallest
