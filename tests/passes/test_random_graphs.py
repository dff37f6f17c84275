"""Random graphs under random plans: equal bits, and the allocator never gives more than was planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mtcompile.kernels.eager import EagerKernels
from mtcompile.passes import rewrite
from mtcompile.passes.proof.same_computation import same_computation
from mtcompile.runtime.executor import Delays
from mtcompile.runtime.verify import verify
from tests.helpers.tracing import equal, interpret, lowered, random_plan, run, trace

pytestmark = pytest.mark.slow  # it compiles many models

UNARY = {
    "tanh": torch.tanh,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "transpose": lambda x: x.t().contiguous().t(),
    "double": lambda x: x.view(-1, 2, x.shape[-1] // 2).transpose(1, 2).reshape(x.shape),
    "dropout": lambda x: F.dropout(x, 0.3),
    "split": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "mean": lambda x: x - x.mean(0, keepdim=True),
}
WEIGHTED = ("linear", "scale", "frozen")
BINARY = {"add": torch.add, "mul": torch.mul, "gate": lambda a, b: a * torch.sigmoid(b)}


class RandomModel(nn.Module):
    """Operations drawn one after the other, each on any earlier value; sometimes in a list of layers."""

    def __init__(self, operations: list[tuple[str, int, int]], layered: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.operations = operations
        made = [nn.Linear(8, 8) for name, _, _ in operations if name in WEIGHTED]
        self.weights = nn.ModuleList(made) if layered else nn.ModuleDict({f"w{chr(97 + i)}": m for i, m in enumerate(made)})
        self.vector = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x * self.vector]
        layers = iter(self.weights if isinstance(self.weights, nn.ModuleList) else self.weights.values())
        for name, first, second in self.operations:
            a, b = values[first % len(values)], values[second % len(values)]
            if name in WEIGHTED:
                layer = next(layers)
                a = (
                    layer(a)
                    if name == "linear"
                    else a * layer.weight[0]
                    if name == "scale"
                    else F.linear(a, layer.weight.detach())
                )
            else:
                a = UNARY[name](a) if name in UNARY else BINARY[name](a, b)
            values.append(a)
        return sum(v.mean() for v in values[-3:])


OPERATION = st.tuples(st.sampled_from([*UNARY, *WEIGHTED, *BINARY]), st.integers(0, 20), st.integers(0, 20))
WORKSPACES = EagerKernels(torch.device("cpu")).workspace


@pytest.mark.parametrize("graphs", [12, pytest.param(50, marks=pytest.mark.long)])
def test_random_graphs_under_random_plans(graphs: int) -> None:
    """A plan each."""
    drawn = given(operations=st.lists(OPERATION, min_size=3, max_size=14), layered=st.booleans(), data=st.data())
    settings(
        max_examples=graphs,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # shrinking takes minutes
        derandomize=True,
        database=None,
    )(drawn(same_bits_within_the_plan))()


def same_bits_within_the_plan(operations: Any, layered: bool, data: Any) -> None:
    model = RandomModel(operations, layered)
    traced = trace(model, {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))})
    expected = interpret(traced.step, traced.inputs)
    plan = random_plan(traced.step, lambda options: data.draw(st.sampled_from(options)))
    step = rewrite(traced.step, plan)
    same_computation(traced.joint, step)
    schedule = lowered(step, plan, WORKSPACES)
    verify(schedule)
    found, measured = run(step, schedule, traced.inputs, 3, Delays(data.draw(st.integers(0, 99)), 50.0))
    assert equal(found, expected)
    assert measured + schedule.resident_nbytes["device"] <= schedule.peak_nbytes["device"]
