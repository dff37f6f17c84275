"""Proves how much micro-batches weigh in a loss that is a cross-entropy; of other losses, this is not proven.

For labels y that are a micro-batch's own, and a number c, these rules alone:

    nll_loss(p, y, mean)[0]                  by the labels of y that are not ignored
    nll_loss(p, y, mean, classes)[0]         by nll_loss(p, y, mean, classes)[1], for weights of classes that all share
    nll_loss(p, y, sum)[0]                   added up
    view, cast, neg of v, v * c, v / c       as v

A factor c may depend on the number of rows. Where it is said to (``meta["numbers"]``), nothing is said of v * c and v / c.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch.joining import Joining, Micro
from mtcompile.passes.joint.loss_weights import Weights
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.step_graph import inputs_of, outputs_of

aten: Any = torch.ops.aten
_AS_IT_IS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._to_copy.default, aten.neg.default}
_SCALED = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_MEAN, _SUM = 1, 2


def check_weights(captured: fx.GraphModule, micro: Micro, joining: Joining) -> None:
    """Raises SameComputationError if the weights of a cross-entropy are others than it has."""
    own = {node for spec, node in inputs_of(captured) if spec.role == "input" and spec.index in micro.split}
    numbers = captured.meta.get("numbers")
    for node in captured.graph.nodes:
        own |= {node} if not own.isdisjoint(node.all_input_nodes) else set()
    by_name = {node.name: node for node in captured.graph.nodes}
    outputs = {spec.index: value for spec, value in outputs_of(captured) if spec.kind == "output"}
    claims = [(outputs[index], weights) for index, weights in joining.weights.items()]
    claims += [(by_name[name], weights) for name, weights in joining.parts.items()]
    for value, weights in claims:
        known = _weights_of(value, own, numbers)
        right = known is None or known == weights
        expect(right, lambda v=value, k=known, w=weights: f"{v.name}, a cross-entropy, to weigh as {k}, found {w}")


def _weights_of(value: fx.Node, own: set[fx.Node], numbers: Any) -> Weights | None:
    """Returns what a loss weighs by the rules above; None where they say nothing."""
    while value.target in _AS_IT_IS or value.target in _SCALED:
        if value.target in _SCALED and not (isinstance(value.args[1], (int, float)) and _is_steady(value, numbers)):
            return None
        value = value.all_input_nodes[0]
    call: Any = value.args[0] if value.target is operator.getitem and value.args[1] == 0 else None
    if call is None or call.target is not aten.nll_loss_forward.default or call.args[1] not in own:
        return None
    _, labels, classes, reduction, ignored = call.args
    if reduction == _SUM:
        return Weights("sum")
    if reduction != _MEAN or classes in own:
        return None
    if classes is None:
        return Weights("tokens", labels.name, int(ignored))
    total = [user for user in call.users if user.target is operator.getitem and user.args[1] == 1]
    return Weights("tokens", count=total[0].name) if total else None


def _is_steady(node: fx.Node, numbers: Any) -> bool:
    """Tells whether a factor is not known to depend on the number of rows."""
    number: Any = node.args[1]
    return numbers is None or numbers.ratio(node, float(number)) in (None, 1.0)
