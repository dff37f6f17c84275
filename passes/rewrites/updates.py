"""Insert update nodes: parameters are updated in the backward, each after the last read of its old version.

As gradients arrive: on the host, an update comes after the next gradients have been stored, so that two sets of slots take
turns and neither the copies nor the updates wait for each other. With more sets, it comes after the next few: an update that
takes longer than the blocks beside it, such as one on disk, then keeps none of them waiting. *Patient*, updates on the host
are listed at the end, in the plan's order: each begins as soon as its gradients are there and its turn has come, and no copy
waits for it. *Held*, all come at the end, once the norm of all gradients is known: a norm per gradient as it arrives, then
one scale that every update reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import fx

from mtcompile.passes.insert import add_call, add_move
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import (
    calls,
    gradient_norms,
    gradient_scale,
    new_node,
    offload,
    placeholders,
    prefetch,
    results,
    step_outputs,
    update,
)
from mtcompile.runtime.schedule import aligned

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters whose gradients one call makes. ``outputs``: positions of these gradients among the step's outputs."""

    call: fx.Node
    outputs: tuple[int, ...]
    params: tuple[fx.Node, ...]
    grads: tuple[fx.Node, ...]

    @property
    def tier(self) -> str:
        return str(self.grads[0].meta["tier"])


def place_updates(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Inserts the updates of the parameters named in ``step.meta["updated"]`` (without it: of all that have gradients)."""
    if plan.updates is None:
        return step
    groups = _groups(step)
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
    _replace_outputs(step, updated)
    return step


def later(items: Sequence[_Item], by: int) -> list[_Item]:
    """Returns for each item the one ``by`` places behind it, or the last one."""
    return [items[min(place + by, len(items) - 1)] for place in range(len(items))]


def _in_order(groups: list[_Group], order: tuple[str, ...]) -> list[_Group]:
    """The groups that ``order`` names, by their first parameters, and then all others as they come."""
    ranks = {name: rank for rank, name in enumerate(order)}
    return sorted(groups, key=lambda group: ranks.get(group.params[0].name, len(ranks)))


def _groups(step: fx.GraphModule) -> list[_Group]:
    """The groups in the order in which their gradients are made."""
    inputs = {
        spec.index: (spec, node)
        for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True)
        if spec.role == "param"
    }
    wanted = step.meta.get("updated")
    outputs: dict[fx.Node, list[int]] = {}
    values = step_outputs(step)
    for position, (spec, value) in enumerate(zip(step.meta["outputs"], values, strict=True)):
        if spec.kind == "grad" and spec.index in inputs and (wanted is None or inputs[spec.index][0].name in wanted):
            outputs.setdefault(value.args[0], []).append(position)
    ordered = (call for call in calls(step) if call in outputs)
    specs = step.meta["outputs"]
    return [
        _Group(
            call,
            tuple(outputs[call]),
            tuple(inputs[specs[position].index][1] for position in outputs[call]),
            tuple(values[position] for position in outputs[call]),
        )
        for call in ordered
    ]


def _update(step: fx.GraphModule, group: _Group, scale: fx.Node | None) -> dict[int, fx.Node]:
    """Inserts the update of one group; the parameters' next versions by position among the outputs."""
    operands = (*group.params, *group.grads, *(() if scale is None else (scale,)))
    node = new_node(step.graph, "call_function", update, operands, {"count": len(group.params)}, f"update_{group.call.name}")
    node.meta.update(_meta(group))
    versions = add_call(step.graph, node, [(f"{p.name}_updated", {**p.meta, "version_of": p.name}) for p in group.params])
    return dict(zip(group.outputs, versions, strict=True))


def _meta(group: _Group) -> dict[str, object]:
    names = tuple(param.meta["name"] for param in group.params)
    return {"phase": "backward", "block": group.call.meta["block"], "tier": group.tier, "names": names}


def _scales(step: fx.GraphModule, groups: list[_Group]) -> dict[str, fx.Node]:
    """Inserts the norms of all gradients and the factor made of them; the factor by the tier where it is."""
    graph, norms = step.graph, []
    for group in groups:
        with graph.inserting_before(results(group.call)[-1].next):
            node = graph.create_node("call_function", gradient_norms, group.grads, name=f"norms_{group.call.name}")
            node.meta.update(_meta(group))
            value = torch.empty(len(group.grads), dtype=_norm_dtype([group]), device="meta")
            (norm,) = add_call(graph, node, [(f"norm_{group.call.name}", _scalar_meta(value, group.tier))])
            if group.tier == "device":
                block, name = group.call.meta["block"], f"store_norm_{group.call.name}"
                (norm,) = add_move(graph, offload, [norm], ("backward", block), name)
        norms.append(norm)
    last = groups[-1]
    with graph.inserting_before(graph.output_node()):
        node = graph.create_node("call_function", gradient_scale, tuple(norms), name="gradient_scale")
        node.meta.update(_meta(last), tier="host", names=tuple(p.meta["name"] for g in groups for p in g.params))
        one = torch.empty((), dtype=_norm_dtype(groups), device="meta")
        (scale,) = add_call(graph, node, [("scale", _scalar_meta(one, "host"))])
        scales = {"host": scale}
        if any(group.tier == "device" for group in groups):
            (scales["device"],) = add_move(graph, prefetch, [scale], ("backward", last.call.meta["block"]), "fetch_scale")
    return scales


def _norm_dtype(groups: list[_Group]) -> torch.dtype:
    """The dtype that holds the norm of each gradient exactly, whatever the gradient's dtype."""
    wide = any(grad.meta["val"].dtype == torch.float64 for group in groups for grad in group.grads)
    return torch.float64 if wide else torch.float32


def _scalar_meta(value: torch.Tensor, tier: str) -> dict[str, object]:
    return {"val": value, "nbytes": aligned(value.numel() * value.element_size()), "role": "state", "tier": tier}


def _replace_outputs(step: fx.GraphModule, updated: dict[int, fx.Node]) -> None:
    """Returns updated parameters in place of their gradients."""
    output = step.graph.output_node()
    values, specs = list(output.args[0]), list(step.meta["outputs"])
    for position, value in updated.items():
        values[position], specs[position] = value, replace(specs[position], kind="update")
    output.args = (tuple(values),)
    step.meta["outputs"] = tuple(specs)
