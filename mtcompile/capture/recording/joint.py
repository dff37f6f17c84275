"""Records the joint graph of a model whose sources are ours: nothing of its forward is hidden from a recording, and no guards
are needed, as the graph is for one trace alone. The graph is the one that ``joint_graph`` gives, in a fraction of the time."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from mtcompile.capture.description import enabled_autocast
from mtcompile.capture.known_shapes import STAND_INS
from mtcompile.passes.inputs import InputSpec, OutputSpec
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.runtime.schedule import Role
from mtcompile.torch_private import pytree
from mtcompile.torch_private.light.tensors import Light, Noting, NotNoted, lighten

_CPU = torch.device("cpu")
_PACKET: type = type(torch.ops.aten.add)
_ASKS = ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point")  # methods that read no values


class NotRecorded(Exception):
    """Raised for a forward that only Dynamo can capture."""


def recorded_joint(model: nn.Module, data: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """Returns the joint graph of ``model(**data)``, a loss, with calls that are still to be ``named``. Parameters, buffers and
    ``data`` are on the device "meta"; the graph computes on the CPU. The model's parameters are of use to nothing else
    afterwards. Raises NotRecorded for a forward that does more than call functions of torch."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled() or enabled_autocast(_CPU):
        raise NotRecorded("expected gradients, and no autocast")
    lighten(model)
    lights = {id(tensor): Light(tensor) for tensor in data.values()}
    taken = {name: lights[id(tensor)] for name, tensor in data.items()}
    recording = _Recording(model, taken)
    noting = Noting(recording.about)
    for light in recording.held:
        light.node = noting.graph.placeholder("input")
    try:
        with noting:
            loss = recording.loss_of(model, taken)
        tangent = Light(torch.empty(loss.shape, dtype=loss.dtype, device="meta"), noting.graph.placeholder("input"))
        with noting:
            wanted = [index for index, light in enumerate(recording.inputs) if light.requires_grad]
            gradients = noting.gradients(loss, tangent, [recording.inputs[index] for index in wanted])
    except NotNoted as error:
        raise NotRecorded(str(error)) from None
    inputs = recording.input_specs()
    result = recording.results[id(loss)].name
    outputs = [(OutputSpec("output", 0, result), loss.node)]
    for index, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None:
            outputs.append((OutputSpec("grad", index, inputs[index].name), gradient.node))
    graph = noting.graph
    first = next(iter(graph.nodes))
    for position, light in enumerate((*recording.inputs, tangent), 1):
        with graph.inserting_before(first):
            node = graph.placeholder("tangents_1" if light is tangent else f"primals_{position}")
        node.meta = {"val": light.value, "partitioner_tag": "is_backward" if light is tangent else "is_forward"}
        light.node.replace_all_uses_with(node)
    graph.output(tuple(node for _, node in outputs))
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "call_function" or node.name.startswith("input")):
            graph.erase_node(node)
    joint = LazyGraphModule({}, graph)
    specs = *inputs, InputSpec("tangent", f"grad of {result}", 0)
    joint.meta.update(inputs=specs, outputs=tuple(spec for spec, _ in outputs), device="cpu", told=(), unordered=())
    return joint


class _Recording(TorchFunctionMode):
    """Notes what the calls of torch inside take. ``held``: the tensors that a model and its call have; ``inputs``: those that
    are taken, in the order of their first use; ``results``: by identity of a tensor, a node with Dynamo's name for it."""

    def __init__(self, model: nn.Module, data: Mapping[str, Light]) -> None:
        super().__init__()
        self.results: dict[int, fx.Node] = {}
        self.inputs: list[Light] = []
        self._graph, self._modules = fx.Graph(), [""]
        self._alive: list[Any] = []  # as long as they live, no other tensor has their identity
        held: list[tuple[Any, Role, str]] = [(light, "input", f"inputs_{name}") for name, light in data.items()]
        held += [(tensor, "buffer", name) for name, tensor in model.named_buffers()]
        held += [(tensor, "param", name) for name, tensor in model.named_parameters()]
        self._names = dict[int, tuple[Role, str]]()
        for light, role, name in held:
            self._names.setdefault(id(light), (role, name))
        self.held = list({id(light): light for light, *_ in held}.values())

    def loss_of(self, model: nn.Module, data: Mapping[str, Light]) -> Light:
        """Calls the model. Raises NotRecorded unless it returns a loss."""
        handles = []

        def leave(*_: Any) -> None:
            self._modules.pop()

        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, path=path: self._modules.append(path)))
            handles.append(module.register_forward_hook(leave))
        try:
            with self:
                loss: Any = model(**data)
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(loss, Light) or id(loss) not in self.results or loss.numel() != 1 or not loss.requires_grad:
            raise NotRecorded(f"expected a loss that torch computed, found {type(loss).__name__}")
        return loss

    def about(self) -> dict[str, Any]:
        """Returns what the graph says of each call that is made now."""
        return {"module_path": self._modules[-1]} if self._modules[-1] else {}

    def input_specs(self) -> tuple[InputSpec, ...]:
        named = [(*self._names[id(light)], light.requires_grad) for light in self.inputs]
        return tuple(InputSpec(role, name, index, trained) for index, (role, name, trained) in enumerate(named))

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
        results = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        if not results and (name == "__get__" or name in _ASKS):
            return result
        is_one = isinstance(result, torch.Tensor)
        if name == "__get__" or not (is_one or (isinstance(result, tuple) and len(results) == len(result))):
            raise NotRecorded(f"{func} returns {type(result).__name__}")
        if before != [operand._version for operand in operands]:
            raise NotRecorded(f"{func} changes an operand")
        if is_one and any(result is operand for operand in operands):  # a conversion to what it is already
            return result
        self._alive.append(result)
        for operand in sorted(operands, key=lambda operand: self._names.get(id(operand), "input")[0] == "input"):
            self._take(operand)  # as Dynamo: first what the model has
        node = self._graph.create_node(*self._target(func, name))
        for value in results:
            self.results[id(value)] = node if is_one else self._graph.create_node("call_function", operator.getitem)
        return result

    def _target(self, func: Any, name: str) -> tuple[str, Any]:
        """Returns what a node that calls ``func`` is."""
        if getattr(torch.Tensor, name, None) is func:
            return "call_method", name
        if isinstance(func, (FunctionType, BuiltinFunctionType, _PACKET)):
            return "call_function", func
        raise NotRecorded(str(func))

    def _take(self, tensor: Any) -> None:
        """Makes a tensor an input if no call made it."""
        if id(tensor) in self.results or any(tensor is light for light in self.inputs):
            return
        if id(tensor) not in self._names:
            raise NotRecorded("a tensor that is none of the model's and no input")
        self.inputs.append(tensor)
