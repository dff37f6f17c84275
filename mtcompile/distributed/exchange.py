"""The collectives of a step, over memory that the ranks of a host share, and between hosts through torch.distributed.

Gradients go through it piece by piece:

    each rank     writes its piece, divided by the number of ranks, where all see it        then all meet
    each rank     adds up its share of the piece: of the ranks of the host, in their order;
                  then of the hosts, in theirs                                              then all meet
    each rank     takes the whole sum

So all ranks have the same bits, which depend on the order of the ranks alone; of two ranks, not even on that.

Where each rank updates a share of every parameter, a piece has the same columns of all ranks' shares, in rows:

    each rank     writes its rows, divided by the number of ranks, where all of its host see them      then all meet
    each rank     adds up the rows of the ranks that have its place on each host: of the ranks of the host, in their order;
                  gives each of these ranks its row; and adds up those that it gets, in the order of the hosts

The process group's own reduce-scatter adds up in an order of its own: gloo's gave other bits for four ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mtcompile.distributed.meeting import Meeting
from mtcompile.passes.analysis.state import share_length
from mtcompile.runtime.devices.arena import span_nbytes
from mtcompile.runtime.schedule import PLACEMENT, placed

PIECE_NBYTES = 8 * 2**20


class Hosts(Protocol):
    """The way between hosts."""

    def add_up(self, share: torch.Tensor) -> None:
        """Make a 1-D share the sum of this share over all hosts, in their order."""

    def broadcast(self, piece: torch.Tensor) -> None:
        """Make ``piece`` that of the first host."""

    def sum_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum, in the order of the hosts, of the row that each of them has for this one. ``rows``: by host."""

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the same rows of every host, in their order."""


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


def staging_nbytes(count: int, hosts: int) -> int:
    """Returns the bytes of a rank, one of ``count`` on each of ``hosts``, through which it reaches other hosts."""
    return 0 if hosts == 1 else placed(2 * PIECE_NBYTES // count)


class Exchange:
    """The exchange between one host's ranks. ``memory``: shared by them. ``ranks``: how many there are, of all hosts, of which
    this is ``rank``."""

    def __init__(self, memory: torch.Tensor, meeting: Meeting, hosts: Hosts | None, ranks: int, rank: int = 0) -> None:
        self.meeting, self.hosts, self.ranks, self.rank = meeting, hosts, ranks, rank
        count = len(meeting.ranks)
        self._pieces = list(memory.view(count + 1, -1))
        self._sum = self._pieces.pop()

    def all_reduce(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], doing: str) -> None:
        """Write the mean of each source over all ranks to its target, which has the same dtype and strides."""
        me, count = self.meeting.me, len(self._pieces)
        given, taken = [_flat(tensor) for tensor in sources], [_flat(tensor) for tensor in targets]
        for dtype, parts in _pieces([(t.dtype, len(t)) for t in given], self._sum.numel()):
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

    def reduce_scatter(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], doing: str) -> list[bool]:
        """Write those elements of the mean of each source over all ranks to its target that this rank updates, one behind the
        other. Returns which of the means have values that are not finite, on whatever rank."""
        me, here = self.meeting.me, len(self._pieces)
        given, taken = [_flat(tensor) for tensor in sources], [_flat(tensor) for tensor in targets]
        lengths, nonfinite = [share_length(len(tensor), self.ranks) for tensor in given], [False] * len(given)
        for dtype, parts in _pieces(self._shares(given, lengths), self._sum.numel() // self.ranks):
            width = parts[-1].offset + parts[-1].stop - parts[-1].start
            views = [piece.view(dtype)[: self.ranks * width].view(self.ranks, width) for piece in self._pieces]
            for part in parts:
                for rank, row in enumerate(views[me]):
                    values = given[part.tensor][_row(part, rank, lengths[part.tensor], len(given[part.tensor]))]
                    torch.mul(values, 1.0 / self.ranks, out=row[part.offset : part.offset + len(values)])
            self.meeting.meet(doing)
            rows = views[0][me::here].clone()
            for view in views[1:]:
                rows.add_(view[me::here])
            total = rows[0] if self.hosts is None else self.hosts.sum_of_rows(rows)
            for part in parts:
                row = _row(part, self.rank, lengths[part.tensor], len(given[part.tensor]))
                own = taken[part.tensor][part.start : part.start + row.stop - row.start]
                own.copy_(total[part.offset : part.offset + len(own)])
                nonfinite[part.tensor] |= not bool(own.isfinite().all())
            self.meeting.meet(doing)
        return self._any(nonfinite, doing)

    def all_gather(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], doing: str) -> None:
        """Write those elements to each target that ranks with this one's place on other hosts have updated. A source is the
        memory of its target: what the ranks of this host have updated is there."""
        assert self.hosts is not None
        here, place = len(self._pieces), self.meeting.me
        whole = [_flat(tensor) for tensor in targets]
        lengths = [share_length(len(tensor), self.ranks) for tensor in whole]
        for dtype, parts in _pieces(self._shares(whole, lengths), self._sum.numel() // self.ranks):
            own = torch.empty(parts[-1].offset + parts[-1].stop - parts[-1].start, dtype=dtype)
            for part in parts:
                values = whole[part.tensor][_row(part, self.rank, lengths[part.tensor], len(whole[part.tensor]))]
                own[part.offset : part.offset + len(values)].copy_(values)
            for host, row in enumerate(self.hosts.gather(own.view(torch.uint8))):
                rank = host * here + place
                for part in parts if rank != self.rank else ():
                    values = whole[part.tensor][_row(part, rank, lengths[part.tensor], len(whole[part.tensor]))]
                    values.copy_(row.view(dtype)[part.offset : part.offset + len(values)])

    def gather_parts(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], doing: str) -> None:
        """Write all elements to each target, of which each host has those in its source that its ranks update. Each rank brings
        the elements of the ranks with its place on other hosts; those of a host exchange what they have brought."""
        assert self.hosts is not None
        here, place, count = len(self._pieces), self.meeting.me, self.ranks // len(self._pieces)
        given, taken = [_flat(tensor) for tensor in sources], [_flat(tensor) for tensor in targets]
        lengths = [share_length(len(tensor), self.ranks) for tensor in given]
        for source, target, length in zip(given, taken, lengths, strict=True):
            own = slice((self.rank - place) * length, (self.rank - place + here) * length)
            target[own].copy_(source[own])
        for dtype, parts in _pieces(self._shares(given, lengths), self._sum.numel() // self.ranks):
            width = parts[-1].offset + parts[-1].stop - parts[-1].start
            own_part = torch.empty(width, dtype=dtype)
            for part in parts:
                values = given[part.tensor][_row(part, self.rank, lengths[part.tensor], len(given[part.tensor]))]
                own_part[part.offset : part.offset + len(values)].copy_(values)
            brought = [row.view(dtype) for row in self.hosts.gather(own_part.view(torch.uint8))]
            rows = {host * here + place: row for host, row in enumerate(brought)}
            if here > 1:
                views = [piece.view(dtype)[: count * width].view(count, width) for piece in self._pieces]
                torch.stack(brought, out=views[place])
                self.meeting.meet(doing)
                rows = {host * here + other: view[host] for other, view in enumerate(views) for host in range(count)}
            for rank, row in rows.items():
                for part in parts if rank // here != self.rank // here else ():
                    values = taken[part.tensor][_row(part, rank, lengths[part.tensor], len(taken[part.tensor]))]
                    values.copy_(row[part.offset : part.offset + len(values)])
            if here > 1:
                self.meeting.meet(doing)

    @staticmethod
    def _shares(tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[tuple[torch.dtype, int]]:
        return [(tensor.dtype, length) for tensor, length in zip(tensors, lengths, strict=True)]

    def _any(self, flags: Sequence[bool], doing: str) -> list[bool]:
        """Returns which flags are set on any rank."""
        count = len(flags)
        own = torch.tensor(flags, dtype=torch.uint8)
        self._sum[self.meeting.me * count : (self.meeting.me + 1) * count].copy_(own)
        self.meeting.meet(doing)
        on_host = self._sum[: len(self._pieces) * count].view(-1, count).amax(0)
        self.meeting.meet(doing)
        of_hosts = [on_host] if self.hosts is None else self.hosts.gather(on_host)
        return torch.stack(of_hosts).amax(0).bool().tolist()

    def broadcast(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], doing: str) -> None:
        """Write each source of the first rank to its target on all ranks."""
        given, taken = [_bytes(tensor) for tensor in sources], [_bytes(tensor) for tensor in targets]
        for _, parts in _pieces([(t.dtype, len(t)) for t in given], self._sum.numel()):
            if self.meeting.me == 0:
                for part in parts:
                    self._sum[part.offset :][: part.stop - part.start].copy_(given[part.tensor][part.start : part.stop])
                if self.hosts is not None:
                    self.hosts.broadcast(self._sum[: parts[-1].offset + parts[-1].stop - parts[-1].start])
            self.meeting.meet(doing)
            for part in parts:
                taken[part.tensor][part.start : part.stop].copy_(self._sum[part.offset :][: part.stop - part.start])
            self.meeting.meet(doing)


def _row(part: _Part, rank: int, length: int, numel: int) -> slice:
    """Returns the elements of a tensor that a part of a rank's share has. ``length``: of a share."""
    return slice(min(numel, rank * length + part.start), min(numel, rank * length + part.stop))


def _pieces(sizes: Sequence[tuple[torch.dtype, int]], nbytes: int) -> Iterator[tuple[torch.dtype, list[_Part]]]:
    """Yields pieces of at most ``nbytes``, each of one dtype: small tensors together, large ones in several. ``sizes``: the
    dtype and number of elements of each."""
    dtype, parts, offset = torch.uint8, list[_Part](), 0
    for index, (kind, length) in enumerate(sizes):
        room, start = nbytes // kind.itemsize, 0
        step = max(1, PLACEMENT // kind.itemsize)
        while start < length:
            if parts and (kind != dtype or offset >= room):
                yield dtype, parts
                parts, offset = [], 0
            dtype = kind
            stop = min(length, start + room - offset)
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
