"""The costs of a home in a step, by where it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from mtcompile.passes.analysis.state import updated_on_disk_nbytes
from mtcompile.passes.lower import update_cost
from mtcompile.passes.planning.linear.needs import needs_of
from mtcompile.passes.planning.linear.terms import Terms
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import param_homes_by_node
from mtcompile.runtime.schedule import PHASES, Queue, Schedule


@dataclass(frozen=True, slots=True)
class HomeCost:
    """The least costs of a home in a step if it is on the host: µs of its fetches by phase, of the copies of its gradients and
    of its update there, and the bytes copied. ``device_update_us``, ``disk_update_us``: of its update if it is on the device or
    on disk; ``drive_us``: how long that keeps the drive busy. ``fetched``, ``stored``: bytes of the weights that fetches
    bring, by phase, and of their gradients, as narrow as they may cross. Fetches are of what regions read whatever is kept; see
    ``blocks`` for those of what is made again."""

    fetch_us: Mapping[str, float]
    store_us: float
    update_us: float
    device_update_us: float
    disk_update_us: float
    drive_us: float
    fetched: Mapping[str, int]
    stored: int


def home_costs(problem: PlanningProblem, on_host: Schedule, on_device: Schedule) -> dict[str, HomeCost]:
    """Adds up what homes cost at least: copies, by what regions need; updates, out of a schedule with every home on the host,
    and of one with every home on the device."""
    step, machine, updates = problem.step, problem.machine, problem.budgets.updates
    needs = needs_of(step)
    # Each queue is read in one schedule: a fixed home is updated on the same one in both.
    updates_us = {"host": _updates_us(step, on_host, "host"), "compute": _updates_us(step, on_device, "compute")}
    on_disk_us, drive_us = defaultdict[str, float](float), defaultdict[str, float](float)
    for home, nbytes, _ in _updates(step, on_host, "host") if updates is not None else ():
        on_disk_us[home] += update_cost(updates, machine, "host", nbytes, nbytes)[1]
        drive_us[home] += machine.drive_us(*[updated_on_disk_nbytes(updates, nbytes)] * 2)
    fetched = {phase: _total(n.read for r, n in needs.items() if r.meta["phase"] == phase) for phase in PHASES}
    stored = _total(need.stored for need in needs.values())
    return {
        home: HomeCost(
            {phase: machine.copy_us(fetched[phase][home], "h2d") for phase in PHASES},
            machine.copy_us(stored[home], "d2h"),
            updates_us["host"][home],
            updates_us["compute"][home],
            on_disk_us[home],
            drive_us[home],
            {phase: fetched[phase][home] for phase in PHASES},
            stored[home],
        )
        for home in dict.fromkeys(step.meta["homes"].values())
    }


def place_casts(problem: PlanningProblem, terms: Terms) -> None:
    """Adds what it costs where the host casts parameters for the forward, and gradients after the backward, and where it does
    not: then they cross as they are. Both are decided by home."""
    machine = problem.machine
    if terms.on_disk:
        return
    for region, needs in terms.needs.items():
        phase, block = region.meta["phase"], region.meta["block"]
        ways = [("d2h", "host", needs.grads_wider, needs.grads_host)]
        if phase == PHASES[0]:
            ways.append(("h2d", "casts", needs.wider, needs.host))
        for queue, work, wider, host in ways:
            for home, nbytes in wider.items():
                if nbytes and home in terms.away:
                    us = machine.copy_us(nbytes, queue), host[home] / machine.host_gbps / 1e3
                    terms.let_host_cast(terms.away[home], us, (queue, phase), (work, phase), (block, block))


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = defaultdict[str, int](int)
    for part in parts:
        for home, nbytes in part.items():
            total[home] += nbytes
    return total


def _updates_us(step: fx.GraphModule, schedule: Schedule, queue: Queue) -> dict[str, float]:
    """Returns the µs of the updates of each home on a queue."""
    us = defaultdict[str, float](float)
    for home, _, share_us in _updates(step, schedule, queue):
        us[home] += share_us
    return us


def _updates(step: fx.GraphModule, schedule: Schedule, queue: Queue) -> Iterator[tuple[str, int, float]]:
    """Yields the updates on a queue: the home, the bytes of it that one changes, and the µs."""
    home_of = param_homes_by_node(step)
    for instruction in schedule.instructions:
        if instruction.work == "update" and instruction.queue == queue:
            written = [schedule.buffers[name] for name in instruction.writes]
            total = sum(buffer.nbytes for buffer in written)
            changed, us = defaultdict[str, int](int), defaultdict[str, float](float)
            for buffer in written:
                if buffer.version_of in home_of and total:
                    home = home_of[buffer.version_of]
                    changed[home] += buffer.nbytes
                    us[home] += instruction.time_us * buffer.nbytes / total
            yield from ((home, nbytes, us[home]) for home, nbytes in changed.items())
