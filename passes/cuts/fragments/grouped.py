"""Recognises the weights of experts that each multiply rows of their own, and cuts these products between experts.

y = _grouped_mm(x, W, ends)               forward and input gradient: rows ends[i - 1] to ends[i] of x times matrix i
dW = _grouped_mm(x.t(), dy, ends)         weight gradient: matrix i is a sum over these rows

Where the rows of a fragment begin is known only when the step runs. So its rows are brought to the front, are multiplied there
by the matrices of the fragment, as groups that end where they end now, and are taken back:

    first = ends[e0 - 1]                                      x' = x[min(range + first, rows - 1)]
    y' = _grouped_mm(x', W[e0:e1], ends[e0:e1] - first)       y = where(range >= first, y'[max(range - first, 0)], y so far)

Each group has the same rows and the same matrix as before, so each of its products and sums is the same. Rows behind the last
group are undefined, with and without fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.slices import grouped_operands, slice_view
from mtcompile.passes.cuts.fragments.linear import recognised
from mtcompile.passes.cuts.fragments.stacked import Matrices, matrices_of
from mtcompile.passes.joint.loss_head import Add
from mtcompile.passes.joint.regions import STARTS_BLOCK
from mtcompile.passes.step_graph import InputSpec

aten: Any = torch.ops.aten
_TRANSPOSE = aten.transpose.int


@dataclass(frozen=True, slots=True)
class Grouped(Matrices):
    """Matrices whose products are of groups of rows, which end at ``ends``."""

    ends: fx.Node


def groups(joint: fx.GraphModule) -> list[Grouped]:
    """Returns the weights of such experts that can be cut."""
    return recognised(joint, _recognise)


def _recognise(spec: InputSpec, weight: fx.Node, gradient: fx.Node | None) -> Grouped | None:
    val = weight.meta["val"]
    if val.dim() != 3 or not val.is_contiguous() or spec.fragment is not None:
        return None
    views = [weight]
    for each in views:
        views += [user for user in each.users if slice_view(user) is each]
    products = list(dict.fromkeys(user for each in views for user in each.users if user not in views))
    pairs = [grouped_operands(product) for product in products]
    ends = {pair[1] for pair in pairs if pair is not None and pair[0] in views}
    if not products or None in pairs or len(ends) != 1 or not all(map(_is_plain, products)):
        return None
    if products[0].meta["phase"] != "forward" or any(product.args[0] in views for product in products):
        return None
    (end,) = ends
    if gradient is not None:
        turns, alike = 0, gradient.meta["val"].is_contiguous() and gradient.meta["val"].shape == val.shape
        while slice_view(gradient) is not None and len(gradient.users) == 1:
            gradient, turns = gradient.args[0], turns + 1
        pair = grouped_operands(gradient)
        own = pair is not None and pair[1] is end and len(gradient.users) == 1 and gradient not in products
        if not (alike and own and turns % 2 == 0 and _turned(gradient.args[0]) is not None and _is_rows(gradient.args[1])):
            return None
    return Grouped(spec, weight, tuple(products), gradient, end)


def _is_rows(value: Any) -> bool:
    """Tells whether an operand is rows that lie one behind the other."""
    return isinstance(value, fx.Node) and value.meta["val"].dim() == 2 and value.meta["val"].is_contiguous()


def _is_plain(product: fx.Node) -> bool:
    return len(product.args) == 3 and not product.kwargs and _is_rows(product.args[0]) and _is_rows(product)


def _turned(operand: Any) -> fx.Node | None:
    """Returns the rows that an operand is the transpose of, in two dimensions; None for anything else."""
    if not isinstance(operand, fx.Node) or operand.target is not _TRANSPOSE or operand.meta["val"].dim() != 2:
        return None
    base = operand.args[0]
    return base if {int(dim) % 2 for dim in operand.args[1:]} == {0, 1} and _is_rows(base) else None


class GroupedCut:
    """The products of one weight in fragments. ``add``: makes the function that appends operations like one; ``rows``: where
    the experts of each fragment start and end; ``orders``: by which the backward finds their blocks."""

    def __init__(
        self,
        grouped: Grouped,
        rows: list[tuple[int, int]],
        weights: list[fx.Node],
        orders: list[int],
        add: Callable[[fx.Node], Add],
        device: torch.device,
    ) -> None:
        self.grouped, self.rows, self.weights, self.orders = grouped, rows, weights, orders
        self.adder, self.device = add, device

    def product(self, product: fx.Node) -> fx.Node:
        """Appends a product in fragments; in the backward, those of the last experts first, as its regions run."""
        forward = product.meta["phase"] == "forward"
        places = range(len(self.rows)) if forward else reversed(range(len(self.rows)))
        whole: fx.Node | None = None
        for place in places:
            add, (start, end) = self._adder(product, place), self.rows[place]
            weight = matrices_of(add, product.args[1], self.grouped.weight, self.weights[place], start, end)
            if forward:
                (weight if weight.op == "call_function" else self._range(add, product)).meta[STARTS_BLOCK] = True
            part = add(product.target, self._front(add, product.args[0], start), weight, self._ends(add, start, end))
            if start:
                back = add(aten.clamp.default, add(aten.sub.Tensor, self._range(add, product), self._first(add, start)), 0)
                part = add(aten.index_select.default, part, 0, back)
            if whole is not None:
                later, earlier, border = (part, whole, start) if forward else (whole, part, end)
                from_there = add(aten.ge.Tensor, self._range(add, product), self._first(add, border))
                part = add(aten.where.self, add(aten.unsqueeze.default, from_there, 1), later, earlier)
            whole = part
        assert whole is not None
        return whole

    def gradients(self, gradient: fx.Node) -> list[fx.Node]:
        """Appends the weight gradients of all fragments."""
        parts: dict[int, fx.Node] = {}
        for place in reversed(range(len(self.rows))):
            add, (start, end) = self._adder(gradient, place), self.rows[place]
            turned: Any = gradient.args[0]
            left = add(_TRANSPOSE, self._front(add, turned.args[0], start), *turned.args[1:])
            right = self._front(add, gradient.args[1], start)
            parts[place] = add(gradient.target, left, right, self._ends(add, start, end))
        return [parts[place] for place in range(len(self.rows))]

    def _adder(self, product: fx.Node, place: int) -> Add:
        add, order = self.adder(product), self.orders[place]

        def of_fragment(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = add(target, *args, **kwargs)
            node.meta["seq_nr"] = order
            return node

        return of_fragment

    def _range(self, add: Add, rows: fx.Node) -> fx.Node:
        return add(aten.arange.default, rows.meta["val"].shape[0], dtype=torch.int64, device=self.device)

    def _first(self, add: Add, expert: int) -> fx.Node:
        """The first row of an expert that is not the first one."""
        return add(aten.slice.Tensor, self.grouped.ends, 0, expert - 1, expert)

    def _front(self, add: Add, x: Any, start: int) -> fx.Node:
        """Rows with those of the expert ``start`` in front."""
        if not start:
            taken: fx.Node = x
            return taken
        ahead = add(aten.add.Tensor, self._range(add, x), self._first(add, start))
        return add(aten.index_select.default, x, 0, add(aten.clamp.default, ahead, None, x.meta["val"].shape[0] - 1))

    def _ends(self, add: Add, start: int, end: int) -> fx.Node:
        ends = add(aten.slice.Tensor, self.grouped.ends, 0, start, end)
        return add(aten.sub.Tensor, ends, self._first(add, start)) if start else ends
