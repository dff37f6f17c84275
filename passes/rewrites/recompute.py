"""Recompute part or all of what a block's forward saved, inside its backward.

The forward body goes in front of the backward body that first reads a value which was not kept; one kernel does both, so that
what was recomputed is freed inside it as the backward proceeds. Random operations are replayed from their saved generator
state.
"""

from __future__ import annotations

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
    kernel_of,
    new_node,
    placeholders,
    regions,
    results,
)

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
    again: dict[fx.Node, fx.Node] = {}
    output = step.graph.output_node()
    returned, output.args = output.args, ()  # which name every gradient: they are written once
    for backward, forwards in inlined.items():
        again |= _fuse(step, backward, forwards, order)
    output.args = map_arg(returned, lambda value: again.get(value, value))
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


def _fuse(step: fx.GraphModule, backward: fx.Node, forwards: Forwards, order: dict[fx.Node, int]) -> Mapping[fx.Node, fx.Node]:
    """Replaces ``backward`` by a call that makes again what ``forwards`` did not keep, and then does its work. Returns what its
    results are now."""
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
    return dict(zip(olds, items, strict=False))


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
        outputs = inline(body, kernel, [env[a] for a in forward.args], states, given)
        for position, item in items.items():
            again = outputs[position]
            if item not in resident and again is not None and item.meta["role"] != "rng":
                env[item] = again
    own = inline(body, kernel_of(step, backward), [env[a] for a in backward.args])
    body.output((*own, *(env[item] for item in extra)))
    return body, used_inputs(body, taken)


def inline(
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


def used_inputs(body: fx.Graph, taken: Mapping[fx.Node, fx.Node]) -> tuple[int, ...]:
    """Drops what a body does not need, and returns the positions of the placeholders that it does."""
    drop_dead(body)
    used = tuple(i for i, node in enumerate(taken.values()) if node.users)
    for node in taken.values():
        if not node.users:
            body.erase_node(node)
    return used
