"""The batch's dimension in results of common operations is what their shape functions say, which are asked for all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.passes.joint.batch import shapes

ROWS, WIDTH = 4, 6


class Common(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.linear(x)
        parts = [h.sum(1, keepdim=True), h.mean(-1), h.mean((1, 2)), h.amax(2), h.amin(1), h.transpose(0, 1).sum(0)]
        joined = torch.cat([h, parts[0]], 1), torch.cat([h, x], 2), torch.cat([x, x], -1)
        weighed = F.softmax(h, 1), F.log_softmax(h.transpose(0, 2), 0)
        heads = h.unsqueeze(1)
        attended = F.scaled_dot_product_attention(heads, heads, heads)
        loss = F.cross_entropy(h.flatten(0, 1), y.flatten())
        return loss + h.sum((0, 1)).mean(), (*parts, *joined, *weighed, attended)


def test_common_operations_have_the_batch_where_their_shape_functions_say(monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen = shapes._by_dims, set[str]()

    def compared(following: Any, node: Any) -> Any:
        place = known(following, node)
        if place is not None:
            with monkeypatch.context() as asking:
                asking.setattr(shapes, "_by_dims", lambda *about: None)
                assert shapes.of_twice_as_many(following, node) == place, node
            seen.add(str(node.target))
        return place

    monkeypatch.setattr(shapes, "_by_dims", compared)
    model = mtcompile.compile(Common(), memory="1MiB", device="cpu", accumulate=2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2 * ROWS, 3, WIDTH, generator=generator), torch.randint(WIDTH, (2 * ROWS, 3), generator=generator)
    model(x, y)
    names = "sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "cat.default", "_softmax", "_log_softmax", "nll_loss"
    assert all(any(name in target for target in seen) for name in (*names, "attention")), seen
