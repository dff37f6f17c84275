"""Insert update nodes: parameters are updated in the backward, each after the last read of its old version.

As gradients arrive: on the host, an update comes after the next gradients have been stored, so that two sets of slots take
turns and neither the copies nor the updates wait for each other. With more sets, it comes after the next few: an update that
takes longer than the blocks beside it, such as one on disk, then keeps none of them waiting. *Patient*, updates on the host
are listed at the end, in the plan's order: each begins as soon as its gradients are there and its turn has come, and no copy
waits for it. *Held*, all come at the end, once the norm of all gradients is known: a norm per gradient as it arrives, then
one scale that every update reads.

The device updates what is at home there, and what the plan *streams*: weights at home on the host whose gradients stay where
they were made, while all that their update reads and writes comes to a slot and goes home again on the copying queues, so that
the host updates others at the same time:

    host     update of block 7             | update of block 5
    h2d      state of block 6              | state of block 4
    d2h      update of block 8, home again | update of block 6, home again

State comes while that for the update before goes home: each is fetched before that update is listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import fx

from mtcompile.passes.analysis.state import crossing_alone
from mtcompile.passes.insert import add_call, add_move
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import (
    calls,
    fetch_state,
    gradient_norms,
    gradient_scale,
    new_node,
    offload,
    placeholders,
    prefetch,
    results,
    step_outputs,
    streamed_state,
    update,
)
from mtcompile.runtime.schedule import aligned

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters whose gradients one call makes. ``outputs``: positions of these gradients among the step's outputs;
    ``streamed``: bytes that cross each way for an update on the device of what is at home on the host; 0 for others."""

    call: fx.Node
    outputs: tuple[int, ...]
    params: tuple[fx.Node, ...]
    grads: tuple[fx.Node, ...]
    streamed: int

    @property
    def tier(self) -> str:
        return str(self.grads[0].meta["tier"])


def place_updates(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Inserts the updates of the parameters named in ``step.meta["updated"]`` (without it: of all that have gradients)."""
    if plan.updates is None:
        return step
    groups = _groups(step, plan.updates.streamed)
    if not groups:
        return step
    order = calls(step)
    place = {call: position for position, call in enumerate(order)}
    end, first_output = len(order) - 1, step.graph.output_node()
    on_host = [group for group in groups if group.tier == "host"]
    # After whose copy home an update comes.
    turns = dict(zip(map(id, on_host), later(on_host, plan.updates.sets - 1), strict=True))
    late = (
        list(reversed(groups)) if plan.updates.held else _in_order(on_host, plan.updates.order) if plan.updates.patient else []
    )
    after: dict[int, list[_Group]] = {}
    for group in groups:
        if group not in late:
            stored = turns.get(id(group), group).call
            reads = [place[user] for param in group.params for user in param.users if user in place]
            after.setdefault(max([place[stored], *reads]), []).append(group)
    after.setdefault(end, []).extend(late)

    scale: dict[str, fx.Node] = _scales(step, groups) if plan.updates.held else {}
    anchors = {position: results(order[position])[-1].next if position != end else first_output for position in after}
    updated: dict[int, fx.Node] = {}  # by position among the outputs
    for position, placed in after.items():
        for group in placed:
            with step.graph.inserting_before(anchors[position]):
                updated |= _update(step, group, scale.get(group.tier))
    _bring_state_ahead(step)
    _replace_outputs(step, updated)
    return step


def _bring_state_ahead(step: fx.GraphModule) -> None:
    fetched = [(call, state) for call in calls(step) if call.target is update and (state := streamed_state(call)) is not None]
    for (before, _), (_, state) in itertools.pairwise(fetched):
        before.prepend(state.args[0])
        before.prepend(state)


def later(items: Sequence[_Item], by: int) -> list[_Item]:
    """Returns for each item the one ``by`` places behind it, or the last one."""
    return [items[min(place + by, len(items) - 1)] for place in range(len(items))]


def _in_order(groups: list[_Group], order: tuple[str, ...]) -> list[_Group]:
    """The groups that ``order`` names, by their first parameters, and then all others as they come."""
    ranks = {name: rank for rank, name in enumerate(order)}
    return sorted(groups, key=lambda group: ranks.get(group.params[0].name, len(ranks)))


def _groups(step: fx.GraphModule, copies: int) -> list[_Group]:
    """The groups in the order in which their gradients are made; of one call, those that are streamed come last, with what
    crosses alone apart. ``copies``: of a parameter that cross for an update."""
    inputs = {
        spec.index: (spec, node)
        for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True)
        if spec.role == "param"
    }
    wanted = step.meta.get("updated")
    alone = crossing_alone(step) if copies else ()
    outputs: dict[fx.Node, dict[object, list[int]]] = {}  # by whether they are streamed, or by what crosses alone
    values = step_outputs(step)
    for position, (spec, value) in enumerate(zip(step.meta["outputs"], values, strict=True)):
        if spec.kind == "grad" and spec.index in inputs and (wanted is None or inputs[spec.index][0].name in wanted):
            streamed = (value.meta["tier"], inputs[spec.index][1].meta["tier"]) == ("device", "host")
            key = spec.name if streamed and spec.name in alone else streamed
            outputs.setdefault(value.args[0], {False: []}).setdefault(key, []).append(position)
    specs, groups = step.meta["outputs"], list[_Group]()
    for call in calls(step):
        for key, places in outputs.get(call, {}).items():
            params = tuple(inputs[specs[place].index][1] for place in places)
            grads, nbytes = tuple(values[place] for place in places), sum(param.meta["nbytes"] for param in params)
            streamed = 0 if key is False else copies * nbytes
            groups += [_Group(call, tuple(places), params, grads, streamed)] if places else []
    return groups


def _update(step: fx.GraphModule, group: _Group, scale: fx.Node | None) -> dict[int, fx.Node]:
    """Inserts the update of one group; the parameters' next versions by position among the outputs."""
    operands, name = (*group.params, *group.grads, *(() if scale is None else (scale,))), f"update_{_name(group)}"
    if group.streamed:
        operands = *operands, _fetched_state(step.graph, group)
    node = new_node(step.graph, "call_function", update, operands, {"count": len(group.params)}, name)
    node.meta.update(_meta(group))
    versions = add_call(step.graph, node, [(f"{p.name}_updated", {**p.meta, "version_of": p.name}) for p in group.params])
    return dict(zip(group.outputs, versions, strict=True))


def _fetched_state(graph: fx.Graph, group: _Group) -> fx.Node:
    """Inserts the fetch of all that a streamed update reads and writes."""
    kwargs, name = {"nbytes": group.streamed}, f"fetch_state_{_name(group)}"
    node = new_node(graph, "call_function", fetch_state, group.params, kwargs, name)
    node.meta.update(_meta(group))
    val = torch.empty(group.streamed, dtype=torch.uint8, device="meta")
    (state,) = add_call(graph, node, [(f"state_{_name(group)}", _state_meta(val, "device"))])
    return state


def _name(group: _Group) -> str:
    return f"{group.call.name}_{group.params[0].name}" if group.streamed else str(group.call.name)


def _meta(group: _Group) -> dict[str, object]:
    names = tuple(param.meta["name"] for param in group.params)
    return {"phase": "backward", "block": group.call.meta["block"], "tier": group.tier, "names": names}


def _scales(step: fx.GraphModule, groups: list[_Group]) -> dict[str, fx.Node]:
    """Inserts the norms of all gradients and the factor made of them; the factor by the tier where it is."""
    graph, norms = step.graph, []
    behind = {group.call: results(group.call)[-1].next for group in groups}
    for group in groups:
        with graph.inserting_before(behind[group.call]):
            node = graph.create_node("call_function", gradient_norms, group.grads, name=f"norms_{_name(group)}")
            node.meta.update(_meta(group))
            value = torch.empty(len(group.grads), dtype=_norm_dtype([group]), device="meta")
            (norm,) = add_call(graph, node, [(f"norm_{_name(group)}", _state_meta(value, group.tier))])
            if group.tier == "device":
                block, name = group.call.meta["block"], f"store_norm_{_name(group)}"
                (norm,) = add_move(graph, offload, [norm], ("backward", block), name)
        norms.append(norm)
    last = groups[-1]
    with graph.inserting_before(graph.output_node()):
        node = graph.create_node("call_function", gradient_scale, tuple(norms), name="gradient_scale")
        node.meta.update(_meta(last), tier="host", names=tuple(p.meta["name"] for g in groups for p in g.params))
        one = torch.empty((), dtype=_norm_dtype(groups), device="meta")
        (scale,) = add_call(graph, node, [("scale", _state_meta(one, "host"))])
        scales = {"host": scale}
        if any(group.tier == "device" for group in groups):
            (scales["device"],) = add_move(graph, prefetch, [scale], ("backward", last.call.meta["block"]), "fetch_scale")
    return scales


def _norm_dtype(groups: list[_Group]) -> torch.dtype:
    """The dtype that holds the norm of each gradient exactly, whatever the gradient's dtype."""
    wide = any(grad.meta["val"].dtype == torch.float64 for group in groups for grad in group.grads)
    return torch.float64 if wide else torch.float32


def _state_meta(value: torch.Tensor, tier: str) -> dict[str, object]:
    return {"val": value, "nbytes": aligned(value.numel() * value.element_size()), "role": "state", "tier": tier}


def _replace_outputs(step: fx.GraphModule, updated: dict[int, fx.Node]) -> None:
    """Returns updated parameters in place of their gradients."""
    output = step.graph.output_node()
    values, specs = list(output.args[0]), list(step.meta["outputs"])
    for position, value in updated.items():
        values[position], specs[position] = value, replace(specs[position], kind="update")
    output.args = (tuple(values),)
    step.meta["outputs"] = tuple(specs)
