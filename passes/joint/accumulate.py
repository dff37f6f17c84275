"""Accumulates gradients inside one step: a captured step of one micro-batch becomes a step of several, region by region.

Each region runs all micro-batches, one after the other, before the next region runs any: its parameters come in once per
pass, and its gradients, summed over the micro-batches in their order, leave once. It is done to the joint graph, so that
everything after plans, proves and runs it like any other operations.

The loss is what it would be over the whole batch, as far as it is linear in the micro-batches' (``loss_weights``): weighted by
the tokens that count, added up, or averaged. A micro-batch without any token that counts weighs nothing, and does not make the
loss NaN. Outputs with the batch in front are put together again. Buffers
that change go from micro-batch to micro-batch. Random numbers are drawn region by region.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mtcompile.passes.joint.batch.joining import Joining, Micro, depending, rows_of, split_inputs
from mtcompile.passes.joint.loss_head import Add, adder, total
from mtcompile.passes.joint.loss_weights import Weights
from mtcompile.passes.joint.regions import assign, cut_by, in_order
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.passes.step_graph import InputSpec, OutputSpec, inputs_of, outputs_of, restride

aten = torch.ops.aten
Region = tuple[str, int]


def _bring_forward(value: fx.Node, region: dict[fx.Node, Region]) -> None:
    """Lets a buffer's next version be made in the region that makes what it is made of: a cast of it stands at the end of a
    traced forward, and the next micro-batch reads it in the layer that it is of."""
    sources = [operand for operand in value.all_input_nodes if operand in region]
    if value.target is operator.getitem or not sources or region.get(value, ("", 0))[0] != "forward":
        return
    for source in sources:
        if len(source.users) == 1:
            _bring_forward(source, region)
    region[value] = min(region[value], max(region[source] for source in sources))


def repeat(joint: fx.GraphModule, micro: Micro, joining: Joining) -> fx.GraphModule:
    """The joint graph of all micro-batches. Raises NotImplementedError for what has no meaning over several: a buffer that is
    changed after the region that reads it, as one is that the backward changes."""
    for spec, value in outputs_of(joint):
        if spec.in_backward:
            raise NotImplementedError(f"a backward that changes {spec.name} in place", value)
    return _Repeat(joint, micro, joining).graph_module()


def _place(spec: OutputSpec) -> tuple[int, int]:
    """Puts what the model returns first, as it returns it, whichever region makes it."""
    return ("output", "mutation", "grad").index(spec.kind), spec.index if spec.kind == "output" else 0


class _Repeat:
    """Builds the joint graph of all micro-batches. ``env``: for each micro-batch, captured node -> its copy; ``outputs``: what
    the new graph returns so far."""

    def __init__(self, joint: fx.GraphModule, micro: Micro, joining: Joining) -> None:
        self.joint, self.micro, self.joining, self.weights = joint, micro, joining, joining.weights
        regions, self.blocks = assign(joint.graph, (), cut_by(joint, micro.alike))
        self.region = dict(regions)
        self.graph = fx.Graph()
        self.env: list[dict[fx.Node, fx.Node]] = [{} for _ in range(micro.count)]
        self.inputs: list[InputSpec] = []
        self.outputs: dict[OutputSpec, fx.Node] = {}
        self.tangents: dict[fx.Node, tuple[fx.Node, int]] = {}  # -> of all, and the index of its output
        self.scales: dict[int | str, list[fx.Node]] = {}  # output index, or reduction -> the weight of each micro-batch
        self.whole: dict[fx.Node, fx.Node] = {}  # what is put together, or computed once
        self.weighed: dict[tuple[fx.Node, str, int], fx.Node] = {}  # of what is computed once, as micro-batches read it
        self.rows, self.own = rows_of(joint, micro), depending(joint, split_inputs(joint, micro))
        self.results = outputs_of(joint)
        self.following = {}  # a buffer's placeholder -> the node that is its next version
        by_index = {spec.index: node for spec, node in inputs_of(joint) if spec.role not in ("tangent", "constant")}
        for spec, value in self.results:
            if spec.kind == "mutation":
                self.following[by_index[spec.index]] = value
                _bring_forward(value, self.region)

    def graph_module(self) -> fx.GraphModule:
        self._take_inputs()
        grads = {value: spec for spec, value in self.results if spec.kind == "grad"}
        for region, nodes in in_order(self.joint.graph, self.region):
            if region[0] == "backward":
                self._put_together(nodes, grads, region)
            for number in range(self.micro.count):
                for node in nodes:
                    if "once" in node.meta:
                        continue
                    copied = self._copy(node, number, region)
                    if node in grads:
                        self._sum(grads[node], node, copied, number)
            if region[0] != "backward":
                self._put_together(nodes, grads, region)
            for spec, value in self.results:
                if self.region.get(value) == region and spec.kind != "grad":
                    self._output(spec, value)
        for spec, value in self.results:  # what no region makes
            if value not in self.region:
                raise NotImplementedError(f"an output ({spec.name}) that is one of its inputs")
        ordered = sorted(self.outputs.items(), key=lambda item: _place(item[0]))
        self.graph.output(tuple(node for _, node in ordered))
        repeated = LazyGraphModule(torch.nn.Module(), self.graph)
        repeated.meta.update(self.joint.meta)
        repeated.meta.update(inputs=tuple(self.inputs), outputs=tuple(spec for spec, _ in ordered), cut=self.blocks)
        repeated.graph.lint()
        return repeated

    def _put_together(self, nodes: Iterable[fx.Node], grads: Mapping[fx.Node, OutputSpec], region: Region) -> None:
        """Puts reductions of a region together, and computes what is computed once."""
        for node in nodes:
            if (name := node.meta.get("reduces")) is not None:
                self.whole[node] = self._total(name, self.joining.parts[name], [env[node] for env in self.env], self._add(node))
            elif "once" in node.meta:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._of_whole)
                args = node.meta["once"](args)
                self.whole[node] = copied = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
                copied.meta = {**node.meta, "region": region}
                if node in grads:
                    self._sum(grads[node], node, copied, 0)

    def _of_whole(self, operand: fx.Node) -> fx.Node:
        if operand in self.tangents:
            return self.tangents[operand][0]
        if operand not in self.whole and operand not in self.env[0]:  # all micro-batches make the same of it, in this region
            args = fx.node.map_arg((operand.args, operand.kwargs), self._of_whole)
            self.whole[operand] = self.graph.create_node(operand.op, operand.target, *args, name=f"{operand.name}_once")
            self.whole[operand].meta = {**operand.meta, "region": self.region[operand]}
        return self.whole[operand] if operand in self.whole else self.env[0][operand]

    def _weighed(self, operand: fx.Node, number: int, node: fx.Node) -> fx.Node:
        """Returns what is computed once as ``node`` of a micro-batch reads it: with the weight that this has in the reduction
        whose backward it is; or its share of a gradient that all add up."""
        name = str(node.meta.get("weighs", ""))
        if (operand, name, number) not in self.weighed:
            weights = self.joining.parts[name] if name else Weights("equal")
            self.weighed[operand, name, number] = self._share(self._of_whole(operand), weights, name, number, node)
        return self.weighed[operand, name, number]

    def _take_inputs(self) -> None:
        outputs = {spec.index: value for spec, value in self.results if spec.kind == "output"}
        for spec, node in inputs_of(self.joint):
            split = spec.role == "input" and spec.index in self.micro.split
            for number in range(self.micro.count if split else 1):
                taken = self.graph.placeholder(node.name if number == 0 else f"{node.name}_micro{number}")
                taken.meta = dict(node.meta)
                self.inputs.append(self.micro.spec(spec, number) if split else spec)
                for env in [self.env[number]] if split else self.env:
                    env[node] = taken
            if spec.role == "tangent":
                self.tangents[node] = taken, spec.index
                taken.meta["val"] = self._whole(spec.index, outputs[spec.index])
                for env in self.env:
                    del env[node]

    def _whole(self, index: int, value: fx.Node) -> torch.Tensor:
        """The tangent of an output over all micro-batches, without content."""
        val = value.meta["val"]
        dim = self.joining.dims.get(index)
        if dim is None:
            return val
        shape = [length * self.micro.count if at == dim else length for at, length in enumerate(val.shape)]
        return val.new_empty_strided(shape, val.stride()) if dim == 0 else val.new_empty(shape)

    def _copy(self, node: fx.Node, number: int, region: Region) -> fx.Node:
        copied = self.graph.create_node(
            node.op,
            node.target,
            *fx.node.map_arg((node.args, node.kwargs), lambda operand: self._operand(operand, number, node)),
            name=node.name if number == 0 else f"{node.name}_micro{number}",
        )
        copied.meta = {**node.meta, "region": region}
        self.env[number][node] = copied
        return copied

    def _operand(self, operand: fx.Node, number: int, node: fx.Node) -> fx.Node:
        if "once" in operand.meta:
            return self._weighed(operand, number, node)
        if operand in self.tangents and operand not in self.env[number]:
            self.env[number][operand] = self._tangent(operand, number, node)
        if number and operand in self.following:
            before = self.env[number - 1].get(self.following[operand])
            if before is None:
                raise NotImplementedError("a buffer that is changed in a later layer than the one that reads it")
            return before
        return self.env[number][operand]

    def _add(self, like: fx.Node) -> Add:
        """Appends an operation to the region of ``like``, a node of the captured graph."""
        add = adder(self.graph, like)

        def with_region(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = add(target, *args, **kwargs)
            node.meta["region"] = self.region[like]
            return node

        return with_region

    def _tangent(self, tangent: fx.Node, number: int, user: fx.Node) -> fx.Node:
        """The tangent of one micro-batch's output, taken from that of all."""
        whole, index = self.tangents[tangent]
        add, val = self._add(user), tangent.meta["val"]
        if (dim := self.joining.dims.get(index)) is not None:
            rows = val.shape[dim]
            part = add(aten.slice.Tensor, whole, dim, number * rows, (number + 1) * rows)
            alike = part.meta["val"].stride() == val.stride()
            return part if alike else add(restride, part, tuple(val.shape), tuple(val.stride()))
        return self._share(whole, self.weights[index], index, number, user)

    def _share(self, whole: fx.Node, weights: Weights, key: int | str, number: int, user: fx.Node) -> fx.Node:
        """Returns what arrives of a gradient at one micro-batch."""
        add, val = self._add(user), whole.meta["val"]
        if weights.kind == "sum":
            return whole
        if weights.kind in ("equal", "same"):
            return add(aten.div.Tensor, whole, self.micro.count)
        scaled = add(aten.mul.Tensor, whole, self.scales[key][number])
        return scaled if scaled.meta["val"].dtype == val.dtype else add(aten._to_copy.default, scaled, dtype=val.dtype)

    def _sum(self, spec: OutputSpec, node: fx.Node, copied: fx.Node, number: int) -> None:
        """Adds up the gradient of an input that all micro-batches share; an input that each has for itself keeps its own."""
        if spec.index in self.micro.split:
            own = replace(spec, index=self.micro.index(spec.index, number))
            self.outputs[replace(own, name=self.micro.spec(InputSpec("input", spec.name, spec.index), number).name)] = copied
            return
        add = self._add(node)
        role = next(s.role for s in self.joint.meta["inputs"] if s.index == spec.index and s.role != "tangent")
        if self.micro.wide and role == "param" and copied.meta["val"].dtype in (torch.bfloat16, torch.float16):
            copied = add(aten._to_copy.default, copied, dtype=torch.float32)
        if number:
            copied = add(aten.add.Tensor, self.outputs[spec], copied)
        self.outputs[spec] = copied

    def _output(self, spec: OutputSpec, value: fx.Node) -> None:
        if value in self.whole:
            self.outputs[spec] = self.whole[value]
            return
        parts = [env[value] for env in self.env]
        add = self._add(value)
        if spec.kind == "mutation":
            self.outputs[spec] = parts[-1]
        elif spec.index in self.weights:
            self.outputs[spec] = self._total(spec.index, self.weights[spec.index], parts, add)
        elif spec.index in self.joining.counts:
            self.outputs[spec] = _put_together(add, self.joining.counts[spec.index], parts)
        elif spec.index in self.joining.dims:
            self.outputs[spec] = add(aten.cat.default, parts, self.joining.dims[spec.index])
        else:
            self._check_shared(spec, value)
            self.outputs[spec] = parts[-1]

    def _check_shared(self, spec: OutputSpec, value: fx.Node) -> None:
        """Raises NotImplementedError for an output that depends on none of the inputs that are cut, but is made of sizes alone,
        where nobody can tell, or that a gradient arrives at."""
        if any(index == spec.index for _, index in self.tangents.values()):
            raise NotImplementedError(f"the gradient of an output ({spec.name}) without the batch in front")
        inputs = [node for _, node in inputs_of(self.joint)]
        if self.rows in value.meta["val"].shape[:1] and value not in depending(self.joint, inputs):
            rows = f"an output ({spec.name}) of {self.rows} rows"
            raise NotImplementedError(f"{rows} that depends on no input, so perhaps not on the batch")

    def _total(self, key: int | str, weights: Weights, losses: list[fx.Node], add: Add) -> fx.Node:
        """A loss, or a reduction, of all micro-batches; its weights are kept under ``key``."""
        if weights.kind == "sum":
            return total(add, losses)
        if weights.kind == "same":
            return losses[-1]
        if weights.kind in ("any", "all"):
            return _put_together(add, aten.logical_or.default if weights.kind == "any" else aten.logical_and.default, losses)
        if weights.kind == "equal":
            return total(add, [add(aten.div.Tensor, loss, self.micro.count) for loss in losses])
        dtype = losses[0].meta["val"].dtype
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        name = weights.count or weights.target
        counted = next(node for node in self.joint.graph.nodes if node.name == name)
        counts = []
        for env in self.env:
            number = env[counted]
            if not weights.count:
                number = add(aten.sum.default, add(aten.ne.Scalar, number, weights.ignored))
            counts.append(add(aten._to_copy.default, add(aten.view.default, number, []), dtype=exact))
        of_all = total(add, counts)
        scales = [add(aten.div.Tensor, count, of_all) for count in counts]
        self.scales[key] = scales
        terms = []
        for loss, scale in zip(losses, scales, strict=True):
            if dtype != exact:
                loss = add(aten._to_copy.default, loss, dtype=exact)
            terms.append(add(aten.masked_fill.Scalar, add(aten.mul.Tensor, loss, scale), add(aten.eq.Scalar, scale, 0), 0))
        loss = total(add, terms)
        return loss if dtype == exact else add(aten._to_copy.default, loss, dtype=dtype)


def _put_together(add: Add, operation: Any, parts: Iterable[fx.Node]) -> fx.Node:
    """The parts of all micro-batches, in their order, joined by an operation of two."""
    return functools.reduce(lambda one, other: add(operation, one, other), parts)
