"""Finds the parameters of which a graph reads rows alone, those that a batch names, and what of them has to cross the link.

``embedding(w, index)`` reads the rows of ``w`` [rows, n] that ``index`` names, and its gradient is zero in all other rows. The
numbers in ``index`` are among those of an input if they were only picked from it and laid out anew. So these rows are known
before the step runs: the others need not be on the device, nor need their gradients, which are zeros (``cuts/rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.passes.step_graph import InputSpec, inputs_of, outputs_of, restride, span_nbytes

aten: Any = torch.ops.aten
_PICKS = (  # each number of a result is one of the first operand
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.t.default),
    *(aten.transpose.int, aten.permute.default, aten.alias.default, aten.detach.default, aten.clone.default),
)
_CASTS = (aten._to_copy.default, restride)
_WIDE = (torch.int32, torch.int64)
ROW_COPY_US = 4.0  # to issue the copy of one row (an estimate, not yet measured on a GPU)
_FAST_LINK = 50_000  # bytes per µs


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a parameter that cross: those that the inputs ``indices`` name. There are at most ``count`` of them, of
    ``nbytes`` together, out of ``rows``. ``held``: how many the device has room for."""

    indices: tuple[str, ...]
    count: int
    nbytes: int
    rows: int
    held: int

    @property
    def held_nbytes(self) -> int:
        """The bytes of the parameter that the device has room for."""
        return self.nbytes // self.count * self.held


def picked_from(node: fx.Node) -> fx.Node | None:
    """Returns the operand among whose numbers all numbers of a node are, for an operation that tells; else None."""
    operand = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(operand, fx.Node):
        return None
    widens = node.target is aten._to_copy.default and {node.meta["val"].dtype, operand.meta["val"].dtype} <= {*_WIDE}
    return operand if node.target in _PICKS or (widens and node.meta["val"].dtype == torch.int64) else None


def lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns ``(w, index)`` of an embedding that reads nothing else of ``w``; None for any other operation."""
    weight, index = (*node.args[:2], None, None)[:2]
    right = node.target is aten.embedding.default and weight is not index and index not in node.args[2:]
    return (weight, index) if right and isinstance(weight, fx.Node) and isinstance(index, fx.Node) else None


def keeps_zeros(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the operands of an operation whose result is zero wherever all of them are; none for any other operation."""
    floats = isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_floating_point()
    count = 2 if node.target is aten.add.Tensor and not node.kwargs else 1 if node.target in _CASTS and floats else 0
    operands = tuple(node.args[:count])
    return operands if all(isinstance(operand, fx.Node) for operand in operands) else ()


def input_of(index: fx.Node) -> fx.Node:
    """Returns the value that the numbers of an index are picked from."""
    while (operand := picked_from(index)) is not None:
        index = operand
    return index


def made_by_rows(gradient: fx.Node) -> list[fx.Node] | None:
    """Returns the operations that make the gradient of a parameter [rows, n] from nothing but embeddings' gradients, these
    included, if nothing else reads what they make; else None."""
    parts = [gradient]
    for node in parts:
        if node.target is not aten.embedding_dense_backward.default:
            operands = keeps_zeros(node)
            if not operands:
                return None
            parts += [operand for operand in operands if operand not in parts]
    readers = {user for node in parts for user in node.users if user not in parts}
    once = [*gradient.graph.output_node().args[0]].count(gradient) == 1
    alike = all(node.meta["val"].shape == gradient.meta["val"].shape and node.meta["val"].is_contiguous() for node in parts)
    return parts if once and alike and readers == {gradient.graph.output_node()} else None


def read_by_rows(joint: fx.GraphModule) -> dict[str, Rows]:
    """Returns the parameters of which a joint graph reads rows alone, fewer than all, by name, if its inputs say which. Their
    gradients are zero in all other rows."""
    inputs = {node: spec for spec, node in inputs_of(joint)}
    grads = {spec.index: value for spec, value in outputs_of(joint) if spec.kind == "grad"}
    by_name = {}
    for node, spec in inputs.items():
        val = node.meta["val"]
        if spec.role != "param" or val.dim() != 2 or not val.numel() or not val.is_contiguous():
            continue
        lookups = [lookup(user) for user in node.users]
        indices = [each[1] if each is not None and each[0] is node else node for each in lookups]
        gradients = list[Any]()
        if spec.index in grads:
            parts = made_by_rows(grads[spec.index])
            gradients = [part for part in parts or () if part.target is aten.embedding_dense_backward.default]
            indices += [part.args[1] for part in gradients] or [node]
        named = {input_of(index) for index in indices}
        if named and all(each in inputs and _names_rows(inputs[each], each) for each in named):
            ordered = [each for each in inputs if each in named]
            count, nbytes = rows_that_cross(val, [each.meta["val"] for each in ordered])
            held = count + any(part.args[3] >= 0 for part in gradients)  # a spare one for what is padding
            if count and held < val.shape[0]:
                by_name[spec.name] = Rows(tuple(inputs[each].name for each in ordered), count, nbytes, len(val), held)
    return by_name


def _names_rows(spec: InputSpec, node: fx.Node) -> bool:
    return spec.role == "input" and spec.places is None and node.meta["val"].is_contiguous()


def fetched_by_rows(joint: fx.GraphModule, embeddings: str) -> dict[str, Rows]:
    """Returns the parameters of which only rows are fetched. With "auto", these are those that spare so many bytes that a fast
    link takes longer for them than the host for asking for each row."""
    if embeddings == "all":
        return {}
    sizes = {spec.name: span_nbytes(node.meta["val"]) for spec, node in inputs_of(joint)}
    return {
        name: rows
        for name, rows in read_by_rows(joint).items()
        if embeddings == "used" or sizes[name] - rows.nbytes >= max(1 << 22, rows.count * ROW_COPY_US * _FAST_LINK)
    }


def rows_that_cross(val: torch.Tensor, indices: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Returns how many rows of ``val`` the ``indices`` name at most, and their bytes."""
    count = min(int(val.shape[0]), sum(int(index.numel()) for index in indices))
    return count, count * int(val.shape[1]) * val.element_size()


def rows_of(step: fx.GraphModule) -> dict[fx.Node, Rows]:
    """Returns the parameters of a step of which only rows cross, each with these rows."""
    rows: dict[str, Rows] = step.meta.get("rows") or {}
    return {node: rows[spec.name] for spec, node in inputs_of(step) if spec.role == "param" and spec.name in rows}
