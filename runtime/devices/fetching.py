"""Fetching: tensors of the host copied to a device one after the other, behind the thread that asks for them."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from mtcompile.runtime.devices.arena import span_nbytes
from mtcompile.runtime.executor import wait_until


class Fetcher(Protocol):
    """Copies tensors in the order in which they are asked for."""

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns a tensor of the device with the strides of ``source``, and a ticket for its bytes, which are on their way."""

    def await_copy(self, ticket: Any) -> None:
        """Makes everything that computes from now on start after a copy."""

    def close(self) -> None:
        """Drops the copies that have not begun, and waits for the others."""


class CpuFetcher:
    """Copies in a thread. ``gbps``: the GB/s that it keeps to, if given, as the link of a slower machine would."""

    def __init__(self, gbps: float | None) -> None:
        self._us_per_byte = 0.0 if gbps is None else 1e-3 / gbps
        self._thread = ThreadPoolExecutor(1, "mtcompile fetches")
        self._copying: dict[Future[None], tuple[torch.Tensor, torch.Tensor]] = {}  # holds what the thread reads and writes
        self._about_to_copy: tuple[torch.Tensor, torch.Tensor] | None = None

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Future[None]]:
        target = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cpu")
        self._about_to_copy = target, source  # an interrupt may come before the next line has ended
        ticket = self._thread.submit(self._copy, target.data_ptr(), source.data_ptr(), span_nbytes(source))
        self._copying[ticket] = target, source
        self._about_to_copy = None
        return target, ticket

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        began = time.perf_counter_ns()
        ctypes.memmove(target, source, nbytes)
        if self._us_per_byte:
            wait_until(began + round(nbytes * self._us_per_byte * 1e3))

    def await_copy(self, ticket: Future[None]) -> None:
        ticket.result()
        self._copying.pop(ticket, None)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copying.clear()
        self._about_to_copy = None


class CudaFetcher:
    """Copies on a stream of its own. *Not yet measured.*"""

    def __init__(self, device: Any) -> None:
        self._device, self._api = device, device.api
        self._stream = device.streams.copying["h2d"]

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        target = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=self._device.where)
        allocated, arrived = self._api.new_event(), self._api.new_event()
        self._api.record(allocated, self._api.current_stream())  # what was there before may still be read
        self._api.wait(self._stream, allocated)
        with self._api.use(self._stream), torch.no_grad():
            self._api.copy(target, source)
        self._api.record(arrived, self._stream)
        return target, arrived

    def await_copy(self, ticket: Any) -> None:
        self._api.wait(self._api.current_stream(), ticket)

    def close(self) -> None:
        """Lets the computing stream, to which the memory of all copies returns, wait for the last one."""
        last = self._api.new_event()
        self._api.record(last, self._stream)
        self._api.wait(self._api.current_stream(), last)
