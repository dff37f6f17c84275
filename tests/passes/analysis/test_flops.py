"""FLOPs of operations: as torch counts them, but for causal attention and attention on a CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from mtcompile.capture.tracing import trace
from mtcompile.passes.analysis import flops as counted
from mtcompile.passes.analysis.flops import node_flops
from mtcompile.passes.step_graph import kernel_of, regions

BATCH, HEADS, TOKENS, SIZE = 2, 4, 64, 8


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.project = causal, nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(BATCH, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).sum()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_on_a_cpu_too(causal: bool) -> None:
    """Two products in the forward and five in the backward; a causal one looks at half of the positions."""
    step = trace(Attention(causal), {"x": torch.zeros(BATCH, TOKENS, HEADS * SIZE)}).step
    nodes = [node for region in regions(step) for node in kernel_of(step, region).graph.nodes]
    flops = [node_flops(node) for node in nodes if "attention" in str(node.target)]
    product = 2 * BATCH * HEADS * TOKENS * TOKENS * SIZE // (1 + causal)
    assert flops == [2 * product, 5 * product]


def call(operation: Any, *operands: Any, val: Any, **named: Any) -> fx.Node:
    """A call of an operation with these ``operands``, and more by name, in a graph of its own."""
    graph = fx.Graph()

    def placed(operand: Any) -> Any:
        if not isinstance(operand, Tensor):
            return operand
        node = graph.placeholder("x")
        node.meta["val"] = operand
        return node

    node = graph.call_function(operation, tuple(map(placed, operands)), {name: placed(each) for name, each in named.items()})
    node.meta["val"] = val
    return node


def of(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("operation", "shapes", "result"),
    [
        (torch.ops.aten.mm.default, [(3, 5), (5, 7)], (3, 7)),
        (torch.ops.aten.addmm.default, [(7,), (3, 5), (5, 7)], (3, 7)),
        (torch.ops.aten.bmm.default, [(2, 3, 5), (2, 5, 7)], (2, 3, 7)),
        (torch.ops.aten.baddbmm.default, [(2, 3, 7), (2, 3, 5), (2, 5, 7)], (2, 3, 7)),
        (
            torch.ops.aten._scaled_dot_product_flash_attention.default,
            [(2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 6)],
            (2, 4, 9, 6),
        ),
        (
            torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
            [(2, 4, 9, 6), (2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 6)],
            (2, 4, 9, 8),
        ),
    ],
)
def test_products_and_attention_count_as_torch_counts(operation: Any, shapes: Sequence[Any], result: Any) -> None:
    operands = [of(*shape) for shape in shapes]
    expected = flop_registry[operation.overloadpacket](*operands, out_val=of(*result))
    assert node_flops(call(operation, *operands, val=of(*result))) == expected > 0
    names = [argument.name for argument in operation._schema.arguments]
    assert node_flops(call(operation, val=of(*result), **dict(zip(names, operands, strict=False)))) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "result", "expected"),
    [
        ((10, 5), (3, 5, 7), (10, 7), 2 * 10 * 5 * 7),  # each row by the matrix of its group
        ((4, 10), (10, 7), (3, 4, 7), 2 * 10 * 4 * 7),  # gradients of the matrices: each adds up its rows
        ((3, 4, 5), (5, 10), (4, 10), 2 * 10 * 4 * 5),
        ((3, 4, 5), (3, 5, 7), (3, 4, 7), 2 * 3 * 4 * 5 * 7),
    ],
)
def test_products_of_groups_count_each_row_once(rows: Any, columns: Any, result: Any, expected: int) -> None:
    ends = torch.tensor([2, 5, 10], dtype=torch.int32)
    assert node_flops(call(torch.ops.aten._grouped_mm.default, of(*rows), of(*columns), ends, val=of(*result))) == expected


def test_products_with_vectors_and_recurrent_layers_count() -> None:
    aten = torch.ops.aten
    assert node_flops(call(aten.mv.default, of(3, 5), of(5), val=of(3))) == 30
    assert node_flops(call(aten.dot.default, of(5), of(5), val=of())) == 10
    layer = call(aten.mkldnn_rnn_layer.default, of(6, 2, 8), of(16, 8), of(16, 4), of(16), of(16), val=(of(6, 2, 4),))
    assert node_flops(layer) == 2 * 6 * 2 * (16 * 8 + 16 * 4)


def test_what_may_multiply_and_has_no_formula_is_named() -> None:
    aten = torch.ops.aten
    with torch.library._scoped_library("mt_flops", "DEF") as library:
        library.define("fused(Tensor x) -> Tensor")
        assert counted.is_uncounted(call(torch.ops.mt_flops.fused.default, of(3), val=of(3)))
    assert counted.is_uncounted(call(aten.linalg_inv_ex.default, of(3, 3), val=of(3, 3)))
    counts = call(aten.mm.default, of(3, 5), of(5, 7), val=of(3, 7))
    elementwise = call(aten.add.Tensor, of(3), of(3), val=of(3)), call(aten.linalg_vector_norm.default, of(3), val=of())
    assert not any(map(counted.is_uncounted, (counts, *elementwise)))


def test_operations_with_a_formula_are_looked_up() -> None:
    """By their names, as torch's table takes long to load; and any that somebody adds, as it is loaded then."""
    computed = {*counted._FIRST_MATRIX, *counted._ATTENTION}
    others = {str(operation) for operation in flop_registry if str(operation).startswith("aten.") and operation not in computed}
    assert len(others) >= 8 and all(map(counted.may_have_formula, others))
    assert not any(map(counted.may_have_formula, ("aten.lgamma", "aten.embedding", "aten.native_layer_norm")))
    image, weight = of(2, 3, 8, 8), of(4, 3, 3, 3)
    operands = image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    assert node_flops(call(torch.ops.aten.convolution.default, *operands, val=of(2, 4, 8, 8))) == 2 * 2 * 4 * 64 * 3 * 9
    cumulated = call(torch.ops.aten.cumsum.default, of(4), 0, val=of(4))
    assert node_flops(cumulated) == 0
    flop_registry[torch.ops.aten.cumsum] = lambda *operands, **_: 44
    try:
        assert node_flops(cumulated) == 44
    finally:
        del flop_registry[torch.ops.aten.cumsum]


def test_planning_a_language_model_loads_no_table() -> None:
    program = "import sys, mtcompile; mtcompile.plan('gpt-11m', machine='h100-sxm'); print('triton' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]
