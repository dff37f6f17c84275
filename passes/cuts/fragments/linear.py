"""Recognises linear weights that can be cut along their output dimension: every reader of such a weight is one of these.

y = x @ W.t() + b        forward: each fragment makes its columns of y
dW = dy.t() @ x          weight gradient: each fragment has the rows that belong to it
dx = dy @ W              input gradient: a sum over the output dimension, which a cut splits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from mtcompile.passes.step_graph import InputSpec, inputs_of, outputs_of, span_nbytes

W = TypeVar("W")  # how a kind of weight is read
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in], and all that reads it. ``product``: mm(x, W.t()) or addmm(b, x, W.t()) of the forward. ``gradient``:
    the weight gradient, and ``for_weight`` the mm(dy.t(), x) that makes it; None for a frozen weight. ``for_input``: each
    mm(dy, W)."""

    spec: InputSpec
    weight: fx.Node
    product: fx.Node
    gradient: fx.Node | None
    for_weight: fx.Node | None
    for_input: tuple[fx.Node, ...]

    @property
    def nbytes(self) -> int:
        return span_nbytes(self.weight.meta["val"])

    @property
    def has_input_gradient(self) -> bool:
        """True where the backward sums over the output dimension, which a cut splits."""
        return bool(self.for_input)


def recognised(joint: fx.GraphModule, recognise: Callable[[InputSpec, fx.Node, fx.Node | None], W | None]) -> list[W]:
    """Returns the weights of a normalized joint graph that can be cut, in the order of its inputs. ``recognise``: tells of a
    parameter, with its gradient, what reads it; None of one that cannot be cut."""
    gradients = {spec.index: value for spec, value in outputs_of(joint) if spec.kind == "grad"}
    weights = (recognise(s, node, gradients.get(s.index)) for s, node in inputs_of(joint) if s.role == "param")
    return [weight for weight in weights if weight is not None]


def linears(joint: fx.GraphModule) -> list[Linear]:
    """Returns the weights of linear layers that can be cut."""
    return recognised(joint, _recognise)


def _recognise(spec: InputSpec, weight: fx.Node, gradient: fx.Node | None) -> Linear | None:
    val = weight.meta["val"]
    if val.dim() != 2 or not val.is_contiguous() or spec.fragment is not None:
        return None
    turned = {user for user in weight.users if user.target is aten.t.default}
    straight = {weight, *(again for one in turned for again in one.users if again.target is aten.t.default)}
    readers = {user for one in (*straight, *turned) for user in one.users} - turned - straight
    for_input = [user for user in readers if _is_product(user) and user.args[0] not in straight and user.args[1] in straight]
    products = readers.difference(for_input)
    if len(products) != 1 or any(user.meta["phase"] != "backward" for user in for_input):
        return None
    (product,) = products
    if product.meta["phase"] != "forward" or not _is_forward(product, turned):
        return None
    for_weight = None if gradient is None else _maker(gradient)
    if gradient is not None and (for_weight is None or for_weight.args[1] in straight):
        return None
    return Linear(spec, weight, product, gradient, for_weight, tuple(for_input))


def _is_product(node: fx.Node) -> bool:
    return node.target is aten.mm.default and not node.kwargs


def _is_forward(node: fx.Node, turned: set[fx.Node]) -> bool:
    """Tells whether a reader is x @ W.t(), or b + x @ W.t() with a bias of one dimension."""
    operands: tuple[fx.Node, ...] = node.args
    if _is_product(node):
        return operands[1] in turned and operands[0] not in turned
    if node.target is not aten.addmm.default or node.kwargs or operands[2] not in turned:
        return False
    return operands[0].meta["val"].dim() == 1 and operands[1] not in turned


def _maker(gradient: fx.Node) -> fx.Node | None:
    """Returns the mm(dy.t(), x) that makes a weight gradient, through an even number of transposes; None for anything else."""
    turns = 0
    while gradient.target is aten.t.default and len(gradient.users) == 1:
        gradient, turns = gradient.args[0], turns + 1
    is_alone = _is_product(gradient) and len(gradient.users) == 1 and turns % 2 == 0
    left = gradient.args[0] if is_alone else None
    return gradient if isinstance(left, fx.Node) and left.target is aten.t.default else None
