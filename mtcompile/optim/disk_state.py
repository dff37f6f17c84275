"""Weights that train on disk, with their optimizer state and remainders: read, updated and written back, a parameter at a time.

A parameter and its state pass through a set of host memory, of which there are ``UPDATE_SETS``: while one is updated, the next
is read and the one before is written (``Pipeline``), also across the calls of one backward. What an update reads and writes is
that memory, with the layout of the parameter, so its bits are those of an update at home.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mtcompile.optim.pipeline import Pipeline
from mtcompile.passes.analysis.state import UPDATE_SETS
from mtcompile.runtime.devices.arena import Layout, layout_of, part, span_nbytes, view
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.requests import whole_blocks
from mtcompile.runtime.disk.store import DiskStore, Move
from mtcompile.runtime.pages import pages

PIECE = 1 << 23  # elements that are updated at a time, where the formula does not care
VALUES, REMAINDER = "", "remainder"  # keys of what is on disk of a parameter beside its optimizer state


class Homes(Protocol):
    """Memory for optimizer state beside the process's own."""

    def new_zeros(self, name: str, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the home of a state of a parameter, as ``like`` but for its dtype, with zeros."""


@dataclass(slots=True)
class Staged:
    """A parameter in host memory during its update; with a remainder, its elements ``start`` to ``stop`` in one row. ``state``:
    its entry in the optimizer, with the tensors there."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    values: Tensor
    remainder: Tensor | None
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The state of one parameter on disk. ``entry``: its live entry in the optimizer; ``remainder``: of a split master.
    ``start``, ``stop``: the elements that are updated; None: all. ``ends``: whether all others have been, then. With a
    remainder, an update may see a few of them at a time: the written formula gives them the same bits."""

    name: str
    parameter: nn.Parameter
    entry: MutableMapping[str, Any]
    remainder: Tensor | None
    start: int = 0
    stop: int | None = None
    ends: bool = True

    @property
    def end(self) -> int:
        return self.parameter.numel() if self.stop is None else self.stop

    def pieces(self) -> Iterator[OnDisk]:
        """Yields the parts that are updated one after the other."""
        size = max(1, PIECE if self.remainder is not None else self.end - self.start)
        for start in range(self.start, self.end, size):
            stop = min(self.end, start + size)
            yield replace(self, start=start, stop=stop, ends=self.ends and stop == self.end)

    def part(self, whole: Tensor) -> Tensor:
        """Returns the elements of one piece, in one row, or all of what is updated at once."""
        count = self.end - self.start
        if self.remainder is None and count == self.parameter.numel():
            return whole
        return whole.as_strided((count,), (1,), whole.storage_offset() + self.start)


class DiskState:
    """The state on disk of one model's parameters. ``wrote``: called with a parameter whose values have been written.
    ``verified``: tells whether to compare what is read with its checksums."""

    def __init__(self, store: DiskStore, wrote: Callable[[str], None], verified: Callable[[], bool]) -> None:
        self.store, self._wrote, self._verified = store, wrote, verified
        self._homes: dict[tuple[str, str], Tensor] = {}  # by the parameter's name and the key
        self._versions: dict[tuple[str, str], int] = {}  # of the homes when their checksums were taken
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pipeline: Pipeline[dict[str, Tensor]] | None = None  # of the updates of one backward

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
            self._memory = torch.frombuffer(pages(nbytes), dtype=torch.uint8)

    def holds(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is on disk."""
        return self.store.place_of(tensor.data_ptr()) is not None

    def give_back(self, entries: Iterable[MutableMapping[str, Any]], masters: Iterable[Any]) -> None:
        """Gives state on disk memory of its own: that of an optimizer's ``entries``, and the remainders of ``masters``."""
        for entry in entries:
            for key, value in entry.items():
                if isinstance(value, Tensor) and self.holds(value):
                    entry[key] = value.clone(memory_format=torch.preserve_format)
        for master in masters:
            if self.holds(master.remainder):
                master.remainder = master.remainder.clone(memory_format=torch.preserve_format)

    def take(self, state: OnDisk) -> Tensor | None:
        """Sends the state of a parameter that is on disk now after it. Returns its remainder there."""
        for key, value in state.entry.items():
            if goes_along(value, state.parameter):
                state.entry[key] = self.write_home(state.name, key, value)
        return None if state.remainder is None else self.write_home(state.name, REMAINDER, state.remainder)

    def new_zeros(self, name: str, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Makes a home on disk, as ``like`` but for its dtype. A part of a file that was never written reads as zeros."""
        layout = Layout(dtype, tuple(like.shape), tuple(like.stride()))
        home = self._home(name, key, layout)
        if self._verified():
            self.store.note(home.data_ptr(), span_nbytes(home), _title(name, key))
        return home

    def update(self, parameters: Sequence[OnDisk], change: Callable[[Staged], None], coming: Iterable[OnDisk] = ()) -> None:
        """Calls ``change`` with each parameter, or each piece of it, in host memory, in order, and writes it back; the last
        ones are still being written when this returns. ``coming``: what the next calls will update, which is read meanwhile.
        Raises DiskError, also of writes that earlier calls have begun."""
        if self._pipeline is None:
            self._pipeline = Pipeline(UPDATE_SETS)
        pieces = [piece for parameter in parameters for piece in parameter.pieces()]
        ahead = islice((piece for parameter in coming for piece in parameter.pieces()), UPDATE_SETS - 1)
        self._pipeline.expect([self._reading(piece) for piece in (*pieces, *ahead)])
        for piece in pieces:
            with self._pipeline.taken() as (tensors, submit):
                staged = _staged(piece, tensors)
                change(staged)
                self.store.write_behind(self._written(piece, staged), submit, partial(self._note_end, piece, staged))

    def finish(self) -> None:
        """Waits until all that has been updated is on disk. Raises DiskError."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.end()

    def settle(self) -> None:
        """Waits as ``finish`` does, after an error, which is the one to report."""
        with contextlib.suppress(Exception):
            self.finish()

    def _reading(self, state: OnDisk) -> tuple[Hashable, Callable[[int], dict[str, Tensor]]]:
        """Returns what reads a parameter's values and state into a set of host memory, and a key that says which these are."""
        homes = {VALUES: state.parameter.detach()}
        if state.remainder is not None:
            homes[REMAINDER] = state.remainder
        homes |= {key: value for key, value in state.entry.items() if goes_along(value, state.parameter)}
        versions = tuple((key, home.data_ptr(), home._version) for key, home in homes.items())
        return (state.name, state.start, state.end, versions), partial(self._read, state, homes)

    def _read(self, state: OnDisk, homes: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
        moves, tensors, size = list[Move](), dict[str, Tensor](), self.staging_nbytes // UPDATE_SETS
        start = number * size
        for key, whole in homes.items():
            home = state.part(whole)
            tensors[key] = tensor = view(self._memory, start, layout_of(home))
            start += whole_blocks(span_nbytes(home))
            if start > (number + 1) * size:
                raise DiskError(f"{state.name}: expected state of {size} bytes at most, found more")
            if not self.holds(home):  # such as after load_state_dict
                tensor.copy_(home)
            elif nbytes := span_nbytes(home):
                self._note_writes(state.name, key, whole)
                moves.append((tensor.data_ptr(), home.data_ptr(), nbytes, _title(state.name, key)))
        self.store.read(moves, self._verified())
        return tensors

    def _written(self, state: OnDisk, staged: Staged) -> list[Move]:
        """Returns the requests that write all that an update changed. The state's entry has what is new."""
        moves: list[Move] = []
        if state.remainder is not None and staged.remainder is not None:
            for key, value in staged.state.items():
                if isinstance(home := state.entry.get(key), Tensor) and goes_along(home, state.parameter):
                    moves += self._move(state.name, key, self._there(state, key, home), value, state)
            moves += self._move(state.name, REMAINDER, state.remainder, staged.remainder, state)
        else:
            for key, value in staged.state.items():
                if goes_along(value, staged.values):
                    whole = value if value.shape == state.parameter.shape else state.parameter
                    layout = replace(layout_of(whole), dtype=value.dtype)
                    state.entry[key] = home = self._home(state.name, key, layout)
                    moves += self._move(state.name, key, home, value, state)
                else:
                    state.entry[key] = value
        return moves + self._move(state.name, VALUES, state.parameter.detach(), staged.values, state)

    def _note_end(self, state: OnDisk, staged: Staged) -> None:
        """Notes that an update has been written. ``staged``: what was, some of it in new memory, which had to last till now."""
        if state.ends:
            torch.autograd.graph.increment_version(state.parameter)
            self._versions[state.name, VALUES] = state.parameter._version
            self._wrote(state.name)

    def _note_writes(self, name: str, key: str, home: Tensor) -> None:
        """Takes the checksums of a home that the user has written to since they were taken."""
        version = home._version
        if self._verified() and version != self._versions.get((name, key), version):
            self.store.note(home.data_ptr(), span_nbytes(home), _title(name, key))
            self._versions[name, key] = version

    def _there(self, state: OnDisk, key: str, value: Tensor) -> Tensor:
        """Returns the home on disk of a tensor that may be elsewhere, such as after load_state_dict; all of it is there
        then."""
        if not self.holds(value):
            value = state.entry[key] = self.write_home(state.name, key, value, must_end=True)
        return value

    def write_home(self, name: str, key: str, value: Tensor, must_end: bool = False) -> Tensor:
        """Writes a tensor to its home on disk, which is made for it the first time. Returns it as it is there. ``must_end``:
        it is an update of a step."""
        home = self._home(name, key, layout_of(value))
        if value is not home:
            self.store.write(self._move(name, key, home, value), must_end)
        return home

    def _home(self, name: str, key: str, layout: Layout) -> Tensor:
        home = self._homes.get((name, key))
        if home is None or layout_of(home) != layout:
            like = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
            memory = torch.frombuffer(self.store.map(span_nbytes(like)), dtype=torch.uint8)
            home = self._homes[name, key] = part(memory, 0, layout)
        return home

    def _move(self, name: str, key: str, home: Tensor, value: Tensor, state: OnDisk | None = None) -> list[Move]:
        """Returns the request that writes a value to its home, or to a part of it; none for a value without elements."""
        target = home if state is None else state.part(home)
        self._versions[name, key] = home._version
        nbytes = span_nbytes(value)
        return [(value.data_ptr(), target.data_ptr(), nbytes, _title(name, key))] if nbytes else []


def _title(name: str, key: str) -> str:
    return f"{key} of {name}" if key else name


def goes_along(value: Any, parameter: Tensor) -> bool:
    """Tells whether an entry of an optimizer goes where its parameter is: what is as large, not a step counter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == parameter.numel()


def _staged(state: OnDisk, tensors: Mapping[str, Tensor]) -> Staged:
    entry = {key: tensors.get(key, value) for key, value in state.entry.items()}
    return Staged(state.name, state.parameter, state.start, state.end, tensors[VALUES], tensors.get(REMAINDER), entry)
