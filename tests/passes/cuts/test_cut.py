"""Weights in fragments: what can be cut, and that a cut joint graph computes what the captured one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from mtcompile.capture.tracing import trace_joint
from mtcompile.kernels.same_bits import has_same_bits
from mtcompile.passes.cuts.fragments.cut import UNCUT, Cut, cut_weights, possible_cuts
from mtcompile.passes.cuts.fragments.linear import linears
from mtcompile.passes.graph_json import graph_from_json, graph_to_json
from mtcompile.passes.joint.build import build
from mtcompile.passes.proof.cuts.fragments import check_fragments
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.step_graph import copy_step, fragments_of, inputs_of, outputs_of
from tests.helpers.tracing import values


class Two(nn.Module):
    """Two linear layers; the second one's input receives a gradient."""

    def __init__(
        self, rows: int = 240, dtype: torch.dtype = torch.float32, bias: bool = True, width: int = 64, last: int = 192
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, rows, bias, dtype=dtype)
        self.second = nn.Linear(rows, last, bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).float().square().mean()


class Tied(nn.Module):
    """A weight with two readers, one of them an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).square().mean()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_a_cut_gives_the_same_bits_where_no_sum_is_split(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    joint, inputs = trace_joint(Two(dtype=dtype, bias=bias), {"x": torch.randn(shape, dtype=dtype)})
    whole = values(joint, inputs)
    cut = copy_step(joint)
    assert cut_weights(cut, Cut(10_000)) == []
    assert {part.parameter for part in fragments_of(cut).values()} == {"first.weight"}
    assert len(fragments_of(cut)) == 5
    fragmented = values(cut, inputs)
    assert whole.keys() == fragmented.keys()
    assert all(torch.equal(value, fragmented[name]) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        pytest.param(sizes, dtype, marks=[pytest.mark.long] * (index > 0 and number != 1))
        for number, sizes in enumerate([(1, 64, 240, 192), (6, 130, 1153, 900), (33, 96, 200, 1025)])
        for index, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16])
    ],
)
def test_a_whole_weight_for_the_input_gradient_gives_the_same_bits(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, threads: int
) -> None:
    """Also where rows at the end, or sizes that no tile divides, would take another kernel by themselves; but for the products
    that are told not to, on some processors."""
    tokens, width, rows, last = sizes
    joint, inputs = trace_joint(Two(rows, dtype, width=width, last=last), {"x": torch.randn(tokens, width, dtype=dtype)})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = values(joint, inputs)
        for parts in (2, 16):
            cut, by = copy_step(joint), Cut(rows * last * dtype.itemsize // parts, gathers=True)
            assert cut_weights(cut, by) == []
            check_fragments(joint, cut, splits=False)
            assert "second.weight" in {part.parameter for part in fragments_of(cut).values()}
            fragmented = values(cut, inputs)
            assert whole.keys() == fragmented.keys()
            equal = all(torch.equal(value, fragmented[name]) for name, value in whole.items())
            assert equal or not has_same_bits(joint, by, torch.device("cpu"))
    finally:
        torch.set_num_threads(before)


def test_a_split_sum_is_near_and_named() -> None:
    joint, inputs = trace_joint(Two(), {"x": torch.randn(5, 64)})
    whole = values(joint, inputs)
    (contract,) = cut_weights(joint, Cut(50_000, splits=True))
    assert "second.weight in 4" in contract
    assert "first.weight" not in contract
    fragmented = values(joint, inputs)
    summed = {"first.weight", "first.bias"}  # behind the input gradient of the second
    assert all(torch.equal(value, fragmented[name]) for name, value in whole.items() if name not in summed)
    for name in summed:
        torch.testing.assert_close(fragmented[name], whole[name])


def test_fragments_fill_the_whole_and_begin_where_slots_may() -> None:
    joint, _ = trace_joint(Two(rows=590, width=65), {"x": torch.randn(5, 65)})
    cut_weights(joint, Cut(7_000))
    parts = [*fragments_of(joint).values()]
    assert [(part.start, part.end) for part in parts] == [(0, 192), (192, 384), (384, 590)]  # none of 14 rows
    assert all(part.start * 65 * 4 % 256 == 0 for part in parts)
    assert len({spec.index for spec in joint.meta["inputs"]}) == len(joint.meta["inputs"])


def test_a_region_runs_for_each_fragment() -> None:
    joint, _ = trace_joint(Two(), {"x": torch.randn(5, 64)})
    cut_weights(joint, Cut(35_000))
    step = build(joint)
    readers = {spec.name: [user.meta["phase"] for user in node.users] for spec, node in inputs_of(step) if spec.fragment}
    assert set(map(tuple, readers.values())) == {("forward",)}
    assert len({user for spec, node in inputs_of(step) if spec.fragment for user in node.users}) == len(readers) == 3
    assert {step.meta["homes"][name] for name in readers} == {"first.weight"}


def test_a_weight_with_other_readers_stays_whole() -> None:
    joint, _ = trace_joint(Tied(), {"x": torch.arange(7)})
    assert linears(joint) == []
    assert possible_cuts(joint, "split") == (UNCUT,)


def test_cuts_to_choose_among() -> None:
    joint, _ = trace_joint(Two(), {"x": torch.randn(5, 64)})
    assert possible_cuts(joint, None) == (UNCUT,)
    exact, split = possible_cuts(joint, "exact"), possible_cuts(joint, "split")
    assert exact[:2] == (UNCUT, Cut(64 * 240 * 4 // 2))
    assert exact[len(exact) // 2 + 1 :][0] == Cut(240 * 192 * 4 // 2, gathers=True)
    assert split[1] == Cut(240 * 192 * 4 // 2, splits=True)


def test_fragments_are_kept_by_json() -> None:
    joint, _ = trace_joint(Two(), {"x": torch.randn(5, 64)})
    cut_weights(joint, Cut(20_000))
    assert graph_from_json(graph_to_json(joint)).meta["inputs"] == joint.meta["inputs"]


def _cut(splits: bool = True) -> tuple[fx.GraphModule, fx.GraphModule]:
    joint, _ = trace_joint(Two(), {"x": torch.randn(5, 64)})
    cut = copy_step(joint)
    cut_weights(cut, Cut(20_000, splits))
    return joint, cut


def test_a_cut_is_proven() -> None:
    check_fragments(*_cut(), splits=True)
    check_fragments(*_cut(splits=False), splits=False)
    with pytest.raises(SameComputationError, match=r"grad .* to be computed"):  # sums that nobody asked to split
        check_fragments(*_cut(), splits=False)


def _swap_weights(cut: fx.GraphModule) -> None:
    first, second, *_ = (node for spec, node in inputs_of(cut) if spec.fragment and spec.fragment.parameter == "second.weight")
    for user in list(first.users):
        user.replace_input_with(first, second)


def _of_target(cut: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in cut.graph.nodes if node.target is target]


def _other_rows(cut: fx.GraphModule) -> None:
    node = next(node for node in _of_target(cut, torch.ops.aten.slice.Tensor) if node.args[2])
    node.args = (*node.args[:2], 0, int(node.args[3]) - int(node.args[2]))  # type: ignore[arg-type, call-overload]


def _other_order(cut: fx.GraphModule) -> None:
    node = _of_target(cut, torch.ops.aten.cat.default)[0]
    node.args = (list(reversed(node.args[0])), *node.args[1:])  # type: ignore[arg-type]


def _summed_twice(cut: fx.GraphModule) -> None:
    node = _of_target(cut, torch.ops.aten.addmm.default)[-1]
    before = node.args[0]
    node.args = (before, *before.args[-2:])  # type: ignore[union-attr]


def _gradients_swapped(cut: fx.GraphModule) -> None:
    (values,) = cut.graph.output_node().args
    at = [i for i, (spec, _) in enumerate(outputs_of(cut)) if spec.name.startswith("second.weight[")]
    order = list(values)  # type: ignore[arg-type]
    order[at[0]], order[at[1]] = order[at[1]], order[at[0]]
    cut.graph.output_node().args = (tuple(order),)


def _described_otherwise(cut: fx.GraphModule) -> None:
    node = _of_target(cut, torch.ops.aten.relu.default)[0]
    node.meta["val"] = node.meta["val"].double()


def _rows_missing(cut: fx.GraphModule) -> None:
    first = next(spec for spec, _ in inputs_of(cut) if spec.fragment)
    assert first.fragment is not None
    fewer = replace(first, fragment=replace(first.fragment, end=first.fragment.end - 1))
    cut.meta["inputs"] = tuple(fewer if spec == first else spec for spec in cut.meta["inputs"])


def _drawn_once_more(cut: fx.GraphModule) -> None:
    relu = _of_target(cut, torch.ops.aten.relu.default)[0]
    with cut.graph.inserting_before(relu):
        drawn = cut.graph.call_function(torch.ops.aten.bernoulli.p, (relu.args[0], 0.5))
    drawn.meta = dict(relu.meta)


CORRUPTIONS = [
    _swap_weights, _other_rows, _other_order, _summed_twice, _gradients_swapped, _described_otherwise, _rows_missing,
    _drawn_once_more,
]  # fmt: skip


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_a_wrong_cut_is_refused(corrupt: Callable[[fx.GraphModule], None]) -> None:
    whole, cut = _cut()
    corrupt(cut)
    with pytest.raises(SameComputationError):
        check_fragments(whole, cut, splits=True)
