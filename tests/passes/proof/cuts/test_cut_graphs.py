"""Chunks and micro-batches are proven: what computes other results than the captured graph is refused, and nothing else."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mtcompile.passes.cuts.tiles.rewrite import tile_tokens
from mtcompile.passes.joint.accumulate import repeat
from mtcompile.passes.joint.batch.joining import Micro, joining_of
from mtcompile.passes.joint.loss_head import chunk_loss
from mtcompile.passes.joint.loss_weights import Weights
from mtcompile.passes.proof.cuts.chunks import check_chunks
from mtcompile.passes.proof.cuts.loss_weights import check_weights
from mtcompile.passes.proof.cuts.micro_batches import check_micro_batches
from mtcompile.passes.proof.cuts.tiles import check_tiles
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.step_graph import copy_step, inputs_of
from tests.helpers.models import CASES, Gpt, Small, tokens
from tests.helpers.proof import cuts
from tests.helpers.tracing import trace, traced_case

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
Check = Callable[[fx.GraphModule], None]


class Head(nn.Module):
    """Logits that are returned, a bias, ignored labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x).tanh())
        return F.cross_entropy(logits.float(), labels), logits


class Averages(nn.Module):
    """A loss of two means and a sum over rows, which are put together and added once; and an output in rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.other(self.one(x).tanh())
        loss = F.cross_entropy(y, labels) + y.square().mean() * y.sum().square()
        return loss, y.softmax(-1)


def _data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 16, (8,), generator=generator)
    labels[2] = -100
    return {"x": torch.randn(8, 16, generator=generator), "labels": labels}


def _micro(joint: fx.GraphModule, count: int, wide: bool = True) -> Micro:
    split = tuple(spec.index for spec in joint.meta["inputs"] if spec.role == "input")
    return Micro(count, split, 1 + max(spec.index for spec in joint.meta["inputs"] if spec.role != "tangent"), wide)


def chunked(joint: fx.GraphModule, chunks: int = 3) -> tuple[fx.GraphModule, Check]:
    cut = copy_step(joint)
    assert chunk_loss(cut, chunks)
    return cut, functools.partial(check_chunks, joint)


def repeated(joint: fx.GraphModule, count: int = 3, wide: bool = True) -> tuple[fx.GraphModule, Check]:
    micro = _micro(joint, count, wide)
    joining = joining_of(joint, micro)
    return repeat(joint, micro, joining), lambda several: check_micro_batches(joint, several, micro, joining)


def _results(graph: fx.GraphModule) -> list[Tensor]:
    """What a graph makes of inputs that are drawn alike for alike inputs."""
    torch.manual_seed(0)
    given = []
    for spec, node in inputs_of(graph):
        val = node.meta["val"]
        known = graph.meta["constants"].get(spec.name)
        drawn = (
            torch.randn(val.shape).to(val.dtype) if val.is_floating_point() else torch.randint(0, 4, val.shape, dtype=val.dtype)
        )
        given.append(drawn if known is None else known)
    with torch.no_grad():
        return list(fx.Interpreter(graph).run(*given))


def _differs(cut: fx.GraphModule, mutant: fx.GraphModule) -> bool:
    try:
        return any(not torch.equal(*pair) for pair in zip(_results(cut), _results(mutant), strict=True))
    except Exception:  # it cannot run
        return True


def test_mutants_that_compute_other_results_are_refused() -> None:
    refused: Counter[str] = Counter()
    head, averages = (trace(model, _data()).joint for model in (Head(), Averages()))
    for joint, way in ((head, chunked), (head, repeated), (averages, repeated)):
        cut, check = way(joint)
        check(cut)
        for kind, mutant in cuts.mutants(joint, cut, 0, 6):
            try:
                check(mutant)
            except SameComputationError:
                refused[kind] += 1
            else:
                assert not _differs(cut, mutant), f"{way.__name__}, {kind}: accepted"
    assert refused.keys() == cuts.KINDS.keys(), refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_the_same_operations_are_accepted_and_no_others(dtype: torch.dtype) -> None:
    joint = trace(Gpt(2).to(dtype), {"tokens": tokens(4)}).joint
    tiled = copy_step(joint)
    assert tile_tokens(tiled, 3) == 3
    check_tiles(joint, tiled)
    refused: Counter[str] = Counter()
    for kind, mutant in cuts.tile_mutants(tiled):
        try:
            check_tiles(joint, mutant)
        except SameComputationError:
            refused[kind] += 1
        else:
            assert not _differs(tiled, mutant), f"{kind}: accepted"
    kinds = {"exchanged operands", "another operand in a tile", "a sum as rows", "other rows", "other length"}
    assert refused.keys() >= kinds, refused


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_model_is_accepted(case: str) -> None:
    joint = traced_case(case).joint
    with_head = chunk_loss(copy_step(joint), 2)
    for chunks in (2, 5, 64) if with_head else (1,):
        cut, check = chunked(joint, chunks) if with_head else (joint, lambda cut: None)
        check(cut)
        micro = _micro(joint, 2, wide=chunks > 2)
        joining = joining_of(joint, micro)
        check_micro_batches(cut, repeat(cut, micro, joining), micro, joining)


def test_a_view_of_another_shape_than_it_is_described_as_is_refused() -> None:
    cut, check = chunked(trace(Head(), _data()).joint)
    views = [node.name for node in cut.graph.nodes if node.target in VIEWS]
    for name in views:
        mutant = copy_step(cut)
        (node,) = (each for each in mutant.graph.nodes if each.name == name)
        node.update_arg(1, [*node.args[1], 1])
        with pytest.raises(SameComputationError):
            check(mutant)
    assert views


class Shifted(nn.Module):
    """Rows that the model itself takes: one row predicts the next; and the rows of the first chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.body(x).tanh()[:-1]
        return F.cross_entropy(self.head(x), labels[1:]) + self.head(x[:3]).exp().mean()


def test_rows_that_a_model_takes_itself_are_no_chunks() -> None:
    cut, check = chunked(trace(Shifted(), _data()).joint, 3)
    check(cut)


@pytest.mark.slow
def test_random_numbers_and_buffers_go_from_micro_batch_to_micro_batch() -> None:
    joint = trace(Small(), {"x": torch.randn(8, 32)}).joint
    cut, check = repeated(joint, 2)
    check(cut)
    names = {node.name: node for node in cut.graph.nodes}
    for node in cut.graph.nodes:  # the second micro-batch draws what the first one does, or reads the buffers that it read
        twin = names.get(f"{node.name}_micro1")
        if twin is not None and ("dropout" in str(node.target) or "batch_norm" in str(node.target)):
            wrong = copy_step(cut)
            by_name = {each.name: each for each in wrong.graph.nodes}
            if "dropout" in str(node.target):
                by_name[twin.name].replace_all_uses_with(by_name[node.name])
            else:
                by_name[twin.name].args = (*by_name[twin.name].args[:3], *by_name[node.name].args[3:])
            with pytest.raises(SameComputationError):
                check(wrong)


def test_a_wrong_weight_of_a_cross_entropy_is_refused() -> None:
    joint = trace(Head(), _data()).joint
    micro = _micro(joint, 2)
    joining = joining_of(joint, micro)
    ((index, weights),) = joining.weights.items()
    check_weights(joint, micro, joining)
    for wrong in (Weights("equal"), Weights("sum"), replace(weights, ignored=0)):
        claimed = replace(joining, weights={index: wrong})
        with pytest.raises(SameComputationError, match="cross-entropy"):
            check_weights(joint, micro, claimed)
        with pytest.raises(SameComputationError):
            check_micro_batches(joint, repeat(joint, micro, claimed), micro, joining)
