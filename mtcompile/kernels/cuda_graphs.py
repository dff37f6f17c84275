"""Kernels as CUDA graphs, for kernels whose operations take longer to issue one by one than to run.

A graph reads and writes its own memory: inputs are copied in, results are copied out, and the memory is held as long as the
kernel. So only small kernels can gain, and each is measured first. Off unless MT_CUDA_GRAPHS=1; not yet measured on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.kernels.measure import copied
from mtcompile.passes.generators import replay, save_rng
from mtcompile.passes.step_graph import body_outputs, is_random, placeholders, storage_nbytes
from mtcompile.runtime.schedule import aligned

Call = Callable[..., Sequence[torch.Tensor]]
_LARGEST = 64 * 2**20  # bytes of inputs and results; copying more costs more than issuing a few operations
_WORTH = 0.9  # a graph must take at most this share of the time without it
_RUNS = 7


class Graphs:
    """The part of torch.cuda's graphs that this module uses, apart, so that the rest can be tested without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: Any = None  # one for all: the allocator keeps memory of each stream apart, for good

    def capture(self, call: Callable[[], Sequence[torch.Tensor]]) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Records ``call``. Returns a function that replays it, and the results that each replay writes."""
        with torch.cuda.device(self.device):
            side = self._side = self._side or torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate on their first run, which a graph cannot record
                call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                results = call()
        return graph.replay, results

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def graphed(kernel: fx.GraphModule, call: Call, workspace: int, graphs: Graphs, examples: Callable[[], Any]) -> Any:
    """Returns (the kernel as a graph, the bytes it holds) if it gives the same bits and is measured to be faster; else None.
    ``examples``: makes inputs with the kernel's layouts and valid contents."""
    nodes = kernel.graph.nodes
    nbytes = sum(aligned(storage_nbytes(n.meta["val"])) for n in (*placeholders(kernel.graph), *body_outputs(kernel)))
    if nbytes > _LARGEST or any(is_random(n) or n.target in (save_rng, replay) for n in nodes):
        return None  # a graph's own generator would draw other numbers
    inputs = examples()
    with torch.no_grad():
        rerun, results = graphs.capture(lambda: call(*inputs))

        def run(*args: torch.Tensor) -> list[torch.Tensor]:
            for static, value in zip(inputs, args, strict=True):
                static.copy_(value)
            rerun()
            return [copied(result) for result in results]

        sample = [_varied(tensor) for tensor in examples()]
        same = all(torch.equal(a, b) for a, b in zip(call(*sample), run(*sample), strict=True))
        if not same or _seconds(graphs, lambda: run(*sample)) > _WORTH * _seconds(graphs, lambda: call(*sample)):
            return None
    return run, nbytes + workspace


def _varied(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a floating-point tensor with values that reveal a mistake. Integers stay as they are, valid as indices."""
    return tensor.uniform_(0.5, 1.5) if tensor.is_floating_point() else tensor


def _seconds(graphs: Graphs, run: Callable[[], Any]) -> float:
    times = []
    for _ in range(_RUNS):
        graphs.synchronize()
        started = time.perf_counter()
        run()
        graphs.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
