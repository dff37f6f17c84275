"""Recognises stacked weights, such as those of all experts, that can be cut along their first dimension.

Every reader multiplies each matrix of the stack by one of its own, so nothing is summed over the stack.

y = bmm(x, W), or W.transpose(1, 2)      forward and input gradient: each fragment makes its matrices of y
dW = bmm(x.transpose(1, 2), dy)          weight gradient: each fragment has its matrices
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.analysis.slices import slice_view
from mtcompile.passes.cuts.fragments.linear import recognised
from mtcompile.passes.joint.loss_head import Add
from mtcompile.passes.step_graph import InputSpec, span_nbytes

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)


@dataclass(frozen=True, slots=True)
class Matrices:
    """A weight [experts, n, m], and all that reads it. ``products``: with the weight or its transposes as one operand;
    ``gradient``: the product that makes the weight gradient; None for a frozen weight."""

    spec: InputSpec
    weight: fx.Node
    products: tuple[fx.Node, ...]
    gradient: fx.Node | None

    @property
    def nbytes(self) -> int:
        return span_nbytes(self.weight.meta["val"])

    @property
    def has_input_gradient(self) -> bool:
        """False: no product sums over the dimension that is cut."""
        return False


class Stacked(Matrices):
    """Matrices whose products are bmm: each with the same number of rows."""

    __slots__ = ()


def stacks(joint: fx.GraphModule) -> list[Stacked]:
    """Returns the stacked weights that can be cut."""
    return recognised(joint, _recognise)


def _recognise(spec: InputSpec, weight: fx.Node, gradient: fx.Node | None) -> Stacked | None:
    val = weight.meta["val"]
    if val.dim() != 3 or not val.is_contiguous() or spec.fragment is not None:
        return None
    views = [weight]
    for each in views:
        views += [user for user in each.users if slice_view(user) is each or is_same(user)]
    products = list(dict.fromkeys(user for each in views for user in each.users if user not in views))
    if not products or not all(_is_product(user) and sum(each in views for each in user.args) == 1 for user in products):
        return None
    if products[0].meta["phase"] != "forward":
        return None
    if gradient is not None:
        contiguous = gradient.meta["val"].is_contiguous()
        while is_same(gradient) and len(gradient.users) == 1:
            gradient = gradient.args[0]
        alone = _is_product(gradient) and len(gradient.users) == 1 and contiguous
        if not alone or gradient in products:
            return None
    return Stacked(spec, weight, tuple(products), gradient)


def is_same(node: fx.Node) -> bool:
    """Tells whether an operation views its operand in the shape that this has."""
    if node.target not in _VIEWS:
        return False
    operand: Any = node.args[0]
    return bool(node.meta["val"].shape == operand.meta["val"].shape)


def _is_product(node: fx.Node) -> bool:
    return node.target is aten.bmm.default and not node.kwargs


def matrices_of(add: Add, operand: fx.Node, weight: fx.Node, fragment: fx.Node, start: int, end: int) -> fx.Node:
    """Returns some of the matrices of an operand: the same view of a fragment, for a view of the weight; else a slice."""
    if operand is weight:
        return fragment
    if owner(operand) is weight:
        viewed = matrices_of(add, operand.args[0], weight, fragment, start, end)
        return viewed if is_same(operand) else add(operand.target, viewed, *operand.args[1:])
    return add(aten.slice.Tensor, operand, 0, start, end)
