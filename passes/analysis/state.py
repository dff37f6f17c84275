"""The bytes of training state and the time of its update: what does not depend on how a step is rewritten."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.step_graph import InputSpec, inputs_of, ranks_of
from mtcompile.runtime.deps import Waits
from mtcompile.runtime.disk.requests import whole_blocks
from mtcompile.runtime.schedule import ALIGNMENT, PHASES, Instruction, Schedule, is_direct, placed
from mtcompile.runtime.sim import clock, period_us

_LINK = ("h2d", "d2h")  # queues of copies, which go through the device's memory
UPDATE_SETS = 3  # of a parameter on disk and its state: one is read, one updated, one written
SCALAR_STATE_NBYTES = ALIGNMENT  # step counters of a parameter's optimizer state, on the host wherever the rest is


@dataclass(frozen=True, slots=True)
class Budgets:
    """The limits of a plan: bytes per tier, None for unlimited. ``state_copies``: optimizer state in sizes of the trained
    parameters. ``state``: its bytes by parameter, where they were measured; then ``state_copies`` is their average.
    ``host_activations``: whether activations may wait on the host. ``reserve``: device bytes that are held beside the
    schedule at all times, such as a generator's state. ``updates``: how parameters are updated in the backward; None: after
    it, with all gradients kept until then. ``disk``: None without a disk. ``disk_staging``: bytes of the host that requests to
    the disk go through. ``disk_updates``: whether weights that train may be on disk, with their state.
    ``update_piece``: the bytes of a parameter on disk that are updated at a time; 0: all. ``disk_slowdown``: how many times as
    long as without the disk's time a step may take; ``disk_days``: how many days of steps the drive must last; 0: any.
    ``disk_takes``: homes that an earlier program put on the host and that may go to disk all the same. ``disk_direct``: whether
    fetches read parameters on disk straight to the device; None: whichever is faster. ``exchange``: bytes of
    the host through which ranks combine gradients. ``sharing``: how many ranks of a host have the home blocks ``once`` between
    them, with their state; each rank counts an equal part of these. ``hosts``: how many have a part each of that state.
    ``parts``: the home blocks of which each of these hosts has a part of the weights, too. ``sums``: what gradients of
    earlier backwards take that the next one adds to, in sizes of the parameters; 0: each step has one backward."""

    device: int | None = None
    host: int | None = None
    state_copies: float = 2.0
    host_activations: bool = True
    reserve: int = 0
    updates: Updates | None = None
    disk: int | None = None
    disk_staging: int = 0
    disk_updates: bool = False
    update_piece: int = 0
    disk_slowdown: float = 0.0
    disk_days: float = 0.0
    disk_takes: tuple[str, ...] = ()
    disk_direct: bool | None = False
    state: Mapping[str, int] | None = None
    exchange: int = 0
    sharing: int = 1
    once: frozenset[str] = frozenset()
    hosts: int = 1
    parts: frozenset[str] = frozenset()
    sums: int = 0

    def grad_copies(self, tier: str) -> int:
        """Gradients that a tier holds during a whole step, in sizes of the parameters that are trained and at home there: those
        of earlier backwards and, on the host, room for the new ones. On the device these are values of the step."""
        return self.sums + (1 if self.updates is None and tier == "host" else 0)

    @property
    def nbytes(self) -> dict[str, int | None]:
        limits = {"device": self.device, "host": self.host}
        return limits if self.disk is None else {**limits, "disk": self.disk}

    def part_of(self, block: str, nbytes: int) -> int:
        """Returns what one rank counts of the bytes of a home block."""
        return -(-nbytes // self.sharing) if block in self.once else nbytes


NO_LIMITS = Budgets()
_ELEMENTS = 64  # shares begin at multiples, so that vectorised kernels see the same elements together as without shares


def share_length(numel: int, ranks: int) -> int:
    """Returns how many elements of a parameter each of ``ranks`` updates; the last ones have fewer, or none."""
    return -(-numel // (ranks * _ELEMENTS)) * _ELEMENTS


def part_of_host(nbytes: int, numel: int, budgets: Budgets) -> int:
    """Returns the bytes of a parameter's state on the host that has the largest part of it. ``nbytes``: of all of it."""
    elements = min(numel, budgets.sharing * share_length(numel, budgets.sharing * budgets.hosts))
    return -(-nbytes * elements // max(1, numel))


def param_nbytes(step: fx.GraphModule) -> dict[str, int]:
    """The bytes of parameters by home block, worked out once per step."""
    if "param_nbytes" not in step.meta:
        step.meta["param_nbytes"] = sizes = dict[str, int]()
        for spec, node in inputs_of(step):
            if spec.role == "param" and spec.name in step.meta["homes"]:
                block = step.meta["homes"][spec.name]
                sizes[block] = sizes.get(block, 0) + placed(node.meta["nbytes"])
    known: dict[str, int] = step.meta["param_nbytes"]
    return known


def trained_nbytes(step: fx.GraphModule) -> dict[str, int]:
    """The bytes of the parameters that require gradients, by home block, worked out once per step. Frozen ones have no
    gradients and no optimizer state."""
    if "trained_nbytes" not in step.meta:
        step.meta["trained_nbytes"] = sizes = dict.fromkeys(param_nbytes(step), 0)
        for spec, node in inputs_of(step):
            if is_trained(spec) and spec.name in step.meta["homes"]:
                sizes[step.meta["homes"][spec.name]] += placed(node.meta["nbytes"])
    known: dict[str, int] = step.meta["trained_nbytes"]
    return known


def is_trained(spec: InputSpec) -> bool:
    """Tells whether an input is a parameter that requires a gradient."""
    return spec.role == "param" and spec.differentiable


def streamable(step: fx.GraphModule, budgets: Budgets) -> list[str]:
    """Returns the home blocks that the device may update though their home is the host: each is whole, of one rank, and has the
    gradients of one backward."""
    updates = budgets.updates
    if updates is None or not updates.streamed or budgets.sums or ranks_of(step) > 1:
        return []
    rows, homes = step.meta.get("rows") or {}, step.meta["homes"]
    parts = {homes.get(spec.name) for spec in step.meta["inputs"] if spec.fragment is not None or spec.name in rows}
    return [home for home, nbytes in trained_nbytes(step).items() if nbytes and home not in parts]


def crossing_alone(step: fx.GraphModule) -> frozenset[str]:
    """Returns the parameters whose state crosses by itself for an update on the device: those that are at least as large as all
    of their home are on average. The others of a home cross together."""
    if "crossing_alone" not in step.meta:
        sizes: dict[str, list[tuple[int, str]]] = {}
        for spec, node in inputs_of(step):
            if is_trained(spec) and (home := step.meta["homes"].get(spec.name)) is not None:
                sizes.setdefault(home, []).append((node.meta["nbytes"], spec.name))
        large = (n for each in sizes.values() for nbytes, n in each if nbytes * len(each) >= sum(size for size, _ in each))
        step.meta["crossing_alone"] = frozenset(large)
    names: frozenset[str] = step.meta["crossing_alone"]
    return names


def state_nbytes(step: fx.GraphModule, budgets: Budgets) -> dict[str, int]:
    """The bytes of optimizer state by home block; of what hosts have parts of, those of the host with the largest."""
    if budgets.state is None:
        sizes = {block: int(nbytes * budgets.state_copies) for block, nbytes in trained_nbytes(step).items()}
        return sizes | _sharded_state_nbytes(step, budgets)
    sizes = dict.fromkeys(param_nbytes(step), 0)
    for name, block in step.meta["homes"].items():
        sizes[block] += budgets.state.get(name, 0)
    return sizes | _sharded_state_nbytes(step, budgets)


def _sharded_state_nbytes(step: fx.GraphModule, budgets: Budgets) -> dict[str, int]:
    """The bytes of optimizer state by home block of which hosts have parts, on that with the largest part of each parameter."""
    sizes: dict[str, int] = dict.fromkeys(budgets.once if budgets.hosts > 1 else (), 0)
    for spec, node in inputs_of(step) if sizes else ():
        measured = budgets.state is not None and spec.role == "param"  # what was trained before has state, too
        if (is_trained(spec) or measured) and (block := step.meta["homes"].get(spec.name)) in sizes:
            state = placed(node.meta["nbytes"]) if budgets.state is None else budgets.state.get(spec.name, 0)
            sizes[block] += part_of_host(state, node.meta["val"].numel(), budgets)
    return sizes if budgets.state is not None else {block: int(n * budgets.state_copies) for block, n in sizes.items()}


def weights_nbytes(step: fx.GraphModule, budgets: Budgets) -> dict[str, int]:
    """The bytes of parameters by home block; of what hosts have parts of, those of the host with the largest."""
    sizes = param_nbytes(step) | dict.fromkeys(budgets.parts, 0)
    for spec, node in inputs_of(step) if budgets.parts else ():
        if spec.role == "param" and (block := step.meta["homes"].get(spec.name)) in budgets.parts:
            sizes[block] += part_of_host(placed(node.meta["nbytes"]), node.meta["val"].numel(), budgets)
    return sizes


def with_parts(step: fx.GraphModule, budgets: Budgets, wanted: bool | None) -> Budgets:
    """Returns budgets under which each host has a part of the weights that hosts update parts of. ``wanted``: None where the
    host is to have room for all that it holds otherwise."""
    sharded = () if budgets.updates is None or budgets.hosts == 1 else budgets.updates.sharded
    if wanted is None and budgets.host is not None:
        wanted = sum(held_nbytes(step, budgets, "host").values()) + budgets.exchange > budgets.host
    return replace(budgets, parts=frozenset(sharded)) if wanted else budgets


def held_nbytes(step: fx.GraphModule, budgets: Budgets, tier: str) -> dict[str, int]:
    """The bytes that a tier ("device", "host") holds at all times, by home block, if all blocks are there: weights, optimizer
    state, and gradients. Of what ranks share, it is one rank's part; of what hosts share, that of the host with the largest.
    Gradients are each rank's own."""
    trained, copies = trained_nbytes(step), budgets.grad_copies(tier)
    state = state_nbytes(step, budgets)
    weights = weights_nbytes(step, budgets).items()
    return {b: budgets.part_of(b, nbytes + state[b]) + copies * trained[b] for b, nbytes in weights}


def on_disk_nbytes(step: fx.GraphModule, budgets: Budgets) -> dict[str, int]:
    """The bytes that each home block takes when it is on disk: weights and optimizer state. Gradients are not there."""
    weights, state = weights_on_disk_nbytes(step), state_on_disk_nbytes(step, budgets)
    return {home: nbytes + state[home] for home, nbytes in weights.items()}


def weights_on_disk_nbytes(step: fx.GraphModule, trained: bool = False) -> dict[str, int]:
    """The bytes that the parameters of each home block take on disk, each in whole blocks of the disk. ``trained``: of those
    alone that require gradients."""
    sizes = dict.fromkeys(param_nbytes(step), 0)
    for spec, node in inputs_of(step):
        if spec.role == "param" and spec.name in step.meta["homes"] and (is_trained(spec) or not trained):
            sizes[step.meta["homes"][spec.name]] += whole_blocks(node.meta["nbytes"])
    return sizes


def state_on_disk_nbytes(step: fx.GraphModule, budgets: Budgets) -> dict[str, int]:
    """The bytes that the optimizer state of each home block takes on disk."""
    sizes = dict.fromkeys(param_nbytes(step), 0)
    for spec, node in inputs_of(step):
        if spec.role == "param" and (home := step.meta["homes"].get(spec.name)) is not None:
            nbytes = node.meta["nbytes"]
            sizes[home] += int(whole_blocks(nbytes) * _state_copies(spec, nbytes, budgets))
    return sizes


def _state_copies(spec: InputSpec, nbytes: int, budgets: Budgets) -> float:
    """A parameter's optimizer state in sizes of the parameter, rounded up where it was measured: on disk, each tensor of it is
    in whole blocks."""
    if budgets.state is None:
        return budgets.state_copies if is_trained(spec) else 0.0
    return math.ceil(budgets.state.get(spec.name, 0) / max(1, placed(nbytes)))


def resident_nbytes(held: Mapping[str, Mapping[str, int]], plan: Plan) -> dict[str, int]:
    """Persistent bytes per tier. ``held``: by tier and home block, as ``held_by_tier`` returns them."""
    totals = dict.fromkeys(held, 0)
    for block, tier in zip(held["host"], plan.tiers(held["host"]), strict=True):
        at = tier if tier in held else "host"
        totals[at] += held[at][block]
    return totals


def held_by_tier(step: fx.GraphModule, budgets: Budgets) -> dict[str, dict[str, int]]:
    """Returns tier -> home block -> the bytes that the tier holds at all times if the block is there."""
    held = {tier: held_nbytes(step, budgets, tier) for tier in ("device", "host")}
    return held if budgets.disk is None else {**held, "disk": on_disk_nbytes(step, budgets)}


def persistent_nbytes(step: fx.GraphModule, plan: Plan, budgets: Budgets) -> dict[str, int]:
    """All that is held per tier at all times: ``state_by_tier``, the reserve, the step counters of optimizers, and what
    requests to a disk go through."""
    return persistent_of(step, budgets)(plan)


def persistent_of(step: fx.GraphModule, budgets: Budgets) -> Callable[[Plan], dict[str, int]]:
    """Returns ``persistent_nbytes`` for many plans: what is the same for all of them is worked out once."""
    held = held_by_tier(step, budgets)
    counters = sum(is_trained(spec) and spec.name in step.meta["homes"] for spec, _ in inputs_of(step))
    last: tuple[object, dict[str, int]] = None, {}  # plans that were made of others mostly share what they decide about homes

    def persistent(plan: Plan) -> dict[str, int]:
        nonlocal last
        decided = plan.decisions.of_kind("params")
        if last[0] is not decided:
            last = decided, resident_nbytes(held, plan)
        totals = last[1].copy()
        totals["device"] += budgets.reserve
        totals["host"] += counters * SCALAR_STATE_NBYTES + budgets.exchange
        if budgets.disk is not None and uses_disk(plan):
            totals["host"] += budgets.disk_staging + update_staging_nbytes(step, plan, budgets)
        return totals

    return persistent


def state_by_tier(step: fx.GraphModule, plan: Plan, budgets: Budgets) -> dict[str, int]:
    """The training state that a plan keeps on each tier."""
    return resident_nbytes(held_by_tier(step, budgets), plan)


def update_staging_nbytes(step: fx.GraphModule, plan: Plan, budgets: Budgets) -> int:
    """The bytes of the host that updates of parameters on disk go through: of the largest such parameter and its state, as many
    sets as are read, updated and written at a time."""
    homes, largest = step.meta["homes"], 0
    for spec, node in inputs_of(step):
        if is_trained(spec) and spec.name in homes and plan.params(homes[spec.name]) == "disk":
            nbytes = node.meta["nbytes"]
            piece = whole_blocks(min(nbytes, budgets.update_piece or nbytes))
            largest = max(largest, int(piece * (1 + _state_copies(spec, nbytes, budgets))))
    return UPDATE_SETS * largest


def uses_disk(plan: Plan) -> bool:
    """Says whether a plan keeps anything on disk."""
    return any(decision.choice == "disk" for decision in plan.decisions)


def times_us(
    schedule: Schedule, waits: Waits | None, machine: Machine, trained: Mapping[str, int], plan: Plan, budgets: Budgets
) -> tuple[float, float]:
    """Microseconds of forward and backward, and the microseconds that the optimizer's update adds to them. ``waits``: what
    instructions wait for; None: the deps in the schedule. ``trained``: bytes that updates change, by home block. Where updates
    run in the backward, the host works on gradients while others are made, through the memory that copies and collectives use
    too, and those of parameters on disk through the drive that is read meanwhile."""
    link = [i for i in schedule.instructions if i.queue in _LINK]
    copied = [sum(i.nbytes for i in link), sum(i.nbytes for i in link if i.phase == PHASES[1])]
    drive = [drive_nbytes(schedule, plan, phases) for phases in (PHASES, PHASES[1:])]
    collectives = 0.0
    for i in schedule.instructions:  # one by one, as summaries do: Python 3.12 sums floats in another way
        collectives += i.time_us if i.work == "collective" else 0.0
    traffic = Traffic(copied, drive, collectives)
    if budgets.updates is None:
        span = _span_us(*clock(schedule, waits=waits))
        return update_figures((span, 0.0, 0.0), traffic, machine, trained, plan, budgets)
    without = [0.0 if _is_update(schedule, i) else i.time_us for i in schedule.instructions]
    starts, ends = clock(schedule, waits=waits, durations=without)
    alone = _span_us(starts, ends)
    begun = (start for i, start in zip(schedule.instructions, starts, strict=True) if i.phase == PHASES[1])
    spans = alone, alone - min(begun, default=alone), period_us(schedule, waits)
    return update_figures(spans, traffic, machine, trained, plan, budgets)


class Traffic(NamedTuple):
    """The traffic of a step. ``copied``: bytes over the link, in all and in the backward; ``drive``: bytes read from disk and
    written there, in all and in the backward; ``collectives``: their µs."""

    copied: Sequence[int]
    drive: Sequence[tuple[int, int]]
    collectives: float = 0.0


def update_figures(
    spans: tuple[float, float, float],
    traffic: Traffic,
    machine: Machine,
    trained: Mapping[str, int],
    plan: Plan,
    budgets: Budgets,
) -> tuple[float, float]:
    """The figures of ``times_us``. ``spans``: the µs of forward and backward, of the backward alone, both as if updates took no
    time, and from one step to the next."""
    copied, drive, collectives = traffic
    alone, backward, period = spans
    contention = machine.contention_us(copied[0])
    of_device = {home for home, d in plan.decisions.of_kind("params").items() if d.choice == "device"}
    of_device.update(home for home in plan.decisions.of_kind("update") if plan.streams(home))
    device_nbytes = sum([trained.get(home, 0) for home in of_device])
    host_nbytes = sum(trained.values()) - device_nbytes
    if budgets.updates is None:
        gathered = machine.collective_us(host_nbytes, budgets.hosts, "all_gather") if budgets.hosts > 1 else 0.0
        return alone + contention, gathered + machine.update_us(host_nbytes, device_nbytes, budgets.state_copies)
    # Updates may run beside the whole step, or beside its backward.
    whole = 0 if budgets.updates.run_ahead else 1
    beside, overlapped = copied[whole], backward if whole else alone
    others = beside / machine.host_gbps / 1e3 + collectives - overlapped
    memory = replace(machine, update_gbps=0.0)
    memory_bound = memory.update_us(host_nbytes, 0, budgets.state_copies, budgets.updates.checked) + others
    disk_bound = machine.drive_us(*drive[whole]) - overlapped
    return alone + contention, max(period - alone, 0.0, memory_bound, disk_bound)


def drive_nbytes(schedule: Schedule, plan: Plan, phases: Sequence[str] = PHASES) -> tuple[int, int]:
    """Returns the bytes that a step reads from disk and writes there in these phases, with those of updates."""
    read = written = 0
    for instruction in schedule.instructions:
        if instruction.phase not in phases:
            continue
        if instruction.queue == "disk_read" or is_direct(instruction, schedule.buffers):
            read += instruction.nbytes
        elif instruction.queue == "disk_write":
            written += instruction.nbytes
        elif instruction.work == "update" and plan.updates is not None:
            versions = (schedule.buffers[name] for name in instruction.writes)
            updated = updated_on_disk_nbytes(plan.updates, sum(b.nbytes for b in versions if b.tier == "disk"))
            read, written = read + updated, written + updated
    return read, written


def updated_on_disk_nbytes(updates: Updates, nbytes: int) -> int:
    """Returns the bytes that an update of ``nbytes`` of parameters on disk reads from there, and writes again."""
    return int(nbytes * (1 + updates.state_copies))


def _span_us(starts: Sequence[float], ends: Sequence[float]) -> float:
    return max(ends) - min(starts) if ends else 0.0


def _is_update(schedule: Schedule, instruction: Instruction) -> bool:
    """Tells whether it updates parameters, or makes or moves what scales their updates."""
    return instruction.work == "update" or any(schedule.buffers[name].role == "state" for name in instruction.writes)
