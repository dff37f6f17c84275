"""Fragments are exact only where the device's library gives them the bits of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mtcompile
from mtcompile.capture.tracing import trace_joint
from mtcompile.kernels.fragment_bits import differing
from mtcompile.passes.cuts.fragments.cut import Cut

CPU, ROWS, COLUMNS = torch.device("cpu"), 480, 64


class Net(nn.Module):
    """A layer, and one of ``ROWS`` rows."""

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, ROWS)
        self.second.weight.requires_grad_(trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


class Library(TorchDispatchMode):
    """Rounds the results of one product otherwise if it has less than ``ROWS`` rows or columns. ``calls``: how many it saw."""

    def __init__(self, product: Any, dim: int) -> None:
        super().__init__()
        self.product, self.dim, self.calls = product, dim, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self.product:
            self.calls += 1
            if result.shape[self.dim] < ROWS:
                result = torch.nextafter(result, torch.full_like(result, torch.inf))
        return result


CUT = Cut(ROWS * COLUMNS * 4 // 2, gathers=True)


@pytest.mark.parametrize(("product", "dim"), [(torch.ops.aten.addmm.default, 1), (torch.ops.aten.mm.default, 0)])
def test_other_bits_are_found(product: Any, dim: int) -> None:
    joint, _ = trace_joint(Net(), {"x": torch.randn(5, COLUMNS)})
    state = torch.get_rng_state()
    assert differing(joint, CUT, CPU, None) == []
    with Library(product, dim) as library:
        assert differing(joint, CUT, CPU, None) == ["second.weight"]
    assert library.calls > 1
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_no_room_or_no_gradient_is_not_compared() -> None:
    joint, _ = trace_joint(Net(trains=False), {"x": torch.randn(5, COLUMNS)})
    with Library(torch.ops.aten.mm.default, 0) as library:
        assert differing(joint, CUT, CPU, None) == []  # weight gradients
    assert not library.calls
    with Library(torch.ops.aten.addmm.default, 1) as library:
        assert differing(joint, CUT, CPU, ROWS * COLUMNS * 4) == []
    assert not library.calls


def test_a_plan_with_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 2048)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    compared: list[Cut] = []

    def all_differ(joint: Any, cut: Cut, *where: Any) -> list[str]:
        compared.append(cut)
        return ["layer.weight"]

    monkeypatch.setattr("mtcompile.compiler.differing", all_differ)
    compiled = mtcompile.compile(First(), memory=256 * 1024, policy="offload-all", fragments="exact", device="cpu")
    with pytest.raises(mtcompile.BudgetError):  # whole weights do not fit
        compiled(torch.randn(4, 64))
    assert compared and len(set(compared)) == len(compared)
