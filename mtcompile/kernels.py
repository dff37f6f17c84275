"""Region -> callable, eager or compiled by Inductor, and the bytes a kernel needs, measured by running it once on inputs
of its own shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mtcompile import capture, internals
from mtcompile.compile_ahead import compile_ahead, compiled_before
from mtcompile.device import allocator_peak
from mtcompile.passes.memory import output_nbytes, workspace_nbytes
from mtcompile.passes.step_graph import (
    body_outputs,
    generator_state,
    is_random,
    iter_tensors,
    placeholders,
    replay,
    save_rng,
    span_nbytes,
    storage_nbytes,
)
from mtcompile.passes.strides import Observe
from mtcompile.randomness import around, explicit
from mtcompile.runtime.arena import layout_of
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
        return lambda: _examples(kernel, self.device)


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
        inputs = _examples(kernel, device)
        with capture.rng_preserved(str(device)), torch.no_grad(), allocator_peak(device) as peak:
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
        with capture.rng_preserved(str(device)), torch.no_grad():
            made = target(*operands[0], **operands[1])
    except (RuntimeError, ValueError, ArithmeticError, LookupError):  # no room, or an operation that refuses zeros
        return None
    results = made if isinstance(made, (tuple, list)) else [made]
    return [tuple(each.stride()) if isinstance(each, torch.Tensor) else None for each in results]


class InductorKernels:
    """Kernels compiled by Inductor, one per distinct body and thread count; eager where it cannot. ``device``: where they
    run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[tuple[str, int], Built] = {}

    def build(self, kernels: Iterable[fx.GraphModule], eager: EagerKernels) -> dict[str, Built]:
        """By name. Says on standard error, once per kernel, why one is eager."""
        from rich.console import Console
        from rich.progress import track

        threads = torch.get_num_threads()
        kernels = list(kernels)
        new = [k for k in kernels if (k.meta["key"], threads) not in self.known]
        console = Console(stderr=True)
        quiet = not console.is_terminal or len(new) < 2
        # Worker processes are for the C++ compiler; for a GPU Inductor has its own, and each of ours would take its memory.
        ahead = compile_ahead(new) if self.device.type == "cpu" else iter(())
        for _ in track(ahead, "compiling kernels", len(new), console=console, transient=True, disable=quiet):
            pass
        for kernel in track(new, "loading kernels", console=console, transient=True, disable=quiet):
            built = _inductor_kernel(kernel, eager, self.device)
            if built.why_eager:
                print(f"mtcompile: kernel {kernel.meta['name']} stays eager: {built.why_eager}", file=sys.stderr)
            self.known[kernel.meta["key"], threads] = built
        return {str(kernel.meta["name"]): self.known[kernel.meta["key"], threads] for kernel in kernels}


def compile_kernel(kernel: fx.GraphModule, device: torch.device) -> Call:
    """By Inductor, from its disk cache where it has been there."""
    random = any(is_random(n) or n.target in (save_rng, replay) for n in kernel.graph.nodes)
    if random:
        where = str(device)
        examples = [generator_state(where), *_examples(kernel, device)]
        return around(internals.inductor(explicit(kernel, where), examples), where)
    return internals.inductor(kernel, _examples(kernel, device))


def _inductor_kernel(kernel: fx.GraphModule, eager: EagerKernels, device: torch.device) -> Built:
    try:
        call = compile_kernel(kernel, device)
        compiled_before(kernel, record=True)
        inputs = _examples(kernel, device)
        with capture.rng_preserved(str(device)), torch.no_grad():
            wrong = _unlike_declared(kernel, inputs, call(*inputs))
        measured = measure(kernel, call, device)
        if not wrong and measured.kept > 0:
            wrong = f"it keeps {measured.kept} bytes after its results are gone"
        if wrong:
            return replace(eager(kernel), why_eager=wrong)
        return Built(call, measured.workspace)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return replace(eager(kernel), why_eager=f"Inductor raised {type(error).__name__}: {first}")


def _unlike_declared(kernel: fx.GraphModule, inputs: list[torch.Tensor], results: Any) -> str:
    """Why results may not stand for the eager ones: another layout, more bytes, or memory of another tensor."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
    for node, tensor in zip(body_outputs(kernel), results, strict=True):
        val = node.meta["val"]
        if (tensor.dtype, tensor.shape, tensor.stride()) != (val.dtype, val.shape, val.stride()):
            return f"its result {node.name} has strides {tuple(tensor.stride())}, expected {tuple(val.stride())}"
        if tensor.untyped_storage().nbytes() > aligned(storage_nbytes(val)):
            return f"its result {node.name} holds {tensor.untyped_storage().nbytes()} bytes, expected {storage_nbytes(val)}"
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.numel() and pointer in taken:
            return f"its result {node.name} shares memory with another tensor"
        taken.add(pointer)
    return ""


def _examples(kernel: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
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
