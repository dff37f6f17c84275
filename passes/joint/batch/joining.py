"""Reads from a captured micro-batch how what micro-batches return is put together: added up, weighted, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from mtcompile.passes.joint.batch.dims import Batch
from mtcompile.passes.joint.batch.numbers import DependsOnRows, Numbers
from mtcompile.passes.joint.batch.once import mark_once, parts_of
from mtcompile.passes.joint.batch.shapes import REDUCED, SIZED
from mtcompile.passes.joint.loss_weights import LossRefused, Weights, put_together, weights
from mtcompile.passes.step_graph import InputSpec, OutputSpec, describe, inputs_of, outputs_of
from mtcompile.runtime.schedule import listed


@dataclass(frozen=True, slots=True)
class Micro:
    """``count`` micro-batches. ``split``: the inputs, by index, of which each has its own; ``inputs``: how many a program of
    one takes. ``wide``: gradients of half-precision parameters are summed, and leave, in fp32. ``alike``: several ranks
    cut each micro-batch alike."""

    count: int
    split: tuple[int, ...]
    inputs: int
    wide: bool = False
    alike: bool = False

    def index(self, index: int, micro: int) -> int:
        """The index at which the program of all takes what a program of one takes at ``index``."""
        if micro == 0 or index not in self.split:
            return index
        return self.inputs + (micro - 1) * len(self.split) + self.split.index(index)

    def specs(self, inputs: tuple[InputSpec, ...]) -> tuple[InputSpec, ...]:
        """The inputs of the program of all."""
        more = (self.spec(inputs[index], micro) for micro in range(1, self.count) for index in self.split)
        return (*inputs, *more)

    def spec(self, spec: InputSpec, micro: int) -> InputSpec:
        name = spec.name if micro == 0 else f"{spec.name} of micro-batch {micro + 1}"
        return replace(spec, index=self.index(spec.index, micro), name=name)


def micro_of(joint: fx.GraphModule, count: int, wide: bool = False, alike: bool = False) -> Micro:
    """Returns ``count`` micro-batches as large as a captured one: all inputs whose first dimension is the batch are split."""
    taken = [(spec, node.meta["val"]) for spec, node in inputs_of(joint) if spec.role not in ("tangent", "constant")]
    batch = max((val.shape[0] for spec, val in taken if spec.role == "input" and val.dim()), default=1)
    split = tuple(spec.index for spec, val in taken if spec.role == "input" and val.dim() and val.shape[0] == batch)
    return Micro(count, split, 1 + max(spec.index for spec, _ in taken), wide, alike)


@dataclass(frozen=True, slots=True)
class Joining:
    """How what micro-batches return is put together, by output index: the ``weights`` of each loss; the ``dims`` along which
    others have the batch; the operations that put the ``counts`` together. ``parts``: instead of weights and counts, those of
    the reductions that losses and counts are made of once for all, by name. ``norms``: the modules that normalize rows by what
    these have in common, as batch norm does in training."""

    weights: Mapping[int, Weights]
    dims: Mapping[int, int]
    counts: Mapping[int, Any]
    parts: Mapping[str, Weights] = field(default_factory=dict)
    norms: str = ""

    def numerics(self, micro: Micro) -> str:
        """Says how gradients and losses are put together, and what is not as for the whole batch."""
        summed = " in fp32" if micro.wide else ""
        gradients = f"{micro.count} micro-batches, their gradients added up{summed} in their order, "
        shares = ", ".join(dict.fromkeys(str(each) for each in self.weights.values() if each.kind != "same"))
        if self.parts:
            shares = "each mean or sum in their losses put together, and what is made of these computed once"
        return gradients + shares + (f", the batch statistics of each by itself ({self.norms})" if self.norms else "")


def joining_of(joint: fx.GraphModule, micro: Micro) -> Joining:
    """Reads from the captured graph, before anything is rewritten, how outputs are put together. ``meta["numbers"]``: those
    that depend on how many rows there are, if they are known. Raises NotImplementedError for a loss whose parts cannot be put
    together, and for an output that depends on the batch in another way. Marks what is computed once (see ``once``)."""
    return _joining(joint, micro, micro.count)


def check_whole(joint: fx.GraphModule, whole: fx.GraphModule, micro: Micro) -> None:
    """Raises NotImplementedError unless a graph of the ``whole`` batch says the same as that of a micro-batch, in which
    dimensions may be of one length by chance, or a part may be all that there is."""
    said = joining_of(joint, micro), _joining(whole, micro, 1 / micro.count)
    weights, others = ({index: (w.kind, w.ignored) for index, w in each.weights.items()} for each in said)
    parts = [Counter((w.kind, w.ignored) for w in each.parts.values()) for each in said]
    if weights != others or parts[0] != parts[1] or (said[0].dims, said[0].counts) != (said[1].dims, said[1].counts):
        outputs = [value for spec, value in outputs_of(joint) if spec.kind == "output"]
        raise DependsOnRows("mixes rows of the whole batch otherwise than those of a micro-batch", outputs[0])


def _joining(joint: fx.GraphModule, micro: Micro, count: float) -> Joining:
    """``count``: times as many rows as the graph has are in all micro-batches."""
    numbers: Numbers = joint.meta.get("numbers") or Numbers()
    numbers.check_seen(joint)
    sized = [node for node in joint.graph.nodes if node.op == "call_function" and numbers.batch_dim(node) is not None]
    rows, split = rows_of(joint, micro), split_inputs(joint, micro)
    grads = {spec.index for spec, _ in outputs_of(joint) if spec.kind == "grad"}
    trained = [node for spec, node in inputs_of(joint) if spec.role != "tangent" and spec.index in grads]
    batch = Batch(split, rows, count, joint.meta["constants"], numbers, trained)
    own = depending(joint, [*split, *sized])
    losses, dims, counts, reduced = dict[int, Weights](), {}, dict[int, Any](), dict[int, fx.Node]()
    for spec, value in outputs_of(joint):
        if spec.kind != "output":
            continue
        if batch.place(value) == SIZED:
            raise LossRefused("depends on the number of rows", value, spec.name)
        if value not in own:
            if _is_loss(value, rows):
                losses[spec.index] = Weights("same")
        elif (dim := batch.dim(value)) is not None and not _is_loss(value, rows):
            dims[spec.index] = dim
            if numbers.known and spec.index < len(numbers.outputs) and numbers.outputs[spec.index] != dim:
                raise NotImplementedError(_no_batch(spec, value), "do not return or assign it", value)
        elif batch.is_reduced(value) or _is_loss(value, rows):
            reduced[spec.index] = value
            if value.meta["val"].numel() > 1:
                _check_output(spec, value, own, batch)
        else:
            raise NotImplementedError(_no_batch(spec, value), "do not return or assign it", batch.mixing(value))
    try:
        for index, value in reduced.items():
            if value.meta["val"].is_floating_point():
                losses[index] = weights(value, own, batch)
            else:
                counts[index] = put_together(value, own, batch)
        parts = dict[str, Weights]()
    except LossRefused as error:
        for value in reduced.values():
            if batch.is_unknown(value):
                raise error
        losses = {index: each for index, each in losses.items() if each.kind == "same"}
        counts, parts = {}, mark_once(joint, reduced, own, batch)
    return Joining(losses, dims, counts, parts, listed(list(dict.fromkeys(_norms(joint, batch))), most=3))


def _norms(joint: fx.GraphModule, batch: Batch) -> Iterator[str]:
    for node in joint.graph.nodes:
        if "batch_norm" in str(node.target) and node.meta.get("phase") == "forward":
            if isinstance(places := batch.place(node), tuple) and places[1] == REDUCED and node.meta["val"][1].numel():
                yield str(node.meta.get("module_path") or node.name)


def _check_output(spec: OutputSpec, value: fx.Node, own: set[fx.Node], batch: Batch) -> None:
    """Raises NotImplementedError for an output, which is no loss, whose parts cannot be put together."""
    try:
        parts_of([value], own, batch)
    except LossRefused as error:
        raise NotImplementedError(_no_batch(spec, value), "do not return or assign it", error.node) from None


def _no_batch(spec: OutputSpec, value: fx.Node) -> str:
    what = f"{spec.name}, {describe(value.meta['val'])} for a micro-batch"
    return f"an output or attribute ({what}) with no dimension known to have a part of each row"


def _is_loss(value: fx.Node, rows: int) -> bool:
    """Says whether an output is a loss. Where micro-batches have one row, a result of shape [1] is that row's and no loss."""
    val = value.meta["val"]
    return val.is_floating_point() and val.numel() == 1 and (val.dim() == 0 or rows > 1)


def split_inputs(joint: fx.GraphModule, micro: Micro) -> list[fx.Node]:
    return [node for spec, node in inputs_of(joint) if spec.role == "input" and spec.index in micro.split]


def rows_of(joint: fx.GraphModule, micro: Micro) -> int:
    """The rows of a micro-batch; 0 where the model reads nothing that is cut."""
    return next((int(node.meta["val"].shape[0]) for node in split_inputs(joint, micro)), 0)


def depending(joint: fx.GraphModule, inputs: list[fx.Node]) -> set[fx.Node]:
    depending = set(inputs)
    for node in joint.graph.nodes:
        if not depending.isdisjoint(node.all_input_nodes):
            depending.add(node)
    return depending
