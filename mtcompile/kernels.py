"""Region -> callable, and the bytes a kernel needs, measured by running it once on inputs of its own shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mtcompile.capture import AllocatorPeak
from mtcompile.passes.memory import output_nbytes, workspace_nbytes
from mtcompile.passes.step_graph import placeholders
from mtcompile.runtime.schedule import aligned


def eager_kernel(kernel: fx.GraphModule) -> Callable[..., Any]:
    """The body run operation by operation; each intermediate is dropped after its last use."""
    return kernel.forward


class Workspaces:
    """Measured workspace per kernel and thread count; a kernel is measured at most once."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], int] = {}

    def __call__(self, kernel: fx.GraphModule) -> int:
        key = (kernel.meta["key"], torch.get_num_threads())
        if key not in self.known:
            self.known[key] = measure_workspace(kernel)
        return self.known[key]


def measure_workspace(kernel: fx.GraphModule) -> int:
    """Bytes of device memory a kernel allocates beside its results: the allocator's own events around one run.

    By shapes alone where no measurement is possible (another profiler is active).
    """
    inputs = [_example(node.meta["val"]) for node in placeholders(kernel.graph)]
    state = torch.get_rng_state()
    try:
        with torch.no_grad(), AllocatorPeak() as peak:
            results = kernel(*inputs)
    finally:
        torch.set_rng_state(state)
    del results
    if peak.nbytes is None:
        return workspace_nbytes(kernel)
    return aligned(max(0, peak.nbytes - output_nbytes(kernel)))


def _example(val: torch.Tensor) -> torch.Tensor:
    """Zeros of that layout (valid as indices); a generator's state where the shape says it is one."""
    state = torch.get_rng_state()
    if val.dtype == torch.uint8 and tuple(val.shape) == tuple(state.shape):
        return state
    return torch.empty_strided(tuple(val.shape), tuple(val.stride()), dtype=val.dtype).zero_()
