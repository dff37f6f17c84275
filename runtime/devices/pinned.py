"""Host memory for a device's copies: page-locked at exactly the size asked for or, where the driver refuses that, ordinary
memory and a small ring of page-locked chunks."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mtcompile.runtime.devices.host_pages import ANYWHERE, Placing, prepare
from mtcompile.runtime.optim.host_kernels import library
from mtcompile.runtime.pages import pages


class Staging:
    """A ring of pinned chunks for the copies of one queue, where the memory at home is not pinned. The issuing thread waits
    for the device when it comes round to a chunk in use; no other thread does."""

    def __init__(self, api: Any, chunks: Sequence[torch.Tensor]) -> None:
        self.api, self.chunks = api, chunks
        self.used: list[Any] = [None] * len(chunks)  # the event after which each may be written again
        self.next = 0

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for start, chunk, slot in self._pieces(source.numel()):
            if self.used[slot] is not None:
                self.api.block(self.used[slot])
            chunk.copy_(source[start : start + chunk.numel()])
            self.api.copy(target[start : start + chunk.numel()], chunk)
            self.used[slot] = self._now()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to the host, and return when all bytes have arrived. Each chunk is read while the next one is in flight."""
        flying: deque[tuple[int, torch.Tensor, Any]] = deque()

        def land() -> None:
            start, chunk, event = flying.popleft()
            self.api.block(event)
            target[start : start + chunk.numel()].copy_(chunk)

        for start, chunk, _ in self._pieces(source.numel()):
            if len(flying) == len(self.chunks):
                land()
            self.api.copy(chunk, source[start : start + chunk.numel()])
            flying.append((start, chunk, self._now()))
        while flying:
            land()

    def _pieces(self, nbytes: int) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Yield (start, the chunk's part, its slot) of each piece."""
        start = 0
        while start < nbytes:
            slot, self.next = self.next, (self.next + 1) % len(self.chunks)
            chunk = self.chunks[slot][: nbytes - start]
            yield start, chunk, slot
            start += chunk.numel()

    def _now(self) -> Any:
        event = self.api.new_event()
        self.api.record(event, self.api.current_stream())
        return event


class NotPinned(RuntimeError):
    """Raised when the driver refuses to pin so many bytes (a container's limit on locked memory, or WSL's on pinned)."""


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def pinned(
    nbytes: int,
    runtime: Any,
    synchronize: Callable[[], None],
    current: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    where: Placing = ANYWHERE,
) -> torch.Tensor:
    """Returns ``nbytes`` of page-locked host memory, rounded up to pages only (torch's own rounds up to powers of two). As of
    torch's, a forked process has none of it.

    ``runtime``: torch.cuda.cudart(). ``synchronize``: waits for the device, whose copies may still be in flight when the
    last tensor is freed. ``current``: makes the device this thread's current one; the runtime would open a context on another.
    ``where``: the memory nodes that its pages should come from.
    Raises NotPinned, and then holds nothing; OSError where the system has no memory."""
    memory = pages(max(nbytes, 1))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    prepare(memory, tensor.data_ptr(), where, library(), torch.get_num_threads())
    return registered(tensor, runtime, synchronize, current)[:nbytes]


def registered(
    tensor: torch.Tensor,
    runtime: Any,
    synchronize: Callable[[], None],
    current: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> torch.Tensor:
    """Page-locks memory that the process has mapped, for as long as a tensor holds it, and returns it. Otherwise as
    ``pinned``."""
    nbytes, pointer = tensor.numel(), tensor.data_ptr()
    with current():
        code = int(runtime.cudaHostRegister(pointer, nbytes, _PORTABLE))
    if code:
        raise NotPinned(f"cudaHostRegister refused {nbytes} bytes with error {code}")

    def release() -> None:
        with current():
            synchronize()
            runtime.cudaHostUnregister(pointer)

    weakref.finalize(tensor.untyped_storage(), release).atexit = False  # the process takes its memory with it
    return tensor
