"""The costs of a home in a step, by where it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.step_graph import inputs_of, outputs_of
from mtcompile.runtime.schedule import PHASES, Schedule


@dataclass(frozen=True, slots=True)
class HomeCost:
    """The costs of a home in a step if it is on the host: µs of its fetches by phase, of the copies of its gradients and of
    its update there, and the bytes copied. ``device_update_us``: of its update if it is on the device. ``fetched``, ``stored``:
    bytes of the weights that fetches bring, by phase, and of their gradients."""

    fetch_us: Mapping[str, float]
    store_us: float
    update_us: float
    device_update_us: float
    fetched: Mapping[str, int]
    stored: int


def home_costs(step: fx.GraphModule, machine: Machine, on_host: Sequence[Schedule], on_device: Schedule) -> dict[str, HomeCost]:
    """Reads what homes cost at least out of schedules with every home on the host, and of one with every home on the device."""
    several = [_home_costs(step, machine, schedule, on_device) for schedule in on_host]
    return {home: _least([costs[home] for costs in several]) for home in several[0]}


def _least(costs: Sequence[HomeCost]) -> HomeCost:
    def by_phase(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {phase: min(each[phase] for each in figures) for phase in PHASES}

    return replace(
        costs[0],
        fetch_us=by_phase([cost.fetch_us for cost in costs]),
        fetched=by_phase([cost.fetched for cost in costs]),
        update_us=min(cost.update_us for cost in costs),
    )


def _home_costs(step: fx.GraphModule, machine: Machine, on_host: Schedule, on_device: Schedule) -> dict[str, HomeCost]:
    homes = step.meta["homes"]
    home_of = {node.name: homes[spec.name] for spec, node in inputs_of(step) if spec.role == "param" and spec.name in homes}
    fetches: dict[tuple[str, str], float] = defaultdict(float)
    updates: dict[tuple[str, str], float] = defaultdict(float)
    copied: dict[tuple[str, str], int] = defaultdict(int)
    for schedule in (on_host, on_device):
        for instruction in schedule.instructions:
            is_update, buffers = instruction.work == "update", schedule.buffers
            if schedule is on_device:  # each queue is read in one schedule: a fixed home is updated on the same one in both
                counts = is_update and instruction.queue == "compute"
            else:
                counts = instruction.queue == ("host" if is_update else "h2d")
            if not counts:
                continue
            touched = [buffers[name] for name in (instruction.writes if is_update else instruction.reads)]
            total = sum(buffer.nbytes for buffer in touched)
            for buffer in touched:
                home = home_of.get(buffer.version_of if is_update else buffer.value)
                if home is not None and total:
                    shares, key = (updates, instruction.queue) if is_update else (fetches, instruction.phase)
                    shares[home, key] += instruction.time_us * buffer.nbytes / total
                    copied[home, instruction.phase] += 0 if is_update else buffer.nbytes
    stored: dict[str, int] = defaultdict(int)
    for spec, value in outputs_of(step):
        if spec.kind == "grad" and spec.name in homes:
            stored[homes[spec.name]] += value.meta["nbytes"]
    return {
        home: HomeCost(
            {phase: fetches[home, phase] for phase in PHASES},
            machine.copy_us(stored[home], "d2h"),
            updates[home, "host"],
            updates[home, "compute"],
            {phase: copied[home, phase] for phase in PHASES},
            stored[home],
        )
        for home in dict.fromkeys(homes.values())
    }
