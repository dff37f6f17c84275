"""A branch of which one side only raises is a check: it raises what a plain run raises, before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from tests.helpers.training import assert_plain, compiled_whole

pytestmark = pytest.mark.slow  # it compiles many models

LIMIT = 90


class Checked(nn.Module):
    """A model that looks at its input in every way that a check is written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.classes = nn.Linear(4, 4), nn.BatchNorm1d(4), 3

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.norm(self.linear(x))
        if labels is not None and labels.max() >= self.classes:
            raise ValueError(f"labels must be below {self.classes}")
        with torch.no_grad():
            if not (x > -5).all():
                raise RuntimeError("too small")
        if (x < 100).all():
            h = h + 1
        else:
            raise KeyError
        if (x > LIMIT).all() or (x == 50).any():
            raise ValueError(f"{x.min()} of {h}")
        if (x == 40).any():
            message = f"not {self.classes}"
            raise TypeError(message, 40)
        return h.square().sum()  # type: ignore[no-any-return]


X = torch.linspace(0, 1, 12).reshape(3, 4)
LABELS = torch.arange(3)


def test_a_model_with_checks_has_the_bits_of_a_plain_run() -> None:
    torch.manual_seed(0)
    assert_plain(Checked(), X, LABELS)


def test_a_check_that_fails_raises_and_nothing_has_changed() -> None:
    torch.manual_seed(0)
    model = mtcompile.compile(Checked(), memory="1GiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(X, LABELS).backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    failing = {
        "ValueError: labels must be below 3\n  at .*test_raising_branches.py.* in forward: if labels": (X, LABELS + 1),
        "RuntimeError: too small": (X - 10, LABELS),
        "KeyError\n": (X + 200, LABELS),
        r'raise ValueError\(f"{x.min\(\)} of {h}"\)': (X + 95, LABELS),
        r'raise ValueError\(f"{x.min\(\)} ': (X.where(X < 1, 50), LABELS),
        "TypeError: not 3: 40": (X.where(X < 1, 40), LABELS),
    }
    for message, inputs in failing.items():
        with pytest.raises(RuntimeError, match=message):
            model(*inputs)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(X, LABELS).backward()


class Caught(nn.Module):
    """Models that catch what they raise, return on one side, or do something before they raise."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way, self.failed = nn.Linear(4, 4), way, False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if self.way == "caught below":
            try:
                self.raise_for(h)
            except ValueError:
                h = h * 2
        elif self.way == "asserted":
            try:
                self.assert_for(h)
            except AssertionError:
                h = h * 3
        elif self.way == "caught":
            try:
                if h.max() > 0:
                    raise ValueError("positive")
            except ValueError:
                h = h * 2
        elif self.way == "returned" and h.max() > 0:
            return h.mean()
        elif self.way == "noted" and h.max() > 0:
            self.failed = True
            raise ValueError("positive")
        return h.sum()

    def raise_for(self, h: Tensor) -> None:
        if h.max() > 0:
            raise ValueError("positive")

    def assert_for(self, h: Tensor) -> None:
        print(end="", flush=False)  # what parts the forward
        assert h.max() > 0, "positive"


@pytest.mark.parametrize("way", ["caught", "caught below", "returned", "noted"])
def test_other_branches_on_tensors_are_refused_in_one_graph(way: str) -> None:
    with pytest.raises(mtcompile.CaptureError, match=r"(?s)at .*test_raising_branches.py.*h.max\(\) > 0"):
        compiled_whole(Caught(way))(X)


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
@pytest.mark.parametrize("way", ["caught", "caught below", "asserted", "returned"])
def test_other_branches_on_tensors_part_a_forward(way: str) -> None:
    torch.manual_seed(0)
    for x in (X, -X):
        assert_plain(Caught(way), x)


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_errors_between_parts_are_those_of_a_plain_run() -> None:
    model = mtcompile.compile(Caught("noted"), memory="1GiB")
    with pytest.raises(ValueError, match="positive"):
        model(X)
    assert model.failed


class Gaussian(nn.Module):
    """A loss of torch's own that checks its operand, which the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance, self.loss = nn.Linear(4, 4), nn.Linear(4, 4), nn.GaussianNLLLoss()

    def forward(self, x: Tensor, shift: Tensor) -> Any:
        return self.loss(self.mean(x), x, self.variance(x).square() + shift)


def test_a_loss_that_checks_its_operands() -> None:
    torch.manual_seed(0)
    assert_plain(Gaussian(), X, torch.zeros(()))
    with pytest.raises(RuntimeError, match=r"(?s)ValueError: var has negative.*test_raising_branches.py.* return self.loss"):
        mtcompile.compile(Gaussian(), memory="1GiB")(X, torch.full((), -9.0))
