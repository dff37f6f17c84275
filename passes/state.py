"""Training state in bytes and its update in time: what of a plan does not depend on how its step is rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from mtcompile.passes.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import placeholders
from mtcompile.runtime.schedule import ALIGNMENT, Schedule, placed
from mtcompile.runtime.trace import Trace, span_us

SCALAR_STATE_NBYTES = ALIGNMENT  # step counters of a parameter's optimizer state, on the host wherever the rest is


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes per tier; None is unlimited. ``state_copies``: optimizer state per parameter, in parameter sizes.
    ``host_activations``: whether activations may wait on the host. ``reserve``: device bytes that are held beside the
    schedule at all times, such as a generator's state. ``update``: after the backward (``step``), with all gradients kept
    for it, or as gradients arrive (``backward``), when only those of two blocks are."""

    device: int | None = None
    host: int | None = None
    state_copies: float = 2.0
    host_activations: bool = True
    reserve: int = 0
    update: Literal["step", "backward"] = "step"

    @property
    def limits(self) -> dict[str, int | None]:
        return {"device": self.device, "host": self.host}


def param_nbytes(step: fx.GraphModule) -> dict[str, int]:
    """Bytes of parameters per home block."""
    sizes: dict[str, int] = {}
    for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True):
        if spec.role == "param" and spec.name in step.meta["homes"]:
            block = step.meta["homes"][spec.name]
            sizes[block] = sizes.get(block, 0) + placed(node.meta["nbytes"])
    return sizes


def resident_nbytes(sizes: Mapping[str, int], plan: Plan, budgets: Budgets) -> dict[str, int]:
    """Persistent bytes per tier, at the home of their block: weights, optimizer state, and gradients, of which one is held
    (an older one may be while a new one is made) or, updated as they arrive, those of two blocks are."""
    totals = {"device": 0, "host": 0}
    largest = {"device": 0, "host": 0}
    held = 2 if budgets.update == "step" else 1
    for block, nbytes in sizes.items():
        tier = "device" if plan.params(block) == "device" else "host"
        totals[tier] += int(nbytes * (held + budgets.state_copies))
        largest[tier] = max(largest[tier], nbytes)
    if budgets.update == "backward":
        return {tier: nbytes + 2 * largest[tier] for tier, nbytes in totals.items()}
    return totals


def update_us(
    schedule: Schedule, trace: Trace, machine: Machine, sizes: Mapping[str, int], plan: Plan, budgets: Budgets
) -> float:
    """What the optimizer's update adds to the step. As gradients arrive, the host works on each while the backward goes
    on, through the memory that copies use too; parameters on the device are updated by the device in any case."""
    there = sum(nbytes for block, nbytes in sizes.items() if plan.params(block) == "device")
    here = sum(sizes.values()) - there
    if budgets.update == "step":
        return machine.update_us(here, there, budgets.state_copies)
    done = 0.0
    for record in sorted(trace.records, key=lambda record: record.end_us):
        instruction = schedule.instructions[record.index]
        if instruction.op == "copy" and schedule.buffers[instruction.writes[0]].role == "grad":
            done = max(done, record.end_us) + machine.update_us(instruction.nbytes, 0, budgets.state_copies)
    copied = sum(i.nbytes for i in schedule.instructions if i.op == "copy" and i.phase == "backward")
    span = span_us(trace)
    starts = (r.start_us for r in trace.records if schedule.instructions[r.index].phase == "backward")
    backward = span - min(starts, default=span)
    crowded = machine.update_us(here, 0, budgets.state_copies) + copied / machine.host_gbps / 1e3 - backward
    return max(0.0, done - span, crowded) + machine.update_us(0, there, budgets.state_copies)
