"""The CUDA device: a stream per queue, an event where a dependency crosses queues, and nothing else.

The executor's threads issue: the caller's thread runs kernels on the stream that was current there, each copying queue
has a thread and a stream of its own. No thread waits for the device; at the end of a phase the compute stream waits for
the copying ones, and the host only for bytes that it may touch next (``Fence.end``).

*Not yet measured*: this file is tested through a recording of the calls it makes (tests/fake_cuda.py), which runs the
streams in every order that their events allow.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from mtcompile.runtime.arena import span_nbytes
from mtcompile.runtime.cpu import POISON, CpuMemory
from mtcompile.runtime.schedule import ALIGNMENT, Queue

_COPYING: tuple[Queue, ...] = ("h2d", "d2h")


class Api(Protocol):
    """What is used of CUDA. Streams and events are the implementation's own."""

    def current_stream(self) -> Any: ...

    def new_stream(self) -> Any: ...

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make ``stream`` this thread's current one."""

    def new_event(self) -> Any: ...

    def record(self, event: Any, stream: Any) -> None: ...

    def wait(self, stream: Any, event: Any) -> None:
        """What ``stream`` is given from now on starts after ``event``."""

    def block(self, event: Any) -> None:
        """The calling thread waits for ``event``."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Of bytes, on the current stream, without waiting."""

    def fill(self, target: torch.Tensor, value: int) -> None:
        """Of bytes, on the current stream, without waiting."""


class Torch:
    """``Api`` by torch.cuda, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def new_event(self) -> Any:
        return torch.cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def block(self, event: Any) -> None:
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fill(self, target: torch.Tensor, value: int) -> None:
        target.fill_(value)


class Streams:
    """The copying queues' streams, kept for the life of a model."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.copying = {queue: api.new_stream() for queue in _COPYING}


class Fence:
    """The order of one phase on the device. ``wait`` and ``signal`` are called by the thread that issues the queue, and a
    wait only after its signal: an event that nothing has recorded would hold nothing back. ``visible``: the queues whose
    bytes at home the caller may read (gradients) or change (weights) as soon as the phase returns."""

    def __init__(self, streams: Streams, visible: Iterable[Queue] = _COPYING) -> None:
        self.api, self.visible = streams.api, frozenset(visible)
        self.streams = {"compute": streams.api.current_stream(), **streams.copying}
        self.events: dict[int, Any] = {}

    def begin(self, queues: Iterable[Queue]) -> None:
        """Copies come after everything the caller has put on its stream: they write where earlier phases have read."""
        if others := [queue for queue in queues if queue in _COPYING]:
            start = self._mark("compute")
            for queue in others:
                self.api.wait(self.streams[queue], start)

    def on(self, queue: Queue) -> contextlib.AbstractContextManager[Any]:
        return self.api.use(self.streams[queue]) if queue in _COPYING else contextlib.nullcontext()

    def wait(self, queue: Queue, index: int) -> None:
        self.api.wait(self.streams[queue], self.events[index])

    def signal(self, queue: Queue, index: int) -> None:
        self.events[index] = self._mark(queue)

    def end(self, queues: Iterable[Queue], failed: bool) -> None:
        """All queues drain into the compute stream; the host waits for those that are visible, or for all after an error,
        which may have come before a copy's memory was needed no more."""
        for queue in queues:
            if queue in _COPYING:
                last = self._mark(queue)
                self.api.wait(self.streams["compute"], last)
                if failed or queue in self.visible:
                    self.api.block(last)
        self.events.clear()

    def _mark(self, queue: Queue) -> Any:
        event = self.api.new_event()
        self.api.record(event, self.streams[queue])
        return event


class CudaMemory(CpuMemory):
    """The bytes of one step on a CUDA device: placed slots in arenas, pooled values from torch's caching allocator. Pooled
    values are freed on the compute queue alone, so the allocator's own order is enough for them."""

    def __init__(self, *args: Any, api: Api, staging: Mapping[Queue, Staging] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.api = api
        self.staging = staging  # where host memory could not be pinned

    def copy(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        pairs = runs_of_bytes(self._pairs(reads, writes))
        to_device = self.schedule.buffers[writes[0]].tier == "device"
        for target, source in pairs:
            if self.staging is None:
                self.api.copy(target, source)
            elif to_device:
                self.staging["h2d"].to_device(target, source)
            else:
                self.staging["d2h"].to_host(target, source)

    def _poison(self, tensor: torch.Tensor, whole: bool) -> None:
        before = tensor.storage_offset() * tensor.element_size() if whole else 0
        nbytes = tensor.untyped_storage().nbytes() if whole else span_nbytes(tensor)
        self.api.fill(bytes_of(tensor, -before, nbytes), POISON)


def bytes_of(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """``nbytes`` bytes of a tensor's storage, ``start`` bytes after its first element."""
    at = tensor.storage_offset() * tensor.element_size() + start
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), at, (nbytes,), (1,))


def runs_of_bytes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(target, source) tensors as the fewest (target, source) copies of bytes: neighbours that lie at the same distance in
    both are one, with the padding between them, so that one copy moves all parameters of a region."""
    run: tuple[torch.Tensor, torch.Tensor, int] | None = None  # the first pair, and the bytes so far
    for target, source in pairs:
        nbytes = span_nbytes(source)
        if nbytes == 0:
            continue
        if run is not None:
            apart = target.data_ptr() - run[0].data_ptr()
            together = (
                apart == source.data_ptr() - run[1].data_ptr()
                and 0 <= apart - run[2] < ALIGNMENT
                and _same_storage(target, run[0])
                and _same_storage(source, run[1])
            )
            if together:
                run = (*run[:2], apart + nbytes)
                continue
            yield bytes_of(run[0], 0, run[2]), bytes_of(run[1], 0, run[2])
        run = (target, source, nbytes)
    if run is not None:
        yield bytes_of(run[0], 0, run[2]), bytes_of(run[1], 0, run[2])


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# ----------------------------------------------------------------------------------------------------------- host memory


class Staging:
    """A ring of pinned chunks through which one queue's copies go where the memory at home is not pinned. The issuing thread
    then waits for the device as it goes round; no other does."""

    def __init__(self, api: Api, chunks: Sequence[torch.Tensor]) -> None:
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
        """Returns when all bytes are there. Each chunk is read while the next is on its way."""
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
        """(start, the chunk's part, its slot) of each piece."""
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
    """The driver refuses to pin so many bytes (a container's limit on locked memory, or WSL's on pinned memory)."""


def pinned(nbytes: int, runtime: Any = None) -> torch.Tensor:
    """``nbytes`` of page-locked host memory at exactly that size, rounded up to pages (torch's own rounds to powers of
    two). ``runtime``: torch.cuda.cudart(). Raises NotPinned; nothing is held then."""
    runtime = runtime or torch.cuda.cudart()
    memory = mmap.mmap(-1, max(nbytes, 1))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), len(memory), 0))
    if code:
        raise NotPinned(f"cudaHostRegister refused {nbytes} bytes with error {code}")
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor[:nbytes]
