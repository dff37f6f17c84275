"""Reads from the captured graph how much each micro-batch's loss weighs in the whole batch's.

A loss is taken apart through what is linear in it (sums of losses, factors that all micro-batches share, casts, reshapes) down
to its reductions. A mean over rows weighs alike in every micro-batch, which have the same number of rows; a mean
cross-entropy weighs by the labels that count; a sum that is divided by a number of the micro-batch's own weighs by that
number; a sum is added up. Anything else is refused: a wrong weight would be a wrong gradient, and silent.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch.alike import constant
from mtcompile.passes.joint.batch.dims import Batch
from mtcompile.passes.joint.batch.shapes import REDUCED, Along

aten = torch.ops.aten
MEAN, SUM = 1, 2  # of every loss's ``reduction``
_CROSS_ENTROPIES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_AS_IT_IS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._to_copy.default, aten.clone.default),
    *(aten.neg.default, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default, aten.alias.default),
)
_ADDED = (aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default)
_SCALED = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
_MEANS = (aten.mean.default, aten.mean.dim)
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_TRUTHS = {
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), aten.logical_or.default),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), aten.logical_and.default),
}
_UNKNOWN = "unknown"  # its ``count`` says why, its ``target`` at which operation


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of micro-batches in a loss. ``kind``: "sum", "equal", "same" for what all make alike, "any" or "all" for
    truth values, or "tokens", by a number of each: elements of ``target`` other than ``ignored``, or what the node ``count``
    makes (names in the captured graph)."""

    kind: str
    target: str = ""
    ignored: int = 0
    count: str = ""

    def __str__(self) -> str:
        texts = {
            "same": "the same for all",
            "tokens": "averaged over the tokens that count",
            "sum": "added up",
            "equal": "averaged, each weighing alike",
        }
        return f"their losses {texts.get(self.kind, self.kind)}"


class LossRefused(NotImplementedError):
    """Raised for a loss whose weights cannot be told. ``node``: the operation that is why."""

    def __init__(self, why: str, node: fx.Node, name: str = "") -> None:
        super().__init__(
            f"a loss ({name}) that {why}, so that it cannot be told how much each micro-batch weighs in it",
            'use a mean over rows, cross_entropy with reduction="mean" or "sum", or pass the number of the whole batch',
        )
        self.node = node


def weights(loss: fx.Node, own: set[fx.Node], batch: Batch) -> Weights:
    """The weights of micro-batches in ``loss``, if all its parts have the same. ``own``: the nodes that differ between
    micro-batches; ``batch``: tells where they have the batch. Raises LossRefused where it has no such weights."""
    parts = _Reading(own, batch).of(loss)
    for part in parts:
        if part.kind == _UNKNOWN:
            raise refused(part.count, next(node for node in loss.graph.nodes if node.name == part.target), loss)
    if len(parts) > 1:
        raise refused("adds several means, or a mean and a sum", loss, loss)
    return next(iter(parts))


def refused(why: str, node: fx.Node, loss: fx.Node) -> LossRefused:
    return LossRefused(why, node, loss.name)


def weights_of_part(node: fx.Node, own: set[fx.Node], batch: Batch) -> Weights | None:
    """The weights of micro-batches in a reduction over rows; None for what is made of reductions. Raises LossRefused for a
    reduction of another kind."""
    reading = _Reading(own, batch)
    if batch.is_unknown(node):
        reason = next(iter(reading.of(node)))
        raise refused(reason.count, batch.mixing(node), node)
    if node.target in (*_AS_IT_IS, *_ADDED):
        return None
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    of_rows = any(isinstance(batch.place(operand), Along) for operand in call.all_input_nodes)
    if of_rows and node.target in _TRUTHS:
        return Weights("any" if _TRUTHS[node.target] is aten.logical_or.default else "all")
    if of_rows and _adds_up(node, batch):
        return Weights("sum")
    parts = reading.of(node)
    weights = next(iter(parts))
    if len(parts) == 1 and weights.kind != _UNKNOWN:
        return weights
    if of_rows or reading.is_sized(node):
        raise refused(weights.count if weights.kind == _UNKNOWN else "is multiplied by a number of rows", node, node)
    return None


def _adds_up(node: fx.Node, batch: Batch) -> bool:
    """Says whether an operation that is reduced over rows adds up something of each: products of columns, counts per expert."""
    if node.target is aten.histc.default:
        return len(node.args) == 4 and node.args[2] != node.args[3]
    if node.target in (aten.scatter_add.default, aten.index_add.default):
        start = constant(node.all_input_nodes[0], batch.constants)
        return start is not None and not start.any()
    return node.target in (aten.mm.default, aten.bmm.default)


def put_together(value: fx.Node, own: set[fx.Node], batch: Batch) -> Any:
    """The operation that puts the micro-batches' parts of a whole number or truth value together: they are added up, or any or
    all of them are true. Raises LossRefused where it is none of these."""
    whole = value
    while whole.target in _AS_IT_IS and whole.all_input_nodes[0].meta["val"].dtype == value.meta["val"].dtype:
        whole = whole.all_input_nodes[0]
    if whole.target in _TRUTHS and isinstance(batch.place(whole.all_input_nodes[0]), Along):
        return _TRUTHS[whole.target]
    if _Reading(own, batch).of(value) == {Weights("sum")}:
        return aten.add.Tensor
    raise refused("is no number that adds up", value, value)


def _unknown(node: fx.Node, why: str) -> set[Weights]:
    return {Weights(_UNKNOWN, node.name, count=why)}


@dataclass(slots=True)
class _Reading:
    """Takes a loss apart. ``own``, ``batch``: as for ``weights``."""

    own: set[fx.Node]
    batch: Batch

    def of(self, node: fx.Node) -> set[Weights]:
        """The weights that the parts of a loss have."""
        target: Any = node.target
        if self.batch.is_unknown(node):
            return self._mixed(node)
        if target in _AS_IT_IS:
            return self.of(node.all_input_nodes[0])
        if target in _ADDED:
            return self._added(node)
        if target in _SCALED:
            return self._scaled(node)
        call: Any = node.args[0] if target is operator.getitem else None
        if call is not None and call.target in _CROSS_ENTROPIES and node.args[1] == 0:
            return self._cross_entropy(call)
        reduction = MEAN if target in _MEANS else SUM if target in _SUMS else _reduction(node)
        if reduction not in (MEAN, SUM):
            return _unknown(node, f"comes from {target}")
        return self._reduced(node, reduction)

    def _mixed(self, node: fx.Node) -> set[Weights]:
        first = self.batch.mixing(node)
        if first.target in (aten.mul.Tensor, aten.div.Tensor) and self.batch.depends(first):
            return _unknown(first, f"depends on the number of rows ({first.target})")
        return _unknown(first, f"depends on several rows of the batch together, or on their number ({first.target})")

    def _reduced(self, node: fx.Node, reduction: int) -> set[Weights]:
        whole = node.all_input_nodes[0]
        while whole.target in _AS_IT_IS:
            whole = whole.all_input_nodes[0]
        joined = whole.all_input_nodes if whole.target in (aten.cat.default, aten.stack.default) else []
        if joined and all(part.meta["val"].numel() == 1 and self.batch.is_reduced(part) for part in joined):
            return self._of_all(joined)  # losses, put side by side
        if self.batch.is_reduced(whole):  # over rows, and what is left of them over the rest
            return self.of(whole)
        if not isinstance(self.batch.place(whole), Along) or not all(map(self._is_of_rows, node.all_input_nodes)):
            return _unknown(node, "is reduced over something else than rows")
        if any(isinstance(place := self.batch.place(each), Along) and place.routed for each in node.all_input_nodes):
            return _unknown(node, "is made of rows that trade places by numbers of the batch's own")
        if reduction == SUM and (why := self._scaled_before(whole)):
            return _unknown(node, why)
        return {Weights("equal" if reduction == MEAN else "sum")}

    def _is_of_rows(self, node: fx.Node) -> bool:
        return self.batch.place(node) != REDUCED

    def _added(self, node: fx.Node) -> set[Weights]:
        mine = [operand for operand in node.all_input_nodes if operand in self.own]
        parts = self._of_all(mine)
        shared = len(mine) < sum(isinstance(x, (fx.Node, int, float)) for x in node.args[:2])
        shared = shared and node.target not in (aten.cat.default, aten.stack.default)
        if shared and any(part.kind == "sum" for part in parts):
            return _unknown(node, "adds to a sum what all micro-batches share")
        return parts

    def _of_all(self, nodes: Iterable[fx.Node]) -> set[Weights]:
        return set().union(*(self.of(node) for node in nodes))

    def _scaled(self, node: fx.Node) -> set[Weights]:
        one, other = node.args[:2]
        if node.target is aten.mul.Tensor and isinstance(other, fx.Node) and (one not in self.own):
            one, other = other, one
        assert isinstance(one, fx.Node)
        if isinstance(other, fx.Node) and other in self.own:
            return _unknown(node, "is multiplied or divided by what a micro-batch has of its own")
        if isinstance(other, fx.Node) and not self.batch.trained.isdisjoint(self.batch.sources(other)):
            return _unknown(node, "is multiplied or divided by what is trained")  # a gradient may be that of no token
        return self._resized(node, self.of(one), one, other)

    def is_sized(self, node: fx.Node) -> bool:
        """Says whether an operation computes with a number that is, or may be, a number of rows."""
        if node.target not in _SCALED:
            return self.batch.depends(node)
        one, other = node.args[:2]
        if isinstance(other, fx.Node) and one not in self.own:
            one, other = other, one
        if isinstance(other, fx.Node) and other in self.own:
            return self.batch.depends(node)
        number, of = self.batch.number(other), other if isinstance(other, fx.Node) else node
        assert isinstance(one, fx.Node)
        return number is not None and self.batch.numbers.ratio(of, number) is None and self._is_size(node, one, number)

    def _resized(self, node: fx.Node, parts: set[Weights], one: fx.Node, other: Any) -> set[Weights]:
        """The weights of a product or quotient of what has ``parts``, and a number."""
        number = self.batch.number(other)
        if number is None:
            return parts
        times = self.batch.numbers.ratio(other if isinstance(other, fx.Node) else node, number)
        if times is None:
            if any(part.kind == "sum" for part in parts) and self._is_size(node, one, number):
                return _unknown(node, "divides a sum by what is the size of a micro-batch")
            return parts
        if times == 1.0:
            return parts
        if node.target in (aten.div.Tensor, aten.div.Scalar):
            times = 1 / times
        if isclose(times * self.batch.count, 1) and parts == {Weights("sum")}:
            return {Weights("equal")}
        if isclose(times, self.batch.count) and parts == {Weights("equal")}:
            return {Weights("sum")}
        return _unknown(node, "is multiplied or divided by a number that depends on the number of rows")

    def _scaled_before(self, node: fx.Node) -> str:
        """Says why what is summed may have been divided by the size of a micro-batch."""
        while node.target in (*_SCALED, *_AS_IT_IS):
            one, other = node.all_input_nodes[0], node.args[1] if node.target in _SCALED else None
            if isinstance(other, fx.Node) and (one not in self.own or one.meta["val"].numel() < other.meta["val"].numel()):
                one, other = other, one
            number = self.batch.number(other)
            of = other if isinstance(other, fx.Node) else node
            if number and self.batch.numbers.ratio(of, number) is None and self._is_size(node, one, number):
                return "sums what is divided by the size of a micro-batch"
            node = one
        return ""

    def _is_size(self, node: fx.Node, scaled: fx.Node, number: float) -> bool:
        """Tells whether a product or quotient divides by a number that is the size of a micro-batch."""
        if not number:
            return False
        by = number if node.target in (aten.div.Tensor, aten.div.Scalar) else 1 / number
        return by > 1 and any(abs(by - size) < 1e-6 * size for size in self._sizes(scaled))

    def _sizes(self, node: fx.Node) -> set[float]:
        """The numbers of rows and elements of what is summed, and of a micro-batch's inputs."""
        while node.target not in (*_SUMS, *_CROSS_ENTROPIES) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        given = [each for each in self.own if each.op == "placeholder"]
        vals = [each.meta["val"] for each in (*node.all_input_nodes, *given) if each in self.own]
        return {float(n) for val in vals for n in (val.numel(), *val.shape[:1])} | {float(self.batch.rows)}

    def _cross_entropy(self, node: fx.Node) -> set[Weights]:
        places = [self.batch.place(operand) for operand in node.all_input_nodes[:2]]
        if not all(isinstance(place, Along) and not place.routed for place in places):
            return _unknown(node, "takes labels, or probabilities, that are not of each row")
        if node.args[3] == SUM:
            return {Weights("sum")}
        if node.args[3] == MEAN and node.args[2] is not None and node.args[2] not in self.own:
            total = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 1), None)
            if total is not None:  # the weights of the labels that count, added up
                return {Weights("tokens", count=total.name)}
        if node.args[3] != MEAN or node.args[2] is not None:
            return _unknown(node, "is a cross-entropy with class weights")
        return {Weights("tokens", node.args[1].name, int(node.args[4]))}


def _reduction(node: fx.Node) -> int | None:
    """The ``reduction`` that a loss is given; None for an operation without one."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for position, argument in enumerate(arguments):
        if argument.name == "reduction":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("reduction", argument.default_value)
            return given if isinstance(given, int) else None
    return None
