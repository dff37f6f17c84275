"""Weights that train on disk, with their optimizer state and remainders: read, updated and written back, a parameter at a time.

    reads     p0 | p1 | p2 | ...
    updates        p0 | p1 | ...
    writes              p0 | ...

A parameter and its state pass through a set of host memory, of which there are ``UPDATE_SETS``. What an update reads and writes
is that memory, with the layout of the parameter, so its bits are those of an update at home.
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.passes.analysis.state import UPDATE_SETS
from mtcompile.runtime.devices.arena import layout_of, part, span_nbytes, view
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.requests import whole_blocks
from mtcompile.runtime.disk.store import DiskStore, Move

VALUES, REMAINDER = "", "remainder"  # keys of what is on disk of a parameter beside its optimizer state


@dataclass(slots=True)
class Staged:
    """A parameter in host memory during its update. ``state``: its entry in the optimizer, with the tensors there."""

    name: str
    parameter: nn.Parameter
    values: Tensor
    remainder: Tensor | None
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What belongs to one parameter on disk. ``entry``: its live entry in the optimizer; ``remainder``: of a split master."""

    name: str
    parameter: nn.Parameter
    entry: MutableMapping[str, Any]
    remainder: Tensor | None


class DiskState:
    """The state on disk of one model's parameters. ``wrote``: called with a parameter whose values have been written.
    ``verified``: tells whether to compare what is read with its checksums."""

    def __init__(self, store: DiskStore, wrote: Callable[[str], None], verified: Callable[[], bool]) -> None:
        self.store, self._wrote, self._verified = store, wrote, verified
        self._homes: dict[tuple[str, str], Tensor] = {}  # by the parameter's name and the key
        self._versions: dict[tuple[str, str], int] = {}  # of the homes when their checksums were taken
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def staging_nbytes(self) -> int:
        return self._memory.numel()

    @property
    def nbytes(self) -> int:
        """The bytes of optimizer state and remainders that are on disk."""
        return sum(home.nbytes for home in self._homes.values())

    def make_room(self, nbytes: int) -> None:
        """Allocates the host memory that updates go through."""
        if nbytes > self.staging_nbytes:
            self._memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # page-aligned, as disks want it

    def holds(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is on disk."""
        return self.store.place_of(tensor.data_ptr()) is not None

    def take(self, state: OnDisk) -> Tensor | None:
        """Sends the state of a parameter that is on disk now after it. Returns its remainder there."""
        for key, value in state.entry.items():
            if self._goes(value, state.parameter):
                state.entry[key] = self._write_home(state.name, key, value)
        return None if state.remainder is None else self._write_home(state.name, REMAINDER, state.remainder)

    def update(self, states: Sequence[OnDisk], change: Callable[[Staged], None]) -> None:
        """Calls ``change`` with each parameter in host memory, in order, and writes it back. Raises DiskError."""
        sets: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        size = self.staging_nbytes // UPDATE_SETS
        for index in range(UPDATE_SETS):
            sets.put(index * size)

        def read(state: OnDisk) -> tuple[int, Staged]:
            start = sets.get()
            if start is None:
                raise DiskError(f"{state.name}: not read, as another one failed")
            return start, self._read(state, start)

        def write(state: OnDisk, start: int, staged: Staged) -> None:
            self._write(state, staged)
            sets.put(start)

        futures: list[Future[Any]] = []
        with ThreadPoolExecutor(1, "mtcompile-disk-in") as reader, ThreadPoolExecutor(1, "mtcompile-disk-out") as writer:
            try:
                reads = [reader.submit(read, state) for state in states]
                futures += reads
                for state, arriving in zip(states, reads, strict=True):
                    while not arriving.done():  # a write that failed gives no set back
                        wait((arriving,), timeout=0.05)
                        _raise_failed(futures)
                    start, staged = arriving.result()
                    change(staged)
                    futures.append(writer.submit(write, state, start, staged))
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()
                for _ in states:
                    sets.put(None)

    def _read(self, state: OnDisk, start: int) -> Staged:
        moves: list[Move] = []
        end = start + self.staging_nbytes // UPDATE_SETS

        def arriving(key: str, home: Tensor) -> Tensor:
            nonlocal start
            tensor = view(self._memory, start, layout_of(home))
            start += whole_blocks(span_nbytes(home))
            if start > end:
                raise DiskError(
                    f"{state.name}: expected state of {self.staging_nbytes // UPDATE_SETS} bytes at most, found more"
                )
            if not self.holds(home):  # such as after load_state_dict
                tensor.copy_(home)
            elif nbytes := span_nbytes(home):
                if self._verified() and home._version != self._versions.get((state.name, key), home._version):
                    self.store.note(home.data_ptr(), nbytes, state.name)
                moves.append((tensor.data_ptr(), home.data_ptr(), nbytes, _title(state.name, key)))
            return tensor

        values = arriving(VALUES, state.parameter.detach())
        remainder = None if state.remainder is None else arriving(REMAINDER, state.remainder)
        entry = {k: arriving(k, v) if self._goes(v, state.parameter) else v for k, v in state.entry.items()}
        self.store.read(moves, self._verified())
        return Staged(state.name, state.parameter, values, remainder, entry)

    def _write(self, state: OnDisk, staged: Staged) -> None:
        for key, value in staged.state.items():
            if self._goes(value, state.parameter):
                value = self._write_home(state.name, key, value)
            state.entry[key] = value
        if state.remainder is not None and staged.remainder is not None:
            self._write_to(state.name, REMAINDER, state.remainder, staged.remainder)
        self._write_to(state.name, VALUES, state.parameter.detach(), staged.values)
        torch.autograd.graph.increment_version(state.parameter)
        self._wrote(state.name)

    def _goes(self, value: Any, parameter: Tensor) -> bool:
        """Tells whether an entry of an optimizer goes where its parameter is: what is as large, not a step counter."""
        return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == parameter.numel()

    def _write_home(self, name: str, key: str, value: Tensor) -> Tensor:
        """Writes a tensor to its home on disk, which is made for it the first time. Returns it as it is there."""
        home = self._homes.get((name, key))
        if home is None or layout_of(home) != layout_of(value):
            memory = torch.frombuffer(self.store.map(span_nbytes(value)), dtype=torch.uint8)
            home = self._homes[name, key] = part(memory, 0, layout_of(value))
        if value is not home:
            self._write_to(name, key, home, value)
        return home

    def _write_to(self, name: str, key: str, home: Tensor, value: Tensor) -> None:
        if nbytes := span_nbytes(value):
            self.store.write([(value.data_ptr(), home.data_ptr(), nbytes, _title(name, key))])
        self._versions[name, key] = home._version


def _title(name: str, key: str) -> str:
    return f"{key} of {name}" if key else name


def _raise_failed(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        if future.done():
            future.result()
