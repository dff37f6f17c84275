"""Fetching: tensors of the host copied to a device one after the other, behind the thread that asks for them."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mtcompile.runtime.devices.arena import span_nbytes
from mtcompile.runtime.executor import wait_until
from mtcompile.runtime.workers import Gate


class Fetcher(Protocol):
    """Copies tensors in the order in which they are asked for."""

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns a tensor of the device with the strides of ``source``, and a ticket for its bytes, which are on their way."""

    def await_copy(self, ticket: Any) -> None:
        """Makes everything that computes from now on start after a copy."""

    def close(self) -> None:
        """Drops the copies that have not begun, and waits for the others."""


@dataclass(slots=True, eq=False)
class _Copying:
    """A copy that was asked for. ``tensors``: what it writes and reads, held until somebody has waited for it."""

    target: int
    source: int
    nbytes: int
    tensors: tuple[torch.Tensor, torch.Tensor] | None
    done: Gate = field(default_factory=Gate)


class CpuFetcher:
    """Copies in a thread. ``gbps``: the GB/s that it keeps to, if given, as the link of a slower machine would.

    An interrupt may come at any line. Nothing is copied once ``close`` has begun to hold ``_busy``, so that memory may go then.
    """

    def __init__(self, gbps: float | None) -> None:
        self._us_per_byte = 0.0 if gbps is None else 1e-3 / gbps
        self._queue: queue.SimpleQueue[_Copying | None] = queue.SimpleQueue()
        self._asked: list[_Copying] = []
        self._busy, self._closed = threading.Lock(), False
        self._thread: threading.Thread | None = None

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, _Copying]:
        target = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cpu")
        copying = _Copying(target.data_ptr(), source.data_ptr(), span_nbytes(source), (target, source))
        self._asked.append(copying)
        self._queue.put(copying)
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy_all, daemon=True, name="mtcompile fetches")
            self._thread.start()
        return target, copying

    def _copy_all(self) -> None:
        while (copying := self._queue.get()) is not None:
            with self._busy:
                if self._closed:
                    return
                began = time.perf_counter_ns()
                ctypes.memmove(copying.target, copying.source, copying.nbytes)
                if self._us_per_byte:
                    wait_until(began + round(copying.nbytes * self._us_per_byte * 1e3))
            copying.done.open()

    def await_copy(self, ticket: _Copying) -> None:
        ticket.done.wait()
        ticket.tensors = None

    def close(self) -> None:
        self._closed = True
        with self._busy:
            for copying in self._asked:  # an interrupted start or join leaves a thread, which holds them until it has its turn
                copying.tensors = None
            self._asked.clear()
        self._queue.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()


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
