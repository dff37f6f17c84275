"""Eager kernels: run a region's body operation by operation; the bytes that it needs are measured once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from mtcompile.kernels.measure import Call, copied, example_inputs, measure, on_zeros
from mtcompile.passes.analysis.storages import reads_storage
from mtcompile.passes.lazy_graph import forward_of
from mtcompile.runtime.devices.arena import own_storage


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel that can be called. ``workspace``: the bytes it needs beside its operands and results. ``why_eager``: why
    Inductor did not compile it although it was asked to. ``note``: how it was measured, if not in one piece."""

    call: Call
    workspace: int
    why_eager: str = ""
    note: str = ""


class EagerKernels:
    """Makes kernels that run a body operation by operation and drop each intermediate after its last use. Measures each kernel
    once per thread count. ``device``: where they run."""

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
        """Returns a function that makes inputs with the kernel's layouts."""
        return lambda: example_inputs(kernel, self.device)


def in_own_storages(kernel: fx.GraphModule, call: Call) -> Call:
    """Returns ``call`` so that it sees each operand in a storage of its own, in place of the arena that the operand may be part
    of, if an operation of the kernel reads storages."""
    if not any(reads_storage(node) for node in kernel.graph.nodes):
        return call
    return lambda *args: call(*map(own_storage, args))


def _eager_kernel(kernel: fx.GraphModule, device: torch.device) -> Built:
    zeros = in_own_storages(kernel, on_zeros(kernel, device))
    call = in_own_storages(kernel, forward_of(kernel))
    measured = measure(kernel, zeros, device)
    if not measured.larger:
        return Built(call, measured.workspace, note=measured.note)
    return Built(_copying(call, measured.larger), measure(kernel, _copying(zeros, measured.larger), device).workspace)


def _copying(call: Call, positions: Sequence[int]) -> Call:
    """Returns ``call`` with copies of the results that hold more bytes than declared: some operations return a view of a larger
    storage."""

    def copying(*args: torch.Tensor) -> list[torch.Tensor]:
        results = list(call(*args))
        for position in positions:
            results[position] = copied(results[position])
        return results

    return copying
