"""Effects in captured graphs: what a checkpoint would change twice, what a backward changes in place, and the tokens that torch
threads through operations with effects to keep their order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.capture.outputs import changes_operand
from mtcompile.capture.refusals import place_of
from mtcompile.errors import CaptureError
from mtcompile.passes.step_graph import InputSpec, is_check, writes
from mtcompile.torch_private import gives_no_gradients, pytree, repeated_effects


def check_checkpoints(graph: fx.GraphModule, inputs: Sequence[InputSpec]) -> None:
    """Raises CaptureError for a torch.utils.checkpoint in Dynamo's graph at which a plain run stops gradients, or in which it
    changes a tensor twice or draws other random numbers in the backward."""
    for module in graph.modules():
        for node in _checkpoints(module) if isinstance(module, fx.GraphModule) else ():
            if gives_no_gradients(node):
                raise CaptureError(
                    "no tensor among the arguments of a torch.utils.checkpoint with use_reentrant=True requires grad, so a "
                    f"plain run gives the parameters in it no gradient{place_of([node])}\n  pass use_reentrant=False, or "
                    "remove the checkpoint: mtcompile itself recomputes what does not fit into memory"
                )
    specs: dict[Any, InputSpec] = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in _checkpoints(graph):
        _check_effects(graph, node, specs)


def _checkpoints(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The checkpoints, in a graph of Dynamo's, that gradients flow through."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        values = pytree.tree_leaves(node.meta.get("example_value"))
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            yield node


def _check_effects(graph: fx.GraphModule, node: fx.Node, specs: dict[Any, InputSpec]) -> None:
    """Raises CaptureError for a checkpoint that changes, in place, a tensor made outside it, or draws random numbers anew: a
    plain run computes it again in the backward, and so changes the tensor twice, or has gradients by other numbers."""
    body: Any = node.args[0]
    operands = node.args[1:]
    values = [value.meta.get("example_value") if isinstance(value, fx.Node) else value for value in operands]
    for position, effect in repeated_effects(node, getattr(graph, body.target), values):
        if position is None:
            raise CaptureError(
                "torch.utils.checkpoint with preserve_rng_state=False draws random numbers, and a plain run draws others in "
                f"the backward{place_of([effect, node])}\n"
                "  remove preserve_rng_state=False, or the checkpoint: mtcompile recomputes what does not fit into memory"
            )
        raise CaptureError(
            f"torch.utils.checkpoint makes a change in the values of {_named(specs.get(operands[position]))}, and a plain "
            f"run repeats it in the backward{place_of([effect, node])}\n"
            "  remove the checkpoint: mtcompile itself recomputes what does not fit into memory"
        )


def _named(spec: InputSpec | None) -> str:
    if spec is None:
        return "a tensor that is computed outside of it"
    return {"param": "the parameter ", "buffer": "the buffer "}.get(spec.role, "") + spec.name


def drop_tokens(joint: fx.GraphModule) -> None:
    """Makes each operation with effects a plain call, which keeps its place in the graph. Raises CaptureError for one that
    returns anything: computed again, it would have its effect twice."""
    graph, output = joint.graph, joint.graph.output_node()
    results = pytree.tree_leaves(output.args[0], is_leaf=lambda value: value is None)
    described = pytree.tree_leaves(output.meta["desc"])
    values = [(value, desc) for value, desc in zip(results, described, strict=True) if not _is_token(desc)]
    output.args = (tuple(value for value, _ in values),)
    output.meta["desc"] = [desc for _, desc in values]
    for node in list(graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)):
        token: Any = node.args[0]
        target, *args = node.args[1:]
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(args), node.kwargs)
        call.meta = {key: value for key, value in node.meta.items() if key != "val"}
        if not is_check(call):
            raise CaptureError(
                f"{target} has an effect and returns a value{place_of([node])}\n  expected operations without effects; call it "
                "outside forward"
            )
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] == 0:
                user.replace_all_uses_with(token)
                graph.erase_node(user)
        graph.erase_node(node)
    for node in list(graph.find_nodes(op="placeholder")):
        if _is_token(node.meta["desc"]) and not node.users:
            graph.erase_node(node)


def _is_token(description: Any) -> bool:
    """Says whether torch describes an input or output as a token."""
    return "Token" in type(description).__name__


def take_changes(joint: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Takes the backward's writes to inputs out of a joint graph: torch leaves each at the end, as a ``copy_`` that nothing
    reads. Returns the written inputs with their new values. Raises CaptureError for any other write."""
    changes: dict[fx.Node, fx.Node] = {}
    for node in [node for node in joint.graph.nodes if writes(node)]:
        changed, *values = node.all_input_nodes
        if node.target is not torch.ops.aten.copy_.default or changed.op != "placeholder" or node.users or len(values) != 1:
            raise CaptureError(
                f"{node.target} changes a tensor in place{place_of([node, *node.all_input_nodes])}\n  expected operations that "
                "torch can trace without changing their operands: use another one at that line"
            )
        changes[changed] = values[0]
        joint.graph.erase_node(node)
    return changes


def changed_after_forward(joint: fx.GraphModule, value: fx.Node) -> bool:
    """Tells whether the backward changes a result of the forward in place. In the joint graph that torch traces, the result is
    then what its memory holds at the end, which torch does not mark as the forward's. Without a backward it marks nothing."""
    while value.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        value = value.all_input_nodes[0]
    marked = any("partitioner_tag" in node.meta for node in joint.graph.find_nodes(op="placeholder"))
    return marked and value.meta.get("partitioner_tag") != "is_forward"


def changing_in_backward(graph: fx.GraphModule, storages: Set[int]) -> list[fx.Node]:
    """Returns the in-place calls of those backwards and hooks in Dynamo's graph that get a tensor of one of these storages."""
    changing: list[fx.Node] = []
    for node in graph.graph.nodes:
        operands = [operand.meta.get("example_value") for operand in node.all_input_nodes]
        if any(isinstance(each, torch.Tensor) and torch_private.storage_id(each) in storages for each in operands):
            bodies = [getattr(graph, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
            calls = (call for body in bodies[-1:] for call in body.graph.nodes if call.op != "placeholder")
            changing += filter(changes_operand, calls)
    return changing
