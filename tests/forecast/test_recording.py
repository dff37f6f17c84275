"""Recording a forward gives the graph that Dynamo gives, or leaves it to Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mtcompile.capture import tracing
from mtcompile.capture.tracing import NotRecorded, recorded
from mtcompile.models.decoders import SHAPES, Shape, fake
from mtcompile.torch_private import building_without_memory

_SMALL = Shape(64, 96, 3, 4, 2, 128, head_dim=16)
_SHAPES = {
    "grouped heads": _SMALL,
    "tied": replace(_SMALL, tied=True),
    "fp32, as many heads": replace(_SMALL, kv_heads=4, dtype=torch.float32),
}


def joint_of(shape: Shape, own: bool, batch: int = 2) -> fx.GraphModule:
    with building_without_memory() as built:
        built(model := fake(shape))
        tokens = torch.zeros((batch, 32), dtype=torch.int64)
        torch.compiler.reset()
        return tracing.trace_joint(model, {"tokens": tokens, "targets": tokens}, own=own)[0]


def listing(joint: fx.GraphModule) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [(spec,) for spec in (*joint.meta["inputs"], *joint.meta["outputs"])]
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        about = (value.dtype, value.shape, value.stride(), value.device) if isinstance(value, Tensor) else value
        called = node.op, node.name, str(node.target), str(node.args), str(node.kwargs)
        rows.append((*called, node.meta.get("module_path"), node.meta.get("phase"), str(about)))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
def test_a_recorded_forward_is_traced_as_one_that_dynamo_captured(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = listing(joint_of(shape, own=False))
    monkeypatch.setattr(tracing, "front_end", None)  # Dynamo is not asked
    assert listing(joint_of(shape, own=True)) == captured
    assert listing(joint_of(shape, own=True, batch=3)) != captured


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_built_in_shapes_are_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[name].shortened(4)
    captured = listing(joint_of(shape, own=False))
    monkeypatch.setattr(tracing, "front_end", None)
    assert listing(joint_of(shape, own=True)) == captured


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
    ],
)
def test_what_cannot_be_recorded_is_left_to_dynamo(does: Callable[[Tensor], Any]) -> None:
    with building_without_memory() as built:
        built(model := Doing(does))
        with pytest.raises(NotRecorded):
            recorded(model, {"x": torch.zeros(2, 4)})
    assert not model._forward_pre_hooks and not model.linear._forward_hooks


def test_a_value_in_python_is_refused() -> None:
    with building_without_memory() as built:
        built(model := Doing(lambda x: x.sum() if x.sum() > 0 else x.mean()))
        with pytest.raises(Exception, match="scalar"):
            recorded(model, {"x": torch.zeros(2, 4)})
