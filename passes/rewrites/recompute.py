"""Recompute part or all of what a block's forward saved, in two ways.

*Variants of a block* (``recompute``): the forward body goes in front of the backward body that first reads a value
which was not kept; one kernel does both, so that what was recomputed is freed inside it as the backward proceeds.
*Chains of blocks* (``repeat_forward``): a value that crosses from block to block is made again by calling its forward
region once more, from an earlier value that was kept, just before the backward first reads it.

Random operations are replayed from their saved generator state in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_arg

from mtcompile.passes.analysis.kernels import attach, drop_dead, install, saved_states
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.generators import replay, save_rng
from mtcompile.passes.insert import add_call
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import (
    body_outputs,
    is_check,
    is_random,
    is_region,
    kernel_of,
    new_node,
    placeholders,
    regions,
    results,
)

# ------------------------------------------------------------------------------------------------- variants of a block


Forwards = list[tuple[fx.Node, frozenset[fx.Node]]]  # forward regions, each with the saved values that it keeps


class Fusion(NamedTuple):
    """A backward region that first makes again what some forwards did not keep: its ``kernel`` and ``operands``. ``later``: of
    what it makes again, the values that later backward regions read, each with these."""

    kernel: fx.GraphModule
    operands: tuple[fx.Node, ...]
    later: Mapping[fx.Node, Sequence[fx.Node]]


def recompute(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Makes what the plan does not keep of a block's saved values again in the block's backward."""
    order = {region: i for i, region in enumerate(regions(step))}
    inlined: dict[fx.Node, Forwards] = {}
    for region in order:
        if region.meta["phase"] == "forward":
            resident, reader = kept_of(step, region, plan, order)
            if reader is not None:
                inlined.setdefault(reader, []).append((region, resident))
    for backward, forwards in inlined.items():
        _fuse(step, backward, forwards, order)
    return step


def kept_of(
    step: fx.GraphModule, region: fx.Node, plan: Plan, order: Mapping[fx.Node, int]
) -> tuple[frozenset[fx.Node], fx.Node | None]:
    """Returns the values of a forward region that stay until the backward, and the first region of that to read another one;
    None if there is none."""
    block = step.meta["blocks"][region.meta["block"]]
    saved = saved_values(region)
    # What leaves the step, as a buffer's next version, stays until then, and its readers read it where it is.
    leaves = {value for value in results(region) if value.meta["role"] not in ("activation", "rng")}
    resident = frozenset(leaves.union(value for value in saved if plan.keeps(block, value.name)))
    users = [user for value in saved if value not in resident for user in value.users]
    return resident, min(users, key=order.__getitem__, default=None)


def fusion(step: fx.GraphModule, backward: fx.Node, forwards: Forwards, order: Mapping[fx.Node, int]) -> Fusion:
    """Returns what ``backward`` becomes if it makes again what ``forwards`` did not keep, and then does its work."""
    moment = order[backward]
    recomputed = [
        item
        for forward, resident in forwards
        for item in results(forward)
        if item not in resident and item.meta["role"] != "rng"
    ]
    # What later backward regions read of the recomputed block comes from here, so that the first copy can go early.
    later = {
        item: [u for u in item.users if u in order and u.meta["phase"] == "backward" and order[u] > moment]
        for item in recomputed
    }
    later = {item: users for item, users in later.items() if users}

    values: dict[fx.Node, int] = {}  # every value of the step graph at play, numbered, so that like layers share the work

    def number(node: fx.Node) -> int:
        return values.setdefault(node, len(values))

    wiring = tuple(
        (
            str(forward.target),
            tuple(number(a) for a in forward.args),
            tuple((int(item.args[1]), number(item), item in resident) for item in results(forward)),
        )
        for forward, resident in forwards
    )
    key = (wiring, str(backward.target), tuple(number(a) for a in backward.args), tuple(number(item) for item in later))
    memo = step.meta["memo"]
    if key not in memo:
        body, used = _fused_body(step, backward, forwards, list(values), list(later))
        kernel = step.get_submodule(install(step, step.meta["kernels"], body))
        memo[key] = kernel, used
    kernel, used = memo[key]
    numbered = list(values)
    return Fusion(kernel, tuple(numbered[i] for i in used), later)


def _fuse(step: fx.GraphModule, backward: fx.Node, forwards: Forwards, order: dict[fx.Node, int]) -> None:
    """Replaces ``backward`` by a call that makes again what ``forwards`` did not keep, and then does its work."""
    kernel, operands, later = fusion(step, backward, forwards, order)
    name = attach(step, kernel)
    with step.graph.inserting_before(backward):
        call = new_node(step.graph, "call_module", name, operands, {}, f"{backward.name}_r")
        call.meta.update(backward.meta, recomputes=tuple(forward.meta["block"] for forward, _ in forwards))
        olds = results(backward)
        items = add_call(step.graph, call, [(i.name, dict(i.meta)) for i in [*olds, *later]])
    for old, new in zip(olds, items, strict=False):
        old.replace_all_uses_with(new)
    for item, new in zip(later, items[len(olds) :], strict=True):
        for user in later[item]:
            user.replace_input_with(item, new)
    for old in olds:
        step.graph.erase_node(old)
    step.graph.erase_node(backward)
    order[call] = order[backward]


def _fused_body(
    step: fx.GraphModule,
    backward: fx.Node,
    forwards: Forwards,
    values: list[fx.Node],
    extra: list[fx.Node],
) -> tuple[fx.Graph, tuple[int, ...]]:
    """The forward bodies and then the backward's, as one body; and the positions of the ``values`` that it takes."""
    body = fx.Graph()
    taken = {value: body.placeholder(value.name) for value in values}
    for value, node in taken.items():
        node.meta = {"val": value.meta.get("held", value.meta["val"])}
    env = dict(taken)
    for forward, resident in forwards:
        kernel = kernel_of(step, forward)
        items = {int(item.args[1]): item for item in results(forward)}
        states = {name: env[items[position]] for name, position in saved_states(kernel).items() if position in items}
        given = {position: env[item] for position, item in items.items() if item in resident}
        outputs = _inline(body, kernel, [env[a] for a in forward.args], states, given)
        for position, item in items.items():
            again = outputs[position]
            if item not in resident and again is not None and item.meta["role"] != "rng":
                env[item] = again
    own = _inline(body, kernel_of(step, backward), [env[a] for a in backward.args])
    body.output((*own, *(env[item] for item in extra)))
    return body, _used(body, taken)


def _inline(
    body: fx.Graph,
    kernel: fx.GraphModule,
    args: list[fx.Node],
    states: Mapping[str, fx.Node] | None = None,
    given: Mapping[int, fx.Node] | None = None,
) -> list[fx.Node | None]:
    """Appends a kernel's body; with ``states``, as a replay. ``given``: outputs that need not be made, by position.
    Returns its outputs (None for generator states)."""
    env: dict[fx.Node, fx.Node] = dict(zip(placeholders(kernel.graph), args, strict=True))
    outputs = body_outputs(kernel)
    env.update({outputs[position]: node for position, node in (given or {}).items()})
    for node in kernel.graph.nodes:
        if node.op != "call_function" or node in env:
            continue
        if states is not None and (node.target is save_rng or is_check(node)):  # checked once, in the forward
            continue
        operands, keywords = map_arg((node.args, node.kwargs), env.__getitem__)
        target: Any = node.target
        if states is not None and is_random(node):
            state = states[node.meta["rng_state"]]
            operands, target = (state, node.meta["rng_device"], node.target, *operands), replay
        env[node] = new_node(body, "call_function", target, operands, keywords, node.name)
        env[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    return [env.get(node) for node in outputs]


# --------------------------------------------------------------------------------------------------- chains of blocks


def repeat_forward(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Makes the values between blocks that the plan recomputes again, by calling their forward regions once more before the
    first backward call that reads them.

    Where neighbouring blocks are recomputed, all of the run is made again at once, from what enters it. With ``plan.span``,
    a longer run is halved: its first half is made again once to enter the second, and once more when its own turn comes;
    and so on, as deep as needed: less is live, and more is computed.
    """
    calls = Calls(regions(step))
    forward = [region for region in calls.place if region.meta["phase"] == "forward"]
    marked = {region: [v for v in results(region) if plan.activation(v.name) == "recompute"] for region in forward}
    for run in _runs(forward, marked):
        _repeat_run(step, run, plan.span or len(run), marked, calls)
    return step


Place = tuple[int, ...]  # of a call: places sort in the order of calls


class Calls:
    """The calls of a step, each with its ``place``. A call keeps it when others are put between."""

    def __init__(self, calls: Sequence[fx.Node]) -> None:
        self.place: dict[fx.Node, Place] = {call: (position,) for position, call in enumerate(calls)}
        self.at = {place: call for call, place in self.place.items()}
        self._put_before: dict[Place, int] = {}

    def put_before(self, place: Place, call: fx.Node) -> None:
        """Puts a new call directly before the one at a place."""
        count = self._put_before[place] = self._put_before.get(place, -1) + 1
        self.place[call] = new = (*place[:-1], place[-1] - 1, count)
        self.at[new] = call


def _runs(forward: list[fx.Node], marked: Mapping[fx.Node, list[fx.Node]]) -> list[list[fx.Node]]:
    """Runs of neighbouring regions with something to make again; the last run first, so that what a repeated call reads may
    be made again too."""
    runs: list[list[fx.Node]] = []
    for before, region in itertools.pairwise([None, *forward]):
        if region is not None and marked[region]:
            if runs and runs[-1][-1] is before:
                runs[-1].append(region)
            else:
                runs.append([region])
    return runs[::-1]


def _repeat_run(
    step: fx.GraphModule, run: list[fx.Node], span: int, marked: Mapping[fx.Node, list[fx.Node]], calls: Calls
) -> None:
    """Makes the ``marked`` values of a run again, at most ``span`` blocks at once, and lets the backward read them. Puts the
    new calls among the ``calls`` of the step."""
    readers = {
        value: [user for user in value.users if is_region(user) and user.meta["phase"] == "backward"]
        for region in run
        for value in marked[region]
    }
    copies: dict[fx.Node, list[tuple[Place, fx.Node]]] = {value: [] for value in readers}  # each with the call it stands before

    def reads(low: int, high: int) -> list[Place]:
        return [calls.place[user] for region in run[low:high] for value in marked[region] for user in readers[value]]

    def latest(value: fx.Node, place: Place) -> fx.Node:
        """The last copy of a value before a call; the value itself where there is none."""
        return next((again for before, again in reversed(copies.get(value, ())) if before <= place), value)

    def repeat(low: int, high: int, place: Place) -> None:
        for region in run[low:high]:
            args = {value: latest(value, place) for value in region.args}
            again = _repeat(step, region, marked[region], calls.at[place], args)
            calls.put_before(place, again[0].args[0])
            for value, new in zip(marked[region], again, strict=True):
                copies[value].append((place, new))

    def serve(low: int, high: int, after: Place) -> None:
        """Makes the run's blocks from ``low`` to ``high`` again for what reads them later than at ``after``."""
        place = min((place for place in reads(low, high) if place > after), default=None)
        if place is None:
            return
        if high - low <= span:
            repeat(low, high, place)
            return
        middle = (low + high + 1) // 2
        repeat(low, middle, place)
        serve(middle, high, after)
        serve(low, middle - 1, max(reads(middle, high), default=place))

    serve(0, len(run), ())
    for value, users in readers.items():
        for user in users:
            if (again := latest(value, calls.place[user])) is not value:
                user.replace_input_with(value, again)


def _repeat(
    step: fx.GraphModule, region: fx.Node, again: list[fx.Node], before: fx.Node, args: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    """Calls a region once more for some of its results; ``args``: what stands for each of its operands."""
    items = {int(item.args[1]): item for item in results(region)}
    states = {name: items[position] for name, position in saved_states(kernel_of(step, region)).items()}
    values = list(dict.fromkeys((*region.args, *states.values())))
    positions = tuple(int(value.args[1]) for value in again)
    memo, key = step.meta["memo"], ("again", str(region.target), tuple(map(values.index, region.args)), positions)
    if key not in memo:
        body, used = _repeated_body(step, region, values, states, positions)
        memo[key] = step.get_submodule(install(step, step.meta["kernels"], body)), used
    kernel, used = memo[key]
    with step.graph.inserting_before(before):
        operands = tuple(args.get(values[i], values[i]) for i in used)
        call = new_node(step.graph, "call_module", attach(step, kernel), operands, {}, f"{region.name}_again")
        call.meta.update(region.meta, phase="backward", recomputes=(region.meta["block"],))
        return add_call(step.graph, call, [(f"{v.name}_again", dict(v.meta)) for v in again])


def _repeated_body(
    step: fx.GraphModule,
    region: fx.Node,
    values: list[fx.Node],
    states: Mapping[str, fx.Node],
    positions: tuple[int, ...],
) -> tuple[fx.Graph, tuple[int, ...]]:
    """A region's body with only the results at ``positions``, and the positions of the ``values`` that it takes."""
    body = fx.Graph()
    taken = {value: body.placeholder(value.name) for value in values}
    for value, node in taken.items():
        node.meta = {"val": value.meta.get("held", value.meta["val"])}
    replayed = {name: taken[state] for name, state in states.items()}
    outputs = _inline(body, kernel_of(step, region), [taken[a] for a in region.args], replayed)
    body.output(tuple(outputs[position] for position in positions))
    return body, _used(body, taken)


def _used(body: fx.Graph, taken: Mapping[fx.Node, fx.Node]) -> tuple[int, ...]:
    """Drops what a body does not need, and returns the positions of the placeholders that it does."""
    drop_dead(body)
    used = tuple(i for i, node in enumerate(taken.values()) if node.users)
    for node in taken.values():
        if not node.users:
            body.erase_node(node)
    return used
