"""Takes the tokens out of a traced graph: torch threads them through operations with effects, to keep their order."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mtcompile.capture.refusals import place_of
from mtcompile.errors import CaptureError
from mtcompile.passes.step_graph import is_check
from mtcompile.torch_private import pytree


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
