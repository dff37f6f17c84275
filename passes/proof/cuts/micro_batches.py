"""Proves that the joint graph of several micro-batches computes what that of one does for each, put together.

Where v_m is a value of micro-batch m of k, made of its own inputs, of those that all share, and of buffers as micro-batch m - 1
has left them; n_m is the number of its tokens, and w_m = n_m / (n_0 + ... + n_(k-1)), these rules alone:

    gradient of what all share           g_0 + g_1 + ... + g_(k-1), in this order, each in fp32 if that was asked for
    gradient of a micro-batch's own      g_m
    buffer                               as the last micro-batch leaves it
    output along its batch               cat(v_0, ..., v_(k-1)); of its gradient t, micro-batch m takes its rows
    loss, by what it weighs:
      a sum                              v_0 + ... + v_(k-1);                                          t
      a mean, each of as many            v_0 / k + ... + v_(k-1) / k;                                  t / k
      a mean over tokens                 v_0 w_0 + ... + v_(k-1) w_(k-1), 0 where w_m is 0;            t w_m
      of no input that is cut            v_(k-1): what differs is by buffers and random numbers;       t / k
    truth value, whole number            v_0 or v_1 ...; v_0 and v_1 ...; v_0 + v_1 + ...

A reduction that a loss is made of is put together by the same rules, what is made of reductions is computed once of these, and
a gradient of such a value arrives at micro-batch m as that of a loss does. It is given what each loss and reduction weighs
(``Joining``), and shares no code with ``accumulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch.joining import Joining, Micro
from mtcompile.passes.joint.loss_weights import Weights
from mtcompile.passes.proof.cuts.numbering import (
    CutNumbers,
    Inputs,
    Layout,
    Results,
    Strided,
    check_computed,
    layout_of,
    strided,
)
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.proof.values import Operand
from mtcompile.passes.step_graph import InputSpec, OutputSpec, inputs_of, outputs_of, restride

aten: Any = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def check_micro_batches(one: fx.GraphModule, several: fx.GraphModule, micro: Micro, joining: Joining) -> None:
    """Raises SameComputationError unless ``several`` computes the results of ``micro.count`` times ``one``, put together."""
    numbers = _MicroNumbers()
    expected = _Expected(one, micro, joining, numbers)
    check_computed(numbers, one, several, expected.inputs, expected.results())


class _MicroNumbers(CutNumbers):
    """Numbers of the values of micro-batches. ``suffix``: of the names that the operations of the current one have. What they
    draw goes by names: which numbers of the stream those are, and what runs first, is for the order of regions to say."""

    suffix = ""

    def draw(self, node: fx.Node) -> Any:
        return node.name + self.suffix

    def restart(self) -> list[tuple[int, str]]:
        return sorted(super().restart())


class _Expected:
    """Numbers of the results that all micro-batches are to have. ``inputs``: that they take; ``numbers``: of each micro-batch's
    values; ``wholes``: of those that are put together or computed once; ``shares``: the w_m of a loss or
    reduction; ``own``: what depends on the inputs that are cut."""

    def __init__(self, one: fx.GraphModule, micro: Micro, joining: Joining, values: _MicroNumbers) -> None:
        self.one, self.micro, self.joining, self.values = one, micro, joining, values
        self._operation = values.operation
        self.inputs: Inputs = {}
        self.numbers: list[dict[fx.Node, int]] = [{} for _ in range(micro.count)]
        self.wholes: dict[fx.Node, int] = {}
        self.shares: dict[int | str, list[int]] = {}
        self.tangents: dict[fx.Node, int] = {}
        self.of_output: dict[fx.Node, InputSpec] = {}  # what a tangent is
        self.by_name = {node.name: node for node in one.graph.nodes}
        self.reductions = {node.meta["reduces"]: node for node in one.graph.nodes if "reduces" in node.meta}
        self.outputs = {spec.index: value for spec, value in outputs_of(one) if spec.kind == "output"}
        by_index = {spec.index: node for spec, node in inputs_of(one) if spec.role not in ("tangent", "constant")}
        self.own = {node for spec, node in inputs_of(one) if spec.role == "input" and spec.index in micro.split}
        for node in one.graph.nodes:
            self.own |= {node} if not self.own.isdisjoint(node.all_input_nodes) else set()
        self.next = {by_index[spec.index]: value for spec, value in outputs_of(one) if spec.kind == "mutation"}
        self._number_inputs()
        self._number_calls()

    def results(self) -> Results:
        """Returns what each result is to be, and the captured node that it is of."""
        results: Results = {}
        params = {spec.index for spec in self.one.meta["inputs"] if spec.role == "param"}
        for spec, value in outputs_of(self.one):
            if spec.kind == "grad" and spec.index in self.micro.split:
                for m in range(self.micro.count):
                    own = self.micro.spec(InputSpec("input", spec.name, spec.index), m)
                    results[OutputSpec("grad", own.index, own.name)] = self.numbers[m][value], value
            elif spec.kind == "grad":
                results[spec] = self._gradient(value, self.micro.wide and spec.index in params), value
            elif value in self.wholes or spec.kind == "mutation":
                results[spec] = self.wholes.get(value, self.numbers[-1].get(value, -1)), value
            else:
                results[spec] = self._output(spec.index, value), value
        return results

    def _gradient(self, value: fx.Node, in_fp32: bool) -> int:
        layout = layout_of(value)
        parts = [self.wholes[value]] if "once" in value.meta else [numbers[value] for numbers in self.numbers]
        if in_fp32 and layout is not None and layout.dtype in _HALF:
            layout = layout._replace(dtype=torch.float32)
            parts = [self._cast(part, layout) for part in parts]
        return self._folded(aten.add.Tensor, parts, layout)

    def _output(self, index: int, value: fx.Node) -> int:
        parts, layout = [numbers[value] for numbers in self.numbers], layout_of(value)
        if index in self.joining.weights:
            return self._put_together(index, self.joining.weights[index], parts, value)
        if index in self.joining.counts:
            return self._folded(self.joining.counts[index], parts, layout)
        if (dim := self.joining.dims.get(index)) is not None:
            whole, _ = self._arriving(index, value.meta["val"])
            return self._operation(aten.cat.default, [Operand(part) for part in parts], dim, layout=whole)
        return parts[-1]

    # ------------------------------------------------------------------------------------------------------ the numbering

    def _number_inputs(self) -> None:
        for spec, node in inputs_of(self.one):
            if spec.role == "tangent":
                self.inputs[spec] = self.values.input(spec, self._arriving(spec.index, self.outputs[spec.index].meta["val"]))
                self.tangents[node], self.of_output[node] = self.inputs[spec][0], spec
                continue
            own = spec.role == "input" and spec.index in self.micro.split
            for m, numbers in enumerate(self.numbers):
                of_micro = self.micro.spec(spec, m) if own else spec
                self.inputs[of_micro] = self.values.input(of_micro, strided(node.meta["val"]))
                numbers[node] = self.inputs[of_micro][0]

    def _number_calls(self) -> None:
        """Numbers each operation when what it reads is numbered: what is computed once is there after reductions, and what a
        buffer becomes after the micro-batch before."""
        calls = [node for node in self.one.graph.nodes if node.op == "call_function"]
        once = [node for node in calls if "once" in node.meta]
        reductions = [node for node in calls if "reduces" in node.meta]
        left = [[node for node in calls if "once" not in node.meta] for _ in self.numbers]
        while once or reductions or any(left):
            before = len(once), len(reductions), sum(map(len, left))
            for m in range(self.micro.count):
                self.values.suffix = f"_micro{m}" if m else ""
                left[m] = [node for node in left[m] if not self._numbered(node, self.numbers[m], self._reader(node, m))]
            self.values.suffix = ""
            reductions = [node for node in reductions if not self._reduced(node)]
            once = [node for node in once if not self._numbered(node, self.wholes, self._whole, node.meta["once"])]
            progress = before != (len(once), len(reductions), sum(map(len, left)))
            expect(progress, lambda: "operations in an order in which micro-batches can run them")

    def _numbered(
        self,
        node: fx.Node,
        numbers: dict[fx.Node, int],
        read: Callable[[fx.Node], int | None],
        changed: Callable[[Any], Any] | None = None,
    ) -> bool:
        """Numbers an operation of what ``read`` gives; returns False if some of it is not known yet."""
        operands = {operand: read(operand) for operand in node.all_input_nodes}
        env = {operand: number for operand, number in operands.items() if number is not None}
        if len(env) < len(operands):
            return False
        numbers[node] = self.values.call(node, env, changed)
        return True

    def _reader(self, node: fx.Node, m: int) -> Callable[[fx.Node], int | None]:
        def read(operand: fx.Node) -> int | None:
            if "once" in operand.meta:  # a gradient of what is made of reductions, or a tangent of it
                name, whole = str(node.meta.get("weighs", "")), self._whole(operand)
                weights = self.joining.parts[name] if name else Weights("equal")
                return None if whole is None else self._share(whole, operand, name, m, weights)
            if operand in self.tangents:
                return self._tangent(operand, m)
            if m and operand in self.next:
                return self.numbers[m - 1].get(self.next[operand])
            return self.numbers[m].get(operand)

        return read

    def _whole(self, operand: fx.Node) -> int | None:
        """Numbers a value of all micro-batches: put together, computed once, or the same in each."""
        if operand in self.tangents or operand in self.wholes:
            return self.tangents.get(operand, self.wholes.get(operand))
        if "once" in operand.meta or "reduces" in operand.meta or any(operand not in numbers for numbers in self.numbers):
            return None
        alike = operand not in self.own or len({numbers[operand] for numbers in self.numbers}) == 1
        expect(alike, lambda: f"{operand.name}, which is read once for all micro-batches, to be the same in each")
        return self.numbers[0][operand]

    def _reduced(self, node: fx.Node) -> bool:
        parts = [numbers[node] for numbers in self.numbers if node in numbers]
        if len(parts) < self.micro.count:
            return False
        name = node.meta["reduces"]
        self.wholes[node] = self._put_together(name, self.joining.parts[name], parts, node)
        return True

    # --------------------------------------------------------------------------------------------------------- the rules

    def _arriving(self, index: int, val: torch.Tensor) -> Strided:
        """Returns the layout of an output's gradient over all micro-batches."""
        layout, dim = strided(val), self.joining.dims.get(index)
        if dim is None:
            return layout
        shape = tuple(length * self.micro.count if at == dim else length for at, length in enumerate(val.shape))
        return Layout(shape, val.dtype), layout[1] if dim == 0 else tuple(torch.empty(shape, device="meta").stride())

    def _tangent(self, tangent: fx.Node, m: int) -> int | None:
        spec, whole, val = self.of_output[tangent], self.tangents[tangent], tangent.meta["val"]
        if (dim := self.joining.dims.get(spec.index)) is None:
            return self._share(whole, tangent, spec.index, m, self.joining.weights[spec.index])
        rows, layout = val.shape[dim], layout_of(tangent)
        part = self._operation(aten.slice.Tensor, Operand(whole), dim, m * rows, (m + 1) * rows, layout=layout)
        if self.inputs[spec][1][1] == tuple(val.stride()):
            return part
        return self._operation(restride, Operand(part), tuple(val.shape), tuple(val.stride()), layout=layout)

    def _share(self, whole: int, of: fx.Node, key: int | str, m: int, weights: Weights) -> int | None:
        layout = layout_of(of)
        if weights.kind == "sum":
            return whole
        if weights.kind in ("equal", "same"):
            return self._operation(aten.div.Tensor, Operand(whole), self.micro.count, layout=layout)
        value = self.reductions[key] if isinstance(key, str) else self.outputs[key]
        if (shares := self._shares(key, weights, value)) is None:
            return None
        scaled = aten.mul.Tensor, Operand(whole), Operand(shares[m])
        assert layout is not None
        wide = torch.promote_types(layout.dtype, torch.float32) if not layout.shape else layout.dtype
        number = self._operation(*scaled, layout=layout._replace(dtype=wide))
        return number if wide == layout.dtype else self._cast(number, layout)

    def _put_together(self, key: int | str, weights: Weights, parts: list[int], value: fx.Node) -> int:
        layout = layout_of(value)
        assert layout is not None
        if weights.kind == "same":
            expect(value not in self.own or len(set(parts)) == 1, lambda: f"{value.name} to be the same in all micro-batches")
            return parts[-1]
        if weights.kind in ("any", "all"):
            return self._folded(aten.logical_or.default if weights.kind == "any" else aten.logical_and.default, parts, layout)
        if weights.kind == "equal":
            parts = [self._operation(aten.div.Tensor, Operand(part), self.micro.count, layout=layout) for part in parts]
        if weights.kind in ("equal", "sum"):
            return self._folded(aten.add.Tensor, parts, layout)
        expect(weights.kind == "tokens", lambda: f"weights of {value.name} that are known, found {weights.kind}")
        exact = Layout(layout.shape, torch.float64 if layout.dtype == torch.float64 else torch.float32)
        shares = self._shares(key, weights, value)
        expect(shares is not None, lambda: f"{weights.count or weights.target}, by which losses weigh")
        assert shares is not None
        terms = []
        for part, share in zip(parts, shares, strict=True):
            part = part if layout == exact else self._cast(part, exact)
            weighed = self._operation(aten.mul.Tensor, Operand(part), Operand(share), layout=exact)
            nothing = self._operation(aten.eq.Scalar, Operand(share), 0, layout=Layout((), torch.bool))
            terms.append(self._operation(aten.masked_fill.Scalar, Operand(weighed), Operand(nothing), 0, layout=exact))
        total = self._folded(aten.add.Tensor, terms, exact)
        return total if layout == exact else self._cast(total, layout)

    def _shares(self, key: int | str, weights: Weights, value: fx.Node) -> list[int] | None:
        """Numbers the w_m of a loss or reduction; None if the numbers of tokens are not known yet."""
        named = self.by_name.get(weights.count or weights.target)
        if key not in self.shares and all(named in numbers for numbers in self.numbers):
            wide = value.meta["val"].dtype == torch.float64
            layout = Layout((), torch.float64 if wide else torch.float32)
            counts = [self._cast(self._counted(weights, named, m), layout) for m in range(self.micro.count)]
            everything = self._folded(aten.add.Tensor, counts, layout)
            self.shares[key] = [
                self._operation(aten.div.Tensor, Operand(count), Operand(everything), layout=layout) for count in counts
            ]
        return self.shares.get(key)

    def _counted(self, weights: Weights, named: Any, m: int) -> int:
        """Numbers how many tokens of a micro-batch count: what tells it, or its labels that are not ignored; []."""
        number, layout = self.numbers[m][named], layout_of(named)
        assert layout is not None
        if not weights.count:
            counts = self._operation(aten.ne.Scalar, Operand(number), weights.ignored, layout=layout._replace(dtype=torch.bool))
            layout = Layout((), torch.int64)
            number = self._operation(aten.sum.default, Operand(counts), layout=layout)
        return self._operation(aten.view.default, Operand(number), [], layout=layout._replace(shape=()))

    def _folded(self, operation: Any, parts: Sequence[int], layout: Layout | None) -> int:
        total = parts[0]
        for part in parts[1:]:
            total = self._operation(operation, Operand(total), Operand(part), layout=layout)
        return total

    def _cast(self, number: int, layout: Layout) -> int:
        return self._operation(aten._to_copy.default, Operand(number), layout=layout, kwargs={"dtype": layout.dtype})
