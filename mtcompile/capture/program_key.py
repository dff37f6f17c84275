"""A key of what would be traced: made of a described graph and of all settings that tracing depends on, in a hundredth of the
time that a trace takes."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.capture.description import Description, autocast_state
from mtcompile.capture.outputs import fake_of
from mtcompile.capture.stamping.blocks import WRITTEN_IN_FULL
from mtcompile.capture.stamping.repeats import shape_of

_IN_FULL = (*WRITTEN_IN_FULL, bool, bytes, torch.memory_format)
_META = {"example_value", "nn_module_stack", "stack_trace", torch_private.NEEDS_GRAD}  # which the key holds
_META |= {"source_fn_stack", "creation_timestamp", "tensor_dict", "grapharg", "steal_arg"}  # of which nothing is traced
_GRAPHS_OWN = {"told", "is_part", "dynamo_flat_name_to_original_fqn", "dynamo_compile_id", "backend_id"}


class _NotKnown(Exception):
    """Raised for what no text describes, or what the user may have changed since."""


def program_key(description: Description, *traced_for: Any) -> str | None:
    """A text that is equal for two programs only if they are traced alike, by this process or, unless ``was_torch_patched``, by
    others on the same processor and device. ``traced_for``: what else decides that, such as the tangents. None for a graph
    that holds tensors or functions other than torch's, and where ``settings_of_traces`` gives none."""
    if (settings := torch_private.settings_of_traces(description.device)) is None:
        return None
    inputs = [fake_of(node) for node in description.graph.graph.find_nodes(op="placeholder")]
    storages = [torch_private.storage_id(tensor) for tensor in inputs]
    about: list[Any] = [
        (torch_private.about_input(tensor), storages.index(torch_private.storage_id(tensor))) for tensor in inputs
    ]
    try:
        about += _written(description.graph)
    except _NotKnown:
        return None
    about += [description.inputs, description.computed, description.autocast, description.backward_autocast]
    about += [description.device, description.at_home, description.told, description.unordered, description.is_part]
    about += [autocast_state(description.device), settings, traced_for]
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _written(owner: fx.GraphModule) -> Iterator[Any]:
    """Yields what each node of a graph, and of those that it calls, does to which values."""
    if not set(owner.meta) <= _GRAPHS_OWN:
        raise _NotKnown
    numbers = {node: number for number, node in enumerate(owner.graph.nodes)}
    for node, number in numbers.items():
        if not set(node.meta) <= _META:
            raise _NotKnown
        target: Any = node.target
        if node.op == "get_attr":
            held = operator.attrgetter(str(target))(owner)
            if not isinstance(held, fx.GraphModule):
                raise _NotKnown
            target = list(_written(held))
        elif node.op == "call_function":
            target = _named(target)
        elif node.op == "call_module":
            raise _NotKnown
        modules = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        about = (
            shape_of(node.meta.get("example_value")),
            modules,
            node.meta.get("stack_trace"),
            node.meta.get(torch_private.NEEDS_GRAD),
        )
        yield number, node.op, node.name, target, _argument(node.args, numbers), _argument(node.kwargs, numbers), about


def _argument(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return fx.Node, numbers[value]
    if isinstance(value, (tuple, list)):  # Size and named tuples too
        return type(value), [_argument(item, numbers) for item in value]
    if isinstance(value, dict):
        return dict, [(_argument(key, numbers), _argument(item, numbers)) for key, item in value.items()]
    if isinstance(value, slice):
        return slice, [_argument(item, numbers) for item in (value.start, value.stop, value.step)]
    return (type(value), value) if type(value) in _IN_FULL else _named(value)


def _named(function: Any) -> tuple[Any, ...]:
    if (name := torch_private.name_of_function(function)) is None:
        raise _NotKnown
    return name
