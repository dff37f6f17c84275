"""Whole-block recomputation: a block's forward is run again inside the first backward region that needs what it saved."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from mtcompile.passes.kernels import Kernels, install, is_impure, saved_states, trim
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import (
    add_call,
    body_outputs,
    kernel_of,
    placeholders,
    regions,
    replay,
    results,
    save_rng,
)


def saved_values(step: fx.GraphModule, region: fx.Node) -> list[fx.Node]:
    """Results of a forward region that only the backward reads: what recomputation makes unnecessary to keep."""
    return [
        value
        for value in results(region)
        if value.meta["role"] == "activation"
        and value.users
        and all(user.op == "call_module" and user.meta["phase"] == "backward" for user in value.users)
    ]


def recomputable(step: fx.GraphModule) -> dict[int, int]:
    """Block -> bytes its forward saves for the backward alone; blocks that save nothing are left out."""
    found = {}
    for region in regions(step):
        if region.meta["phase"] == "forward":
            nbytes = sum(value.meta["nbytes"] for value in saved_values(step, region))
            if nbytes:
                found[region.meta["block"]] = nbytes
    return found


def recompute(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """For every block the plan recomputes: its forward body goes in front of the backward body that first reads a saved
    value, random operations replayed from their saved generator state. One kernel does both, so that what was
    recomputed is freed inside it as the backward proceeds."""
    order = {region: i for i, region in enumerate(regions(step))}
    inlined: dict[fx.Node, list[fx.Node]] = {}
    for region in order:
        if region.meta["phase"] == "forward" and plan.variant(step.meta["blocks"][region.meta["block"]]) == "recompute":
            users = [user for value in saved_values(step, region) for user in value.users]
            if users:
                inlined.setdefault(min(users, key=order.__getitem__), []).append(region)
    moments = {forward: order[backward] for backward, forwards in inlined.items() for forward in forwards}
    for backward, forwards in inlined.items():
        _fuse(step, backward, forwards, order, moments)
    return trim(step)


def _fuse(
    step: fx.GraphModule,
    backward: fx.Node,
    forwards: list[fx.Node],
    order: dict[fx.Node, int],
    moments: dict[fx.Node, int],
) -> None:
    kernels: Kernels = step.meta["kernels"]
    body = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}  # value of the step graph -> node of the new body
    inputs: list[fx.Node] = []

    def value(node: fx.Node) -> fx.Node:
        if node not in env:
            first = next(iter(body.nodes), None)
            anchor = env[inputs[-1]] if inputs else None
            context = body.inserting_after(anchor) if anchor else body.inserting_before(first) if first else None
            if context is None:
                env[node] = body.placeholder(node.name)
            else:
                with context:
                    env[node] = body.placeholder(node.name)
            env[node].meta = {"val": node.meta["val"]}
            inputs.append(node)
        return env[node]

    remade: list[fx.Node] = []
    for forward in forwards:
        made = _inline(body, kernel_of(step, forward), [value(a) for a in forward.args], _states(step, forward, value))
        for item in results(forward):
            again = made[int(item.args[1])]
            if again is not None and item.meta["role"] != "rng":
                env[item] = again
                remade.append(item)
    own = _inline(body, kernel_of(step, backward), [value(a) for a in backward.args], {})
    # What later backward regions read of the recomputed block comes from here, so that the first copy can go early.
    moment = order[backward]
    later = {
        item: [
            u
            for u in item.users
            if u in order and u.meta["phase"] == "backward" and order[u] > moment and moments.get(u) is None
        ]
        for item in remade
    }
    extra = [item for item, users in later.items() if users]
    body.output((*own, *(env[item] for item in extra)))

    with step.graph.inserting_before(backward):
        call = step.graph.create_node("call_module", install(step, kernels, body), tuple(inputs), name=f"{backward.name}_r")
        call.meta.update(backward.meta)
        items = add_call(step.graph, call, [(f"{i.name}", dict(i.meta)) for i in [*results(backward)] + extra])
    olds = results(backward)
    for old, new in zip(olds, items, strict=False):
        old.replace_all_uses_with(new)
    for item, new in zip(extra, items[len(olds) :], strict=True):
        for user in later[item]:
            user.replace_input_with(item, new)
    for old in olds:
        step.graph.erase_node(old)
    step.graph.erase_node(backward)
    order[call] = moment


def _states(step: fx.GraphModule, forward: fx.Node, value: Any) -> dict[str, fx.Node]:
    """Name of each random operation's save_rng node in the forward body -> the placeholder holding that state."""
    items = {int(item.args[1]): item for item in results(forward)}
    return {name: value(items[position]) for name, position in saved_states(kernel_of(step, forward)).items()}


def _inline(body: fx.Graph, kernel: fx.GraphModule, args: list[fx.Node], states: dict[str, fx.Node]) -> list[fx.Node | None]:
    """Append a kernel's body; with ``states``, as a replay. Returns its outputs (None for generator states)."""
    env: dict[fx.Node, fx.Node] = dict(zip(placeholders(kernel.graph), args, strict=True))
    for node in kernel.graph.nodes:
        if node.op != "call_function" or (states and node.target is save_rng):
            continue
        operands, keywords = map_arg((node.args, node.kwargs), env.__getitem__)
        if states and is_impure(node):
            operands = (states[node.meta["rng_state"]], node.target, *operands)
            env[node] = body.create_node("call_function", replay, operands, keywords, name=node.name)
        else:
            env[node] = body.create_node("call_function", node.target, operands, keywords, name=node.name)
        env[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    return [env.get(node) for node in body_outputs(kernel)]
