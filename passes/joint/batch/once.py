"""Marks what is computed once for all micro-batches: what is made of reductions over the whole batch, and its backward.

A loss is made of reductions over rows: means, sums, cross-entropies. Each is put together from those of the micro-batches, with
weights of its own; what follows is computed once, as for the whole batch. So is its backward, up to the gradients of
reductions, each of which arrives at a micro-batch with the weight that this has in the reduction.

    logits ──cross-entropy──┐             ``reduces``: put together        ``once``: computed once
    hidden ──mean──────────(+)── loss     ``weighs``: operations of the backward of a reduction
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch.dims import Batch
from mtcompile.passes.joint.loss_weights import Weights, refused, weights_of_part
from mtcompile.passes.step_graph import inputs_of

aten = torch.ops.aten


def mark_once(joint: fx.GraphModule, results: Mapping[int, fx.Node], own: set[fx.Node], batch: Batch) -> dict[str, Weights]:
    """Marks, in ``meta``, what is computed once for ``results``, by output index, which are reduced over the batch. Returns the
    weights of their reductions, by name. ``own``: what differs between micro-batches. Raises LossRefused for a reduction whose
    parts cannot be put together, and where a row reads one."""
    reductions, once = parts_of(results.values(), own, batch)
    trained = [node for node in reductions if not batch.trained.isdisjoint(batch.sources(node))]
    backwards = {node.meta["seq_nr"]: node for node in trained if "seq_nr" in node.meta}
    local = {node for node in own if not node.all_input_nodes}
    for spec, tangent in inputs_of(joint):
        if spec.role == "tangent":
            (once if spec.index in results else local).add(tangent)
    for node in joint.graph.nodes:
        operands = set(node.all_input_nodes)
        whole, rows = operands & (once | reductions.keys()), operands & local
        if node.op != "call_function" or node in once:
            continue
        if node in reductions:
            node.meta["reduces"] = node.name
            local.add(node)
        elif node.meta.get("phase") == "backward" and operands & once and node.meta.get("seq_nr") in backwards:
            node.meta["weighs"] = backwards[node.meta["seq_nr"]].name
            local.add(node)
        elif whole and rows - reductions.keys():
            if node.meta.get("phase") != "backward" or node.target is not aten.add.Tensor or operands & reductions.keys():
                raise refused("is made of rows that read what all rows make together", node, next(iter(results.values())))
            local.add(node)  # gradients of a parameter, of which the whole batch makes some once
        elif whole:
            once.add(node)
        elif rows:
            local.add(node)
    for node in once:
        node.meta["once"] = _args_of_whole(node, batch, next(iter(results.values())))
    return {node.name: weights for node, weights in reductions.items()}


def _args_of_whole(node: fx.Node, batch: Batch, loss: fx.Node) -> Callable[[Any], Any]:
    """Returns what makes an operation's arguments those of the whole batch: numbers of rows are larger."""
    if node.op != "call_function" or not batch.depends(node):
        return tuple
    given = next((number for number in node.args if isinstance(number, (int, float))), None)
    times = None if given is None else batch.numbers.ratio(node, given)
    if times is None or node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        raise refused("is made with a number that depends on the number of rows", node, loss)
    return functools.partial(_times, times=times)


def _times(args: Any, times: float) -> Any:
    return tuple(times * each if isinstance(each, (int, float)) else each for each in args)


def parts_of(results: Iterable[fx.Node], own: set[fx.Node], batch: Batch) -> tuple[dict[fx.Node, Weights], set[fx.Node]]:
    """Returns the reductions over rows that results are made of, with their weights, and what is made of these. Raises
    LossRefused."""
    reductions, once, todo = dict[fx.Node, Weights](), set[fx.Node](), list(results)
    while todo:
        node = todo.pop()
        if node in reductions or node in once or node not in own:
            continue
        if (weights := weights_of_part(node, own, batch)) is not None:
            reductions[node] = weights
        else:
            once.add(node)
            todo += node.all_input_nodes
    return reductions, once
