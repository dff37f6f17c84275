"""Values that a forward takes from its inputs are captured as they are, compared before each call, captured again if others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Masked(nn.Module):
    """A model that looks at its mask and at a buffer in every way, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(4, 4), nn.Dropout(), 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(self.linear(x))
        if (mask > 0).any().item():
            h = h * 2
        padded = torch.where(mask == 1, -1, mask)
        padded[:2] += 5
        row = padded[1:]
        if (row > 4).all():
            h = h - 3
        padded.fill_(0)
        if mask.sum() < 3:
            h = h + 1
        for _ in range(int(mask.max())):
            h = h * 1.5
        if self.steps >= 2:
            h = -h
        self.steps += 1
        first, second = h.split([1, mask.tolist()[0] + 2])
        return first.sum() + second.square().sum()


MASKS = ([0, 0, 0], [0, 1, 0], [0, 0, 2], [0, 0, 0], [0, 1, 0], [0, 1, 0])


def test_each_call_takes_its_own_values() -> None:
    torch.manual_seed(0)
    plain = Masked()
    model = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    for number, mask in enumerate(MASKS):
        results = []
        for each in (plain, model):
            torch.manual_seed(number)
            loss = each(X, torch.tensor(mask))
            loss.backward()
            results.append([loss.detach(), each.linear.weight.grad, each.steps, torch.get_rng_state()])
        assert all(map(torch.equal, *results))
    assert model.calls == plain.calls


class Looking(nn.Module):
    """Models that look at values which more than the call's inputs decide."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.norm, self.way = nn.Linear(4, 4), nn.BatchNorm1d(4), way

    def forward(self, x: Tensor) -> Tensor:
        seen = {
            "parameter": lambda: self.linear.weight > 0,
            "random": lambda: torch.rand(4) > 0.5,
            "changed": lambda: (x.add_(1), x > 0)[1],
            "statistics": lambda: (self.norm(x), self.norm.running_mean > 0)[1],
            "large": lambda: torch.ones(1 << 23) > 0,
        }
        return -self.linear(x).sum() if seen[self.way]().any() else self.linear(x).sum()


@pytest.mark.parametrize("way", ["parameter", "random", "changed", "statistics", "large"])
def test_values_that_more_than_the_inputs_decide_are_refused(way: str) -> None:
    model, state = mtcompile.compile(Looking(way), memory="1GiB"), torch.get_rng_state()
    with pytest.raises(mtcompile.CaptureError, match=r"(?s)test_known_values.py.*in forward: return -self.linear"):
        model(X)
    assert torch.equal(state, torch.get_rng_state())
