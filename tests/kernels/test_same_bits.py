"""Products in fragments, compared on the device before a plan may use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.kernels import same_bits
from mtcompile.kernels.same_bits import has_same_bits
from mtcompile.passes.cuts.fragments.cut import Cut, possible_cuts
from tests.helpers.tracing import trace

CPU = torch.device("cpu")


class First(nn.Module):
    """A linear layer whose input needs no gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(48, rows, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


def joint(dtype: torch.dtype) -> Any:
    return trace(First(dtype), {"x": torch.randn(11, 48, dtype=dtype)}).joint


def test_a_product_that_is_another_in_fragments_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = joint(torch.float32)
    cut = possible_cuts(graph, "exact")[1]
    assert has_same_bits(graph, cut, CPU)
    other = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, dim=0: other(tensors, dim).mul(1 + 2**-20))
    assert not has_same_bits(graph, cut, CPU)
    assert has_same_bits(graph, Cut(cut.nbytes, splits=True), CPU)  # the contract says that bits differ


@pytest.mark.slow
def test_fragments_have_the_bits_of_plain_or_are_not_used() -> None:
    model, plain = First(torch.float64, 1024), First(torch.float64, 1024)
    x = torch.randn(11, 48, dtype=torch.float64)
    compiled = mtcompile.compile(model, memory=500_000, device="cpu", policy="offload-all")
    try:
        loss = compiled(x)
    except mtcompile.BudgetError:
        graph = trace(First(torch.float64, 1024), {"x": x}).joint
        assert not all(has_same_bits(graph, cut, CPU) for cut in possible_cuts(graph, "exact"))
        return
    assert "in fragments" in str(compiled.plan)
    loss.backward()
    plain(x).backward()
    assert torch.equal(loss, plain(x)) and torch.equal(model.first.weight.grad, plain.first.weight.grad)


def test_a_device_without_room_to_compare_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> bool:
        raise torch.OutOfMemoryError("no room")

    graph = joint(torch.float32)
    monkeypatch.setattr(same_bits, "_is_same", no_room)
    assert not has_same_bits(graph, possible_cuts(graph, "exact")[1], CPU)
    assert has_same_bits(graph, possible_cuts(graph, "exact")[1], CPU, untold=True)


def test_on_an_accelerator_products_that_take_more_than_the_limit_are_not_run() -> None:
    graph, cuda = joint(torch.float32), torch.device("cuda")
    cut = possible_cuts(graph, "exact")[1]
    assert not has_same_bits(graph, cut, cuda, limit=1000) and has_same_bits(graph, cut, cuda, limit=1000, untold=True)
