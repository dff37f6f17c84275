"""Parameters that are fetched while a forward runs arrive before they are read, and never over what is still read."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtcompile.runtime.devices.cuda import Streams
from mtcompile.runtime.devices.fetching import CpuFetcher, CudaFetcher
from tests.helpers.fake_cuda import FakeCuda

SOURCES = [torch.full((3, 5), float(i)).t() for i in range(8)]


def read_in_turns(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Reads each source from the device, the next two on their way, in memory for three that is used again and again."""
    fetcher = CudaFetcher(SimpleNamespace(api=cuda, streams=Streams(cuda), where=torch.device("cpu")))
    memory = itertools.cycle([torch.empty(3, 5).t() for _ in range(3)])
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **options: next(memory))
    waiting: list[Any] = [fetcher.fetch(source) for source in SOURCES[:2]]
    results = [torch.full((5, 3), -1.0) for _ in SOURCES]
    for index, result in enumerate(results):
        waiting += [fetcher.fetch(source) for source in SOURCES[index + 2 : index + 3]]
        target, ticket = waiting.pop(0)
        fetcher.await_copy(ticket)
        cuda.launch(lambda result=result, target=target: result.copy_(target))
    fetcher.close()
    cuda.synchronize()
    return results


@pytest.mark.parametrize("eager", [0.0, 0.3, 0.9])
def test_a_gpu_reads_what_has_arrived_in_memory_that_nobody_reads(eager: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        with monkeypatch.context() as patched:
            results = read_in_turns(FakeCuda(seed, eager), patched)
        assert all(map(torch.equal, results, SOURCES)), seed


@pytest.mark.parametrize("side", ["stream1", "stream2", "main"])
def test_without_a_wait_some_order_is_wrong(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above can fail. One of the copying streams is that of fetches."""
    wrong = 0
    for seed in range(20):
        cuda = FakeCuda(seed, 0.3)
        wait = cuda.wait
        cuda.wait = lambda stream, event, wait=wait: None if stream.name == side else wait(stream, event)  # type: ignore[method-assign]
        with monkeypatch.context() as patched:
            wrong += not all(map(torch.equal, read_in_turns(cuda, patched), SOURCES))
    assert bool(wrong) == (side != "stream2")


def test_a_throttled_link_takes_its_time_and_keeps_strides() -> None:
    fetcher = CpuFetcher(gbps=1e-3)  # 60 bytes take 60 µs
    began = time.perf_counter()
    copies = [fetcher.fetch(source) for source in SOURCES]
    for (target, ticket), source in zip(copies, SOURCES, strict=True):
        fetcher.await_copy(ticket)
        assert torch.equal(target, source) and target.stride() == source.stride()
    assert time.perf_counter() - began >= 60e-6 * len(SOURCES)
    fetcher.close()


def test_what_is_closed_holds_no_tensor_even_while_its_thread_has_not_ended() -> None:
    fetcher = CpuFetcher(gbps=1e-5)  # the first copy takes 6 ms: the others have not begun
    copies = [fetcher.fetch(source) for source in SOURCES]
    fetcher.close()
    assert all(ticket.tensors is None for _, ticket in copies)
