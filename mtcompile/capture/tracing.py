"""Traces one training step of a model to graphs, without compiling or running it, for plans, fixtures and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mtcompile.capture.description import describe
from mtcompile.capture.dynamo import front_end
from mtcompile.capture.joint import joint_graph
from mtcompile.capture.recording.joint import recorded_joint
from mtcompile.capture.stamping.blocks import numbered
from mtcompile.capture.stamping.stamp import named, stamped
from mtcompile.passes.joint.build import build
from mtcompile.passes.joint.loss_head import chunk_loss
from mtcompile.passes.joint.normalize import normalize
from mtcompile.passes.joint.strides import Observe
from mtcompile.references import collecting_seldom
from mtcompile.torch_private import within_a_graphs_mode, without_guards


@dataclass(frozen=True, slots=True)
class Traced:
    """The normalized joint graph, the step graph built of it, and the tensors it takes, in order."""

    joint: fx.GraphModule
    step: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]


def trace(
    model: nn.Module,
    data: Mapping[str, Any],
    device: torch.device | None = None,
    loss_chunks: int = 1,
    observe: Observe | None = None,
) -> Traced:
    """``trace_joint``, cut into regions; with ``loss_chunks``, its loss head in chunks."""
    joint, inputs = trace_joint(model, data, device, observe)
    with within_a_graphs_mode():
        if loss_chunks > 1:
            chunk_loss(joint, loss_chunks)
        return Traced(joint, build(joint), inputs)


def trace_joint(
    model: nn.Module,
    data: Mapping[str, Any],
    device: torch.device | None = None,
    observe: Observe | None = None,
    repeated: tuple[str, int] | None = None,
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """The normalized joint graph of ``model(**data)`` whose loss (its scalar outputs) receives a gradient, and the tensors it
    takes. ``device``: where it would compute; tensors may be fake, so that a model of any size can be traced. ``observe``: as
    for ``normalize``. ``repeated``: (name of a list of modules, number): the graph is that of a model with this many of them,
    all like those of ``model``, which has at least ``blocks.FEWEST``. Raises CaptureError."""
    where = device or torch.device("cpu")
    traces: list[tuple[fx.GraphModule, tuple[torch.Tensor, ...]]] = []
    names: dict[int, tuple[str, str]] = {id(b): ("buffer", n) for n, b in model.named_buffers()}
    names |= {id(p): ("param", n) for n, p in model.named_parameters()}

    def backend(graph: Any, inputs: Any) -> Any:
        results = fx.node.map_arg(graph.graph.output_node().args[0], lambda node: node.meta["example_value"])
        description = describe(graph, inputs, lambda tensor: names.get(id(tensor)), where)
        scalars = tuple(differentiable and scalar for _, differentiable, scalar in description.computed)
        joint = joint_graph(description, scalars, observe)
        with within_a_graphs_mode():
            traces.append((_repeated(joint, repeated, observe), tuple(inputs)))
        return lambda *_: results  # shapes alone: nothing runs

    def call(**inputs: Any) -> Any:  # a frame of our own: Dynamo skips those of torch.nn
        return model(**inputs)

    with collecting_seldom(), without_guards():
        front_end(call, backend, where)(**data)
    return traces[0]


def record_joint(model: nn.Module, data: Mapping[str, torch.Tensor], repeated: tuple[str, int] | None = None) -> fx.GraphModule:
    """``trace_joint`` of a model whose sources are ours, on the device "meta" like ``data``. Raises NotRecorded for one that
    cannot be recorded."""
    with collecting_seldom():
        return _repeated(named(recorded_joint(model, data)), repeated, None)


def _repeated(joint: fx.GraphModule, repeated: tuple[str, int] | None, observe: Observe | None) -> fx.GraphModule:
    return normalize(joint if repeated is None else stamped(joint, numbered(joint, *repeated)), observe)
