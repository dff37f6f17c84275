"""The collectives of a step, over memory that the ranks of a host share, and between hosts through torch.distributed.

Gradients go through it piece by piece:

    each rank     writes its piece, divided by the number of ranks, where all see it        then all meet
    each rank     adds up its share of the piece: of the ranks of the host, in their order;
                  then of the hosts, in theirs                                              then all meet
    each rank     takes the whole sum

So all ranks have the same bits, which depend on the order of the ranks alone; of two ranks, not even on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mtcompile.distributed.meeting import Meeting
from mtcompile.runtime.devices.arena import span_nbytes
from mtcompile.runtime.schedule import PLACEMENT

PIECE_NBYTES = 8 * 2**20


class Hosts(Protocol):
    """The way between hosts."""

    def add_up(self, share: torch.Tensor) -> None:
        """Make a 1-D share the sum of this share over all hosts, in their order."""

    def broadcast(self, piece: torch.Tensor) -> None:
        """Make ``piece`` that of the first host."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements ``start`` to ``stop`` of one tensor, ``offset`` elements into a piece."""

    tensor: int
    start: int
    stop: int
    offset: int


def exchange_nbytes(count: int, piece_nbytes: int = PIECE_NBYTES) -> int:
    """Returns the bytes of shared memory that an exchange between ``count`` ranks of a host takes."""
    return (count + 1) * piece_nbytes


class Exchange:
    """The exchange between one host's ranks. ``memory``: shared by them. ``ranks``: how many there are, of all hosts."""

    def __init__(self, memory: torch.Tensor, meeting: Meeting, hosts: Hosts | None, ranks: int) -> None:
        self.meeting, self.hosts, self.ranks = meeting, hosts, ranks
        count = len(meeting.ranks)
        self._pieces = list(memory.view(count + 1, -1))
        self._sum = self._pieces.pop()

    def all_reduce(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], doing: str) -> None:
        """Write the mean of each source over all ranks to its target, which has the same dtype and strides."""
        me, count = self.meeting.me, len(self._pieces)
        given, taken = [_flat(tensor) for tensor in sources], [_flat(tensor) for tensor in targets]
        for dtype, parts in _pieces(given, self._sum.numel()):
            length = parts[-1].offset + parts[-1].stop - parts[-1].start
            views = [piece.view(dtype)[:length] for piece in self._pieces]
            total = self._sum.view(dtype)[:length]
            for part in parts:
                values = given[part.tensor][part.start : part.stop]
                torch.mul(values, 1.0 / self.ranks, out=views[me][part.offset : part.offset + len(values)])
            self.meeting.meet(doing)
            share = slice(length * me // count, length * (me + 1) // count)
            total[share].copy_(views[0][share])
            for view in views[1:]:
                total[share].add_(view[share])
            if self.hosts is not None:
                self.hosts.add_up(total[share])
            self.meeting.meet(doing)
            for part in parts:
                taken[part.tensor][part.start : part.stop].copy_(total[part.offset :][: part.stop - part.start])

    def broadcast(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], doing: str) -> None:
        """Write each source of the first rank to its target on all ranks."""
        given, taken = [_bytes(tensor) for tensor in sources], [_bytes(tensor) for tensor in targets]
        for _, parts in _pieces(given, self._sum.numel()):
            if self.meeting.me == 0:
                for part in parts:
                    self._sum[part.offset :][: part.stop - part.start].copy_(given[part.tensor][part.start : part.stop])
                if self.hosts is not None:
                    self.hosts.broadcast(self._sum[: parts[-1].offset + parts[-1].stop - parts[-1].start])
            self.meeting.meet(doing)
            for part in parts:
                taken[part.tensor][part.start : part.stop].copy_(self._sum[part.offset :][: part.stop - part.start])
            self.meeting.meet(doing)


def _pieces(tensors: Sequence[torch.Tensor], nbytes: int) -> Iterator[tuple[torch.dtype, list[_Part]]]:
    """Yields pieces of at most ``nbytes``, each of one dtype: small tensors together, large ones in several."""
    dtype, parts, offset = torch.uint8, list[_Part](), 0
    for index, tensor in enumerate(tensors):
        room, start = nbytes // tensor.element_size(), 0
        step = max(1, PLACEMENT // tensor.element_size())
        while start < len(tensor):
            if parts and (tensor.dtype != dtype or offset >= room):
                yield dtype, parts
                parts, offset = [], 0
            dtype = tensor.dtype
            stop = min(len(tensor), start + room - offset)
            parts.append(_Part(index, start, stop, offset))
            offset += -(-(stop - start) // step) * step
            start = stop
    if parts:
        yield dtype, parts


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of the elements in their order in memory, with the gaps between them."""
    return tensor.detach().as_strided((span_nbytes(tensor) // tensor.element_size(),), (1,))


def _bytes(tensor: torch.Tensor) -> Any:
    return _flat(tensor).view(torch.uint8)
