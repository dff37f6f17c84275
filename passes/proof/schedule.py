"""Checks I5, second half: the schedule is exactly the rewritten step's, in every figure and name.

The buffer table and the instructions are made out once more, from the step graph (which ``same_computation`` has compared with
the captured graph) and from what no graph knows (``Given``), and compared field by field. Left to ``runtime/verify`` is what a
lowering is free to choose: offsets, where buffers are allocated and freed, and waits. Predicted times prove nothing and are
not looked at.

It shares no code with ``passes/lower``, whose mistakes it is there to find.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.state import NO_LIMITS, SCALAR_STATE_NBYTES, UPDATE_SETS, Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.step_graph import (
    MOVES_OF_ROWS,
    InputSpec,
    all_gather,
    body_outputs,
    calls,
    fetch_state,
    gathers_parts,
    gradient_norms,
    gradient_scale,
    inputs_of,
    is_collective,
    is_convert,
    is_move,
    is_region,
    kernel_of,
    moved,
    must_run,
    offload,
    offload_rows,
    outputs_of,
    placeholders,
    prefetch,
    prefetch_rows,
    prefetch_slices,
    ranks_of,
    read,
    recomputes,
    reduce_scatter,
    results,
    scales_of,
    source,
    step_outputs,
    streamed_state,
    update,
    write,
)
from mtcompile.runtime.schedule import BLOCK, Buffer, Instruction, Schedule, aligned, placed, used_by_disk
from mtcompile.runtime.verify import peak


@dataclass(frozen=True, slots=True)
class Given:
    """The facts that a schedule rests on beside its graph. ``plan``: where parameters have their homes. ``budgets``: what was
    asked for. ``workspace``: the bytes that a kernel needs beside its operands and results, as measured. ``held_nbytes``:
    device bytes that kernels keep from call to call. ``inputs_on_device``: whether all inputs are there, and no parameter has a
    home. ``ranks``: how many train together."""

    plan: Plan
    budgets: Budgets = NO_LIMITS
    workspace: Callable[[fx.GraphModule], int] = workspace_nbytes
    held_nbytes: int = 0
    inputs_on_device: bool = False
    ranks: int = 1


# The queue and the work of each move.
_DIRECTIONS: dict[Any, tuple[Any, Any]] = {
    **dict.fromkeys((prefetch, prefetch_slices, prefetch_rows), ("h2d", "prefetch")),
    **dict.fromkeys((offload, offload_rows), ("d2h", "offload")),
    read: ("disk_read", "read"),
    write: ("disk_write", "write"),
}


def check_schedule(step: fx.GraphModule, schedule: Schedule, given: Given) -> None:
    """Raises SameComputationError unless the schedule runs the step's calls, in order, over a table of exactly the step's
    values, with the bytes that these and their kernels need; and unless the step does what was asked for."""
    expect(ranks_of(step) == given.ranks, lambda: f"a step of {given.ranks} ranks, found {ranks_of(step)}")
    _homes(step, given)
    _direct_as_asked(step, given)
    _updates_as_asked(step, given)
    _nothing_for_nothing(step)
    _table(step, schedule)
    _instructions(step, schedule, given)
    _totals(step, schedule, given)


# ------------------------------------------------------------------------------------------------ the step, as asked for


def _homes(step: fx.GraphModule, given: Given) -> None:
    """Checks that inputs are where the executor will find them, and that results leave to where it will look for them."""
    homes: Mapping[str, str] = step.meta["homes"]
    tiers: dict[int, str] = {}
    for spec, node in inputs_of(step):
        if given.inputs_on_device or spec.role == "tangent":
            tier = "device"
        elif spec.role == "param" and spec.name in homes:
            tier = {"device": "device", "disk": "disk"}.get(given.plan.params(homes[spec.name]), "host")
        else:
            tier = spec.tier
        part = spec.role == "param" and homes.get(spec.name) in given.budgets.parts
        expect(bool(node.meta.get("part")) == part, lambda s=spec, p=part: f"{'a part' if p else 'all'} of {s.name} at home")
        expect(node.meta["tier"] == tier, lambda s=spec, t=tier, n=node: f"{s.name} on the {t}, found {n.meta['tier']}")
        if spec.role not in ("tangent", "constant"):
            tiers[spec.index] = tier
    for result, value in outputs_of(step):
        tier = "device" if result.kind == "output" else tiers[result.index]
        tier = "host" if tier == "disk" and result.kind == "grad" else tier
        at = value.meta["tier"]
        expect(at == tier, lambda r=result, t=tier, a=at: f"{r.kind} {r.name} to leave on the {t}, found {a}")


def _direct_as_asked(step: fx.GraphModule, given: Given) -> None:
    """Checks that exactly those parameters on disk come straight to the device that the plan lets, if that was allowed."""
    allowed = not given.plan.disk_direct or given.budgets.disk_direct is not False
    expect(allowed, lambda: "reads from disk through the host, found a plan that reads straight to the device")
    for call in calls(step):
        tiers = {operand.meta["tier"] for operand in moved(call)} if is_move(call) else set()
        if "disk" in tiers and call.target is not read:
            right = call.target is prefetch and tiers == {"disk"} and given.plan.disk_direct
            expect(right, lambda c=call: f"{c.name} to take what was read from disk, found that it reads there itself")
        elif "disk" in tiers and given.plan.disk_direct:
            fetched = [user for item in results(call) for user in item.users]
            apart = all(user.target in (prefetch_rows, prefetch_slices) for user in fetched)
            spilled = all(operand.op != "placeholder" for operand in call.args)
            expect(apart or spilled, lambda c=call: f"{c.name} to go straight to the device, found a read to the host")


def _updates_as_asked(step: fx.GraphModule, given: Given) -> None:
    """Checks that those parameters are updated in the backward whose updates were asked for there, scaled if asked for."""
    updates, wanted = given.budgets.updates, step.meta.get("updated")
    params = {spec.index: spec.name for spec in step.meta["inputs"] if spec.role == "param"}
    for spec in step.meta["outputs"]:
        if spec.kind in ("grad", "update"):
            name = params.get(spec.index)
            kind = "grad" if updates is None or name is None or (wanted is not None and name not in wanted) else "update"
            expect(spec.kind == kind, lambda s=spec, k=kind: f"{k} of {s.name}, found {s.kind}")
    for call in calls(step):
        if call.target is update:
            scaled = len(scales_of(call)) == (updates is not None and updates.held)
            expect(scaled, lambda c=call: f"{c.name} to be scaled exactly where the norm of all gradients is asked for")
            shares = set() if updates is None else {*updates.sharded}
            _streamed_as_asked(step, call, given)
            _scattered_as_asked(step, call, shares)
            _gathered_as_asked(step, call, shares - given.budgets.parts if given.budgets.hosts > 1 else ())


def _streamed_as_asked(step: fx.GraphModule, call: fx.Node, given: Given) -> None:
    """Checks that the device updates exactly those parameters of which the plan lets it, if that was allowed, and that their
    state has room for a weight, its remainder and its fp32 state each."""
    state, updates, count = streamed_state(call), given.budgets.updates, call.kwargs["count"]
    for name in call.meta["names"]:
        home = step.meta["homes"].get(name)  # None: of a weight that is not read
        asked = "streamed" if home is not None and given.plan.streams(home) else "not streamed"
        right = (asked == "streamed") == (state is not None)
        expect(right, lambda n=name, a=asked: f"{n} to be {a} for its update")
    if state is not None:
        params, fetch = call.args[:count], state.args[0]
        expect(fetch.args == params, lambda: f"{fetch.name} to bring the state of {params}, found that of {fetch.args}")
        nbytes = (0 if updates is None else updates.streamed) * sum(param.meta["nbytes"] for param in params)
        expect(0 < nbytes == state.meta["nbytes"], lambda: f"{nbytes} B for {state.name}, found {state.meta['nbytes']}")


def _scattered_as_asked(step: fx.GraphModule, call: fx.Node, shares: Collection[str]) -> None:
    """Checks that those parameters alone are updated by a share of their gradient of which each rank updates a share."""
    count: Any = call.kwargs["count"]
    for gradient, name in zip(call.args[count : 2 * count], call.meta["names"], strict=True):
        made_by: Any = gradient.args[0]
        right = made_by.target is not reduce_scatter or step.meta["homes"].get(name) in shares
        expect(right, lambda n=name: f"all of the gradient of {n} for its update, found a share")


def _gathered_as_asked(step: fx.GraphModule, call: fx.Node, sharded: Collection[str]) -> None:
    """Checks that exactly those parameters are gathered after their update of which hosts update parts and have all."""
    for item, name in zip(results(call), call.meta["names"], strict=True):
        gathered = [user for user in item.users if user.target is all_gather]
        asked = step.meta["homes"].get(name) in sharded
        right = len(gathered) == asked and (not asked or len(item.users) == 1)
        expect(right, lambda i=item, a=asked: f"{i.name} to be gathered from the hosts {'once' if a else 'never'}")


def _nothing_for_nothing(step: fx.GraphModule) -> None:
    """Checks that every operand and every result of a call is needed: bytes that nothing reads would be moved and held."""
    for call in calls(step):
        for item in results(call):
            expect(bool(item.users), lambda i=item: f"a reader of {i.name}, found none")
        if is_region(call):
            kernel = kernel_of(step, call)
            needed = _needed(kernel)
            for operand, node in zip(call.args, placeholders(kernel.graph), strict=True):
                expect(node in needed, lambda c=call, o=operand: f"{c.name} to need {o}, found that its kernel never does")


def _needed(kernel: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes of a body that its results depend on, or what advances the generator."""
    needed = {*body_outputs(kernel), *filter(must_run, kernel.graph.nodes)}
    for node in reversed(kernel.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


# ------------------------------------------------------------------------------------------------------ the buffer table


def _table(step: fx.GraphModule, schedule: Schedule) -> None:
    outputs = set(step_outputs(step))
    expected = {node.name: _home(node) for node in placeholders(step.graph)}
    for call in calls(step):
        for item in results(call):
            expected[item.name] = _made(call, item, item in outputs)
    names = schedule.buffers.keys()
    expect(names == expected.keys(), lambda: f"buffers of the step's values, found {sorted(names ^ expected.keys())} besides")
    for name, buffer in schedule.buffers.items():
        described = replace(buffer, offset=None)
        expect(described == expected[name], lambda e=expected[name], b=described: f"{e}, found {b}")
        placed_alone = (buffer.offset is not None) == (buffer.kind == "placed")
        expect(placed_alone, lambda b=buffer: f"an offset of placed buffers alone, found {b}")


def _home(node: fx.Node) -> Buffer:
    meta = node.meta
    return Buffer(node.name, node.name, meta["tier"], "home", meta["nbytes"], meta["role"])


def _made(call: fx.Node, item: fx.Node, leaves: bool) -> Buffer:
    """Returns the buffer of a call's result. What a region makes comes from the allocator and may leave as it is; what is moved
    or cast lies in a slot, unless it leaves; an update writes over a home; what scales updates is no user's."""
    meta = item.meta
    buffer = Buffer(item.name, source(item).name, meta["tier"], "pooled", meta["nbytes"], meta["role"])
    if is_region(call):
        return replace(buffer, returned=leaves)
    if call.target is prefetch_slices:  # of a value whose other slices are not there
        buffer = replace(buffer, value=f"{buffer.value}[{source(call.args[-1]).name}]")
    updated: Any = call.args[item.args[1]] if call.target is all_gather else None
    if updated is not None and not gathers_parts(call):
        return replace(buffer, kind="home", version_of=str(updated.args[0].args[updated.args[1]]))
    if call.target is prefetch_rows:
        buffer = replace(buffer, value=f"{buffer.value}[rows {' '.join(map(str, call.args[1:]))}]")
    if is_move(call) or is_convert(call) or is_collective(call):
        return replace(buffer, kind="home" if leaves else "pooled" if meta.get("pooled") else "placed")
    if call.target is update:
        position: Any = item.args[1]
        return replace(buffer, kind="home", version_of=str(call.args[position]))
    pooled = meta["tier"] == "device" and call.target is not fetch_state
    return replace(buffer, kind="pooled" if pooled else "placed")


# ------------------------------------------------------------------------------------------------------ the instructions


def _instructions(step: fx.GraphModule, schedule: Schedule, given: Given) -> None:
    expected = calls(step)
    listed = [i for i in schedule.instructions if i.op in ("copy", "run")]
    expect(len(listed) == len(expected), lambda: f"{len(expected)} calls, found {len(listed)}")
    for instruction, call in zip(listed, expected, strict=True):
        bare = replace(instruction, time_us=0.0, deps=(), previous_step_deps=())
        again = _instruction(step, call, given)
        expect(bare == again, lambda a=again, b=bare: f"{a}, found {b}")
        if is_region(call):
            kernel = kernel_of(step, call)
            declared = len(bare.reads), len(bare.writes)
            whole = len(placeholders(kernel.graph)), len(body_outputs(kernel))
            expect(declared == whole, lambda c=call, d=declared: f"{c.name} to declare all of its kernel's operands, found {d}")
    for instruction in schedule.instructions:
        if instruction.op in ("alloc", "free"):
            plain = Instruction(instruction.op, instruction.queue, instruction.phase, writes=instruction.writes)
            bare = replace(instruction, deps=(), previous_step_deps=(), block="")
            expect(bare == plain, lambda p=plain, b=bare: f"{p}, found {b}")


def _instruction(step: fx.GraphModule, call: fx.Node, given: Given) -> Instruction:
    operands: tuple[Any, ...] = call.args
    written = results(call)
    row = Instruction(
        "copy" if is_move(call) else "run",
        "host",
        call.meta["phase"],
        tuple(operand.name for operand in operands),
        tuple(item.name for item in written),
        call.name,
        label=call.name,
        block=step.meta["blocks"][call.meta["block"]],
    )
    if is_region(call):
        workspace = given.workspace(kernel_of(step, call))
        work = "recompute" if recomputes(call) else "compute"
        return replace(row, queue="compute", kernel=str(call.target), workspace=workspace, work=work)
    if is_move(call):
        nbytes, ends, rows = sum(operand.meta["nbytes"] for operand in moved(call)), "", tuple[str, ...]()
        if call.target is prefetch_slices:
            ends = operands[-1].name
        if call.target in MOVES_OF_ROWS:
            rows = tuple(operand.name for operand in operands[1:])
            val, named = operands[0].meta["val"], sum(operand.meta["val"].numel() for operand in operands[1:])
            nbytes = min(val.shape[0], named) * val[0].numel() * val.element_size()
        queue, work = _DIRECTIONS[call.target]
        return replace(row, queue=queue, kernel="", nbytes=nbytes, work=work, ends=ends, rows=rows)
    if is_convert(call):
        return replace(row, work="convert")
    if is_collective(call):
        return replace(row, queue="network", work="collective", nbytes=sum(operand.meta["nbytes"] for operand in operands))
    allowed = update, fetch_state, gradient_norms, gradient_scale
    expect(call.target in allowed, lambda: f"a call of the step graph, found {call}")
    if call.target is fetch_state:
        return replace(row, queue="h2d", work="update", nbytes=written[0].meta["nbytes"])
    if (state := streamed_state(call)) is not None:
        return replace(row, queue="d2h", work="update", nbytes=state.meta["nbytes"])
    if call.meta["tier"] == "host":
        return replace(row, work="update")
    updates, workspace = given.budgets.updates, 0
    if call.target is update and updates is not None:
        workspace = aligned(int(sum(item.meta["nbytes"] for item in written) * updates.workspace_copies))
    return replace(row, queue="compute", workspace=workspace, work="update")


# ------------------------------------------------------------------------------------------------------------ the totals


def _totals(step: fx.GraphModule, schedule: Schedule, given: Given) -> None:
    updates = given.budgets.updates
    ahead = updates is not None and updates.run_ahead
    expect(schedule.run_ahead == ahead, lambda: f"run_ahead={ahead} as asked for, found {schedule.run_ahead}")
    limits = {tier: nbytes for tier, nbytes in given.budgets.nbytes.items() if nbytes is not None}
    _same_bytes("budget", limits, schedule.budget_nbytes)
    _same_bytes("resident", _resident(step, given), schedule.resident_nbytes)
    arenas, by_disk = {"device": 0, "host": 0}, used_by_disk(schedule.instructions)
    if any(buffer.offset is not None and buffer.tier == "disk" for buffer in schedule.buffers.values()):
        arenas["disk"] = 0
    for buffer in schedule.buffers.values():
        if buffer.offset is not None:
            end = buffer.offset + placed(buffer.nbytes, buffer.tier, buffer.name in by_disk)
            arenas[buffer.tier] = max(arenas[buffer.tier], end)
    _same_bytes("arena", arenas, schedule.arena_nbytes)
    _same_bytes("peak", peak(schedule), schedule.peak_nbytes)


def _same_bytes(what: str, expected: Mapping[str, int], declared: Mapping[str, int]) -> None:
    expect(dict(expected) == dict(declared), lambda: f"{what} bytes {dict(expected)}, found {dict(declared)}")


def _resident(step: fx.GraphModule, given: Given) -> dict[str, int]:
    """Returns the bytes that the model holds at all times: weights, optimizer state, gradients that wait for optimizer.step()
    (an older one may be held while a new one is made), step counters, and what the device holds beside."""
    budgets, homes = given.budgets, step.meta["homes"]
    held = {"device": budgets.reserve + given.held_nbytes, "host": budgets.exchange} | (
        {} if budgets.disk is None else {"disk": 0}
    )
    estimated: dict[str, int] = {}  # trained weights by home block, whose state is rounded together where it is estimated
    by_home: dict[str, int] = {}
    gradients: dict[str, int] = {}  # that are held from step to step or made at home, each rank's own
    staged = [0]  # of each parameter on disk that is updated: with its state, what is in memory at a time
    for spec, node in inputs_of(step):
        if spec.role != "param" or spec.name not in homes:
            continue
        nbytes, home = placed(node.meta["nbytes"]), homes[spec.name]
        held["host"] += SCALAR_STATE_NBYTES if spec.differentiable else 0
        if budgets.disk is not None and given.plan.params(home) == "disk":
            blocks, copies = -(-node.meta["nbytes"] // BLOCK) * BLOCK, _state_copies(spec, nbytes, budgets)
            held["disk"] += blocks + int(blocks * copies)
            if spec.differentiable:
                staged.append(int(min(blocks, budgets.update_piece or blocks) * (1 + copies)))
            continue
        state = nbytes if budgets.state is None else budgets.state.get(spec.name, 0)
        if budgets.hosts > 1 and home in budgets.once:
            state = _of_largest_host(state, node.meta["val"].numel(), budgets)
        at_home = _of_largest_host(nbytes, node.meta["val"].numel(), budgets) if home in budgets.parts else nbytes
        by_home[home] = by_home.get(home, 0) + at_home + (0 if budgets.state is None else state)
        if spec.differentiable:
            new = 1 if budgets.updates is None and given.plan.params(home) != "device" else 0  # there, values of the step
            gradients[home] = gradients.get(home, 0) + nbytes * (budgets.sums + new)
            estimated[home] = estimated.get(home, 0) + state
    for home, nbytes in by_home.items():
        nbytes += int(estimated.get(home, 0) * budgets.state_copies) if budgets.state is None else 0
        ranks = budgets.sharing if home in budgets.once else 1
        held["device" if given.plan.params(home) == "device" else "host"] += -(-nbytes // ranks) + gradients.get(home, 0)
    if budgets.disk is not None and any(decision.choice == "disk" for decision in given.plan.decisions):
        held["host"] += budgets.disk_staging + UPDATE_SETS * max(staged)
    return held


def _of_largest_host(nbytes: int, numel: int, budgets: Budgets) -> int:
    """The state of a parameter on the first host, whose ranks have whole shares: 64 elements or a multiple each."""
    ranks = budgets.sharing * budgets.hosts
    share = 64 * (-(-numel // (64 * ranks)))
    return -(-nbytes * min(numel, share * budgets.sharing) // max(1, numel))


def _state_copies(spec: InputSpec, nbytes: int, budgets: Budgets) -> float:
    """The optimizer state of a parameter on disk, in sizes of the parameter; whole ones where it was measured."""
    if budgets.state is not None:
        return -(-budgets.state.get(spec.name, 0) // max(1, nbytes))
    return budgets.state_copies if spec.differentiable else 0.0
