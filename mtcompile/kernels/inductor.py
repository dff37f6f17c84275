"""Kernels compiled by Inductor, each distinct one once. A kernel stays eager if its results cannot replace the eager ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.errors import ends_device
from mtcompile.kernels.compile_pool import compile_ahead, record_compiled
from mtcompile.kernels.eager import Built, EagerKernels, in_own_storages
from mtcompile.kernels.measure import measure, shared_positions
from mtcompile.kernels.random import with_explicit_state, with_generator
from mtcompile.kernels.zeros.run import Call, example_inputs, looks_up_values
from mtcompile.passes.generators import generator_state, replay, rng_preserved, save_rng
from mtcompile.passes.step_graph import body_outputs, is_random, storage_nbytes
from mtcompile.runtime.schedule import aligned


class InductorKernels:
    """Compiles kernels by Inductor, once per distinct body and thread count; some stay eager. ``device``: where they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[tuple[str, int], Built] = {}

    def build(self, kernels: Iterable[fx.GraphModule], eager: EagerKernels) -> dict[str, Built]:
        """Builds every kernel, and returns them by name. Prints to stderr, once per kernel, why it stays eager."""
        from rich.console import Console
        from rich.progress import track

        threads = torch.get_num_threads()
        kernels = list(kernels)
        new = [k for k in kernels if (k.meta["key"], threads) not in self.known]
        console = Console(stderr=True)
        quiet = not console.is_terminal or len(new) < 2
        # Worker processes serve the C++ compiler only. For a GPU, Inductor has its own, and each of ours would take GPU memory.
        ahead = compile_ahead(new) if self.device.type == "cpu" else iter(())
        for _ in track(ahead, "compiling kernels", len(new), console=console, transient=True, disable=quiet):
            pass
        for kernel in track(new, "loading kernels", console=console, transient=True, disable=quiet):
            built = _inductor_kernel(kernel, eager, self.device)
            if built.why_eager:
                print(f"mtcompile: kernel {kernel.meta['name']} stays eager: {built.why_eager}", file=sys.stderr)
            self.known[kernel.meta["key"], threads] = built
        return {str(kernel.meta["name"]): self.known[kernel.meta["key"], threads] for kernel in kernels}


def compile_kernel(kernel: fx.GraphModule, device: torch.device, strict: bool = False) -> Call:
    """Compiles a kernel by Inductor, or loads it from Inductor's disk cache. ``strict``: as ``torch_private.inductor``."""
    random = any(is_random(n) or n.target in (save_rng, replay) for n in kernel.graph.nodes)
    if random:
        examples = [generator_state(str(device)), *example_inputs(kernel, device)]
        compiled = torch_private.inductor(with_explicit_state(kernel, str(device)), examples, strict)
        return with_generator(compiled, str(device))
    return torch_private.inductor(kernel, example_inputs(kernel, device), strict)


def _inductor_kernel(kernel: fx.GraphModule, eager: EagerKernels, device: torch.device) -> Built:
    if device.type != "cpu" and looks_up_values(kernel):
        return replace(eager(kernel), why_eager="it computes indices, which made-up inputs may put out of range")
    try:
        call = in_own_storages(kernel, compile_kernel(kernel, device))
        record_compiled(kernel)
        difference = difference_of_run(kernel, call, device)
        measured = measure(kernel, call, device)
        if not difference and measured.unreleased > 0:
            difference = f"it keeps {measured.unreleased} bytes after its results are gone"
        if difference:
            return replace(eager(kernel), why_eager=difference)
        return Built(call, measured.workspace, note=measured.note)
    except Exception as error:
        if ends_device(error):
            raise
        first = next(iter(str(error).splitlines()), "")
        return replace(eager(kernel), why_eager=f"Inductor raised {type(error).__name__}: {first}")


def difference_of_run(kernel: fx.GraphModule, call: Call, device: torch.device) -> str:
    """Says what ``difference_in_memory`` does of one run. Its inputs are gone then: two sets of operands may have no room."""
    inputs = example_inputs(kernel, device)
    with rng_preserved(str(device)), torch.no_grad():
        return difference_in_memory(kernel, inputs, call(*inputs))


def difference_in_memory(kernel: fx.GraphModule, inputs: list[torch.Tensor], results: Any) -> str:
    """Says why results cannot replace the eager ones: another layout, more bytes, or shared memory; "" if they can."""
    shared = shared_positions(inputs, results)
    for position, (node, tensor) in enumerate(zip(body_outputs(kernel), results, strict=True)):
        val = node.meta["val"]
        if (tensor.dtype, tensor.shape, tensor.stride()) != (val.dtype, val.shape, val.stride()):
            return f"its result {node.name} has strides {tuple(tensor.stride())}, expected {tuple(val.stride())}"
        if tensor.untyped_storage().nbytes() > aligned(storage_nbytes(val)):
            return f"its result {node.name} holds {tensor.untyped_storage().nbytes()} bytes, expected {storage_nbytes(val)}"
        if position in shared:
            return f"its result {node.name} shares memory with another tensor"
    return ""
