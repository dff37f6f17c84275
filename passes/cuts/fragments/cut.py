"""Cuts linear weights into fragments: rows of the weight that are copied, multiplied, differentiated and updated by themselves.

    W [out, in] on the host                   W[0:n]  W[n:2n]  ...        each with a copy of its own
         | prefetch                             | prefetch | prefetch
    y = x @ W.t()               becomes       y_0 = x @ W[0:n].t(), y_1 = ..., y = cat(y_0, y_1, ...)
    dW = dy.t() @ x                           dW[0:n] = dy[:, 0:n].t() @ x, ...
    dx = dy @ W                               dx = dy @ cat(W[0:n], W[n:2n], ...)
                                  or, split,  dx = dy[:, 0:n] @ W[0:n] + ..., the last rows first

A block starts at each fragment, so that a region runs as soon as its fragment has landed. All of it is plain ATen in the joint
graph, so everything after plans, proves and runs fragments like any other parameters.

Stacked weights [experts, n, m] are cut between experts (``stacked``, ``grouped``), which splits no sum.

Every element of y and of dW is the same sum over the same operands as before. Libraries sum in the same order too if all
fragments but the last are multiples of ``_TILE`` rows, and the last has as many at least. dx is a sum over rows of W: either
the whole W is made again from its fragments, which takes its bytes twice for the time of that product, or the cut splits it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.kernels import drop_dead
from mtcompile.passes.cuts.fragments.grouped import Grouped, GroupedCut, groups
from mtcompile.passes.cuts.fragments.linear import Linear, linears
from mtcompile.passes.cuts.fragments.stacked import Stacked, matrices_of, stacks
from mtcompile.passes.joint.loss_head import adder
from mtcompile.passes.joint.regions import STARTS_BLOCK
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import Fragment, InputSpec, OutputSpec, fragments_of, inputs_of, outputs_of
from mtcompile.runtime.schedule import listed, placed

aten = torch.ops.aten
_PARTS = (2, 4, 8, 16)  # of the largest weight, to try
# Libraries compute products in tiles of 6 to 48 rows of the weight, and rows at the end, or a few rows alone, by other kernels
# that sum in another order. A multiple of this many rows moves no row from one to the other.
_TILE = 48
FIRST_INDEX = 1 << 20  # of a fragment: above those of a program's inputs, which micro-batches add to
_FIRST_ORDER = 1 << 40  # by which the backward finds the block of a fragment: above the numbers of the trace


Weight = Linear | Stacked | Grouped


@dataclass(frozen=True, slots=True)
class Cut:
    """Says which linear weights are cut: those of more than ``nbytes``, into fragments of about as many at most; 0: none.
    Of weights whose input receives a gradient, ``gathers`` cuts those too and makes the whole again for that gradient;
    ``splits`` cuts them and sums it over fragments. A fragment begins at a multiple of ``begins`` bytes."""

    nbytes: int = 0
    splits: bool = False
    gathers: bool = False
    begins: int = placed(1)


UNCUT = Cut()


def possible_cuts(joint: fx.GraphModule, fragments: str | None, begins: int = UNCUT.begins) -> tuple[Cut, ...]:
    """Returns the cuts to choose among, the coarsest first: none, and fragments of half of the largest weight, a quarter, and
    so on. ``fragments``: "exact": where no sum is split, first without weights that are made whole again; "split": any; None:
    no cut. ``begins``: as in ``Cut``."""
    if fragments is None:
        return (UNCUT,)
    kinds = (Cut(splits=True),) if fragments == "split" else (Cut(), Cut(gathers=True))
    cuts, before = [UNCUT], list[str]()
    for kind in kinds:
        weights = _whole(joint, kind)
        if (names := [weight.spec.name for weight in weights]) != before:
            largest = max(weight.nbytes for weight in weights)
            cuts += [replace(kind, nbytes=-(-largest // parts), begins=begins) for parts in _PARTS]
        before = names
    return tuple(cuts)


def cut_weights(joint: fx.GraphModule, cut: Cut) -> list[str]:
    """Cuts weights of a normalized joint graph in place. Returns what its contract says of that, one line for weights whose
    sums are split."""
    in_fragments = cuts_of(joint, cut)
    for weight, rows in in_fragments:
        if isinstance(weight, Grouped):
            _cut_grouped(joint, weight, rows)
        elif isinstance(weight, Stacked):
            _cut_stacked(joint, weight, rows)
        else:
            _cut(joint, weight, rows, cut.splits)
    if in_fragments:
        drop_dead(joint.graph)
        for weight, _ in in_fragments:
            joint.graph.erase_node(weight.weight)
        joint.graph.lint()
        joint.recompile()
    sums = [(weight.spec.name, rows) for weight, rows in in_fragments if cut.splits and weight.has_input_gradient]
    split = [f"{name} in {len(rows)}" for name, rows in sums]
    return [f"input gradients summed over fragments ({listed(split, 3)})"] if split else []


def cuts_of(joint: fx.GraphModule, cut: Cut) -> list[tuple[Weight, list[tuple[int, int]]]]:
    """Returns the weights that a cut cuts, each with the first row and the end of its fragments."""
    whole = _whole(joint, cut) if cut.nbytes else []
    return [(weight, rows) for weight in whole if len(rows := _rows(weight, cut)) > 1]


def _whole(joint: fx.GraphModule, cut: Cut) -> list[Weight]:
    """The weights that a cut may cut, of any size."""
    weights: list[Weight] = [*linears(joint), *stacks(joint), *groups(joint)]
    return [weight for weight in weights if cut.splits or cut.gathers or not weight.has_input_gradient]


def _rows(weight: Weight, cut: Cut) -> list[tuple[int, int]]:
    """Returns where each fragment starts and ends. A fragment begins where a slot may, so that fragments lie side by side in
    the memory of the whole, or where a disk may read, and each has about as many bytes as the others. Those of a linear weight
    begin at a multiple of ``_TILE`` rows, and fewer rows than that at the end belong to the fragment before; but where a sum is
    split anyway, a weight of few rows is cut finer."""
    val = weight.weight.meta["val"]
    rows, row_nbytes = val.shape[0], math.prod(val.shape[1:]) * val.element_size()
    count = -(-weight.nbytes // cut.nbytes)
    finer = cut.splits and weight.has_input_gradient and rows < count * _TILE
    fewest = _TILE if isinstance(weight, Linear) and not finer else 1
    step = math.lcm(cut.begins // math.gcd(cut.begins, row_nbytes), fewest)
    share = rows // count if fewest > 1 else -(-rows // count) + step - 1
    size = max(step, share // step * step)
    starts = [start for start in range(0, rows, size) if start == 0 or rows - start >= fewest]
    return list(zip(starts, [*starts[1:], rows], strict=True))


def _cut(joint: fx.GraphModule, linear: Linear, rows: list[tuple[int, int]], splits: bool) -> None:
    specs = _specs(joint, linear, rows)
    weights = _take(joint, linear, specs)
    orders = [_FIRST_ORDER + spec.index for spec in specs]
    _forward(joint.graph, linear, rows, weights, orders)
    gradients = _weight_gradients(joint.graph, linear, rows, orders)
    for product in linear.for_input:
        if splits:
            _split_input_gradient(joint.graph, product, rows, weights, orders)
        else:
            _input_gradient(joint.graph, product, weights, orders[0])
    _return(joint, linear, specs, gradients)


def _cut_stacked(joint: fx.GraphModule, stacked: Stacked, rows: list[tuple[int, int]]) -> None:
    specs = _specs(joint, stacked, rows)
    weights = _take(joint, stacked, specs)
    orders = [_FIRST_ORDER + spec.index for spec in specs]
    gradients: list[fx.Node] = []
    for product in (*stacked.products, *([] if stacked.gradient is None else [stacked.gradient])):
        parts: dict[int, fx.Node] = {}
        forward = product.meta["phase"] == "forward"
        with joint.graph.inserting_before(product):
            add = adder(joint.graph, product)
            places = range(len(rows)) if forward else reversed(range(len(rows)))  # backward regions run in this order
            for place in places:
                operands = [matrices_of(add, each, stacked.weight, weights[place], *rows[place]) for each in product.args]
                parts[place] = add(product.target, *operands)
                parts[place].meta["seq_nr"] = orders[place]
                if forward:
                    next(each for each in operands if each.op == "call_function").meta[STARTS_BLOCK] = True
            in_order = [parts[place] for place in range(len(rows))]
            if product is stacked.gradient:
                gradients = in_order
                continue
            whole = add(aten.cat.default, in_order, 0)
            if forward:
                whole.meta[STARTS_BLOCK] = True
        product.replace_all_uses_with(whole)
    _return(joint, stacked, specs, gradients)


def _cut_grouped(joint: fx.GraphModule, grouped: Grouped, rows: list[tuple[int, int]]) -> None:
    specs = _specs(joint, grouped, rows)
    weights = _take(joint, grouped, specs)
    orders, graph = [_FIRST_ORDER + spec.index for spec in specs], joint.graph
    cut = GroupedCut(grouped, rows, weights, orders, lambda like: adder(graph, like), torch.device(joint.meta["device"]))
    for product in grouped.products:
        with graph.inserting_before(product):
            whole = cut.product(product)
            if product.meta["phase"] == "forward":
                whole = adder(graph, product)(aten.alias.default, whole)
                whole.meta[STARTS_BLOCK] = True
        product.replace_all_uses_with(whole)
    gradients: list[fx.Node] = []
    if grouped.gradient is not None:
        with graph.inserting_before(grouped.gradient):
            gradients = cut.gradients(grouped.gradient)
    _return(joint, grouped, specs, gradients)


def _specs(joint: fx.GraphModule, linear: Weight, rows: list[tuple[int, int]]) -> list[InputSpec]:
    spec = linear.spec
    first = FIRST_INDEX + sum(each.fragment is not None for each in joint.meta["inputs"])
    return [
        replace(spec, name=f"{spec.name}[{start}:{end}]", index=first + i, fragment=Fragment(spec.name, spec.index, start, end))
        for i, (start, end) in enumerate(rows)
    ]


def _take(joint: fx.GraphModule, linear: Weight, specs: list[InputSpec]) -> list[fx.Node]:
    """Takes the fragments as inputs in place of the weight."""
    val, weights = linear.weight.meta["val"], []
    for i, spec in enumerate(specs):
        assert spec.fragment is not None
        with joint.graph.inserting_before(linear.weight):
            weight = joint.graph.placeholder(f"{linear.weight.name}_rows{i}")
        rows = val.new_empty((spec.fragment.end - spec.fragment.start, *val.shape[1:]))
        weight.meta = {**linear.weight.meta, "val": rows}
        weights.append(weight)
    inputs = [[each] if each != linear.spec else specs for each in joint.meta["inputs"]]
    joint.meta["inputs"] = tuple(each for several in inputs for each in several)
    return weights


def _forward(graph: fx.Graph, linear: Linear, rows: list[tuple[int, int]], weights: list[fx.Node], orders: list[int]) -> None:
    product, parts = linear.product, []
    with graph.inserting_before(product):
        add = adder(graph, product)
        for (start, end), weight, order in zip(rows, weights, orders, strict=True):
            *bias, x, _ = product.args
            turned = add(aten.t.default, weight)
            turned.meta[STARTS_BLOCK] = True
            operands = [add(aten.slice.Tensor, bias[0], 0, start, end)] if bias else []
            parts.append(add(product.target, *operands, x, turned))
            parts[-1].meta["seq_nr"] = order
        whole = add(aten.cat.default, parts, 1)
        whole.meta[STARTS_BLOCK] = True
    product.replace_all_uses_with(whole)


def _weight_gradients(graph: fx.Graph, linear: Linear, rows: list[tuple[int, int]], orders: list[int]) -> list[fx.Node]:
    product = linear.for_weight
    if product is None:
        return []
    turned, x = product.args
    gradients = []
    with graph.inserting_before(product):
        add = adder(graph, product)
        for (start, end), order in reversed([*zip(rows, orders, strict=True)]):
            part = add(aten.mm.default, add(aten.slice.Tensor, turned, 0, start, end), x)
            part.meta["seq_nr"] = order
            gradients.append(part)
    return gradients[::-1]


def _input_gradient(graph: fx.Graph, product: fx.Node, weights: list[fx.Node], order: int) -> None:
    """Makes the whole weight again for the input gradient. It is the last of its regions of the backward, so that fragments
    arrive behind the weight gradients."""
    with graph.inserting_before(product):
        add = adder(graph, product)
        again = add(aten.mm.default, product.args[0], add(aten.cat.default, weights, 0))
    for node in (again, again.args[1]):
        node.meta["seq_nr"] = order
    product.replace_all_uses_with(again)


def _split_input_gradient(
    graph: fx.Graph, product: fx.Node, rows: list[tuple[int, int]], weights: list[fx.Node], orders: list[int]
) -> None:
    """Sums the input gradient over fragments, the last one first: backward regions run in this order."""
    total: Any = None
    with graph.inserting_before(product):
        add = adder(graph, product)
        for (start, end), weight, order in reversed([*zip(rows, weights, orders, strict=True)]):
            columns = add(aten.slice.Tensor, product.args[0], 1, start, end)
            operands = (columns, weight) if total is None else (total, columns, weight)
            total = add(aten.mm.default if total is None else aten.addmm.default, *operands)
            total.meta["seq_nr"] = order
    product.replace_all_uses_with(total)


def _return(joint: fx.GraphModule, linear: Weight, specs: list[InputSpec], gradients: list[fx.Node]) -> None:
    """Returns the gradients of the fragments in place of that of the weight."""
    outputs: list[tuple[OutputSpec, Any]] = []
    for spec, value in outputs_of(joint):
        if linear.gradient is not None and spec.kind == "grad" and spec.index == linear.spec.index:
            outputs += [(OutputSpec("grad", s.index, s.name), g) for s, g in zip(specs, gradients, strict=True)]
        else:
            outputs.append((spec, value))
    joint.graph.output_node().args = (tuple(value for _, value in outputs),)
    joint.meta["outputs"] = tuple(spec for spec, _ in outputs)


def has_misplaced_fragments(step: fx.GraphModule, plan: Plan, begins: int) -> bool:
    """Tells whether a plan keeps a weight that its step takes in fragments where it cannot be: on the device, where its
    gradients would be too, each by itself, or on disk although not all its fragments begin at multiples of ``begins`` bytes."""
    homes, torn = step.meta["homes"], homes_between(step, begins)
    tiers = {home: plan.params(home) for name in fragments_of(step) if (home := homes.get(name))}
    return any(tier == "device" or (tier == "disk" and home in torn) for home, tier in tiers.items())


def homes_between(step: fx.GraphModule, begins: int) -> dict[str, str]:
    """Returns the homes of the weights with a fragment that begins between multiples of ``begins`` bytes, where a disk cannot
    read it, each with the weight."""
    homes, torn = step.meta["homes"], dict[str, str]()
    for spec, node in inputs_of(step):
        if (part := spec.fragment) is not None and spec.name in homes:
            val = node.meta["val"]
            if part.start * math.prod(val.shape[1:]) * val.element_size() % begins:
                torn[homes[spec.name]] = part.parameter
    return torn
