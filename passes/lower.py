"""From a rewritten step graph to a schedule: queues, slots, byte offsets, frees; ``runtime/deps`` adds the waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from mtcompile.passes.analysis.cost import Machine, kernel_us
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.plan import Plan
from mtcompile.passes.slots import assign_offsets
from mtcompile.passes.step_graph import (
    calls,
    is_convert,
    is_region,
    is_update,
    kernel_of,
    placeholders,
    prefetch,
    results,
    source,
    step_outputs,
    update,
)
from mtcompile.runtime import deps
from mtcompile.runtime.schedule import Buffer, Instruction, Op, Phase, Queue, Schedule, aligned

Workspace = Callable[[fx.GraphModule], int]


@dataclass(frozen=True, slots=True)
class _Step:
    """A copy or run before allocs and frees are put around it."""

    instruction: Instruction
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def lower(
    step: fx.GraphModule,
    plan: Plan,
    machine: Machine,
    resident_nbytes: Mapping[str, int],
    workspace: Workspace = workspace_nbytes,
) -> Schedule:
    """The schedule of a rewritten step graph.

    ``resident_nbytes``: persistent bytes per tier, counted at all times. ``workspace``: bytes a kernel needs beside its
    operands and results (measured, or by shapes). Placed slots: what prefetch and offload write. Pooled: what regions
    make. Peaks are computed here and proven by ``runtime/verify``.
    """
    buffers = _buffers(step)
    work = _work(step, plan, buffers, machine, workspace)
    listed = _with_lives(work, buffers, plan.lookahead)
    buffers, arenas = assign_offsets(listed, buffers)
    limit = {tier: n for tier, n in plan.budget_bytes.items() if n is not None}
    ahead = plan.updates is not None and plan.updates.run_ahead
    schedule = Schedule(tuple(listed), buffers, arenas, dict(resident_nbytes), limit, run_ahead=ahead)
    return replace(deps.derive(schedule), peak_nbytes=_peaks(schedule))


def _buffers(step: fx.GraphModule) -> dict[str, Buffer]:
    outputs = step_outputs(step)
    returned = set(outputs)
    found: dict[str, Buffer] = {}

    def add(node: fx.Node, kind: str, leaves: bool = False, role: str = "", over: str = "") -> None:
        meta = node.meta
        found[node.name] = Buffer(
            node.name,
            source(node).name,
            meta["tier"],
            kind,
            meta["nbytes"],
            role or meta["role"],
            leaves=leaves,
            over=over,
        )

    for node in placeholders(step.graph):
        add(node, "home")
    for call in calls(step):
        for item in results(call):
            if over := item.meta.get("over"):
                add(item, "home", over=over)
            elif is_convert(call):
                add(item, "home" if item in returned else "placed")
            elif is_update(call):
                add(item, "pooled" if item.meta["tier"] == "device" else "placed")
            elif is_region(call):
                add(item, "pooled", leaves=item in returned)
            else:
                add(item, "home" if item in returned else "placed")
    return found


def _work(
    step: fx.GraphModule, plan: Plan, buffers: Mapping[str, Buffer], machine: Machine, workspace: Workspace
) -> list[_Step]:
    work = []
    for call in calls(step):
        phase: Phase = call.meta["phase"]
        reads = tuple(operand.name for operand in call.args)
        writes = tuple(item.name for item in results(call))
        if is_region(call):
            name = str(call.target)
            kernel = kernel_of(step, call)
            time_us = kernel_us(kernel, machine)
            instruction = Instruction(
                "run", "compute", phase, reads, writes, name, workspace(kernel), time_us=time_us, label=call.name
            )
        elif is_convert(call):
            touched = sum(buffers[name].nbytes for name in (*reads, *writes))
            time_us = touched / machine.host_gbps / 1e3
            instruction = Instruction("run", "host", phase, reads, writes, call.name, time_us=time_us, label=call.name)
        elif is_update(call):
            instruction = _update(call, plan, buffers, machine, reads, writes)
        else:
            queue: Queue = "h2d" if call.target is prefetch else "d2h"
            nbytes = sum(buffers[name].nbytes for name in reads)
            instruction = Instruction(
                "copy",
                queue,
                phase,
                reads,
                writes,
                nbytes=nbytes,
                time_us=machine.copy_us(nbytes, queue),
                label=call.name,
            )
        work.append(_Step(instruction, reads, writes))
    return work


def _update(
    call: fx.Node, plan: Plan, buffers: Mapping[str, Buffer], machine: Machine, reads: tuple[str, ...], writes: tuple[str, ...]
) -> Instruction:
    """Of parameters, where they are at home; and what makes its scale, which reads gradients once."""
    assert plan.updates is not None
    here, updates = call.meta["tier"] == "host", plan.updates
    queue: Queue = "host" if here else "compute"
    if call.target is update:
        nbytes = sum(buffers[name].nbytes for name in writes)
        time_us = machine.update_us(nbytes if here else 0, 0 if here else nbytes, updates.state_copies)
        workspace = 0 if here else aligned(int(nbytes * updates.workspace_copies))
    else:
        nbytes, workspace = sum(buffers[name].nbytes for name in reads), 0
        time_us = nbytes / (machine.host_gbps if here else machine.memory_gbps) / 1e3
    return Instruction("run", queue, "backward", reads, writes, call.name, workspace, time_us=time_us, label=call.name)


def _with_lives(work: list[_Step], buffers: Mapping[str, Buffer], lookahead: int) -> list[Instruction]:
    """Allocs before the first write, frees after the last use.

    A pooled value whose last use is a copy home is freed on the compute queue, which then waits for the copy: at once
    when memory is what counts (no lookahead), after the next region otherwise, so that the copy hides behind it.
    """
    last: dict[str, int] = {}
    for position, item in enumerate(work):
        for name in (*item.reads, *item.writes):
            last[name] = position
    ending: dict[int, list[str]] = {}
    for name, position in last.items():
        if buffers[name].kind != "home" and not buffers[name].leaves:
            ending.setdefault(position, []).append(name)

    listed: list[Instruction] = []
    waiting: list[str] = []

    def life(op: Op, name: str, queue: Queue, phase: Phase) -> None:
        listed.append(Instruction(op, "compute" if buffers[name].kind == "pooled" else queue, phase, writes=(name,)))

    for position, item in enumerate(work):
        instruction = item.instruction
        phase, queue = instruction.phase, instruction.queue
        for name in item.writes:
            if buffers[name].kind != "home":
                life("alloc", name, queue, phase)
        listed.append(instruction)
        if instruction.op == "run" and queue == "compute":
            for name in waiting:
                life("free", name, "compute", phase)
            waiting = []
        for name in ending.get(position, ()):
            if buffers[name].kind == "pooled" and queue != "compute" and lookahead:
                waiting.append(name)
            else:
                life("free", name, queue, phase)
        if waiting and (position + 1 == len(work) or work[position + 1].instruction.phase != phase):
            for name in waiting:
                life("free", name, "compute", phase)
            waiting = []
    return listed


def _peaks(schedule: Schedule) -> dict[str, int]:
    """Bytes per tier: resident + arena + the largest sum of live pooled values and workspace."""
    buffers = schedule.buffers
    tangents = sum(b.nbytes for b in buffers.values() if b.role == "tangent" and b.tier == "device")
    live = most = 0
    for instruction in schedule.instructions:
        if instruction.op in ("alloc", "free"):
            buffer = buffers[instruction.writes[0]]
            if buffer.kind == "pooled":
                live += buffer.nbytes if instruction.op == "alloc" else -buffer.nbytes
        extra = tangents if instruction.phase == "backward" else 0
        most = max(most, live + instruction.workspace + extra)
    peaks = {tier: schedule.resident_nbytes.get(tier, 0) + schedule.arena_nbytes.get(tier, 0) for tier in ("device", "host")}
    peaks["device"] += most
    return peaks
