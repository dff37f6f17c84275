"""Region -> callable, eager or compiled by Inductor, and the bytes a kernel needs, measured by running it once on inputs
of its own shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mtcompile import capture
from mtcompile.compile_ahead import compile_ahead, compiled_before
from mtcompile.passes.memory import output_nbytes, workspace_nbytes
from mtcompile.passes.step_graph import body_outputs, is_random, iter_tensors, placeholders, replay, save_rng, storage_nbytes
from mtcompile.randomness import around, explicit
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
    count, at most once."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], Built] = {}

    def __call__(self, kernel: fx.GraphModule) -> Built:
        key = (kernel.meta["key"], torch.get_num_threads())
        if key not in self.known:
            self.known[key] = _eager_kernel(kernel)
        return self.known[key]

    def workspace(self, kernel: fx.GraphModule) -> int:
        return self(kernel).workspace


def _eager_kernel(kernel: fx.GraphModule) -> Built:
    workspace, larger = measure(kernel, kernel.forward)
    if not larger:
        return Built(kernel.forward, workspace)

    def call(*args: torch.Tensor) -> list[torch.Tensor]:
        """With results of the bytes that were declared: some operations return the start of a larger storage."""
        made = list(kernel.forward(*args))
        for position in larger:
            made[position] = torch.empty_strided(
                made[position].shape, made[position].stride(), dtype=made[position].dtype
            ).copy_(made[position])
        return made

    return Built(call, measure(kernel, call)[0])


def measure(kernel: fx.GraphModule, call: Call) -> tuple[int, tuple[int, ...]]:
    """Bytes of device memory a kernel allocates beside its results, from the allocator's own events around one run (by
    shapes alone where another profiler is active); and which results hold more bytes than declared."""
    inputs = _examples(kernel)
    with capture.rng_preserved(), torch.no_grad(), capture.AllocatorPeak() as peak:
        results = call(*inputs)
    declared = [aligned(storage_nbytes(node.meta["val"])) for node in body_outputs(kernel)]
    held = [tensor.untyped_storage().nbytes() for tensor in results]
    del results
    larger = tuple(i for i, (one, other) in enumerate(zip(held, declared, strict=True)) if one > other)
    if peak.nbytes is None:
        return workspace_nbytes(kernel), larger
    return aligned(max(0, peak.nbytes - output_nbytes(kernel))) + _by_values(kernel), larger


def _by_values(kernel: fx.GraphModule) -> int:
    """Room for operations whose own buffers depend on the values they are given, which the measurement's are not: as many
    bytes as their operands and results have."""
    nodes = [n for n in kernel.graph.nodes if "_embedding_bag" in str(n.target)]
    return sum(aligned(storage_nbytes(v)) for n in nodes for near in (n, *n.all_input_nodes) for v in iter_tensors(near))


class InductorKernels:
    """Kernels compiled by Inductor, one per distinct body and thread count; eager where it cannot."""

    def __init__(self) -> None:
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
        for _ in track(compile_ahead(new), "compiling kernels", len(new), console=console, transient=True, disable=quiet):
            pass
        for kernel in track(new, "loading kernels", console=console, transient=True, disable=quiet):
            built = _inductor_kernel(kernel, eager)
            if built.why_eager:
                print(f"mtcompile: kernel {kernel.meta['name']} stays eager: {built.why_eager}", file=sys.stderr)
            self.known[kernel.meta["key"], threads] = built
        return {str(kernel.meta["name"]): self.known[kernel.meta["key"], threads] for kernel in kernels}


def compile_kernel(kernel: fx.GraphModule) -> Call:
    """By Inductor, from its disk cache where it has been there."""
    random = any(is_random(n) or n.target in (save_rng, replay) for n in kernel.graph.nodes)
    if random:
        return around(capture.inductor(explicit(kernel), [torch.get_rng_state(), *_examples(kernel)]))
    return capture.inductor(kernel, _examples(kernel))


def _inductor_kernel(kernel: fx.GraphModule, eager: EagerKernels) -> Built:
    try:
        call = compile_kernel(kernel)
        compiled_before(kernel).touch()
        inputs = _examples(kernel)
        with capture.rng_preserved(), torch.no_grad():
            wrong = _unlike_declared(kernel, inputs, call(*inputs))
        wrong = wrong or _keeps_memory(kernel, call)
        if wrong:
            return replace(eager(kernel), why_eager=wrong)
        return Built(call, measure(kernel, call)[0])
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


def _keeps_memory(kernel: fx.GraphModule, call: Call) -> str:
    """Why a kernel's bytes cannot be promised: some are still held when its results are gone."""
    inputs = _examples(kernel)
    with capture.rng_preserved(), torch.no_grad(), capture.AllocatorPeak() as peak:
        call(*inputs)
    kept = sum(nbytes for _, nbytes in peak.events)
    return f"it keeps {kept} bytes after its results are gone" if kept > 0 else ""


def _examples(kernel: fx.GraphModule) -> list[torch.Tensor]:
    return [_example(node.meta["val"]) for node in placeholders(kernel.graph)]


def _example(val: torch.Tensor) -> torch.Tensor:
    """Zeros of that layout (valid as indices); a generator's state where the shape says it is one."""
    state = torch.get_rng_state()
    if val.dtype == torch.uint8 and tuple(val.shape) == tuple(state.shape):
        return state
    return torch.empty_strided(tuple(val.shape), tuple(val.stride()), dtype=val.dtype).zero_()
