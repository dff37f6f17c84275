"""Reads from the captured graph how much each micro-batch's loss weighs in the whole batch's.

A loss is taken apart through what is linear in it (sums of losses, factors that all micro-batches share, casts, reshapes) down
to its reductions. A mean over rows weighs alike in every micro-batch, which have the same number of rows; a mean
cross-entropy weighs by the labels that count; a sum that is divided by a number of the micro-batch's own weighs by that
number; a sum is added up. Anything else is refused: a wrong weight would be a wrong gradient, and silent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch_dims import constant

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
_UNKNOWN = "unknown"  # its ``count`` says why


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of micro-batches in a loss. ``kind``: "sum", "equal", or "tokens", by a number that each has: elements of
    ``target`` other than ``ignored``, or what the node ``count`` makes (names in the captured graph)."""

    kind: str
    target: str = ""
    ignored: int = 0
    count: str = ""

    def __str__(self) -> str:
        texts = {"tokens": "averaged over the tokens that count", "sum": "added up", "equal": "averaged, each weighing alike"}
        return f"their losses {texts[self.kind]}"


def weights(loss: fx.Node, own: set[fx.Node], rows: int, is_reduced: Callable[[fx.Node], bool]) -> Weights:
    """The weights of micro-batches in ``loss``. ``own``: the nodes that differ between micro-batches; ``rows``: rows of each;
    ``is_reduced``: tells what has been reduced over these. Raises NotImplementedError where the weights cannot be told."""
    parts = _Reading(own, rows, is_reduced).of(loss)
    counted = {part for part in parts if part.kind == "tokens"}
    if len(counted) == 1:  # what is added to a cross-entropy weighs as that does
        return counted.pop()
    if unknown := [part for part in parts if part.kind == _UNKNOWN] if not counted else []:
        raise _refused(unknown[0].count)
    if {part.kind for part in parts} <= {"equal", "tokens"}:
        return Weights("equal")
    if {part.kind for part in parts} == {"sum"}:
        return Weights("sum")
    raise _refused("is a sum in one part and a mean in another")


def _refused(why: str) -> NotImplementedError:
    return NotImplementedError(
        f"a loss that {why}, so that it cannot be told how much each micro-batch weighs in it (use a mean over rows, "
        'cross_entropy with reduction="mean" or "sum", or pass the number of the whole batch)'
    )


def _unknown(why: str) -> set[Weights]:
    return {Weights(_UNKNOWN, count=why)}


@dataclass(slots=True)
class _Reading:
    """Takes a loss apart. ``own``, ``rows``, ``is_reduced``: as for ``weights``."""

    own: set[fx.Node]
    rows: int
    is_reduced: Callable[[fx.Node], bool]

    def of(self, node: fx.Node) -> set[Weights]:
        """The weights that the parts of a loss have."""
        target: Any = node.target
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
            return _unknown(f"comes from {target}")
        return self._reduced(node, reduction)

    def _reduced(self, node: fx.Node, reduction: int) -> set[Weights]:
        whole = node.all_input_nodes[0]
        while whole.target in _AS_IT_IS:
            whole = whole.all_input_nodes[0]
        joined = whole.all_input_nodes if whole.target in (aten.cat.default, aten.stack.default) else []
        if joined and all(part.meta["val"].numel() == 1 for part in joined):  # losses, put side by side
            return self._of_all(joined)
        if whole in self.own and self.is_reduced(whole):  # over rows, and what is left of them over the rest
            return self.of(whole)
        if whole.meta["val"].numel() % max(self.rows, 1):
            return _unknown("is reduced over something else than rows")
        if reduction == SUM and (why := self._scaled_before(whole)):
            return _unknown(why)
        return {Weights("equal" if reduction == MEAN else "sum")}

    def _added(self, node: fx.Node) -> set[Weights]:
        mine = [operand for operand in node.all_input_nodes if operand in self.own]
        parts = self._of_all(mine)
        constants = len(mine) < sum(isinstance(x, (fx.Node, int, float)) for x in node.args[:2])
        if constants and any(part.kind == "sum" for part in parts) and node.target in (aten.add.Tensor, aten.sub.Tensor):
            return _unknown("adds to a sum what all micro-batches share")
        return parts

    def _of_all(self, nodes: Iterable[fx.Node]) -> set[Weights]:
        return set().union(*(self.of(node) for node in nodes))

    def _scaled(self, node: fx.Node) -> set[Weights]:
        one, other = node.args[:2]
        if node.target is aten.mul.Tensor and isinstance(other, fx.Node) and (one not in self.own):
            one, other = other, one
        assert isinstance(one, fx.Node)
        if isinstance(other, fx.Node) and other in self.own:
            parts = self.of(one) if node.target is aten.div.Tensor else set()
            if parts == {Weights("sum")} and other.meta["val"].numel() == 1:
                return {_counted(other)}
            return _unknown("is multiplied or divided by what a micro-batch has of its own")
        parts = self.of(one)
        if any(part.kind == "sum" for part in parts) and self._is_size(node, one, _number(other)):
            return _unknown("divides a sum by what is the size of a micro-batch")
        return parts

    def _scaled_before(self, node: fx.Node) -> str:
        """Says why what is summed may have been divided by the size of a micro-batch, or by what it has of its own."""
        while node.target in (*_SCALED, *_AS_IT_IS):
            one, other = node.all_input_nodes[0], node.args[1] if node.target in _SCALED else None
            if isinstance(other, fx.Node) and (one not in self.own or one.meta["val"].numel() < other.meta["val"].numel()):
                one, other = other, one
            if isinstance(other, fx.Node) and other in self.own and other.meta["val"].numel() == 1:
                return "sums what is multiplied or divided by what a micro-batch has of its own"
            if self._is_size(node, one, _number(other)):
                return "sums what is divided by the size of a micro-batch"
            node = one
        return ""

    def _is_size(self, node: fx.Node, scaled: fx.Node, number: float | None) -> bool:
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
        return {float(n) for val in vals for n in (val.numel(), *val.shape[:1])} | {float(self.rows)}

    def _cross_entropy(self, node: fx.Node) -> set[Weights]:
        if node.args[3] == SUM:
            return {Weights("sum")}
        if node.args[3] != MEAN or node.args[2] is not None:
            return _unknown("is a cross-entropy with class weights")
        return {Weights("tokens", node.args[1].name, int(node.args[4]))}


def _number(value: Any) -> float | None:
    """Returns a number, also one that the graph makes of nothing; None for anything else."""
    if isinstance(value, fx.Node) and value.meta["val"].numel() == 1 and (made := constant(value)) is not None:
        return float(made)
    return float(value) if isinstance(value, (int, float)) else None


def _counted(node: fx.Node) -> Weights:
    """Weights by the number that ``node`` makes. Where it counts the labels that are not ignored, they are the weights that a
    cross-entropy has."""
    counted = node
    while counted.target in (aten._to_copy.default, aten.view.default):
        counted = counted.all_input_nodes[0]
    if counted.target in _SUMS:
        compared = counted.all_input_nodes[0]
        while compared.target is aten._to_copy.default:
            compared = compared.all_input_nodes[0]
        if compared.target is aten.ne.Scalar:
            return Weights("tokens", compared.args[0].name, int(compared.args[1]))
        if compared.target is aten.bitwise_not.default and compared.args[0].target is aten.eq.Scalar:
            equal = compared.args[0]
            return Weights("tokens", equal.args[0].name, int(equal.args[1]))
    return Weights("tokens", count=node.name)


def _reduction(node: fx.Node) -> int | None:
    """The ``reduction`` that a loss is given; None for an operation without one."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for position, argument in enumerate(arguments):
        if argument.name == "reduction":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("reduction", argument.default_value)
            return given if isinstance(given, int) else None
    return None
