"""Kernels call torch's own bindings where these call the same operations, with the same operands, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from mtcompile.kernels.bindings import with_bindings

aten = torch.ops.aten


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def body(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(x)


def ran(module: fx.GraphModule, x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    with torch.no_grad(), Called() as called:
        return module(x), called.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_calls_the_same_operations_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.layer_norm(x, (8,)).view(2, 4, 8).transpose(1, 2) * 0.5
        h = torch.softmax(h.expand(3, 2, 8, 4), -1, dtype=torch.float32).sum([0], True).to(x.dtype)
        return torch.cat(h.split(4, 2), 2).tanh().pow(2).add(h, alpha=3) - torch.arange(4).to(x.dtype)

    x = torch.randn(8, 8, dtype=dtype)
    kernel = body(block, x)
    quick = with_bindings(kernel)
    (wanted, names), (found, called) = ran(kernel, x), ran(quick, x)
    assert torch.equal(found, wanted) and called == names
    assert "torch.tanh(" in quick.code and "torch_Tensor_view(" in quick.code and "torch.tanh(" not in kernel.code


@pytest.mark.parametrize(
    ("operation", "operands"),
    [
        (aten.mul.Scalar, (2.0,)),  # torch.mul calls mul.Tensor
        (aten.matmul.default, (torch.eye(4),)),  # is made of others
        (aten.tanh_backward.default, (torch.ones(4, 4),)),  # has none
    ],
)
def test_an_operation_that_no_binding_calls_stays(operation: Any, operands: tuple[Any, ...]) -> None:
    graph, x = fx.Graph(), torch.randn(4, 4)
    given = graph.placeholder("x")
    other = [graph.placeholder("y")] if isinstance(operands[0], torch.Tensor) else list(operands)
    call = graph.call_function(operation, (given, *other))
    graph.output(call)
    for node, value in zip(graph.nodes, (x, *[v for v in operands if isinstance(v, torch.Tensor)], x), strict=False):
        node.meta["val"] = value
    quick = with_bindings(fx.GraphModule(torch.nn.Module(), graph))
    assert [node.target for node in quick.graph.nodes if node.op == "call_function"] == [operation]


def test_a_default_device_decides_nothing() -> None:
    kernel = body(lambda x: x + torch.arange(4), torch.ones(4))
    quick = with_bindings(kernel)
    assert "torch.add(" in quick.code and "torch.arange(" not in quick.code
