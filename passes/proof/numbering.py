"""Numbers the values of a joint graph and of a step graph: equal numbers, equal bits.

Two operations get the same number when they are the same operation on the same numbers, at the same place in the
generator's stream. Copies, views made again and recomputed operations then fall together; anything else does not.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.analysis.slices import grouped_operands, is_sliceable, slice_view
from mtcompile.passes.generators import replay, save_rng
from mtcompile.passes.proof.values import Key, Operand, ValueNumbers, arguments, frozen, phase_of
from mtcompile.passes.step_graph import (
    all_gather,
    body_outputs,
    fetch_state,
    gradient_norms,
    gradient_scale,
    inputs_of,
    is_collective,
    is_convert,
    is_move,
    is_random,
    is_region,
    is_update,
    kernel_of,
    offload_rows,
    placeholders,
    prefetch_rows,
    prefetch_slices,
    scales_of,
)

Number = tuple[Any, ...]  # what a value is; of an operation's result, one integer


class Numbering(ValueNumbers):
    """Numbers of the values of joint and step graphs. ``device``: whose generator is drawn from; ``drawn_in``: the phase of
    each random operation, in order. ``slices``: of values of which only the slices with rows are there, the whole value and
    where the rows end. ``named``: of parameters of which the captured graph takes rows, at home, what names these."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.drawn_in: list[str] = []
        self.slices: dict[Number, tuple[Number, Number]] = {}
        self.named: dict[Number, tuple[Rows, tuple[Number, ...]]] = {}

    def of(self, key: Key) -> Number:
        return (self.number(key),)

    def restart(self) -> list[str]:
        """Begins the next graph; returns the phases in which the last one drew random numbers, in order."""
        drawn, self.drawn_in, self.stream = self.drawn_in, [], 0
        return drawn

    def joint(self, graph: fx.Graph) -> dict[fx.Node, Number]:
        """Returns the numbers of a joint graph's values."""
        numbers = self._inputs(graph)
        # Phases run one after the other, and the generator's stream is counted in the order of execution.
        for node in graph.nodes:
            if node.op == "call_function":
                numbers[node] = self._operation(node, numbers, phase_of(node))
        return numbers

    def step(self, step: fx.GraphModule, rows: Mapping[str, Rows]) -> dict[fx.Node, Number]:
        """Returns the numbers of a step graph's values. ``rows``: the parameters of which the captured graph takes rows; at
        home they are whole."""
        numbers = self._inputs(step.graph)
        by_name = {spec.name: numbers[node] for spec, node in inputs_of(step) if spec.role == "input"}
        for spec, node in inputs_of(step):
            if spec.role == "param" and spec.name in rows:
                numbers[node] = ("all rows", *numbers[node])
                self.named[numbers[node]] = rows[spec.name], tuple(by_name[name] for name in rows[spec.name].indices)
            if node.meta.get("part"):
                numbers[node] = ("part", *numbers[node])
        several: dict[fx.Node, tuple[Number, ...]] = {}  # of a call's results
        for node in step.graph.nodes:
            if is_region(node):
                several[node] = self._body(kernel_of(step, node), [numbers[a] for a in node.args], node.meta["phase"])
            elif is_convert(node):
                casts = zip(node.args, node.kwargs["casts"], strict=True)
                several[node] = tuple(self._cast(numbers[value], cast) for value, cast in casts)
            elif is_collective(node):
                several[node] = tuple(over_ranks(node.target, numbers[a]) for a in node.args)
            elif is_update(node):
                several[node] = _updated(node, [numbers[a] for a in node.args])
            elif node.target is prefetch_slices:
                *values, ends = [numbers[a] for a in node.args]
                sliceable = [is_sliceable(a.meta["val"]) for a in node.args[:-1]]
                several[node] = tuple(self._slices(*each, ends) for each in zip(values, sliceable, strict=True))
            elif node.target is prefetch_rows:
                value, *indices = [numbers[a] for a in node.args]
                taken, expected = self.named.get(value, (None, ()))
                right = taken is not None and (node.kwargs["held"], *indices) == (taken.held, *expected)
                several[node] = (value[1:] if right else self.of(("rows", value, *indices)),)
            elif node.target is offload_rows:
                value, *indices = [numbers[a] for a in node.args]
                several[node] = (self.all_rows(value, node.kwargs["rows"], indices),)
            elif is_move(node):
                several[node] = tuple(numbers[a] for a in node.args)
            elif node.op == "call_function" and node.target is operator.getitem:
                numbers[node] = several[node.args[0]][node.args[1]]
            elif node.op not in ("placeholder", "output"):
                raise ValueError(f"expected calls of the step graph's vocabulary, found {node.format_node()}")
        return numbers

    def all_rows(self, gradient: Number, rows: Any, indices: Iterable[Number]) -> Number:
        """Numbers a gradient of so many rows that is zero but in those that indices name, which are there."""
        return self.of(("gradient", gradient, rows, *indices))

    def _inputs(self, graph: fx.Graph) -> dict[fx.Node, Number]:
        return {node: self.of(("input", position)) for position, node in enumerate(placeholders(graph))}

    def _cast(self, value: Number, cast: Mapping[str, Any]) -> Number:
        """Numbers a cast as the operation that it is."""
        return self.of((torch.ops.aten._to_copy.default, (Operand(value),), frozen(sorted(cast.items())), None))

    def _body(self, kernel: fx.GraphModule, operands: list[Number], phase: str) -> tuple[Number, ...]:
        numbers: dict[fx.Node, Number] = dict(zip(placeholders(kernel.graph), operands, strict=True))
        for node in kernel.graph.nodes:
            if node.op == "call_function":
                numbers[node] = self._operation(node, numbers, phase)
        return tuple(numbers[node] for node in body_outputs(kernel))

    def _slices(self, value: Number, is_sliceable: bool, ends: Number) -> Number:
        """Numbers the slices of a value that have rows. Other operations than those of ``analysis/slices`` get numbers of
        their own on them, which the captured graph does not have."""
        number = self.of(("slices", value, ends))
        if is_sliceable:
            self.slices[number] = value, ends
        return number

    def _on_slices(self, node: fx.Node, numbers: dict[fx.Node, Number], phase: str) -> Number | None:
        """Numbers an operation on slices as that on the whole value where it reads no others; None for any other operation."""
        if (value := slice_view(node)) is not None and numbers[value] in self.slices:
            whole, ends = self.slices[numbers[value]]
            return self._slices(self._operation(node, {**numbers, value: whole}, phase), True, ends)
        weight, end = grouped_operands(node) or (None, None)
        if weight is None or end is None or node.args[0] is weight:
            return None
        whole, ends = self.slices.get(numbers[weight], (None, None))
        return None if whole is None or numbers[end] != ends else self._operation(node, {**numbers, weight: whole}, phase)

    def _operation(self, node: fx.Node, numbers: dict[fx.Node, Number], phase: str) -> Number:
        if self.slices and (number := self._on_slices(node, numbers, phase)) is not None:
            return number
        if node.target is save_rng:
            return ("state", self.stream + 1, node.args[0])
        operands, keywords = arguments(node, numbers)
        if node.target is replay:
            state, (device, target) = operands[0].number, node.args[1:3]
            if state[:1] + state[2:] != ("state", device) or device != self.device:
                return self.of(("replayed elsewhere", state, device))
            return self.of((target, operands[3:], keywords, state[1]))
        if node.target is torch.ops.aten.clone.default and not keywords:
            return operands[0].number  # the same bits in memory of their own
        if node.target is operator.getitem:
            return self.of(("item", operands[0].number, operands[1]))
        place = None
        if is_random(node):
            place = self.draw(node)
            self.drawn_in.append(phase)
        return self.of((node.target, operands, keywords, place))


def over_ranks(collective: Any, value: Number) -> Number:
    """Numbers what a collective makes of the values that all ranks number so. Parts that are gathered are the whole."""
    if collective is all_gather and value[0] == "part":
        return value[1:]
    return (collective.__name__, *value)


def _updated(node: fx.Node, values: list[Number]) -> tuple[Number, ...]:
    """Numbers what an update makes, by its operands; norms and a scale, by the gradients that they are made of, in order."""
    if node.target is fetch_state:
        return (("state", *values),)
    if node.target is gradient_norms:
        return (("norms", *values),)
    if node.target is gradient_scale:
        return (("scale", *(grad for norms in values for grad in norms[1:])),)
    count: Any = node.kwargs["count"]
    pairs, scales = zip(values[:count], values[count : 2 * count], strict=True), values[2 * count :][: len(scales_of(node))]
    return tuple(("update", *pair, *scales) for pair in pairs)
