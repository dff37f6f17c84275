"""Traces one training step of a model to graphs, without compiling or running it, for plans, fixtures and tests."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from mtcompile.capture.description import describe
from mtcompile.capture.dynamo import front_end
from mtcompile.capture.joint import joint_graph
from mtcompile.capture.known_shapes import STAND_INS
from mtcompile.capture.stamping.blocks import numbered
from mtcompile.capture.stamping.stamp import stamped
from mtcompile.passes.joint.build import build
from mtcompile.passes.joint.loss_head import chunk_loss
from mtcompile.passes.joint.normalize import normalize
from mtcompile.passes.joint.strides import Observe
from mtcompile.torch_private import pytree

_PACKET: type = type(torch.ops.aten.add)
_ASKS = ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point")  # methods that read no values


@dataclass(frozen=True, slots=True)
class Traced:
    """The normalized joint graph, the step graph built of it, and the tensors it takes, in order."""

    joint: fx.GraphModule
    step: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Collects no garbage inside: tracing and planning make many objects and few cycles, and looking for garbage among them
    takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def trace(
    model: nn.Module,
    data: Mapping[str, Any],
    device: torch.device | None = None,
    loss_chunks: int = 1,
    observe: Observe | None = None,
) -> Traced:
    """``trace_joint``, cut into regions; with ``loss_chunks``, its loss head in chunks."""
    joint, inputs = trace_joint(model, data, device, observe)
    if loss_chunks > 1:
        chunk_loss(joint, loss_chunks)
    return Traced(joint, build(joint), inputs)


def trace_joint(
    model: nn.Module,
    data: Mapping[str, Any],
    device: torch.device | None = None,
    observe: Observe | None = None,
    repeated: tuple[str, int] | None = None,
    own: bool = False,
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """The normalized joint graph of ``model(**data)`` whose loss (its scalar outputs) receives a gradient, and the tensors it
    takes. ``device``: where it would compute; tensors may be fake, so that a model of any size can be traced. ``observe``: as
    for ``normalize``. ``repeated``: (name of a list of modules, number): the graph is that of a model with this many of them,
    all like those of ``model``, which has at least ``blocks.FEWEST``. ``own``: the model's sources are ours, so that nothing of
    its forward is hidden from a recording; ``data`` is then fake too. Raises CaptureError."""
    where = device or torch.device("cpu")
    traces: list[tuple[fx.GraphModule, tuple[torch.Tensor, ...]]] = []
    names: dict[int, tuple[str, str]] = {id(b): ("buffer", n) for n, b in model.named_buffers()}
    names |= {id(p): ("param", n) for n, p in model.named_parameters()}

    def backend(graph: Any, inputs: Any) -> Any:
        results = fx.node.map_arg(graph.graph.output_node().args[0], lambda node: node.meta["example_value"])
        description = describe(graph, inputs, lambda tensor: names.get(id(tensor)), where)
        scalars = tuple(differentiable and scalar for _, differentiable, scalar in description.computed)
        joint = joint_graph(description, scalars, observe)
        if repeated is not None:
            joint = stamped(joint, numbered(joint, *repeated))
        traces.append((normalize(joint, observe), tuple(inputs)))
        return lambda *_: results  # shapes alone: nothing runs

    def call(**inputs: Any) -> Any:  # a frame of our own: Dynamo skips those of torch.nn
        return model(**inputs)

    with collecting_later():
        if own:
            with contextlib.suppress(NotRecorded):
                backend(*recorded(model, data))
                return traces[0]
        front_end(call, backend, where)(**data)
    return traces[0]


# ---------------------------------------------------------------------------------------- recording


class NotRecorded(Exception):
    """Raised for a forward that only Dynamo can capture."""


def recorded(model: nn.Module, data: Mapping[str, Any]) -> tuple[fx.GraphModule, Sequence[torch.Tensor]]:
    """Records the forward of a model whose sources are ours as the graph that Dynamo captures of it, several times faster:
    no guards are needed, as the graph is for one trace alone. Returns it and the tensors that it takes. Parameters and ``data``
    are fake. Raises NotRecorded for a forward that does more than call functions of torch."""
    recording = _Recording(model, data)
    handles = []
    for path, module in model.named_modules():
        entry = f"L['model'].{path}".rstrip("."), type(module)
        handles.append(module.register_forward_pre_hook(lambda *_, entry=entry: recording.stack.append(entry)))
        handles.append(module.register_forward_hook(lambda *_: recording.stack.pop() and None))
    try:
        with recording:
            results = model(**data)
    finally:
        for handle in handles:
            handle.remove()
    outputs = results if isinstance(results, tuple) else (results,)
    if not all(isinstance(value, torch.Tensor) and id(value) in recording.nodes for value in outputs):
        raise NotRecorded(f"expected results that torch computed, found {type(results).__name__}")
    recording.graph.output(tuple(recording.nodes[id(value)] for value in outputs))
    return fx.GraphModule({}, recording.graph), recording.inputs


class _Recording(TorchFunctionMode):
    """Makes each call of torch inside a node of ``graph``. ``inputs``: tensors that it takes, in the order of their first use;
    ``nodes``: by identity of a tensor; ``stack``: the modules that are being called."""

    def __init__(self, model: nn.Module, data: Mapping[str, Any]) -> None:
        super().__init__()
        self.graph, self.inputs, self.stack = fx.Graph(), list[torch.Tensor](), list[tuple[str, type]]()
        self.nodes: dict[int, fx.Node] = {}
        self._results: list[Any] = []  # as long as they live, no other tensor has their identity
        held = *model.named_parameters(), *model.named_buffers()
        self._states = {id(tensor): name.replace(".", "_") for name, tensor in held}
        self._data = {id(tensor): f"L_inputs_{name}_" for name, tensor in [*data.items()][::-1]}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (stand_in := STAND_INS.get(func)) is not None:
            with self:
                return stand_in(*args, **kwargs)
        operands = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        before, name = [operand._version for operand in operands], str(getattr(func, "__name__", ""))
        if name.endswith("_") and not name.endswith("__"):
            raise NotRecorded(f"{name} changes its operand")
        result = func(*args, **kwargs)
        made = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        if not made and (name == "__get__" or name in _ASKS):
            return result
        is_one = isinstance(result, torch.Tensor)
        if name == "__get__" or not (is_one or (isinstance(result, tuple) and len(made) == len(result))):
            raise NotRecorded(f"{func} returns {type(result).__name__}")
        if before != [operand._version for operand in operands]:
            raise NotRecorded(f"{func} changes an operand")
        if is_one and any(result is operand for operand in operands):  # a conversion to what it is already
            return result
        self._results.append(result)
        for operand in sorted(operands, key=lambda operand: id(operand) not in self._states):  # as Dynamo: first what is held
            self._operand(operand)
        arguments = pytree.tree_map_only(torch.Tensor, lambda tensor: self.nodes[id(tensor)], (tuple(args), dict(kwargs)))
        node = self._node(result, *self._target(func, name), *arguments)
        if is_one:
            self.nodes[id(result)] = node
        for place, value in () if is_one else enumerate(result):
            self.nodes[id(value)] = self._node(value, "call_function", operator.getitem, (node, place), {})
        return result

    def _target(self, func: Any, name: str) -> tuple[str, Any]:
        """Returns what a node that calls ``func`` is."""
        if getattr(torch.Tensor, name, None) is func:
            return "call_method", name
        if isinstance(func, (FunctionType, BuiltinFunctionType, _PACKET)):
            return "call_function", func
        raise NotRecorded(str(func))

    def _node(self, value: Any, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta = {"nn_module_stack": {path: (path, kind) for path, kind in self.stack}, "example_value": value}
        return node

    def _operand(self, tensor: torch.Tensor) -> None:
        """Makes a tensor an input if no call made it."""
        if id(tensor) in self.nodes:
            return
        name = self._states.get(id(tensor)) or self._data.get(id(tensor))
        if name is None:
            raise NotRecorded("a tensor that is none of the model's and no input")
        before = self.nodes[id(self.inputs[-1])].next if self.inputs else next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(before) if before is not None else contextlib.nullcontext():
            node = self.graph.placeholder(name)
        node.meta = {"example_value": tensor}
        self.nodes[id(tensor)] = node
        self.inputs.append(tensor)
