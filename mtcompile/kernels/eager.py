"""Region -> callable, eager or compiled by Inductor, and the bytes a kernel needs, measured by running it once on inputs
of its own shapes."""

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
class Built:
    """A kernel that can be called, and the bytes it needs beside its operands and results. ``why_eager``: why Inductor
    did not make it, if it should have."""

    call: Call
    workspace: int
    why_eager: str = ""


class EagerKernels:
    """Bodies run operation by operation, each intermediate dropped after its last use; measured, by kernel and thread
    count, at most once. ``device``: where they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[tuple[str, int], Built] = {}

    def __call__(self, kernel: fx.GraphModule) -> Built:
        key = (kernel.meta["key"], torch.get_num_threads())
        if key not in self.known:
            self.known[key] = _eager_kernel(kernel, self.device)
        return self.known[key]

    def workspace(self, kernel: fx.GraphModule) -> int:
        return self(kernel).workspace

    def examples(self, kernel: fx.GraphModule) -> Callable[[], list[torch.Tensor]]:
        """What makes inputs of the kernel's layouts."""
        return lambda: examples_for(kernel, self.device)


def _eager_kernel(kernel: fx.GraphModule, device: torch.device) -> Built:
    measured = measure(kernel, kernel.forward, device)
    if not measured.larger:
        return Built(kernel.forward, measured.workspace)

    def call(*args: torch.Tensor) -> list[torch.Tensor]:
        """With results of the bytes that were declared: some operations return the start of a larger storage."""
        made = list(kernel.forward(*args))
        for position in measured.larger:
            old = made[position]
            made[position] = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(old)
        return made

    return Built(call, measure(kernel, call, device).workspace)


@dataclass(frozen=True, slots=True)
class Measured:
    """``workspace``: bytes of device memory allocated beside results. ``larger``: which results hold more bytes than
    declared. ``kept``: bytes still held when the results are gone."""

    workspace: int
    larger: tuple[int, ...] = ()
    kept: int = 0


def measure(kernel: fx.GraphModule, call: Call, device: torch.device) -> Measured:
    """From the allocator's own events around one run; by shapes alone where another profiler is active, or where a GPU has
    no room for a run of its own beside what it holds."""
    declared = [aligned(storage_nbytes(node.meta["val"])) for node in body_outputs(kernel)]
    try:
        inputs = examples_for(kernel, device)
        with rng_preserved(str(device)), torch.no_grad(), allocator_peak(device) as peak:
            results = call(*inputs)
            held = [tensor.untyped_storage().nbytes() for tensor in results]
            del results
    except torch.OutOfMemoryError:
        return Measured(workspace_nbytes(kernel) + _by_values(kernel))
    larger = tuple(i for i, (one, other) in enumerate(zip(held, declared, strict=True)) if one > other)
    if peak.nbytes is None:
        return Measured(workspace_nbytes(kernel), larger)
    return Measured(aligned(max(0, peak.nbytes - output_nbytes(kernel))) + _by_values(kernel), larger, peak.kept)


def _by_values(kernel: fx.GraphModule) -> int:
    """Room for operations whose own buffers depend on the values they are given, which the measurement's are not: as many
    bytes as their operands and results have."""
    nodes = [n for n in kernel.graph.nodes if "_embedding_bag" in str(n.target)]
    return sum(aligned(storage_nbytes(v)) for n in nodes for near in (n, *n.all_input_nodes) for v in iter_tensors(near))


def strides_on(device: torch.device) -> Observe:
    """Runs operations once each on zeros of their operands' layouts, and says how what they make is strided."""
    known: dict[str, list[tuple[int, ...] | None] | None] = {}

    def observe(node: fx.Node) -> list[tuple[int, ...] | None] | None:
        layouts = fx.node.map_arg((node.args, node.kwargs), lambda n: tuple(map(str, map(layout_of, iter_tensors(n)))))
        key = f"{node.target} {layouts}"
        if key not in known:
            known[key] = _strides_made(node, device)
        return known[key]

    return observe


def _strides_made(node: fx.Node, device: torch.device) -> list[tuple[int, ...] | None] | None:
    operands: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: _example(n, device))
    target: Any = node.target
    try:
        with rng_preserved(str(device)), torch.no_grad():
            made = target(*operands[0], **operands[1])
    except (RuntimeError, ValueError, ArithmeticError, LookupError):  # no room, or an operation that refuses zeros
        return None
    results = made if isinstance(made, (tuple, list)) else [made]
    return [tuple(each.stride()) if isinstance(each, torch.Tensor) else None for each in results]


def examples_for(kernel: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
    return [_example(node, device) for node in placeholders(kernel.graph)]


def _example(node: fx.Node, device: torch.device) -> torch.Tensor:
    """Zeros of that layout (valid as indices); a generator's state where one is taken."""
    if any(user.target is replay and user.args[0] is node for user in node.users):
        return generator_state(str(device))
    val, where = node.meta["val"], torch.device("cpu") if _read_by_the_host(node) else device
    elements = span_nbytes(val) // val.element_size()
    return torch.zeros(elements, dtype=val.dtype, device=where).as_strided(tuple(val.shape), tuple(val.stride()))


def _read_by_the_host(node: fx.Node) -> bool:
    """The seed and offset of memory-efficient attention are in host memory, and its backward reads them there."""
    for user in node.users:
        if "efficient_attention_backward" in str(user.target):
            names = [argument.name for argument in user.target._schema.arguments]  # type: ignore[union-attr]
            if any(given is node and names[i] in ("philox_seed", "philox_offset") for i, given in enumerate(user.args)):
                return True
    return False
