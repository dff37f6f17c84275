"""The linear program while it is built: its variables, and how much each takes of queues and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
from torch import fx

from mtcompile.passes.analysis.state import param_nbytes
from mtcompile.passes.planning.linear.needs import Needs, needs_of, param_homes
from mtcompile.passes.planning.linear.program import Program, Work, added
from mtcompile.runtime.schedule import PHASES


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a queue in a phase for the blocks from ``low`` to ``high``: µs per unit of each variable, and constant µs."""

    low: int
    high: int
    us: Mapping[int, float]
    fixed: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """``time``: the variable for the whole step, in µs; ``span``: phase -> the variable for its time. ``loads``: (queue, phase)
    -> what the queue does; ``copied``: phase -> bytes by variable; ``held``: tier -> bytes by variable, at the start of the
    backward. ``away``: home -> the variable for its share on the host; ``staying``: for the share that is there and, once
    fetched for the forward, stays for the backward; ``on_disk``: for the share that is on disk, which is a part of ``away``
    (without a disk, there is none). ``needs``: of each region. ``backwards``: the backward regions of a block, by its index.
    ``blocks``: home -> the first and the last block of the regions that read it or make its gradients. ``sums``: what ``work``
    returned, by range; ``ends``: the first and the last blocks of ``loads``, for it."""

    program: Program
    time: int
    span: Mapping[str, int]
    loads: dict[tuple[str, str], list[Load]]
    copied: dict[str, dict[int, float]]
    held: dict[str, dict[int, float]]
    away: Mapping[str, int]
    staying: Mapping[str, int]
    on_disk: Mapping[str, int]
    needs: Mapping[fx.Node, Needs]
    backwards: Mapping[int, list[fx.Node]]
    blocks: Mapping[str, tuple[int, int]]
    sums: dict[tuple[str, str], dict[tuple[int, int], Work]]
    ends: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)

    def of_phase(self, phase: str) -> list[fx.Node]:
        return [region for region in self.needs if region.meta["phase"] == phase]

    def work(self, queue: str, phase: str, low: int = -1, high: int = 1 << 30) -> Work:
        """Returns what a queue certainly does in a phase for the blocks from ``low`` to ``high``. It is a variable, the sum of
        what it was asked for last within this range and of the rest: so rows are short, however many blocks there are. No load
        may be added any more."""
        asked = self.sums[queue, phase]
        if (low, high) not in asked:
            within = next(((a, b) for a, b in reversed(asked) if low <= a and b <= high), None)
            us, fixed = ({}, 0.0) if within is None else asked[within]
            loads = [self.loads[queue, phase][place] for place in self._between((queue, phase), (low, high), within)]
            total = added(us, *(load.us for load in loads))
            asked[low, high] = self.program.summed(total), fixed + sum(load.fixed for load in loads)
        return asked[low, high]

    def _between(self, of: tuple[str, str], ends: tuple[int, int], without: tuple[int, int] | None) -> list[int]:
        """Returns the places of the loads within a range of blocks, but for those within another."""
        if of not in self.ends:
            self.ends[of] = tuple(numpy.array([[load.low, load.high] for load in self.loads[of]], dtype=int).reshape(-1, 2).T)
        lows, highs = self.ends[of]

        def within(low: int, high: int) -> Any:
            return (low <= lows) & (highs <= high)

        places: list[int] = numpy.flatnonzero(within(*ends) if without is None else within(*ends) & ~within(*without)).tolist()
        return places

    def let_host_cast(
        self, share: int, us: tuple[float, float], link: tuple[str, str], work: tuple[str, str], within: tuple[int, int]
    ) -> None:
        """Adds that the host may cast a part of the variable ``share``, for the blocks ``within``. ``us``: the µs by which what
        it does not cast crosses longer, on ``link``, and those in which it casts, counted as ``work``; both for all of it."""
        longer_us, host_us = us
        by_host = self.program.variable()
        self.program.at_most({by_host: 1.0, share: -1.0})
        self.loads[link].append(Load(*within, {share: longer_us, by_host: -longer_us}))
        self.loads[work].append(Load(*within, {by_host: host_us}))

    def updates(self, low: int = -1, high: int = 1 << 30) -> dict[str, Work]:
        """Returns the updates on the host of these blocks, with what those of parameters on disk wait longer for the disk."""
        updates = {"host": self.work("host", "backward", low, high)}
        return updates | ({"disk": self.work("disk", "backward", low, high)} if self.on_disk else {})

    def by_share(self, amounts: Mapping[str, float]) -> dict[int, float]:
        """Returns amounts by home, such as bytes, as amounts by variable."""
        return {self.away[home]: float(n) for home, n in amounts.items() if home in self.away}

    def again(self, amounts: Mapping[int, float]) -> dict[int, float]:
        """Returns amounts by the share on the host as amounts by the part of it that does not stay from the forward on."""
        stays = {self.away[home]: variable for home, variable in self.staying.items()}
        return {**amounts, **{stays[variable]: -n for variable, n in amounts.items()}}


def terms_of(step: fx.GraphModule, disk: bool = False) -> Terms:
    """Returns the terms of a step graph, with its variables for time and homes and nothing taken yet. ``disk``: whether there
    is one."""
    program = Program()
    needs = needs_of(step)
    users: dict[str, list[int]] = {home: [] for home in param_nbytes(step)}
    for region, need in needs.items():
        for home in (*param_homes(step, region).values(), *need.grads):
            users[home].append(region.meta["block"])
    backwards: dict[int, list[fx.Node]] = defaultdict(list)
    for region in needs:
        if region.meta["phase"] == "backward":
            backwards[region.meta["block"]].append(region)
    return Terms(
        program,
        0,
        {phase: program.variable(None) for phase in PHASES},
        defaultdict(list),
        {phase: defaultdict(float) for phase in PHASES},
        {tier: defaultdict(float) for tier in ("device", "host", "disk")},
        {home: program.variable() for home in param_nbytes(step)},
        {home: program.variable() for home in param_nbytes(step)},
        {home: program.variable() for home in param_nbytes(step)} if disk else {},
        needs,
        dict(backwards),
        {home: (min(indices, default=0), max(indices, default=0)) for home, indices in users.items()},
        defaultdict(dict),
    )
