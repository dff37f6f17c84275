"""accumulate=k and models that keep what they compute: forward assigns attributes and buffers once for the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.errors import CaptureError

pytestmark = pytest.mark.slow  # it compiles several models


class Keeping(nn.Module):
    """Keeps something of each forward: ``kind`` says what."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.log: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        hidden = []
        for layer in self.layers:
            x = layer(x).tanh()
            hidden.append(x)
        if self.kind == "count":
            self.count += 1
        if self.kind == "calls":
            self.calls += 1
        if self.kind == "log":
            self.log.append(x.detach())
        if self.kind == "by_name":
            self.by_name["x"] = x.detach()
        if self.kind == "last":
            self.last = x.detach()
        if self.kind == "cache":
            if self.last is None:
                self.last = torch.arange(16.0) / 16
            x = x + self.last
        if self.kind == "weight":
            self.last = self.layers[0].weight.detach() * 2
        loss = x.square().mean()
        return (loss, *reversed(hidden)) if self.kind == "hidden" else loss


def kept(model: Keeping) -> list[Tensor]:
    last = [] if model.last is None else [model.last]
    return [model.count, torch.tensor(model.calls), *model.log, *model.by_name.values(), *last]


def keeping(kind: str, count: int | str) -> Keeping:
    torch.manual_seed(0)
    return mtcompile.compile(Keeping(kind), memory="1MiB", device="cpu", accumulate=count)


@pytest.mark.parametrize("kind", ["count", "calls", "log", "by_name", "last", "cache", "weight"])
def test_forward_keeps_what_it_computes_of_the_whole_batch(kind: str) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = Keeping(kind)
    plain(x)
    for count in (2, "auto"):
        model = keeping(kind, count)
        model(x).backward()
        expected = kept(plain)
        if kind == "count":  # a buffer that changes goes from micro-batch to micro-batch
            expected[0] = torch.tensor(2 if count == 2 else 1)
        assert len(kept(model)) == len(expected)
        for one, other in zip(kept(model), expected, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other)


def test_outputs_come_in_the_order_in_which_forward_returns_them() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = Keeping("hidden")
    halves = [plain(half)[1:] for half in x.chunk(2)]
    loss, *hidden = keeping("hidden", 2)(x)
    assert loss.shape == ()
    for one, parts in zip(hidden, zip(*halves, strict=True), strict=True):
        assert torch.equal(one, torch.cat(parts))


def test_a_refused_call_leaves_attributes_as_they_were() -> None:
    for kind, rows in (("cache", 32), ("count", 8)):
        model = keeping(kind, 2)
        before = [tensor.clone() for tensor in kept(model)]
        bad = torch.randn(rows, 16 if kind == "cache" else 15)
        with pytest.raises(CaptureError):
            model(bad)
        assert len(kept(model)) == len(before)
        assert all(torch.equal(one, other) for one, other in zip(kept(model), before, strict=True))
