"""A kernel becomes a CUDA graph where that is faster and right, on graphs that replay by calling again."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mtcompile
from mtcompile.kernels import cuda_graphs
from mtcompile.kernels.cuda_graphs import graphed
from mtcompile.kernels.eager import EagerKernels
from mtcompile.passes.step_graph import is_random, placeholders
from tests.helpers.models import make
from tests.helpers.tracing import traced_case
from tests.helpers.training import adamw, same, train

pytestmark = pytest.mark.slow  # it compiles many models

CPU = torch.device("cpu")


def test_all_captures_are_on_one_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    def graph(graph: Any, stream: Any, capture_error_mode: str) -> contextlib.AbstractContextManager[None]:
        streams.append(stream)
        return contextlib.nullcontext()

    main = Stream()
    fakes = {"Stream": Stream, "current_stream": lambda: main, "graph": graph, "CUDAGraph": Mock}
    for name, fake in {**fakes, "device": contextlib.nullcontext, "stream": contextlib.nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = cuda_graphs.Graphs(torch.device("cuda", 0))
    for _ in range(3):
        graphs.capture(lambda: [torch.zeros(1)])
    assert len(streams) == 3 and len({id(stream) for stream in streams}) == 1 and streams[0] is not main


class Replaying:
    """A "graph" writes its results where the first run put them, and is ``faster`` than calling."""

    def __init__(self, faster: bool = True, wrong: bool = False) -> None:
        self.faster, self.wrong, self.replays, self.replaying = faster, wrong, 0, False

    def capture(self, call: Callable[[], Sequence[torch.Tensor]]) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        results = [tensor.clone() for tensor in call()]

        def again() -> None:
            self.replays += 1
            if not self.faster:
                time.sleep(0.02)
            self.replaying = True
            for result, new in zip(results, call(), strict=True):
                result.copy_(new)
            self.replaying = False
            if self.wrong and results:
                results[0].add_(1)

        return again, results

    def synchronize(self) -> None: ...


def slow(call: Any, graphs: Replaying) -> Any:
    """Takes long to issue, which a graph saves."""

    def run(*args: torch.Tensor) -> Any:
        if not graphs.replaying:
            time.sleep(0.01)
        return call(*args)

    return run


def test_a_graph_is_used_where_it_is_faster_and_right() -> None:
    eager = EagerKernels(CPU)
    for kernel in traced_case("llama").step.children():
        call, examples = eager(kernel).call, eager.examples(kernel)
        late, wrong, graphs = Replaying(faster=False), Replaying(wrong=True), Replaying()
        assert graphed(kernel, call, 0, late, examples) is None
        assert graphed(kernel, slow(call, wrong), 0, wrong, examples) is None
        run, held = graphed(kernel, slow(call, graphs), 64, graphs, examples)
        inputs = [t.uniform_() if t.is_floating_point() else t for t in examples()]
        results = run(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(results, call(*inputs), strict=True))
        again = run(*inputs)  # which leaves earlier results as they are
        assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(results, again, strict=True))
        assert held >= 64 + sum(n.meta["val"].untyped_storage().nbytes() for n in placeholders(kernel.graph))


def test_random_kernels_stay_as_they_are() -> None:
    eager = EagerKernels(CPU)
    random = [k for k in traced_case("gpt2").step.children() if any(is_random(n) for n in k.graph.nodes)]
    assert random
    for kernel in random:
        assert graphed(kernel, kernel.forward, 0, Replaying(), eager.examples(kernel)) is None


def with_graphs(compiled: Any, graphs: Replaying | None) -> None:
    session = compiled._mt_model.session
    session.toolchain = replace(session.toolchain, graphs=graphs)


def test_what_graphs_hold_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = make("tied")
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1e9)
    peaks = []
    for graphs in (None, Replaying()):
        copied = copy.deepcopy(model)
        optimizer = adamw(copied.parameters())
        compiled: Any = mtcompile.compile(copied, memory="64MiB", optimizer=optimizer, device="cpu")
        with_graphs(compiled, graphs)
        assert same(expected, train(compiled, optimizer, data))
        peaks.append(compiled.memory_report()["planned_peak_device_bytes"])
        tight = peaks[0] + 64
    assert peaks[1] > peaks[0] and graphs is not None and graphs.replays
    compiled = mtcompile.compile(copy.deepcopy(model), memory=tight, device="cpu")
    replaying = Replaying()
    with_graphs(compiled, replaying)
    compiled(**data).backward()
    assert replaying.replays and compiled.memory_report()["planned_peak_device_bytes"] <= tight
