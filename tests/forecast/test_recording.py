"""Recording a forward and its backward gives the graph that torch's own tracing gives, or leaves it to that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mtcompile.capture.recording.joint import NotRecorded, recorded_joint
from mtcompile.capture.tracing import record_joint, trace_joint
from mtcompile.models.decoders import fake
from mtcompile.models.lora import add_lora
from mtcompile.models.shapes import SHAPES, Shape
from mtcompile.passes.graph_json import graph_to_json
from mtcompile.torch_private import building_on_meta, building_without_memory

_SMALL = Shape(64, 96, 2, 4, 2, 128, head_dim=16)
_SHAPES = {
    "grouped heads": _SMALL,
    "tied": replace(_SMALL, tied=True),
    "fp32, as many heads": replace(_SMALL, kv_heads=4, dtype=torch.float32),
}
_QUICK = ("grouped heads", 1), ("tied", 2), ("fp32, as many heads", 2)


def traced(shape: Shape, batch: int, repeated: tuple[str, int] | None, lora: int = 0) -> fx.GraphModule:
    with building_without_memory() as built:
        model = fake(shape)
        if lora:
            add_lora(model, lora)
        built(model)
        tokens = torch.zeros((batch, 32), dtype=torch.int64)
        torch.compiler.reset()
        return trace_joint(model, {"tokens": tokens, "targets": tokens}, repeated=repeated)[0]


def recorded(shape: Shape, batch: int, repeated: tuple[str, int] | None, lora: int = 0) -> fx.GraphModule:
    with building_on_meta():
        model = fake(shape)
        if lora:
            add_lora(model, lora)
    tokens = torch.zeros((batch, 32), dtype=torch.int64, device="meta")
    return record_joint(model, {"tokens": tokens, "targets": tokens}, repeated)


def written(joint: fx.GraphModule) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """All that the passes read of a graph. Numbers of autograd's steps count from the first, as they depend on what ran
    before."""
    graph = json.loads(graph_to_json(joint))
    numbers = [node["meta"]["seq_nr"] for node in graph["nodes"] if "seq_nr" in node["meta"]]
    for node in graph["nodes"]:
        if "seq_nr" in node["meta"]:
            node["meta"]["seq_nr"] -= min(numbers)
    return graph, [joint.meta["told"], joint.meta["unordered"], joint.meta["constants"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        pytest.param(shape, batch, marks=[pytest.mark.long] * ((name, batch) not in _QUICK), id=f"{name}-{batch}")
        for name, shape in _SHAPES.items()
        for batch in (1, 2)
    ],
)
def test_a_recorded_step_is_as_torch_traces_it(shape: Shape, batch: int) -> None:
    expected = written(traced(shape, batch, None))
    assert written(recorded(shape, batch, None)) == expected
    assert written(recorded(shape, batch + 1, None)) != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[pytest.mark.long] * (n != _QUICK[0][0]), id=n) for n, s in _SHAPES.items()]
)
def test_adapters_are_recorded_as_torch_traces_them(shape: Shape) -> None:
    expected = written(traced(shape, 2, None, lora=4))
    assert written(recorded(shape, 2, None, lora=4)) == expected
    assert written(recorded(shape, 2, None, lora=8)) != expected


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_built_in_shapes_are_recorded(name: str) -> None:
    repeated = "blocks", SHAPES[name].layers
    shape = SHAPES[name].shortened(4)
    assert written(recorded(shape, 2, repeated)) == written(traced(shape, 2, repeated))


@pytest.mark.slow
def test_recording_loads_no_tracing_of_torch() -> None:
    """Loading it takes longer than all the rest of a recording."""
    code = (
        "import sys, tests.forecast.test_recording as t; t.recorded(t._SMALL, 2, None);"
        "print([name for name in ('torch._dynamo', 'sympy', 'torch._functorch.aot_autograd') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


class Doing(nn.Module):
    def __init__(self, does: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self.linear(x))


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x.add_(1).sum(),  # changes a value
        lambda x: (x.sum(), 3.0),  # returns a number
        lambda x: x.sum() * torch.ones(()).requires_grad_(),
        lambda x: torch.add(x.detach(), 1, out=x.detach()).sum(),
        lambda x: x.T.sum(),  # reads an attribute
        lambda x: x.data.sum(),
        lambda x: x.sum() if x.sum() > 0 else x.mean(),  # looks at a value
        lambda x: nn.functional.dropout(x).sum(),  # draws random numbers
    ],
)
def test_what_cannot_be_recorded_is_left_to_dynamo(does: Callable[[Tensor], Any]) -> None:
    with building_on_meta():
        model = Doing(does)
    with pytest.raises(NotRecorded):
        recorded_joint(model, {"x": torch.zeros(2, 4, device="meta")})
    assert not model._forward_pre_hooks and not model.linear._forward_hooks


@pytest.mark.parametrize("shape", [replace(_SMALL, kv_heads=1), replace(_SMALL, heads=1, kv_heads=1)])
def test_values_whose_strides_are_not_known_are_left_to_torch(shape: Shape) -> None:
    with pytest.raises(NotRecorded, match="unusual strides"):
        recorded(shape, 2, None)


def test_a_loss_is_needed() -> None:
    with building_on_meta():
        model = Doing(lambda x: x)
    with pytest.raises(NotRecorded, match="a loss"):
        recorded_joint(model, {"x": torch.zeros(2, 4, device="meta")})
