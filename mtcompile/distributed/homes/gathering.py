"""Optimizer state and weights of which each host has a part, made whole.

``state_dict()``, ``master_parameters`` and ``close`` are called on all ranks, and each gets all of it. A checkpoint is written
by the first rank, which asks the other hosts for each piece as it writes it; the first rank of each of them answers
until that one has ended (``PartsOnHosts.serve``). So no host needs room for the state of all to save it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtcompile.optim.written_update import flat
from mtcompile.runtime.optim.operands import joined

_END = -1  # in place of the number of a tensor: nothing more is asked for


@dataclass(frozen=True, slots=True)
class WholeLater:
    """A tensor of which each host has a part, for a file that is written piece by piece. ``home``: with this host's part;
    ``read``: returns its elements from one to another, in their order in memory. ``high``: of a remainder, the same of the
    other half of the fp32 values that are meant."""

    home: Tensor
    read: Callable[[int, int], Tensor]
    high: Callable[[int, int], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.home.dtype if self.high is None else torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.home.shape

    @property
    def nbytes(self) -> int:
        return self.home.numel() * self.dtype.itemsize

    def values(self) -> Tensor:
        whole = torch.empty_like(self.home, dtype=self.dtype)
        count = max(1, self.home.numel() // 8)
        for place, piece in zip(itertools.count(0, count), self._in_memory(count)):
            flat(whole)[place : place + len(piece)].copy_(piece)
        return whole

    def pieces(self, count: int) -> Iterator[Tensor]:
        """Yields the values in row-major order, ``count`` at a time."""
        if self.home.is_contiguous():
            yield from self._in_memory(count)
        else:
            yield from self.values().reshape(-1).split(count)

    def _in_memory(self, count: int) -> Iterator[Tensor]:
        for start in range(0, self.home.numel(), count):
            stop = min(start + count, self.home.numel())
            piece = self.read(start, stop)
            yield piece if self.high is None else joined(self.high(start, stop), piece)


class PartsOnHosts:
    """The way to the parts that other hosts have. ``hosts``: the ranks that have this one's place there, see ``Connection``.
    ``around``: turns errors of that way into RanksParted. ``together``: waits until all ranks read."""

    def __init__(self, hosts: Any, around: Callable[[str], AbstractContextManager[None]], together: Callable[[], None]) -> None:
        self._group, self._peers, self._around, self._together = hosts.group, hosts.peers, around, together
        self._me = self._peers.index(dist.get_rank())

    def whole(self, home: Tensor, part: Callable[[int], slice]) -> Tensor:
        """Returns a copy of a tensor with the parts of all hosts; all ranks call it. ``part``: the elements that a host has, in
        their order in memory."""
        copy = torch.empty_like(home)
        self._together()
        with self._around("for what other hosts have: all ranks call state_dict, master_parameters and close"):
            flat(copy)[part(self._me)].copy_(flat(home)[part(self._me)])
            for host, peer in enumerate(self._peers):
                if len(values := flat(copy)[part(host)]):
                    dist.broadcast(values.view(torch.uint8), peer, group=self._group)
        return copy

    def read(self, number: int, home: Tensor, part: Callable[[int], slice], start: int, stop: int) -> Tensor:
        """Returns elements of a tensor on the first rank, as those that ``serve`` send them. ``number``: its place among the
        tensors that all hosts have parts of."""
        piece = torch.empty(stop - start, dtype=home.dtype)
        with self._around("for what other hosts have, to save it"):
            dist.broadcast(torch.tensor([number, start, stop]), self._peers[0], group=self._group)
            for host, peer in enumerate(self._peers):
                low, high = max(start, part(host).start), min(stop, part(host).stop)
                if low < high:
                    values = piece[low - start : high - start]
                    if host == self._me:
                        values.copy_(flat(home)[low:high])
                    else:
                        dist.recv(values.view(torch.uint8), peer, group=self._group)
        return piece

    def end(self) -> None:
        """Says on the first rank that nothing more will be read."""
        with self._around("to end a save"):
            dist.broadcast(torch.tensor([_END, 0, 0]), self._peers[0], group=self._group)

    def serve(self, homes: list[tuple[Tensor, Callable[[int], slice]]]) -> None:
        """Sends the first rank what it reads, until it ends. ``homes``: each tensor, with its parts by host."""
        asked = torch.empty(3, dtype=torch.int64)
        with self._around("until the first rank has saved: all ranks call save, as often"):
            while True:
                dist.broadcast(asked, self._peers[0], group=self._group)
                number, start, stop = asked.tolist()
                if number == _END:
                    return
                home, part = homes[number]
                low, high = max(start, part(self._me).start), min(stop, part(self._me).stop)
                if low < high:
                    dist.send(flat(home)[low:high].view(torch.uint8), self._peers[0], group=self._group)
