"""The CUDA device: a stream per queue, an event where a dependency crosses queues, and nothing else.

The executor's threads issue: the caller's thread runs kernels on the stream that was current there, each copying queue
has a thread and a stream of its own. No thread waits for the device; at the end of a phase the compute stream waits for
the copying ones, and the host only for bytes that its caller may touch next (``Fence.end``) and, where a phase has kernels on
the host, before these for all copies of earlier phases (``Fence.on``).

It is tested on a GPU, and without one through a recording of the calls it makes (tests/helpers/fake_cuda.py), which runs the
streams in every order that their events permit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mtcompile.runtime.devices.arena import arena, span_nbytes
from mtcompile.runtime.devices.cpu import POISON, CpuMemory
from mtcompile.runtime.devices.cuda_driver import Api, catch_up, drivers
from mtcompile.runtime.devices.joining import bytes_of, runs_of_bytes
from mtcompile.runtime.devices.pinned import NotPinned, Staging
from mtcompile.runtime.disk.direct import DirectReader, KvikioReader
from mtcompile.runtime.disk.store import DiskStore
from mtcompile.runtime.schedule import BLOCK, HOST_AWAITS, HOST_QUEUES, SECTOR, Queue, Tier
from mtcompile.runtime.trace import Record

_COPYING: tuple[Queue, ...] = ("h2d", "d2h")
_CHUNKS, _CHUNK_NBYTES = 3, 32 * 2**20  # of a staging ring, per direction


class Streams:
    """The streams of the copying queues, which live as long as the model. ``last``: the stream that computed most recently.
    ``ends``: by queue, the event at the end of the last phase that copied on it."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.copying = {queue: api.new_stream() for queue in _COPYING}
        self.last: Any = None
        self.ends: dict[Queue, Any] = {}


class Fence:
    """Keeps one phase in order on the device. The thread that issues a queue calls ``wait`` and ``signal``, and waits only
    after the signal, since an event that nothing has recorded holds nothing back. ``visible``: the queues whose bytes at
    home the caller may read (gradients) or change (weights) as soon as the phase returns."""

    def __init__(self, streams: Streams, visible: Iterable[Queue] = _COPYING, timed: bool = False) -> None:
        self.api, self.visible, self.timed = streams.api, frozenset(visible), timed
        current = streams.api.current_stream()
        self.streams = {"compute": current, **streams.copying}
        self.ends = streams.ends
        self.earlier = [end for queue, end in streams.ends.items() if queue in HOST_AWAITS]
        self.events: dict[int, Any] = {}
        self.stamps: list[tuple[int, Queue, Any]] = []
        before, streams.last = streams.last, current
        self.moved = None if before is None or before == current else before  # the caller's stream of the phase before

    def begin(self, queues: Iterable[Queue]) -> None:
        """Start copies after all that the caller has put on its stream: they write where earlier phases have read."""
        if self.moved is not None:  # the arenas go from one stream to the other
            self.api.wait(self.streams["compute"], self._mark(self.moved))
        if self.timed:
            self.stamp("compute", -1)
        if others := [queue for queue in queues if queue in _COPYING]:
            start = self._mark(self.streams["compute"])
            for queue in others:
                self.api.wait(self.streams[queue], start)

    @contextlib.contextmanager
    def on(self, queue: Queue) -> Iterator[None]:
        """Issue to the queue's stream. The host's queues wait for the copies of earlier phases first: they touch the host's
        memory as soon as they run, and an earlier forward, dropped or not, ended without waiting for its copies."""
        if queue in HOST_QUEUES:
            for end in self.earlier:
                self.api.block(end)
        with self.api.use(self.streams[queue]) if queue in _COPYING else contextlib.nullcontext():
            yield

    def wait(self, queue: Queue, index: int) -> None:
        """Make ``queue`` wait for an event. The host's queues are threads and block; what waits for them is issued after."""
        event = self.events[index]
        if event is not None and queue in HOST_QUEUES:
            self.api.block(event)
        elif event is not None:
            self.api.wait(self.streams[queue], event)

    def signal(self, queue: Queue, index: int) -> None:
        self.events[index] = self._mark(self.streams[queue]) if queue not in HOST_QUEUES else None

    def end(self, queues: Iterable[Queue], failed: bool) -> None:
        """Drain all queues into the compute stream. The host waits for the visible ones, or for all after an error, since a
        copy may still need its memory then."""
        for queue in queues:
            if queue in _COPYING:
                last = self.ends[queue] = self._mark(self.streams[queue])
                self.api.wait(self.streams["compute"], last)
                if failed or queue in self.visible:
                    self.api.block(last)

    def stamp(self, queue: Queue, index: int) -> None:
        self.stamps.append((index, queue, self._mark(self.streams[queue], timed=True)))

    def records(self) -> list[Record]:
        (_, _, start), *stamps = self.stamps
        times: dict[int, list[float]] = {}
        for index, _, event in stamps:
            times.setdefault(index, []).append(self.api.elapsed_us(start, event))
        queues = {index: queue for index, queue, _ in stamps}
        records = [Record(index, queues[index], *pair) for index, pair in times.items() if len(pair) == 2]
        return sorted(records, key=lambda record: (record.start_us, record.index))

    def _mark(self, stream: Any, timed: bool = False) -> Any:
        event = self.api.new_event(timed)
        self.api.record(event, stream)
        return event


class CudaMemory(CpuMemory):
    """The bytes of one step on a CUDA device: placed slots in arenas, pooled values from torch's caching allocator. Pooled
    values are freed on the compute queue alone, so the allocator's own order suffices for them."""

    def __init__(self, *args: Any, api: Api, staging: Mapping[Queue, Staging] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.api = api
        self.staging = staging  # where some host memory could not be pinned

    def copy(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        if self.schedule.buffers[reads[0]].tier == "disk":
            return self._read_directly(reads, writes)
        self._copy_all(self._pairs(reads, writes), self.schedule.buffers[writes[0]].tier == "device")

    def _copy_pairs(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copy_all(pairs, to_device=True)

    def _copy_parts(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], to_device: bool) -> None:
        self._copy_all(pairs, to_device)

    def _index(self, name: str) -> torch.Tensor:
        """Return a tensor in memory that the host reads. The thread that issues copies waits for one of the device."""
        tensor = self.tensors[name]
        return tensor if self.schedule.buffers[name].tier == "host" else self.api.to_host(tensor)

    def _read_directly(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Read once all that was issued before has run, and return when the bytes are there: no stream orders such a read."""
        catch_up(self.api)
        super()._read_directly(reads, writes)

    def _fill_with_zeros(self, target: torch.Tensor) -> None:
        """Fill host memory once all copies that were issued before have run: no stream orders what the host writes."""
        catch_up(self.api)
        super()._fill_with_zeros(target)

    def _slices_with_rows(self, ends: torch.Tensor) -> list[int]:
        """Return which slices have rows. The thread that issues copies waits until the device has computed that."""
        return super()._slices_with_rows(self.api.to_host(ends))

    def _copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], to_device: bool) -> None:
        for target, source in runs_of_bytes(pairs, self.slabs):
            if self.staging is None or (source if to_device else target).is_pinned():
                self.api.copy(target, source)
            elif to_device:
                self.staging["h2d"].to_device(target, source)
            else:
                self.staging["d2h"].to_host(target, source)

    def _poison(self, tensor: torch.Tensor, tier: Tier, whole: bool) -> None:
        if tier == "host":  # a copy that was issued may still have to read it, and no stream orders what the host writes
            return
        before = int(tensor.storage_offset()) * tensor.element_size() if whole else 0
        nbytes = tensor.untyped_storage().nbytes() if whole else span_nbytes(tensor)
        self.api.fill(bytes_of(tensor, -before, nbytes), POISON)


class NamedMemory(CudaMemory):
    """Issues every copy and kernel within an NVTX range of its name, so that a profiler shows the schedule's names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.names = {(i.reads, i.writes): i.label or i.kernel or i.op for i in self.schedule.instructions}

    def copy(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        with self._range(reads, writes):
            super().copy(reads, writes)

    def copy_slices(self, reads: Sequence[str], writes: Sequence[str], ends: str) -> float:
        with self._range((*reads, ends), writes):
            return super().copy_slices(reads, writes, ends)

    def copy_rows(self, reads: Sequence[str], writes: Sequence[str], rows: Sequence[str]) -> float:
        with self._range((*reads, *rows), writes):
            return super().copy_rows(reads, writes, rows)

    def run(self, kernel: Callable[..., Any], reads: Sequence[str], writes: Sequence[str], workspace: int) -> None:
        with self._range(reads, writes):
            super().run(kernel, reads, writes, workspace)

    @contextlib.contextmanager
    def _range(self, reads: Sequence[str], writes: Sequence[str]) -> Iterator[None]:
        self.api.push(self.names[tuple(reads), tuple(writes)])
        try:
            yield
        finally:
            self.api.pop()


class CudaDevice:
    """One GPU (or what torch drives alike): its streams, its arenas, and the host memory that its copies reach.

    ``staging``: the rings that copies go through once the driver has refused to pin host memory; None before. ``ranges``:
    whether to issue NVTX ranges. ``check_host(nbytes, failed)``: raises where the host has no room for an allocation, or has
    refused it.
    """

    def __init__(
        self,
        where: torch.device,
        api: Api | None = None,
        ranges: bool = False,
        check_host: Callable[[int, bool], None] = lambda nbytes, failed: None,
    ) -> None:
        self.where, self.ranges, self.check_host = where, ranges, check_host
        self.api = api or drivers.get(where.type, Api)(where)
        self.streams = Streams(self.api)
        self.staging: dict[Queue, Staging] | None = None

    def arena(self, tier: Tier, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of a tier's memory. Pinned memory cannot be swapped, so what does not fit is refused before."""
        if tier == "device":
            return arena(nbytes, self.where)
        self.check_host(nbytes, False)
        try:
            return self.api.pin(nbytes) if nbytes else arena(0)
        except OSError:  # of mmap
            self.check_host(nbytes, True)
            raise
        except NotPinned:
            self._stage()
            return arena(nbytes, alignment=SECTOR)

    def reach(self, memory: torch.Tensor) -> torch.Tensor:
        """Pin host memory that is mapped already, such as what processes share: each registers what it has mapped."""
        try:
            return self.api.register(memory)
        except NotPinned:
            self._stage()
            return memory

    def _stage(self) -> None:
        if self.staging is None:
            self.staging = {queue: Staging(self.api, self._chunks()) for queue in _COPYING}

    def _chunks(self) -> list[torch.Tensor]:
        try:
            return [self.api.pin(_CHUNK_NBYTES) for _ in range(_CHUNKS)]
        except NotPinned:  # not even that much: correct all the same, only slower
            return [arena(_CHUNK_NBYTES) for _ in range(_CHUNKS)]

    def memory(self, *args: Any, **options: Any) -> CudaMemory:
        return (NamedMemory if self.ranges else CudaMemory)(*args, **options, api=self.api, staging=self.staging)

    def direct(self, store: DiskStore) -> DirectReader:
        return KvikioReader(store, self.api.to_host, arena(BLOCK, self.where))

    def fence(self, visible: Iterable[Queue], timed: bool) -> Fence:
        return Fence(self.streams, visible, timed)

    def synchronize(self) -> None:
        self.api.synchronize()
