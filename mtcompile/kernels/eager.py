"""Eager kernels: run a region's body operation by operation; the bytes that it needs are measured once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from mtcompile.cached.remembered import Remembered
from mtcompile.kernels.bindings import with_bindings
from mtcompile.kernels.measure import (
    Alone,
    Measured,
    alike,
    allocating,
    composed,
    copied,
    measure,
    measured_alone,
    setting_key,
)
from mtcompile.kernels.zeros.run import Call, example_inputs, on_zeros
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.storages import reads_storage
from mtcompile.passes.generators import replay, save_rng
from mtcompile.passes.lazy_graph import forward_of
from mtcompile.runtime.devices.arena import own_storage


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel that can be called. ``workspace``: the bytes it needs beside its operands and results. ``why_eager``: why
    Inductor did not compile it although it was asked to. ``note``: how it was measured, if not in one piece.
    ``elementwise_nbytes``: what its elementwise operations move one by one, where chains were looked for; ``in_chains_nbytes``:
    those of them that chains do."""

    call: Call
    workspace: int
    why_eager: str = ""
    note: str = ""
    elementwise_nbytes: int = 0
    in_chains_nbytes: int = 0


class EagerKernels:
    """Makes kernels that run a body operation by operation and drop each intermediate after its last use. Measures each kernel
    that is made once in a process, per thread count and setting; of those that are only planned with, most have operations in
    common: it measures each of these once. ``device``: where they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[tuple[str, int], Built] = {}
        self.alone: defaultdict[int, dict[str, Alone]] = defaultdict(dict)  # by thread count
        self.by_operations: dict[tuple[str, int], int | None] = {}
        self.measures_each = False  # before it is planned with

    def __call__(self, kernel: fx.GraphModule) -> Built:
        """Returns a kernel, measured. Its workspace is no less than what it was planned with."""
        key = _key(kernel)
        if key not in self.known:
            built = _eager_kernel(kernel, self.device)
            self.known[key] = replace(built, workspace=max(built.workspace, self._by_operations(kernel) or 0))
        return self.known[key]

    def workspace(self, kernel: fx.GraphModule) -> int:
        """Returns the bytes that a kernel is planned with: by its operations as far as these tell it, or else measured."""
        if self.measures_each or _key(kernel) in self.known:
            return self.measured(kernel)
        needed = self._by_operations(kernel)
        return self.measured(kernel) if needed is None else needed

    def measured(self, kernel: fx.GraphModule) -> int:
        """Returns the bytes that a kernel runs with."""
        return self(kernel).workspace

    def _by_operations(self, kernel: fx.GraphModule) -> int | None:
        """Returns a kernel's bytes by its operations; None if they do not tell these."""
        key = _key(kernel)
        if key not in self.by_operations:
            self.by_operations[key] = self._composed(kernel, self.alone[key[1]])
        return self.by_operations[key]

    def _composed(self, kernel: fx.GraphModule, known: dict[str, Alone]) -> int | None:
        if any(node.target in (save_rng, replay) for node in kernel.graph.nodes):  # a generator's state is not counted there
            return None
        alone = {node: measured_alone(node, self.device, known) for node in allocating(kernel)}
        return composed(kernel, alone) if all(each.as_declared for each in alone.values()) else None

    def about(self, kernel: fx.GraphModule, threads: int) -> int:
        """Returns the bytes that a kernel needs as far as that was measured, or else by shapes: measures nothing."""
        if (built := self.known.get((kernel.meta["key"], threads))) is not None:
            return built.workspace
        known = self.alone.get(threads, {})
        alone = {node: known.get(alike(node), Alone(0)) for node in allocating(kernel)}
        return max(workspace_nbytes(kernel), composed(kernel, alone))

    def examples(self, kernel: fx.GraphModule) -> Callable[[], list[torch.Tensor]]:
        """Returns a function that makes inputs with the kernel's layouts."""
        return lambda: example_inputs(kernel, self.device)


_kernels = Remembered[Measured](10_000)


def _key(kernel: fx.GraphModule) -> tuple[str, int]:
    """Returns what a kernel's bytes depend on: its body, and the threads that run it."""
    return kernel.meta["key"], torch.get_num_threads()


def in_own_storages(kernel: fx.GraphModule, call: Call) -> Call:
    """Returns ``call`` so that it sees each operand in a storage of its own, in place of the arena that the operand may be part
    of, if an operation of the kernel reads storages."""
    if not any(reads_storage(node) for node in kernel.graph.nodes):
        return call
    return lambda *args: call(*map(own_storage, args))


def _eager_kernel(kernel: fx.GraphModule, device: torch.device) -> Built:
    """Returns a kernel, measured once in a process."""
    key = setting_key(device, kernel.graph.nodes, kernel.meta["key"])
    if (measured := _kernels.get(key)) is None:
        measured = _measured(kernel, kernel, device)
        _kernels.put(None if measured.estimated else key, measured)
    return _built(kernel, kernel, measured)


def measured_kernel(kernel: fx.GraphModule, body: fx.GraphModule, device: torch.device) -> Built:
    """Returns a kernel that runs ``body``, which computes what its own body does, measured."""
    return _built(kernel, body, _measured(kernel, body, device))


def _measured(kernel: fx.GraphModule, body: fx.GraphModule, device: torch.device) -> Measured:
    zeros = in_own_storages(kernel, on_zeros(body, device))
    measured = measure(kernel, zeros, device)
    if measured.foreign:
        with_copies = measure(kernel, _copying(zeros, measured.foreign), device)
        return replace(measured, workspace=with_copies.workspace, note="", estimated=with_copies.estimated)
    return measured


def _built(kernel: fx.GraphModule, body: fx.GraphModule, measured: Measured) -> Built:
    call = in_own_storages(kernel, forward_of(with_bindings(body)))
    return Built(_copying(call, measured.foreign) if measured.foreign else call, measured.workspace, note=measured.note)


def _copying(call: Call, positions: Sequence[int]) -> Call:
    """Returns ``call`` with copies of some results: some operations return a view of a larger storage, or of an operand without
    saying so."""

    def copying(*args: torch.Tensor) -> list[torch.Tensor]:
        results = list(call(*args))
        for position in positions:
            results[position] = copied(results[position])
        return results

    return copying
