"""The time of a kernel by formula: what its operations take one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from mtcompile.capture.tracing import trace
from mtcompile.passes.analysis.cost import Cost, Machine, node_cost, node_flops
from mtcompile.passes.step_graph import kernel_of, regions

aten = torch.ops.aten
MACHINE = Machine("round", flops=1e12, memory_gbps=100.0, issue_us=1.0)


def nodes(model: nn.Module, **data: torch.Tensor) -> list[fx.Node]:
    step = trace(model, data).step
    return [node for region in regions(step) for node in kernel_of(step, region).graph.nodes if node.op == "call_function"]


def one(among: list[fx.Node], name: str) -> fx.Node:
    return next(node for node in among if name in str(node.target))


def test_what_is_no_product_does_not_hide_behind_products() -> None:
    product, other = Cost(2 * 10**9, 10**6, product_nbytes=10**6), Cost(nbytes=10**8)
    assert product.time_us(MACHINE) == 2000 and other.time_us(MACHINE) == 1000
    assert (product + other).time_us(MACHINE) == 3000
    assert (product + other).flops_us(MACHINE) == 3000 and (product + other).traffic_us(MACHINE) == 1010


def test_a_product_takes_as_long_as_its_slower_part() -> None:
    narrow = Cost(10**6, 10**8, product_nbytes=10**8)
    assert narrow.time_us(MACHINE) == 1000 and narrow.flops_us(MACHINE) == 1


def test_products_run_at_the_rate_of_their_dtype() -> None:
    class Both(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 8, 3, dtype=dtype), nn.Linear(6, 8, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.conv(x)).square().sum()

    def us(dtype: torch.dtype, name: str, machine: Machine) -> float:
        of_dtype = nodes(Both(dtype), x=torch.ones(1, 3, 8, 8, dtype=dtype))
        return node_cost(one(of_dtype, name)).flops_us(replace(machine, issue_us=0.0))

    machine = replace(MACHINE, fp32_flops=1e11, tf32_flops=5e11, fp64_flops=1e10)
    bf16 = {name: us(torch.bfloat16, name, machine) for name in ("addmm", "convolution")}
    assert bf16 == {name: us(torch.float32, name, MACHINE) for name in bf16}  # other rates are not known there
    for name, in_tf32 in ("addmm", "tf32_products"), ("convolution", "tf32_convolutions"):
        assert us(torch.float32, name, machine) == pytest.approx(10 * bf16[name])
        assert us(torch.float64, name, machine) == pytest.approx(100 * bf16[name])
        assert us(torch.float32, name, replace(machine, **{in_tf32: True})) == pytest.approx(2 * bf16[name])


def test_launches_count_for_small_operations_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
            return (small * self.weight).sum() + (large * self.weight).sum()

    products = [n for n in nodes(Twice(), small=torch.ones(4), large=torch.ones(2**22)) if n.target is aten.mul.Tensor]
    assert [node_cost(node).operations for node in products[:2]] == [1, 0]


def test_attention_takes_longer_than_a_product_of_as_many_flops() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.project(x).view(2, 64, 4, 8).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q).sum()

    among = nodes(Attention(), x=torch.zeros(2, 64, 32))
    shares = [node_cost(n).slow_flops / node_flops(n) for n in among if "dot_product" in str(n.target) and node_flops(n)]
    assert shares == pytest.approx([0.25, 0.6], rel=1e-3)
    assert node_cost(one(among, "addmm")).slow_flops == 0


@pytest.mark.parametrize(("classes", "reads"), [(1000, (1, 2)), (32 * 1024, (3, 3))])
def test_a_softmax_reads_long_rows_again(classes: int, reads: tuple[int, int]) -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).log_softmax(-1).square().sum()

    among = nodes(Classes(), x=torch.zeros(8, classes))
    row = 8 * classes * 4
    forward, backward = (node_cost(one(among, name)).nbytes for name in ("_log_softmax.d", "_log_softmax_backward"))
    assert (forward, backward) == ((reads[0] + 1) * row, (reads[1] + 1) * row)


def test_grouped_heads_count_as_many_as_the_queries_have() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).split([32, 8, 8], -1)
            q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in (q, k, v))
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum()

    attention = one(nodes(Grouped(), x=torch.zeros(2, 16, 32)), "scaled_dot_product")
    heads = [operand.meta["val"].shape[1] for operand in attention.all_input_nodes]
    assert set(heads) == {4, 1}, "the model's heads are no longer grouped in the graph"
    assert node_flops(attention) == 4 * 2 * 4 * 16 * 16 * 8


class Rotated(nn.Module):
    """Rotary embeddings by halves, and what lies as it did."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        heads = (self.project(x).sin() * self.scale).view(2, 8, 4, 16).transpose(1, 2)
        return (heads * table + torch.cat([-heads[..., 8:], heads[..., :8]], -1) * table).sum()


def test_operations_on_values_of_different_strides_go_by_elements() -> None:
    among = nodes(Rotated(), x=torch.zeros(2, 8, 64), table=torch.zeros(8, 16))
    elements = 2 * 8 * 64
    forward = among[: next(i for i, n in enumerate(among) if "sum" in str(n.target))]
    shares = {(str(n.target), node_cost(n).strided) for n in forward}
    assert {("aten.neg.default", elements // 2), ("aten.cat.default", elements), ("aten.add.Tensor", elements)} <= shares
    assert ("aten.sin.default", 0) in shares and {n for name, n in shares if "mul" in name} == {0, elements}


def test_elements_of_different_strides_take_as_long_as_measured_or_as_their_bytes() -> None:
    work = Cost(nbytes=10**8, strided=10**7, strided_nbytes=6 * 10**7)
    assert work.time_us(MACHINE) == 1000  # by its bytes alone, where the rate is not known
    slow, fast = (replace(MACHINE, strided_gops=rate) for rate in (10.0, 1000.0))
    assert work.time_us(slow) == 1400 and work.time_us(fast) == 1000
    assert work.time_us(replace(slow, fuses=True)) == 1000
