"""Specializes a graph of Dynamo's for any size to the sizes of a call: symbols become numbers, modules stay known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

Key = tuple[Any, ...]


def is_symbolic(value: Any) -> bool:
    """True for an example input of Dynamo's without a fixed value or size."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride(), value.storage_offset()))
    return True


def numbers_among(graph: fx.GraphModule) -> frozenset[int]:
    """The positions of the inputs that are Python numbers, which Dynamo passes as tensors."""
    arguments = (node.meta.get("grapharg") for node in graph.graph.find_nodes(op="placeholder"))
    return frozenset(i for i, argument in enumerate(arguments) if not getattr(argument, "is_tensor", True))


def with_numbers(inputs: Sequence[Any], numbers: Collection[int]) -> list[Any]:
    """The inputs of a call, with Python numbers as what they are."""
    return [v.item() if i in numbers and isinstance(v, torch.Tensor) else v for i, v in enumerate(inputs)]


def size_key(inputs: Sequence[Any]) -> Key:
    """The key of a graph for the sizes of a call: all of the inputs that it depends on."""
    return tuple(
        (tuple(v.shape), tuple(v.stride()), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else v for v in inputs
    )


def specialize(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A copy of ``graph`` that takes only the tensors among ``inputs``, with their sizes, and those tensors."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    examples = (node.meta.get("example_value") for node in placeholders)
    mode = next(type(e.fake_mode) for e in examples if hasattr(e, "fake_mode"))()
    fakes = [mode.from_tensor(v, static_shapes=True) if isinstance(v, torch.Tensor) else v for v in inputs]
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            operand: Any = node.args[0] if node.target == "item" else None
            if isinstance(operand, fx.Node) and _is_number(values[operand]):  # Dynamo passes it as a tensor
                values[node] = values[operand]
            else:
                values[node] = super().run_node(node)
            return values[node]

    with mode, torch.enable_grad():
        Recorder(graph, garbage_collect_values=False).run(*fakes)
    specialized = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        value = values.get(node)
        if node.op != "output" and _is_number(value):
            env[node] = value
            continue
        if node.op == "output":
            specialized.output(map_arg(node.args[0], env.__getitem__))
            continue
        env[node] = specialized.create_node(
            node.op, node.target, *map_arg((node.args, node.kwargs), env.__getitem__), name=node.name, type_expr=node.type
        )
        env[node].meta = {**node.meta, "example_value": value}
        env[node].meta.pop("grapharg", None)
    return fx.GraphModule(graph, specialized), [v for v in inputs if isinstance(v, torch.Tensor)]


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_number(v) for v in value) and len(value) > 0
    return isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
