"""The emulated device: real tensors in host memory, held to the same byte limit as a device's memory would be."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtcompile.runtime.devices.arena import Layout, arena, layout_of, same_strides, span_nbytes, view
from mtcompile.runtime.devices.joining import NO_SLABS, bytes_of
from mtcompile.runtime.devices.rows import stretches_of
from mtcompile.runtime.disk.direct import Arrival, DirectReader, StoreReader
from mtcompile.runtime.disk.store import DiskStore
from mtcompile.runtime.schedule import ALIGNMENT, SECTOR, Queue, Schedule, Tier, gib

POISON = 0xFF  # every float type reads NaN, every index far out of range


class LimitError(RuntimeError):
    """Raised when an instruction would exceed the tier's limit, because the plan was wrong about its kernel."""


@dataclass(frozen=True, slots=True)
class Arenas:
    """The placed memory of each tier: uint8 tensors aligned to the schedule's granularity. ``disk``: None without slots there;
    ``scratch``: the store that it is mapped from."""

    device: torch.Tensor
    host: torch.Tensor
    disk: torch.Tensor | None = None
    scratch: DiskStore | None = None


class CpuMemory:
    """The bytes of one step. ``tensors``: what each live buffer is bound to; the caller binds homes.

    Every result is compared with what the schedule declared, since a wrong size would break the limit and a wrong
    layout the numbers. ``trusted`` skips that, for a program whose kernels have passed it once. ``check`` never skips it,
    and overwrites freed bytes, so that a use after free shows as NaN. ``views``: the tensors of placed slots, which a
    caller whose arenas stay keeps from step to step.
    """

    def __init__(
        self,
        schedule: Schedule,
        layouts: Mapping[str, Layout],
        arenas: Arenas,
        check: bool = False,
        trusted: bool = False,
        views: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.schedule, self.layouts, self.arenas, self.check = schedule, layouts, arenas, check
        self.trusted = trusted and not check
        self.views = {} if views is None else views
        self.tensors: dict[str, torch.Tensor] = {}
        self.unused: dict[str, torch.Tensor] = {}  # room for what was fetched by binding it to the user's own tensor
        self.live = 0  # pooled bytes that are reserved
        self.disk: DiskStore | None = None  # of homes on disk
        self.direct: DirectReader | None = None  # reads it into the device
        self.home_names: Mapping[str, str] = {}  # of homes, as the user knows them
        self.verified = False  # compare what is read from disk with its checksums
        self.slabs = NO_SLABS  # of homes
        self.together: Mapping[str, tuple[str, int, int]] = {}  # as ``usage.allocated_together`` returns them
        self._shared: dict[str, torch.Tensor] = {}  # allocations for several values, until the last of these has its part
        limit = schedule.peak_nbytes.get("device", 0)
        self.free_nbytes = limit - schedule.arena_nbytes.get("device", 0) - schedule.resident_nbytes.get("device", 0)

    def let_go(self) -> None:
        """Let go of all tensors, after a step."""
        self.tensors.clear()
        self._shared.clear()
        self.slabs = NO_SLABS

    def leave_device(self) -> None:
        """Let go of the device's arena, in which nothing is live between phases."""
        self.take_device(self.arenas.device.new_empty(0))

    def leave(self) -> None:
        """Let go of all arenas, for good."""
        self.arenas, self.views = Arenas(self.arenas.device.new_empty(0), self.arenas.host.new_empty(0)), {}

    def take_device(self, memory: torch.Tensor) -> None:
        """Place the device's slots in ``memory`` from now on."""
        self.arenas = replace(self.arenas, device=memory)
        self.views = {}

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor

    def alloc(self, name: str, filled: bool = False) -> None:
        buffer = self.schedule.buffers[name]
        if buffer.kind == "pooled":
            self.reserve(buffer.nbytes, name)
            if filled:  # by a copy; kernels bring the memory of what they make
                self.tensors[name] = self._allocated(name)
            return
        slot = self.views.get(name)
        if slot is None:
            memory = getattr(self.arenas, buffer.tier)
            assert buffer.offset is not None and memory is not None
            slot = self.views[name] = view(memory, buffer.offset, self.layouts[name])
        self.tensors[name] = slot

    def reserve(self, nbytes: int, name: str) -> None:
        self._check_room(nbytes, name)
        self.live += nbytes

    def _allocated(self, name: str) -> torch.Tensor:
        layout, where = self.layouts[name], self.arenas.device.device
        if name not in self.together:
            return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=where)
        first, offset, nbytes = self.together[name]
        if offset == 0:
            self._shared[first] = arena(nbytes, where)
        is_last = offset + self.schedule.buffers[name].nbytes == nbytes
        return view(self._shared.pop(first) if is_last else self._shared[first], offset, layout)

    def free(self, name: str) -> None:
        buffer = self.schedule.buffers[name]
        tensor = self.tensors.pop(name)
        pooled = buffer.kind == "pooled"
        if pooled:
            self.live -= buffer.nbytes
        own = self.unused.pop(name, tensor)
        if not self.check:
            return
        if self.arenas.scratch is not None and buffer.tier == "disk":
            self.arenas.scratch.forget(tensor.data_ptr(), span_nbytes(tensor))
        elif tensor.numel():
            self._poison(own if pooled else self.views[name], buffer.tier, whole=pooled and name not in self.together)

    def _poison(self, tensor: torch.Tensor, tier: Tier, whole: bool) -> None:
        """Overwrite a tensor's bytes; ``whole``: all of its storage, which no other value uses."""
        storage = tensor.untyped_storage()
        pointer, nbytes = (storage.data_ptr(), storage.nbytes()) if whole else (tensor.data_ptr(), span_nbytes(tensor))
        ctypes.memset(pointer, POISON, nbytes)

    def copy(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        if self.schedule.buffers[reads[0]].tier == "disk":
            return self._read_directly(reads, writes)
        for read, write, (target, source) in zip(reads, writes, self._pairs(reads, writes), strict=True):
            if source.data_ptr() % ALIGNMENT and self.schedule.buffers[read].role == "input":
                self.tensors[write] = source  # such as data[5:10]: the bits of some kernels depend on the address
                self.unused[write] = target  # given back by the thread that took it
            else:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), span_nbytes(source))

    def copy_slices(self, reads: Sequence[str], writes: Sequence[str], ends: str) -> float:
        """Copy the slices that have rows, and return their share. Under ``check``, the others are overwritten, so that a read
        of them shows as NaN."""
        used = self._slices_with_rows(self.tensors[ends])
        pairs = self._pairs(reads, writes)
        if self.check:
            for name in writes:
                self._poison(self.tensors[name], self.schedule.buffers[name].tier, whole=False)
        self._copy_pairs([(target[i], source[i]) for target, source in pairs for i in used])
        every = sum(source.shape[0] for _, source in pairs)
        return len(used) * len(pairs) / every if every else 1.0

    def _slices_with_rows(self, ends: torch.Tensor) -> list[int]:
        """Return which slices have rows, by where the rows of each end. Waits for the device."""
        places = ends.tolist()
        return [i for i, (start, end) in enumerate(itertools.pairwise((0, *places))) if start != end]

    def copy_rows(self, reads: Sequence[str], writes: Sequence[str], rows: Sequence[str]) -> float:
        """Copy the rows that are named, and return their share of as many as could be. On the device they are one behind the
        other, and what is behind them is overwritten under ``check``; at home, all other rows become zeros."""
        ((target, source),) = self._pairs(reads, writes)
        indices, to_device = [self._index(name) for name in rows], self.schedule.buffers[writes[0]].tier == "device"
        count = len(source if to_device else target)
        named, at = stretches_of(indices, count), 0
        if not to_device:
            self._fill_with_zeros(target)
        elif self.check:
            self._poison(target, "device", whole=False)
        parts = list[tuple[torch.Tensor, torch.Tensor]]()
        for start, end in named:
            here, there = slice(at, at + end - start), slice(start, end)
            parts.append((target[here], source[there]) if to_device else (target[there], source[here]))
            at = here.stop
        self._copy_parts(parts, to_device)
        most = min(count, sum(index.numel() for index in indices))
        return at / most if most else 1.0

    def _index(self, name: str) -> torch.Tensor:
        """Return a tensor of the step in memory that the host reads."""
        return self.tensors[name]

    def _fill_with_zeros(self, target: torch.Tensor) -> None:
        ctypes.memset(target.data_ptr(), 0, span_nbytes(target))

    def _copy_parts(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], to_device: bool) -> None:
        self._copy_pairs(pairs)

    def _copy_pairs(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), span_nbytes(source))

    def _read_directly(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Read homes on disk straight into the device."""
        assert self.disk is not None and self.direct is not None, "whoever binds homes on disk gives what reads them"
        arrivals, others = [], []
        for read, (target, source) in zip(reads, self._pairs(reads, writes), strict=True):
            if self.disk.place_of(source.data_ptr()) is None:  # the user has given the parameter memory of its own
                others.append((target, source))
            elif nbytes := span_nbytes(source):
                filled = bytes_of(target, 0, nbytes)
                arrivals.append(Arrival(filled, source.data_ptr(), self.home_names.get(read, read)))
        self._copy_pairs(others)
        self.direct.read(arrivals, self.check or self.verified)

    def transfer(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        to_disk = self.schedule.buffers[writes[0]].tier == "disk"
        slots = self.schedule.buffers[(writes if to_disk else reads)[0]].kind == "placed"
        store = self.arenas.scratch if slots else self.disk
        assert store is not None, "whoever binds homes on disk, or lends slots there, gives their store"
        moves = []
        for read, write, (target, source) in zip(reads, writes, self._pairs(reads, writes), strict=True):
            memory, home = (source, target) if to_disk else (target, source)
            if store.place_of(home.data_ptr()) is None:  # the user has given the parameter memory of its own
                ctypes.memmove(target.data_ptr(), source.data_ptr(), span_nbytes(source))
            elif nbytes := span_nbytes(source):
                name = write if to_disk else read
                moves.append((memory.data_ptr(), home.data_ptr(), nbytes, self.home_names.get(name, name)))
        if to_disk:
            store.write(moves)
        else:
            store.read(moves, self.check or self.verified)

    def _pairs(self, reads: Sequence[str], writes: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the (target, source) pairs of a copy. Raises RuntimeError where their layouts differ."""
        pairs = [(self.tensors[write], self.tensors[read]) for read, write in zip(reads, writes, strict=True)]
        for read, write, (target, source) in () if self.trusted else zip(reads, writes, pairs, strict=True):
            if not same_strides(source.shape, source.stride(), target.stride()) or source.dtype != target.dtype:
                raise RuntimeError(
                    f"copy {read} -> {write}: expected equal strides and dtype, found {layout_of(source)} {layout_of(target)}"
                )
        return pairs

    def run(self, kernel: Callable[..., Any], reads: Sequence[str], writes: Sequence[str], workspace: int) -> None:
        self._check_room(workspace, "workspace")
        outputs = kernel(*[self.tensors[name] for name in reads])
        for name, tensor in zip(writes, outputs, strict=True):
            buffer = self.schedule.buffers[name]
            if buffer.version_of:  # the kernel has written it in place
                self.tensors[name] = self.tensors[buffer.version_of]
            elif buffer.kind != "pooled":
                self.tensors[name].copy_(tensor)
            else:
                tensor = tensor if tensor.numel() else self._empty(name, tensor)
                if not self.trusted:
                    self._compare(name, tensor)
                self.tensors[name] = tensor

    def exchange(self, collective: Callable[..., None], reads: Sequence[str], writes: Sequence[str]) -> None:
        for name in writes:
            if home := self.schedule.buffers[name].version_of:  # it is written in place
                self.tensors[name] = self.tensors[home]
        collective([self.tensors[name] for name in reads], [self.tensors[name] for name in writes])

    def stream(self, kernel: Callable[..., None], reads: Sequence[str], writes: Sequence[str]) -> None:
        self.exchange(functools.partial(kernel, self._copy_parts), reads, writes)

    def _empty(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without elements, of the declared dtype: kernels that find nothing to do may give another one."""
        layout = self.layouts[name]
        if tensor.shape != layout.size or tensor.dtype == layout.dtype:
            return tensor
        return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=tensor.device)

    def _check_room(self, nbytes: int, what: str) -> None:
        if self.live + nbytes > self.free_nbytes:
            raise LimitError(
                f"{what} needs {gib(nbytes)} beside {gib(self.live)} in use; the plan left {gib(self.free_nbytes)}"
            )

    def _compare(self, name: str, tensor: torch.Tensor) -> None:
        layout, declared = self.layouts[name], self.schedule.buffers[name].nbytes
        fits = tensor.untyped_storage().nbytes() <= declared
        if fits and self.schedule.buffers[name].role == "rng":  # passed on as it is, whatever it is
            return
        alike = tensor.dtype == layout.dtype and tensor.shape == layout.size
        if fits and alike and same_strides(layout.size, tensor.stride(), layout.stride):
            return
        raise RuntimeError(
            f"{name}: expected {layout} in {declared} bytes, found {layout_of(tensor)} in "
            f"{tensor.untyped_storage().nbytes()}: torch's shape propagation is wrong about an operation that makes it"
        )


class CpuDevice:
    """The emulated device: its memory is the host's, its kernels run in the calling thread."""

    where = torch.device("cpu")
    staging = None
    memory = CpuMemory

    def arena(self, tier: Tier, nbytes: int) -> torch.Tensor:
        return arena(nbytes, alignment=SECTOR if tier == "host" else ALIGNMENT)

    def reach(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def direct(self, store: DiskStore) -> DirectReader:
        return StoreReader(store)

    def fence(self, visible: Iterable[Queue], timed: bool) -> None:
        """Return None: what a thread has run here is complete."""

    def synchronize(self) -> None:
        """Return at once: nothing runs behind the threads."""
