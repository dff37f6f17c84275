"""Connects the ranks of a process group: which of them share a host, memory that these share, and the way between hosts."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtcompile import knobs
from mtcompile.distributed.exchange import Exchange, exchange_nbytes, staging_nbytes
from mtcompile.distributed.homes.shared_memory import shared_memory
from mtcompile.distributed.meeting import Meeting, meeting_nbytes
from mtcompile.errors import MtcompileError
from mtcompile.runtime.schedule import placed

RECORD_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class Hosts:
    """The way between hosts: the ranks that have this one's place on each of them, in a gloo group. ``peers``: these, by host;
    ``ranks``: all ranks of each host. Both are in order of the ranks."""

    group: Any
    peers: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Returns the same rows of every host, in their order."""
        gathered = [torch.empty_like(rows) for _ in self.peers]
        dist.all_gather(gathered, rows.contiguous(), group=self.group)
        return gathered

    def add_up(self, share: torch.Tensor) -> None:
        """Makes a 1-D share the sum of this share over all hosts, in their order; each host adds up a part of it."""
        count, width, own = len(self.peers), share.element_size(), self.peers.index(dist.get_rank())
        bounds = [len(share) * i // count for i in range(count + 1)]
        parts = [share[start:stop] for start, stop in itertools.pairwise(bounds)]
        received = share.new_empty(count * len(parts[own]))
        sizes = [len(parts[own]) * width] * count, [len(part) * width for part in parts]
        dist.all_to_all_single(received.view(torch.uint8), share.view(torch.uint8), *sizes, group=self.group)
        first, *others = received.view(count, -1)
        parts[own].copy_(first)
        for other in others:
            parts[own].add_(other)
        for peer, part in zip(self.peers, parts, strict=True):
            if len(part):
                dist.broadcast(part.view(torch.uint8), peer, group=self.group)

    def sum_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the sum, in the order of the hosts, of the row that each of them has for this one. ``rows``: by host."""
        received: torch.Tensor = torch.empty_like(rows)
        dist.all_to_all_single(received.view(torch.uint8), rows.view(torch.uint8), group=self.group)
        for other in received[1:]:
            received[0].add_(other)
        return received[0]

    def broadcast(self, piece: torch.Tensor) -> None:
        """Makes ``piece`` that of the first host."""
        dist.broadcast(piece, self.peers[0], group=self.group)


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection of a rank with the others. ``rank``: its place among ``count``; ``host``: the ranks of its host, in order.
    ``exchange_nbytes``: its part of the host's memory for exchanges. ``records``: two tables in shared memory, with a row for
    each rank. ``gather``: returns the number that each rank passed to it."""

    rank: int
    count: int
    host: tuple[int, ...]
    hosts: Hosts | None
    meeting: Meeting
    exchange: Exchange
    exchange_nbytes: int
    records: torch.Tensor
    gather: Callable[[int], list[int]]


def connect(process_group: Any = None) -> Connection | None:
    """Connects this rank with the others of ``process_group``, or of the default group; all of them call it.

    Returns None where this process is alone. Raises MtcompileError where ranks of a host cannot share memory, or where hosts
    have different numbers of ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise MtcompileError("expected an initialised process group; call torch.distributed.init_process_group first")
        return None
    members = sorted(dist.get_process_group_ranks(process_group if process_group is not None else dist.group.WORLD))
    if len(members) == 1 or dist.get_rank() not in members:
        return None
    if not hasattr(os, "memfd_create"):
        raise MtcompileError("several ranks share memory as Linux does; expected Linux, or one rank")
    rank, group = members.index(dist.get_rank()), _gloo(members)
    host_ids = _gather(_host_id(), len(members), group)
    by_host = {host: [i for i, other in enumerate(host_ids) if other == host] for host in dict.fromkeys(host_ids)}
    if len({len(ranks) for ranks in by_host.values()}) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in by_host.values())
        raise MtcompileError(f"expected the same number of ranks on each host, found {sizes}; start as many on each")
    if [other for ranks in by_host.values() for other in ranks] != list(range(len(members))):
        raise MtcompileError("expected the ranks of each host to follow each other, as torchrun starts them; found them mixed")
    host = tuple(by_host[host_ids[rank]])
    place = host.index(rank)
    hosts = None
    if len(by_host) > 1:
        peers = tuple(members[ranks[place]] for ranks in by_host.values())
        hosts = Hosts(_gloo(peers), peers, tuple(map(tuple, by_host.values())))

    def gather(number: int) -> list[int]:
        return _gather(number, len(members), group)

    def gather_here(number: int) -> list[int]:
        numbers = gather(number)
        return [numbers[other] for other in host]

    nbytes = (placed(meeting_nbytes(len(host))), placed(2 * len(members) * RECORD_NBYTES), exchange_nbytes(len(host)))
    memory = shared_memory(sum(nbytes), place == 0, gather_here)
    meet, records, pieces = memory.split(nbytes)
    meeting = Meeting(meet, host, _visible(gather_here(os.getpid())), place, knobs.ranks_timeout())
    exchange = Exchange(pieces, meeting, hosts, len(members), rank)
    tables = records[: 2 * len(members) * RECORD_NBYTES].view(2, len(members), RECORD_NBYTES)
    own_nbytes = placed(-(-sum(nbytes) // len(host))) + staging_nbytes(len(host), len(by_host))
    return Connection(rank, len(members), host, hosts, meeting, exchange, own_nbytes, tables, gather)


def _gloo(members: Sequence[int]) -> Any:
    """Returns a group of the host's memory: that of the caller may be of GPUs."""
    timeout = datetime.timedelta(seconds=knobs.ranks_timeout())
    return dist.new_group(list(members), timeout=timeout, backend="gloo", use_local_synchronization=True)


def _gather(number: int, count: int, group: Any) -> list[int]:
    """Returns the number that each rank passed."""
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(numbers, torch.tensor([number]), group=group)
    return [int(each) for each in numbers]


def _host_id() -> int:
    """Returns a number that only ranks of this host have."""
    name = knobs.ranks_host()
    if not name:
        boot = Path("/proc/sys/kernel/random/boot_id")
        name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _visible(processes: Sequence[int]) -> list[int]:
    """Returns the processes, and 0 for those that cannot be seen from here."""
    return [process if Path(f"/proc/{process}").exists() else 0 for process in processes]
