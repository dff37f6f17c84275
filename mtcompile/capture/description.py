"""Descriptions of captured graphs: their inputs by role, their outputs by how they are rebuilt."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.capture.effects import check_checkpoints
from mtcompile.capture.outputs import Flow, Output, fake_of, flow_of, only_values, outputs_of
from mtcompile.capture.refusals import NotOneGraph, place_of
from mtcompile.errors import CaptureError
from mtcompile.passes.step_graph import InputSpec
from mtcompile.torch_private import pytree
from mtcompile.torch_private.known_values import is_mask
from mtcompile.torch_private.plain_torch import Question

_CPU = torch.device("cpu")

# Which computed outputs receive a gradient, and with which strides (True: those that torch chooses); for inference, None.
Pattern = tuple[bool | tuple[int, ...], ...]
Tangents = Pattern | None


@dataclass(frozen=True, slots=True)
class Description:
    """The inputs and outputs of a captured graph, and the settings of its call.

    ``inputs``: a spec per input of the graph. ``outputs``: how to rebuild each of its outputs. ``computed``: the outputs
    the program must produce: (name, differentiable, is a scalar). ``autocast``: (device, enabled, dtype) at the call;
    ``backward_autocast``: (device, dtype) of those enabled when backward is called, which is mostly outside autocast.
    ``device``: where it computes. ``at_home``: whether its parameters need not be there. ``told``: the places in its code that
    were told that they are being compiled. ``unordered``: as ``outputs_of`` names them. ``only_values``: indices of the inputs
    that require grad, but of which forward reads only the values (detached, or under ``torch.no_grad()``). ``is_part``: it is
    one of the parts of a forward. ``flow``: as ``flow_of`` returns it.
    """

    graph: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[Output, ...]
    computed: tuple[tuple[str, bool, bool], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device
    at_home: bool
    backward_autocast: tuple[tuple[str, torch.dtype], ...] = ()
    told: tuple[Question, ...] = ()
    unordered: tuple[str, ...] = ()
    only_values: frozenset[int] = frozenset()
    is_part: bool = False
    flow: Flow | None = None


def autocast_state(device: torch.device) -> tuple[tuple[str, bool, torch.dtype], ...]:
    kinds = [d for d in dict.fromkeys(("cpu", "cuda", device.type)) if torch.amp.is_autocast_available(d)]
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in kinds)


def enabled_autocast(device: torch.device) -> tuple[tuple[str, torch.dtype], ...]:
    """(device, dtype) of every autocast that is enabled now."""
    return tuple((kind, dtype) for kind, enabled, dtype in autocast_state(device) if enabled)


def device_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> torch.device:
    """The device that a graph of Dynamo's computes on: the first one other than the host among its inputs and values."""
    values = [*inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    devices = (v.device for v in values if isinstance(v, torch.Tensor) and v.device.type not in ("cpu", "meta"))
    return next(devices, _CPU)


def describe(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    names: Callable[[torch.Tensor], tuple[str, str] | None],
    device: torch.device = _CPU,
    at_home: bool = True,
    views: bool = True,
) -> Description:
    """Read Dynamo's graph; ``names(tensor)`` gives (role, path) of the model's own parameters and buffers. ``views``: as for
    ``outputs_of``.

    ``graph`` is changed: outputs become those the program computes; with ``at_home``, constants that name the host, where
    parameters are read, name ``device``, where they are when they are used.
    Raises CaptureError for inputs or outputs that have no static shape.
    """
    if at_home and device.type != "cpu":
        _check_factories(graph, device)
        _retarget(graph, device)
    _return_items(graph)
    _check_values(graph)
    specs = []
    input_nodes = list(graph.graph.find_nodes(op="placeholder"))
    for index, (node, tensor) in enumerate(zip(input_nodes, inputs, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"input {node.name} is symbolic ({type(tensor).__name__}); expected tensors of static shape: "
                "do not mark dimensions as dynamic"
            )
        if tensor.is_conj():  # of which kernels would see what memory holds
            raise CaptureError(
                f"input {_input_name(node)} is a conjugate view (x.conj()); expected a tensor that holds its values: pass "
                "x.conj().resolve_conj()"
            )
        known = names(tensor)
        role, name = known if known else ("input", _input_name(node))
        on_device = role == "input" and device.type != "cpu" and tensor.device == device
        specs.append(InputSpec(role, name, index, tensor.requires_grad, "device" if on_device else "host"))  # type: ignore[arg-type]

    check_checkpoints(graph, specs)
    outputs, computed_nodes, unordered = outputs_of(graph.graph, views)
    computed = tuple(
        (node.name, bool(fake_of(node).requires_grad), fake_of(node).numel() == 1 and fake_of(node).is_floating_point())
        for node in computed_nodes
    )
    flow = flow_of(graph.graph, outputs, computed_nodes)
    graph.graph.output_node().args = (computed_nodes,)
    graph.recompile()
    autocast, told = autocast_state(device), graph.meta.get("told", ())
    return Description(
        graph,
        tuple(specs),
        outputs,
        computed,
        autocast,
        device,
        at_home,
        told=told,
        unordered=unordered,
        only_values=only_values(graph.graph),
        is_part=graph.meta.get("is_part", False),
        flow=flow,
    )


def _return_items(graph: fx.GraphModule) -> None:
    """Makes ``x.item()`` that is only returned, as for a log, a copy of x: Dynamo's caller makes a number of it."""
    nodes = graph.graph
    for item in nodes.find_nodes(op="call_method", target="item"):
        tensor = item.args[0]
        for user in [user for user in item.users if user.target is torch.scalar_tensor]:
            value = fake_of(tensor)
            with nodes.inserting_before(item):
                detached = nodes.call_method("detach", (tensor,))
                scalar = nodes.call_method("reshape", (detached, ()))
                copy = nodes.call_method("clone", (scalar,))
            with value.fake_mode:  # type: ignore[attr-defined]
                fake = torch.empty((), dtype=value.dtype, device=value.device)
            for node in (detached, scalar, copy):
                node.meta = {**user.meta, "example_value": fake}
            user.replace_all_uses_with(copy)
            nodes.erase_node(user)
        if not item.users:
            nodes.erase_node(item)


def _check_values(graph: fx.GraphModule) -> None:
    """Raise CaptureError where a shape or Python value that is used depends on what tensors hold, or a generator is seeded."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if getattr(node.target, "__module__", "") == "torch.random":
                raise CaptureError(
                    f"forward calls torch.{node.target.__name__}, which a graph cannot hold{place_of([node])}\n"
                    "  expected random numbers from torch's default generator, seeded outside forward"
                )
            values = pytree.tree_leaves(node.meta.get("example_value"))
            used = node.users and any(map(depends_on_values, values))
            if node.op != "placeholder" and (used or _writes_where_a_mask_is(node)):
                raise NotOneGraph(
                    f"a shape or Python value depends on what tensors hold{place_of([node, *node.users])}\n"
                    "  expected static shapes; try torch.where or a tensor operation at that line in place of .item(), a "
                    "boolean mask as an index, nonzero or unique, or compute the value outside forward and pass it"
                )


def _writes_where_a_mask_is(node: fx.Node) -> bool:
    """Says whether a node is ``x[mask] = tensor``, where the number of elements depends on the mask."""
    if node.target is not operator.setitem or not isinstance(node.args[2], fx.Node):
        return False
    value = node.args[2].meta.get("example_value")
    if getattr(value, "constant", None) is not None:  # one number, which torch fills the places with
        return False
    indices = (index for index in pytree.tree_leaves(node.args[1]) if isinstance(index, fx.Node))
    return any(is_mask(index.meta.get("example_value")) for index in indices)


def depends_on_values(value: Any) -> bool:
    """True for a symbolic number, and for a tensor with a symbolic size."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


_RANDOM_FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)


def _check_factories(graph: fx.GraphModule, device: torch.device) -> None:
    """Raise CaptureError for random numbers that plain PyTorch would draw from the host's generator."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            value = node.meta.get("example_value")
            random = node.target in _RANDOM_FACTORIES and not node.all_input_nodes and "device" not in node.kwargs
            if random and isinstance(value, torch.Tensor) and value.device.type == "cpu":
                raise CaptureError(
                    f"the model's forward draws random numbers on the host ({getattr(node.target, '__name__', node.target)} "
                    f"without device=), expected them on {device}, where it computes: pass device=x.device, x being an input"
                )


def _retarget(graph: fx.GraphModule, device: torch.device) -> None:
    """Make every constant that names the host name ``device``."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == "cpu" else value

    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
            if node.kwargs.get("device") == "cpu":
                node.kwargs = {**node.kwargs, "device": device}
            if node.op == "call_method" and node.target == "to":
                node.args = tuple(device if argument == "cpu" else argument for argument in node.args)
            if node.op == "call_method" and node.target == "cpu":
                node.target, node.args = "to", (node.args[0], device)


def _input_name(node: fx.Node) -> str:
    return re.sub(r"^[lL]_+|_+$", "", node.name) or node.name
