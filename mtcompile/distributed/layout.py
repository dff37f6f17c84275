"""The ranks that a forecast counts with: how many GPUs on how many hosts, and what each of them has of its host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtcompile import knobs
from mtcompile.distributed.exchange import exchange_nbytes, staging_nbytes
from mtcompile.optim.state_sizes import is_elementwise
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.runtime.schedule import placed


@dataclass(frozen=True, slots=True)
class RankLayout:
    """``gpus`` ranks on each of ``hosts``. ``network_gbps``: between hosts, per direction; None: the machine's."""

    gpus: int = 1
    hosts: int = 1
    network_gbps: float | None = None

    @property
    def count(self) -> int:
        return self.gpus * self.hosts

    def machine(self, whole: Machine, once: bool) -> Machine:
        """Returns the machine as each rank has it. ``once``: weights lie once for all ranks of a host, which update shares;
        each of several hosts updates a part."""
        shared = whole.shared_by(self.gpus, once, self.hosts if knobs.ranks_shard() else 1)
        return shared if self.network_gbps is None else replace(shared, network_gbps=self.network_gbps)

    def budgets(self, of_host: Budgets, once: bool) -> Budgets:
        """Returns the budgets of each rank, which has an equal part of the host. With weights that lie there ``once``, a rank
        waits for the others' updates after each backward, or in each step of the optimizer."""
        if self.count == 1:
            return of_host
        host = None if of_host.host is None else of_host.host // self.gpus
        updates, sharing = of_host.updates, self.gpus if once else 1
        hosts = self.hosts if once and knobs.ranks_shard() else 1
        if once and self.gpus * hosts > 1 and updates is not None:
            updates = replace(updates, run_ahead=False, in_turn=hosts > 1)
        exchange = placed(-(-exchange_nbytes(self.gpus) // self.gpus)) + staging_nbytes(self.gpus, self.hosts)
        return replace(of_host, host=host, updates=updates, sharing=sharing, exchange=exchange, hosts=hosts)


ALONE = RankLayout()


def layout_named(gpus: int, hosts: int, network_gbps: float | None, solve: str | None, disk: object) -> RankLayout:
    """Returns the layout. Raises ValueError for one that cannot be planned."""
    if gpus < 1 or hosts < 1:
        raise ValueError(f"expected gpus and hosts of 1 or more, found {gpus} and {hosts}")
    if network_gbps is not None and network_gbps <= 0:
        raise ValueError(f"expected a network of more than 0 GB/s, found {network_gbps:g}")
    if gpus * hosts > 1 and solve is not None:
        raise ValueError(f"solve={solve!r} expects one rank, found {gpus * hosts}: solve for one, then plan all")
    if gpus * hosts > 1 and disk is not None:
        raise ValueError("expected no disk= where several ranks train: weights on disk are not shared between them yet")
    return RankLayout(gpus, hosts, network_gbps)


def updates_once(make_optimizer: Callable[[list[Any]], torch.optim.Optimizer] | None) -> bool:
    """Tells whether the ranks of a host update one set of weights in shares. ``make_optimizer``: makes the optimizer; None: one
    that treats each element by itself."""
    if make_optimizer is None or not knobs.ranks_share():
        return knobs.ranks_share()
    return is_elementwise(make_optimizer([torch.nn.Parameter(torch.zeros(2, 2))]))
