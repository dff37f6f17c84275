"""Weights of experts that multiply groups of rows, cut between experts: the bits of whole weights, and proven."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mtcompile.capture.tracing import Traced
from mtcompile.passes.cuts.fragments.cut import Cut, cut_weights, possible_cuts
from mtcompile.passes.cuts.fragments.grouped import groups
from mtcompile.passes.proof.cuts.fragments import check_fragments
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.step_graph import copy_step, fragments_of
from tests.helpers.tracing import trace, values

pytestmark = pytest.mark.slow  # it traces models

EXPERTS, WIDTH, INNER = 6, 16, 24
aten: Any = torch.ops.aten


class Experts(nn.Module):
    """A mixture whose first expert, and one in the middle, have no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x, order = torch.tanh(x * self.scale), chosen.argsort(stable=True)
        ends = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        inner = F.silu(F.grouped_mm(x[order], self.up.transpose(1, 2), offs=ends))
        y = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_copy(0, order, y).square().mean()


def chosen() -> Tensor:
    return torch.tensor([5, 1, 1, 4, 2, 5, 1, 2, 2, 4, 4])


@functools.cache
def traced(dtype: torch.dtype = torch.float32) -> Traced:
    torch.manual_seed(0)
    return trace(Experts().to(dtype), {"x": torch.randn(11, WIDTH).to(dtype), "chosen": chosen()})


def cut_of(joint: fx.GraphModule, cut: Cut) -> fx.GraphModule:
    copied = copy_step(joint)
    assert cut_weights(copied, cut) == []
    return copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_fragments_have_the_bits_of_whole_ones(dtype: torch.dtype) -> None:
    whole = traced(dtype)
    expected, counts = values(whole.joint, whole.inputs), set()
    assert {each.spec.name for each in groups(whole.joint)} == {"up", "down"}
    for cut in possible_cuts(whole.joint, "exact")[1:]:
        joint = cut_of(whole.joint, cut)
        check_fragments(whole.joint, joint, splits=False)
        counts.add(sum(part.parameter == "up" for part in fragments_of(joint).values()))
        results = values(joint, whole.inputs)
        assert all(torch.equal(expected[name], results[name]) for name in expected)
    assert {2, 6} <= counts


def _corrupted(joint: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    def change(target: Any, count: int, args: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> fx.GraphModule:
        """Changes the arguments of the first operation that has so many."""
        copied = copy_step(joint)
        nodes = copied.graph.find_nodes(op="call_function", target=target)
        node = next(node for node in nodes if len(node.args) == count)
        node.args = args(node.args)
        return copied

    where, clamp = aten.where.self, aten.clamp.default
    yield "another first row", change(aten.slice.Tensor, 4, lambda a: (*a[:2], a[2] + 1, a[3] + 1))
    yield "rows counted otherwise", change(aten.arange.default, 1, lambda a: (10,))
    yield "fewer rows in front", change(clamp, 3, lambda a: (*a[:2], 9))
    yield "rows taken back elsewhere", change(clamp, 2, lambda a: (a[0], 1))
    yield "another dimension", change(aten.index_select.default, 3, lambda a: (a[0], 1, a[2]))
    yield "the later rows twice", change(where, 3, lambda a: (a[0], a[1], a[1]))
    yield "the earlier rows twice", change(where, 3, lambda a: (a[0], a[2], a[2]))
    yield "halves exchanged", change(where, 3, lambda a: (a[0], a[2], a[1]))


def test_graphs_that_compute_other_rows_are_refused() -> None:
    whole = traced().joint
    joint, refused = cut_of(whole, possible_cuts(whole, "exact")[1]), []
    check_fragments(whole, joint, splits=False)
    for what, corrupted in _corrupted(joint):
        with pytest.raises(SameComputationError):
            check_fragments(whole, corrupted, splits=False)
            pytest.fail(what)
        refused.append(what)
    assert len(refused) == 8


class Read(nn.Module):
    """Weights of experts that something else reads too, or by groups that end elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y = F.grouped_mm(x, self.weight, offs=ends)
        if self.how == "norm":
            return y.square().mean() + self.weight.norm()
        return (y + F.grouped_mm(x, self.weight, offs=ends + 0)).square().mean()


@pytest.mark.parametrize("how", ["norm", "elsewhere"])
def test_other_weights_stay_whole(how: str) -> None:
    ends = torch.tensor([0, 2, 3, 3, 7, 8], dtype=torch.int32)
    assert groups(trace(Read(how), {"x": torch.randn(8, WIDTH), "ends": ends}).joint) == []
