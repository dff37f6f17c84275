"""Measures kernels and operations by running them once on inputs with their layouts: bytes of workspace, strides of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.machine.device import allocator_peak
from mtcompile.passes.analysis.memory import output_nbytes, workspace_nbytes
from mtcompile.passes.generators import generator_state, replay, rng_preserved
from mtcompile.passes.joint.strides import Observe
from mtcompile.passes.step_graph import body_outputs, iter_tensors, placeholders, span_nbytes, storage_nbytes
from mtcompile.runtime.devices.arena import layout_of
from mtcompile.runtime.schedule import aligned

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run of a kernel. ``workspace``: bytes of device memory allocated beside results. ``larger``: the
    positions of results that hold more bytes than declared. ``unreleased``: bytes still held after the results are gone."""

    workspace: int
    larger: tuple[int, ...] = ()
    unreleased: int = 0


def measure(kernel: fx.GraphModule, call: Call, device: torch.device) -> Measured:
    """Measures a kernel by the allocator's own events around one run. Estimates it from shapes if another profiler is active or
    if a GPU has no room for the run."""
    declared = [aligned(storage_nbytes(node.meta["val"])) for node in body_outputs(kernel)]
    try:
        inputs = example_inputs(kernel, device)
        with rng_preserved(str(device)), torch.no_grad(), allocator_peak(device) as peak:
            results = call(*inputs)
            actual = [tensor.untyped_storage().nbytes() for tensor in results]
            del results
    except torch.OutOfMemoryError:
        return Measured(workspace_nbytes(kernel) + _value_dependent_nbytes(kernel))
    larger = tuple(i for i, (one, other) in enumerate(zip(actual, declared, strict=True)) if one > other)
    if peak.nbytes is None:
        return Measured(workspace_nbytes(kernel), larger)
    return Measured(aligned(max(0, peak.nbytes - output_nbytes(kernel))) + _value_dependent_nbytes(kernel), larger, peak.kept)


def _value_dependent_nbytes(kernel: fx.GraphModule) -> int:
    """Returns extra bytes for operations whose buffers depend on their input values, which example inputs do not show: as many
    bytes as their operands and results have."""
    nodes = [n for n in kernel.graph.nodes if "_embedding_bag" in str(n.target)]
    return sum(aligned(storage_nbytes(v)) for n in nodes for around in (n, *n.all_input_nodes) for v in iter_tensors(around))


def strides_on(device: torch.device) -> Observe:
    """Returns a function that runs an operation once, on zeros with its operands' layouts, and returns its results' strides."""
    known: dict[str, list[tuple[int, ...] | None] | None] = {}

    def observe(node: fx.Node) -> list[tuple[int, ...] | None] | None:
        layouts = fx.node.map_arg((node.args, node.kwargs), lambda n: tuple(map(str, map(layout_of, iter_tensors(n)))))
        key = f"{node.target} {layouts}"
        if key not in known:
            known[key] = _result_strides(node, device)
        return known[key]

    return observe


def _result_strides(node: fx.Node, device: torch.device) -> list[tuple[int, ...] | None] | None:
    operands: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: example(n, device))
    target: Any = node.target
    try:
        with rng_preserved(str(device)), torch.no_grad():
            result = target(*operands[0], **operands[1])
    except (RuntimeError, ValueError, ArithmeticError, LookupError):  # no room, or an operation that refuses zeros
        return None
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tuple(each.stride()) if isinstance(each, torch.Tensor) else None for each in results]


def example_inputs(kernel: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
    """Makes inputs with the kernel's layouts, valid whatever it does with them."""
    return [example(node, device) for node in placeholders(kernel.graph)]


def example(node: fx.Node, device: torch.device) -> torch.Tensor:
    """Makes zeros with the node's layout (valid as indices), or a generator's state if that is what the node stands for."""
    if any(user.target is replay and user.args[0] is node for user in node.users):
        return generator_state(str(device))
    val = node.meta["val"]
    device = torch.device("cpu") if _read_by_the_host(node) else device
    elements = span_nbytes(val) // val.element_size()
    return torch.zeros(elements, dtype=val.dtype, device=device).as_strided(tuple(val.shape), tuple(val.stride()))


def _read_by_the_host(node: fx.Node) -> bool:
    """Tells whether a node is the seed or offset of memory-efficient attention, whose backward reads them in host memory."""
    for user in node.users:
        if "efficient_attention_backward" in str(user.target):
            names = [argument.name for argument in user.target._schema.arguments]  # type: ignore[union-attr]
            if any(arg is node and names[i] in ("philox_seed", "philox_offset") for i, arg in enumerate(user.args)):
                return True
    return False


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides and no more bytes than they span."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
