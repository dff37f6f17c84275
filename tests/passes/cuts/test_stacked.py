"""Stacked weights in fragments: which can be cut, and that a cut joint graph computes what the captured one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from mtcompile.capture.tracing import trace_joint
from mtcompile.kernels.same_bits import has_same_bits
from mtcompile.passes.cuts.fragments.cut import Cut, cut_weights
from mtcompile.passes.cuts.fragments.stacked import stacks
from mtcompile.passes.proof.cuts.fragments import check_fragments
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.step_graph import copy_step, fragments_of
from tests.helpers.tracing import values

EXPERTS, NBYTES = 8, 8 * 16 * 24 * 4


class Stack(nn.Module):
    """Three stacked weights, the last one read as its transposes, between two layers. ``more``: what else is done with the
    first."""

    def __init__(self, more: Callable[[torch.Tensor], Any] = lambda weight: 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.more = more
        self.first, self.last = nn.Linear(16, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape, dtype=dtype) / 4) for shape in ((16, 24), (24, 16)))
        self.frozen = nn.Parameter(torch.randn(EXPERTS, 24, 24, dtype=dtype) / 4, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).expand(EXPERTS, -1, -1)
        hidden = torch.relu(x @ self.up) @ self.frozen.transpose(1, 2)
        return self.last(hidden @ self.down).float().square().mean() + self.more(self.up)


def _cut(model: nn.Module, nbytes: int) -> tuple[fx.GraphModule, fx.GraphModule, tuple[torch.Tensor, ...]]:
    x = torch.randn(5, 16, dtype=next(model.parameters()).dtype)
    joint, inputs = trace_joint(model, {"x": x})
    cut = copy_step(joint)
    assert cut_weights(cut, Cut(nbytes)) == []
    return joint, cut, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_cut_along_the_stack_keeps_all_bits(parts: int, dtype: torch.dtype) -> None:
    """But where this machine's kernels add up in another order, which has to be noticed."""
    model = Stack(dtype=dtype)
    joint, cut, inputs = _cut(model, nbytes := -(-model.up.nbytes // parts))
    assert {each.parameter for each in fragments_of(cut).values()} >= {"up", "down", "frozen"}
    check_fragments(joint, cut, splits=False)
    whole, fragments = values(joint, inputs), values(cut, inputs)
    assert whole.keys() == fragments.keys()
    equal = all(torch.equal(whole[name], fragments[name]) for name in whole)
    assert equal or not has_same_bits(joint, Cut(nbytes), torch.device("cpu"))


@pytest.mark.parametrize("more", [lambda w: w.square().mean(), lambda w: torch.bmm(w, w.transpose(1, 2)).mean()])
def test_a_stack_with_other_readers_stays_whole(more: Callable[[torch.Tensor], torch.Tensor]) -> None:
    joint, _ = trace_joint(Stack(more), {"x": torch.randn(5, 16)})
    assert [stacked.spec.name for stacked in stacks(joint)] == ["frozen", "down"]


def _swapped(cut: fx.GraphModule, target: object, place: int) -> None:
    """Swaps an operand of two calls."""
    one, other, *_ = (node for node in cut.graph.nodes if node.target is target)
    first, second = one.args[place], other.args[place]
    one.update_arg(place, second)
    other.update_arg(place, first)


def _other_order(cut: fx.GraphModule) -> None:
    (joined, *_) = (node for node in cut.graph.nodes if node.target is torch.ops.aten.cat.default)
    joined.update_arg(0, list(reversed(joined.args[0])))


@pytest.mark.parametrize("corrupt", [lambda cut: _swapped(cut, torch.ops.aten.bmm.default, 1), _other_order])
def test_a_wrong_cut_is_refused(corrupt: Callable[[fx.GraphModule], None]) -> None:
    whole, cut, _ = _cut(Stack(), NBYTES // 4)
    corrupt(cut)
    with pytest.raises(SameComputationError):
        check_fragments(whole, cut, splits=False)
