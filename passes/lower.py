"""Lowers a rewritten step graph to a schedule: queues, slots, byte offsets and frees. ``runtime/deps`` adds the waits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from torch import fx

from mtcompile.passes.analysis.cost import Machine, crossing, kernel_us
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.state import updated_on_disk_nbytes
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.slots import assign_offsets
from mtcompile.passes.step_graph import (
    MOVES_OF_ROWS,
    calls,
    fetch_state,
    gathers_parts,
    gradient_norms,
    is_collective,
    is_convert,
    is_region,
    is_update,
    kernel_of,
    moved,
    offload,
    offload_rows,
    placeholders,
    prefetch,
    prefetch_rows,
    prefetch_slices,
    read,
    recomputes,
    results,
    source,
    step_outputs,
    streamed_state,
    update,
    write,
)
from mtcompile.runtime import deps
from mtcompile.runtime.schedule import Buffer, Instruction, Op, Queue, Schedule, Work, aligned
from mtcompile.runtime.usage import peaks

_MOVES: dict[object, tuple[Work, Queue]] = {
    prefetch: ("prefetch", "h2d"),
    prefetch_slices: ("prefetch", "h2d"),
    prefetch_rows: ("prefetch", "h2d"),
    offload: ("offload", "d2h"),
    offload_rows: ("offload", "d2h"),
    read: ("read", "disk_read"),
    write: ("write", "disk_write"),
}
Workspace = Callable[[fx.GraphModule], int]


def lower(
    step: fx.GraphModule,
    plan: Plan,
    machine: Machine,
    resident_nbytes: Mapping[str, int],
    workspace: Workspace = workspace_nbytes,
) -> Schedule:
    """Returns the schedule of a rewritten step graph: ``lower_without_deps``, with dependencies."""
    return deps.derive(lower_without_deps(step, plan, machine, resident_nbytes, workspace))


def lower_without_deps(
    step: fx.GraphModule,
    plan: Plan,
    machine: Machine,
    resident_nbytes: Mapping[str, int],
    workspace: Workspace = workspace_nbytes,
) -> Schedule:
    """Returns the schedule of a rewritten step graph, without dependencies.

    ``resident_nbytes``: persistent bytes per tier, counted at all times. ``workspace``: bytes a kernel needs beside its
    operands and results (measured, or by shapes). Moves write placed slots, or pooled values where the plan says so; regions
    make pooled values.
    Peaks are computed here and proven by ``runtime/verify``.
    """
    buffers = _buffers(step)
    work = [_instruction(step, call, plan, machine, workspace) for call in calls(step)]
    early = {operand.name for call in calls(step) if call.meta.get("early") for operand in call.args}
    instructions = _with_lives(work, buffers, plan.lookahead, early)
    buffers, arenas = assign_offsets(instructions, buffers)
    limit = {tier: n for tier, n in plan.budget_bytes.items() if n is not None}
    ahead = plan.updates is not None and plan.updates.run_ahead
    schedule = Schedule(tuple(instructions), buffers, arenas, dict(resident_nbytes), limit, run_ahead=ahead)
    return replace(schedule, peak_nbytes=peaks(schedule))


def work_of(call: fx.Node) -> Work:
    """Returns the kind of work of a call of a step graph."""
    if is_region(call):
        return "recompute" if recomputes(call) else "compute"
    if is_update(call):
        return "update"
    if is_convert(call):
        return "convert"
    if is_collective(call):
        return "collective"
    return _MOVES[call.target][0]


def _buffers(step: fx.GraphModule) -> dict[str, Buffer]:
    outputs = set(step_outputs(step))
    buffers: dict[str, Buffer] = {}

    def add(node: fx.Node, kind: str, returned: bool = False, version_of: str = "") -> None:
        meta = node.meta
        about = node.name, _value(node), meta["tier"], kind, meta["nbytes"], meta["role"]
        buffers[node.name] = Buffer(*about, returned=returned, version_of=version_of)

    for node in placeholders(step.graph):
        add(node, "home")
    for call in calls(step):
        for item in results(call):
            if home := item.meta.get("version_of"):
                add(item, "home", version_of=home)
            elif is_region(call):
                add(item, "pooled", returned=item in outputs)
            elif is_update(call):
                pooled = item.meta["tier"] == "device" and call.target is not fetch_state
                add(item, "pooled" if pooled else "placed")
            else:
                add(item, "home" if item in outputs else "pooled" if item.meta.get("pooled") else "placed")
    return buffers


def _value(node: fx.Node) -> str:
    """The name of the value that a buffer holds. Slices of a value are another one, by where their rows end, and so are rows
    of a parameter, by what names them. A gradient of which only rows crossed is whole."""
    call = node.args[0] if node.target is operator.getitem else None
    if call is not None and call.target is prefetch_slices:
        return f"{source(node).name}[{source(call.args[-1]).name}]"
    if call is not None and call.target is prefetch_rows:
        return f"{source(node).name}[rows {' '.join([index.name for index in call.args[1:]])}]"
    return source(node).name


def _instruction(step: fx.GraphModule, call: fx.Node, plan: Plan, machine: Machine, workspace: Workspace) -> Instruction:
    """Returns the copy or run of one call, before allocs and frees are put around it."""
    written = results(call)
    read_nbytes, written_nbytes = (sum([value.meta["nbytes"] for value in values]) for values in (call.args, written))
    work, block = work_of(call), step.meta["blocks"][call.meta["block"]]
    queue: Queue = "host"
    kernel, scratch, moved_nbytes = call.name, 0, 0
    if work in ("compute", "recompute"):
        body = kernel_of(step, call)
        queue, kernel, scratch, time_us = "compute", str(call.target), workspace(body), kernel_us(body, machine)
    elif work == "convert":
        time_us = (read_nbytes + written_nbytes) / machine.host_gbps / 1e3
    elif work == "collective":
        queue, moved_nbytes = "network", read_nbytes
        kind = str(getattr(call.target, "__name__", "")) + (" of parts" if gathers_parts(call) else "")
        time_us = machine.collective_us(read_nbytes, step.meta["hosts"], kind)
    elif work == "update":
        queue = "host" if call.meta["tier"] == "host" else "compute"
        assert plan.updates is not None
        if call.target is update:
            on_disk = sum([item.meta["nbytes"] for item in written if item.meta["tier"] == "disk"])
            scratch, time_us = update_cost(plan.updates, machine, queue, written_nbytes, on_disk)
            if (state := streamed_state(call)) is not None:  # it lies in its slot, where the update leaves it to go home
                queue, scratch, moved_nbytes = "d2h", 0, state.meta["nbytes"]
                time_us += machine.copy_us(moved_nbytes, queue)
        elif call.target is fetch_state:
            queue, moved_nbytes = "h2d", written_nbytes
            time_us = machine.copy_us(moved_nbytes, queue)
        else:  # what scales updates reads every gradient once, or what it is cast to
            is_cast = call.target is gradient_norms and queue == "host"  # a device casts as it reads
            read_nbytes = int(read_nbytes * (plan.updates.norm_copies if is_cast else 1))
            time_us = read_nbytes / (machine.host_gbps if queue == "host" else machine.memory_gbps) / 1e3
    else:
        queue, kernel, moved_nbytes = _MOVES[call.target][1], "", sum([value.meta["nbytes"] for value in moved(call)])
        direct = queue == "h2d" and call.args[0].meta["tier"] == "disk"
        time_us = machine.copy_us(moved_nbytes, "direct" if direct else queue)
        if call.target in MOVES_OF_ROWS:
            moved_nbytes, time_us = crossing(call, machine, queue)
    return Instruction(
        "run" if kernel else "copy",
        queue,
        call.meta["phase"],
        tuple([operand.name for operand in call.args]),
        tuple([item.name for item in written]),
        kernel,
        scratch,
        nbytes=moved_nbytes,
        time_us=time_us,
        label=call.name,
        block=block,
        work=work,
        ends=call.args[-1].name if call.target is prefetch_slices else "",
        rows=tuple([index.name for index in call.args[1:]]) if call.target in MOVES_OF_ROWS else (),
    )


def update_cost(updates: Updates, machine: Machine, queue: Queue, nbytes: int, on_disk: int = 0) -> tuple[int, float]:
    """Returns the workspace in bytes and the microseconds of updating ``nbytes`` of parameters where they are at home. What is
    ``on_disk`` is read and written with its state, beside the updates, but through one drive."""
    copies, checked = updates.state_copies, updates.checked
    if queue == "host":
        moved = updated_on_disk_nbytes(updates, on_disk)
        return 0, max(machine.update_us(nbytes, 0, copies, checked), machine.drive_us(moved, moved))
    return aligned(int(nbytes * updates.workspace_copies)), machine.update_us(0, nbytes, copies, checked)


def _with_lives(work: list[Instruction], buffers: Mapping[str, Buffer], lookahead: int, early: Set[str]) -> list[Instruction]:
    """Lists allocs before the first write of their buffer, and frees after its last use.

    A pooled value that is copied home is freed on the compute queue, which then waits for the copy: after its last use when
    memory is what counts (no lookahead), otherwise no sooner than as many regions after the copy as prefetches are ahead, so
    that the copy hides behind these. What is ``early`` is freed before the next region, but behind all that is fetched for
    it: so copies home and fetches cross at the same time.
    """
    last = {name: position for position, user in enumerate(work) for name in (*user.reads, *user.writes)}
    ending: dict[int, list[str]] = {}
    for name, position in last.items():
        if buffers[name].kind != "home" and not buffers[name].returned:
            ending.setdefault(position, []).append(name)

    instructions: list[Instruction] = []
    deferred: list[tuple[int, str, Instruction]] = []  # after which region to free a buffer, and its last user
    ran = 0  # regions
    copied: dict[str, int] = {}  # value -> regions that had run when its copy home was listed

    def life(op: Op, name: str, user: Instruction) -> None:
        queue = "compute" if buffers[name].kind == "pooled" else user.queue
        instructions.append(Instruction(op, queue, user.phase, writes=(name,), block=user.block))

    def free_deferred(whole: bool = False) -> None:
        for due, name, user in tuple(deferred):
            if whole or due <= ran:
                deferred.remove((due, name, user))
                life("free", name, user)

    def computes(user: Instruction) -> bool:
        return user.op == "run" and user.queue == "compute"

    for position, user in enumerate(work):
        for name in user.writes:
            if buffers[name].kind != "home":
                life("alloc", name, user)
        instructions.append(user)
        if user.queue == "d2h":
            copied |= {name: ran for name in user.reads if name not in early}
        if computes(user):
            ran += 1
            free_deferred()
        for name in ending.get(position, ()):
            due = copied[name] + lookahead if name in copied and lookahead and buffers[name].kind == "pooled" else ran
            if due > ran or name in early:
                deferred.append((due, name, user))
            else:
                life("free", name, user)
        if position + 1 == len(work) or work[position + 1].phase != user.phase:
            free_deferred(whole=True)
        elif computes(work[position + 1]):
            free_deferred()
    return instructions
