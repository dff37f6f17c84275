"""The bytes of training state and the time of its update: what does not depend on how a step is rewritten."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.step_graph import inputs_of
from mtcompile.runtime.deps import Waits
from mtcompile.runtime.disk.requests import whole_blocks
from mtcompile.runtime.schedule import ALIGNMENT, Instruction, Schedule, placed
from mtcompile.runtime.sim import clock, period_us

_LINK = ("h2d", "d2h")  # queues of copies, which go through the device's memory
UPDATE_SETS = 3  # of a parameter on disk and its state: one is read, one updated, one written
SCALAR_STATE_NBYTES = ALIGNMENT  # step counters of a parameter's optimizer state, on the host wherever the rest is


@dataclass(frozen=True, slots=True)
class Budgets:
    """The limits of a plan: bytes per tier, None for unlimited. ``state_copies``: optimizer state in parameter sizes.
    ``host_activations``: whether activations may wait on the host. ``reserve``: device bytes that are held beside the
    schedule at all times, such as a generator's state. ``updates``: how parameters are updated in the backward; None: after
    it, with all gradients kept until then. ``disk``: None without a disk. ``disk_staging``: bytes of the host that requests to
    the disk go through. ``disk_updates``: whether weights that train may be on disk, with their state.
    ``frozen_copies``: as ``copies``, of frozen parameters that are counted as such.
    ``update_piece``: the bytes of a parameter on disk that are updated at a time; 0: all."""

    device: int | None = None
    host: int | None = None
    state_copies: float = 2.0
    host_activations: bool = True
    reserve: int = 0
    updates: Updates | None = None
    disk: int | None = None
    disk_staging: int = 0
    disk_updates: bool = False
    frozen_copies: float = 1.0
    update_piece: int = 0

    @property
    def copies(self) -> float:
        """Training state in parameter sizes: weights, optimizer state, and gradients where they wait for optimizer.step()."""
        return (2 if self.updates is None else 1) + self.state_copies

    @property
    def nbytes(self) -> dict[str, int | None]:
        limits = {"device": self.device, "host": self.host}
        return limits if self.disk is None else {**limits, "disk": self.disk}


NO_LIMITS = Budgets()


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


def on_disk_nbytes(step: fx.GraphModule) -> dict[str, int]:
    """The bytes that the parameters of each home block take on disk, in whole blocks of the disk, worked out once per step."""
    if "on_disk_nbytes" not in step.meta:
        step.meta["on_disk_nbytes"] = sizes = dict[str, int]()
        for spec, node in inputs_of(step):
            if spec.role == "param" and (home := step.meta["homes"].get(spec.name)) is not None:
                sizes[home] = sizes.get(home, 0) + whole_blocks(node.meta["nbytes"])
    known: dict[str, int] = step.meta["on_disk_nbytes"]
    return known


def copies_of(step: fx.GraphModule, home: str, budgets: Budgets) -> float:
    """Training state of a home block in parameter sizes."""
    return budgets.frozen_copies if home in step.meta.get("frozen", ()) else budgets.copies


def trained_nbytes(step: fx.GraphModule) -> dict[str, int]:
    """``param_nbytes`` without the homes that are known to be frozen."""
    frozen: Collection[str] = step.meta.get("frozen", ())
    return {home: nbytes for home, nbytes in param_nbytes(step).items() if home not in frozen}


def resident_nbytes(step: fx.GraphModule, plan: Plan, budgets: Budgets) -> dict[str, int]:
    """Persistent bytes per tier, at the home of their block: weights, optimizer state, and gradients where they wait for
    optimizer.step() (an older one may be held while a new one is made)."""
    totals = dict.fromkeys(budgets.nbytes, 0)
    on_disk = on_disk_nbytes(step) if "disk" in totals else {}
    for home, nbytes in param_nbytes(step).items():
        tier, copies = plan.params(home), copies_of(step, home, budgets)
        if tier == "disk":
            totals["disk"] += int(on_disk[home] * copies)
        else:
            totals["device" if tier == "device" else "host"] += int(nbytes * copies)
    return totals


def persistent_nbytes(step: fx.GraphModule, plan: Plan, budgets: Budgets) -> dict[str, int]:
    """All that is held per tier at all times: ``resident_nbytes``, the reserve, the step counters of optimizers, and what
    requests to a disk go through."""
    totals = resident_nbytes(step, plan, budgets)
    totals["device"] += budgets.reserve
    totals["host"] += len(step.meta["homes"]) * SCALAR_STATE_NBYTES
    if budgets.disk is not None and uses_disk(plan):
        totals["host"] += budgets.disk_staging + update_staging_nbytes(step, plan, budgets)
    return totals


def update_staging_nbytes(step: fx.GraphModule, plan: Plan, budgets: Budgets) -> int:
    """The bytes of the host that updates of parameters on disk go through: of the largest such parameter and its state, as many
    sets as are read, updated and written at a time."""
    homes, frozen = step.meta["homes"], step.meta.get("frozen", ())
    largest = 0
    for spec, node in inputs_of(step):
        home = homes.get(spec.name) if spec.role == "param" else None
        if home is not None and home not in frozen and plan.params(home) == "disk":
            largest = max(largest, whole_blocks(min(node.meta["nbytes"], budgets.update_piece or node.meta["nbytes"])))
    return UPDATE_SETS * int(largest * (1 + budgets.state_copies))


def uses_disk(plan: Plan) -> bool:
    """Says whether a plan keeps anything on disk."""
    return any(decision.choice == "disk" for decision in plan.decisions)


def times_us(
    schedule: Schedule, waits: Waits | None, machine: Machine, sizes: Mapping[str, int], plan: Plan, budgets: Budgets
) -> tuple[float, float]:
    """Microseconds of forward and backward, and the microseconds that the optimizer's update adds to them. ``sizes``: bytes of
    the parameters that it updates, by home. ``waits``: what instructions wait for; None: the deps in the schedule. Where
    updates run in the backward, the host works on gradients while others are made, through the memory that copies use too."""
    copied = sum(i.nbytes for i in schedule.instructions if i.queue in _LINK)
    contention = machine.contention_us(copied)
    device_nbytes = sum(nbytes for block, nbytes in sizes.items() if plan.params(block) == "device")
    host_nbytes = sum(sizes.values()) - device_nbytes
    if budgets.updates is None:
        update_us = machine.update_us(host_nbytes, device_nbytes, budgets.state_copies)
        return _span_us(*clock(schedule, waits=waits)) + contention, update_us
    without = [0.0 if _is_update(schedule, i) else i.time_us for i in schedule.instructions]
    starts, ends = clock(schedule, waits=waits, durations=without)
    alone = overlapped = _span_us(starts, ends)  # without updates; and as much of it as updates may run beside
    if not budgets.updates.run_ahead:
        backward = (start for i, start in zip(schedule.instructions, starts, strict=True) if i.phase == "backward")
        overlapped -= min(backward, default=alone)
        copied = sum(i.nbytes for i in schedule.instructions if i.queue in _LINK and i.phase == "backward")
    memory_bound = machine.update_us(host_nbytes, 0, budgets.state_copies) + copied / machine.host_gbps / 1e3 - overlapped
    return alone + contention, max(period_us(schedule, waits) - alone, 0.0, memory_bound)


def _span_us(starts: Sequence[float], ends: Sequence[float]) -> float:
    return max(ends) - min(starts) if ends else 0.0


def _is_update(schedule: Schedule, instruction: Instruction) -> bool:
    """Tells whether it updates parameters, or makes or moves what scales their updates."""
    return instruction.work == "update" or any(schedule.buffers[name].role == "state" for name in instruction.writes)
