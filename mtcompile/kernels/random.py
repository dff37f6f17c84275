"""Random operations in compiled kernels: the generator's state becomes a value.

A compiler may move or drop operations that seem to have no effects. So inside a kernel, each random operation is one opaque
operator from (state, tensors) to (results, next state), and the state passes from one to the next like any value. The kernel
takes the generator's state as first input and returns it as last output; ``with_generator`` puts it back. Every random number
is the one that the plain run draws.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mtcompile.passes.analysis.kernels import Operand
from mtcompile.passes.generators import generator_state, replay, rng_preserved, save_rng, set_generator_state
from mtcompile.passes.step_graph import body_outputs, is_random, placeholders


def with_explicit_state(kernel: fx.GraphModule, device: str) -> fx.GraphModule:
    """Returns ``kernel`` with the state of the device's generator as first input and last output, and no hidden effects."""
    body = fx.Graph()
    state = body.placeholder("generator_state")
    env = {node: body.node_copy(node) for node in placeholders(kernel.graph)}
    for node in kernel.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is save_rng:
            env[node] = state
        elif node.target is replay:
            saved, _, target, *args = node.args
            env[node], _ = _draw(body, device, env[saved], target, tuple(args), node.kwargs, env)
        elif is_random(node):
            env[node], state = _draw(body, device, state, node.target, node.args, node.kwargs, env)
        else:
            env[node] = body.node_copy(node, env.__getitem__)
    outputs = [env[node] for node in body_outputs(kernel)]
    # A state that leaves the kernel needs its own memory.
    for position, node in enumerate(body_outputs(kernel)):
        if node.target is save_rng:
            outputs[position] = body.call_function(torch.ops.aten.clone.default, (outputs[position],))
    body.output((*outputs, body.call_function(torch.ops.aten.clone.default, (state,))))
    return fx.GraphModule(kernel, body)


def with_generator(call: Callable[..., Any], device: str) -> Callable[..., Sequence[torch.Tensor]]:
    """Wraps a kernel of ``with_explicit_state`` so that it reads and advances the device's generator."""

    def run(*args: torch.Tensor) -> Sequence[torch.Tensor]:
        results: Sequence[torch.Tensor] = call(generator_state(device), *args)
        set_generator_state(device, results[-1])
        return results[:-1]

    return run


def _draw(
    body: fx.Graph, device: str, state: fx.Node, target: Any, args: Any, kwargs: Any, env: dict[fx.Node, fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """Returns the results of a random operation (getitems that follow it read those of a tuple), and the next state."""
    tensors: list[fx.Node] = []

    def operand(node: fx.Node) -> Any:
        tensors.append(env[node])
        return Operand(len(tensors) - 1)  # by its position among the operation's tensors

    operands = map_arg((args, kwargs), operand)
    results = body.call_function(_operator(device, target, *operands), (state, tensors))
    next_state = body.call_function(operator.getitem, (results, -1))
    single = len(target._schema.returns) == 1
    return (body.call_function(operator.getitem, (results, 0)) if single else results), next_state


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns the argument with its tensors filled in. It is no closure: a closure that calls itself is a reference cycle, and
    would keep the tensors until the next garbage collection."""
    if isinstance(value, Operand):
        return tensors[value.number]
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(v, tensors) for v in value)
    return value


def _operator(device: str, target: Any, args: Any, kwargs: Any) -> Any:
    """Returns the operator for one random operation with these arguments, registered on first use."""
    text = f"{device} {target} {args!r} {kwargs!r}"
    name = f"random_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    namespace = torch.ops.mtcompile
    if not hasattr(namespace, name):

        def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            result = target(*_filled(tuple(args), tensors), **{key: _filled(value, tensors) for key, value in kwargs.items()})
            return [result] if isinstance(result, torch.Tensor) else list(result)

        def draw(state: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            with rng_preserved(device):
                set_generator_state(device, state)
                return [*call(tensors), generator_state(device)]

        custom = torch.library.custom_op(
            f"mtcompile::{name}", draw, mutates_args=(), schema="(Tensor state, Tensor[] tensors) -> Tensor[]"
        )
        custom.register_fake(lambda state, tensors: [*call(tensors), torch.empty_like(state)])
    return getattr(namespace, name).default
