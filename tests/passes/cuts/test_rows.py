"""Joint graphs that take rows of embeddings: the bits of all rows, and no other graph passes for one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mtcompile.capture.tracing import Traced
from mtcompile.passes.analysis.rows import fetched_by_rows
from mtcompile.passes.cuts.form import in_rows
from mtcompile.passes.cuts.rows.take import take_rows
from mtcompile.passes.proof.cuts.rows import check_rows
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.step_graph import copy_step, inputs_of, offload_rows, outputs_of, prefetch_rows
from tests.helpers.tracing import trace, values

WORDS = 64
aten = torch.ops.aten


class Padded(nn.Module):
    """Two tables looked up by the same numbers, one of them twice: with padding (3), and laid out anew without."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(WORDS, 8, padding_idx=3, **options), nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        again = F.embedding(ids.t().unsqueeze(0), self.table.weight)[0].transpose(0, 1)
        return self.head(self.table(ids) + again + self.other(ids)).logsumexp(-1).mean()


def ids() -> Tensor:
    drawn = torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(0))
    drawn[0], drawn[1, :2], drawn[2, 0] = drawn[2], 3, WORDS - 1
    return drawn


def traced(by_frequency: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Traced, fx.GraphModule]:
    torch.manual_seed(0)
    whole = trace(Padded(scale_grad_by_freq=by_frequency).to(dtype), {"ids": ids()})
    taken = in_rows(whole.joint, "used")
    assert taken is not None and len(taken.meta["rows"]) == 2
    return whole, taken


@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_bits_of_all(by_frequency: bool, dtype: torch.dtype) -> None:
    whole, taken = traced(by_frequency, dtype)
    inputs, by_name = list(whole.inputs), {spec.name: spec for spec in whole.joint.meta["inputs"]}
    for name, rows in taken.meta["rows"].items():
        assert rows.count == 15 and rows.held == 15 + (name == "table.weight")  # a spare one for padding
        index = by_name[name].index
        (inputs[index],) = prefetch_rows(inputs[index], inputs[by_name[rows.indices[0]].index], held=rows.held)
    expected, results = values(whole.joint, whole.inputs), values(taken, tuple(inputs))
    for name in taken.meta["rows"]:
        (results[name],) = offload_rows(results[name], ids(), rows=WORDS)
    assert expected.keys() == results.keys()
    assert all(torch.equal(expected[name], results[name]) for name in expected)


def _corrupted(taken: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    def changed(change: Callable[[fx.GraphModule], None]) -> fx.GraphModule:
        copied = copy_step(taken)
        copied.meta["rows"] = dict(taken.meta["rows"])
        change(copied)
        return copied

    def with_places(**fields: Any) -> Callable[[fx.GraphModule], None]:
        def change(graph: fx.GraphModule) -> None:
            inputs = list(graph.meta["inputs"])
            at = next(i for i, spec in enumerate(inputs) if spec.places is not None and spec.places.without >= 0)
            inputs[at] = replace(inputs[at], places=replace(inputs[at].places, **fields))
            graph.meta["inputs"] = tuple(inputs)

        return change

    def with_operand(target: Any, at: int, operand: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule], None]:
        def change(graph: fx.GraphModule) -> None:
            node = next(node for node in graph.graph.nodes if node.target is target)
            node.args = (*node.args[:at], operand(graph), *node.args[at + 1 :])

        return change

    def input_of(name: str) -> Callable[[fx.GraphModule], fx.Node]:
        return lambda graph: next(node for spec, node in inputs_of(graph) if name in spec.name)

    def with_rows(**fields: Any) -> Callable[[fx.GraphModule], None]:
        def change(graph: fx.GraphModule) -> None:
            rows = graph.meta["rows"]
            rows["table.weight"] = replace(rows["table.weight"], **fields)

        return change

    def swap_gradients(graph: fx.GraphModule) -> None:
        output = graph.graph.output_node()
        places = {spec.name: at for at, (spec, _) in enumerate(outputs_of(graph)) if spec.kind == "grad"}
        one, other = places["table.weight"], places["other.weight"]
        results = list(output.args[0])
        results[one], results[other] = results[other], results[one]
        output.args = (tuple(results),)

    yield "other padding", changed(with_places(without=4))
    yield "no padding", changed(with_places(without=-1, spare=-1))
    yield "spare place of a row", changed(with_places(spare=0))
    yield "more rows than there are", changed(with_places(rows=WORDS + 1))
    yield "unknown numbers", changed(with_places(among=()))
    yield "room for fewer", changed(with_rows(count=14))
    yield "another table", changed(with_rows(rows=WORDS // 2))
    yield "numbers for places", changed(with_operand(aten.embedding.default, 1, input_of("ids")))
    yield "the other weight", changed(with_operand(aten.embedding.default, 0, input_of("other.weight")))
    yield "fewer gradients", changed(with_operand(aten.embedding_dense_backward.default, 2, lambda graph: 14))
    yield "a row without gradient", changed(with_operand(aten.embedding_dense_backward.default, 3, lambda graph: 2))
    yield "swapped gradients", changed(swap_gradients)


def test_graphs_that_take_other_rows_are_refused() -> None:
    whole, taken = traced()
    check_rows(whole.joint, taken)
    refused = []
    for what, corrupted in _corrupted(taken):
        with pytest.raises(SameComputationError):
            check_rows(whole.joint, corrupted)
            pytest.fail(what)
        refused.append(what)
    assert len(refused) == 12


class Reused(nn.Module):
    """A gradient that something else reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().sum()


def test_a_gradient_that_is_read_elsewhere_stays_whole() -> None:
    joint = trace(Reused(), {"ids": ids()}).joint
    assert fetched_by_rows(joint, "used")
    gradient = next(value for spec, value in outputs_of(joint) if spec.name == "table.weight")
    output = joint.graph.output_node()
    with joint.graph.inserting_before(output):
        norm = joint.graph.call_function(aten.sum.default, (gradient,))
    norm.meta = copy.copy(gradient.meta)
    output.args = ((*output.args[0], norm),)
    joint.meta["outputs"] = (*joint.meta["outputs"], replace(joint.meta["outputs"][0], kind="output", name="sum"))
    assert not fetched_by_rows(joint, "used")


def test_as_many_numbers_as_rows_need_all() -> None:
    joint = trace(Reused(), {"ids": torch.zeros(WORDS, dtype=torch.int64)}).joint
    assert not fetched_by_rows(joint, "used")
    take_rows(joint, {})
    assert joint.meta["rows"] == {}
