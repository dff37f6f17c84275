"""Insert collectives: what the ranks of a job combine, each right after it has come home.

Every rank has the gradients of its own batch. Their mean takes the place of each gradient from where it is on the host, so that
updates, norms and ``p.grad`` see the same bits on all ranks. New versions of buffers (the statistics of a batch norm) are those
of the first rank. Collectives are listed in the order in which the backward makes gradients, whatever a plan decides.

Where ranks update shares of a parameter, each needs the elements of the gradient that it updates, and no others. Between hosts:

    gradient --> reduce_scatter --> its part --> update of a part --> all_gather --> the whole parameter, on every host

Updates come in the order of a plan, and the gathers behind them too; before each phase ranks compare these orders. Where hosts
have parts of the weights as well, nothing is gathered behind the update, but before each copy to the device (``transfers``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.state import share_length
from mtcompile.passes.insert import add_call
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.step_graph import (
    InputSpec,
    OutputSpec,
    all_gather,
    all_reduce,
    broadcast,
    calls,
    inputs_of,
    outputs_of,
    ranks_of,
    reduce_scatter,
    results,
    update,
)
from mtcompile.runtime.happens_before import Order
from mtcompile.runtime.schedule import Schedule, aligned


def combine_over_ranks(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Puts an all-reduce behind each offload of gradients of parameters, a reduce-scatter where ranks update shares of these,
    and a broadcast behind each offload of buffers. Does nothing for one rank, or for a step without gradients."""
    if (ranks := ranks_of(step)) == 1 or not any(spec.kind == "grad" for spec in step.meta["outputs"]):
        return step
    inputs = {spec.index: (spec, node) for spec, node in inputs_of(step) if spec.role != "tangent"}
    combined: dict[tuple[fx.Node, Any], list[int]] = {}  # (offload, collective) -> positions among the outputs
    for position, (spec, value) in enumerate(outputs_of(step)):
        if spec.index in inputs and (target := collective_of(step, plan.updates, spec, inputs[spec.index], value)) is not None:
            combined.setdefault((value.args[0], target), []).append(position)
    output = step.graph.output_node()
    values = list(output.args[0])
    for (call, target), positions in combined.items():
        operands = [values[position] for position in positions]
        with step.graph.inserting_before(results(call)[-1].next):
            verb, past = _VERBS[target]
            name = f"{verb}_{call.name.removeprefix('store_')}"
            node = step.graph.create_node("call_function", target, tuple(operands), name=name)
            names = tuple(step.meta["outputs"][position].name for position in positions)
            node.meta.update(phase=call.meta["phase"], block=call.meta["block"], names=names)
            metas = [dict(value.meta) for value in operands]
            for meta in metas if target is reduce_scatter else ():
                meta.update(share_of(ranks, meta["val"]))
            items = add_call(step.graph, node, [(f"{v.name}_{past}", meta) for v, meta in zip(operands, metas, strict=True)])
        for position, item in zip(positions, items, strict=True):
            values[position] = item
    output.args = (tuple(values),)
    return step


def collective_of(
    step: fx.GraphModule, updates: Updates | None, spec: OutputSpec, of: tuple[InputSpec, fx.Node], value: fx.Node
) -> Any:
    """Returns what combines an output over ranks; None for nothing. ``of``: the input that it is a gradient or version of."""
    (source, home), kind = of, spec.kind
    if kind == "output" or source.role != ("param" if kind == "grad" else "buffer"):
        return None
    scattered = kind == "grad" and _is_scattered(step, updates, source.name, home, value)
    return broadcast if kind != "grad" else reduce_scatter if scattered else all_reduce


def share_of(ranks: int, val: torch.Tensor) -> dict[str, Any]:
    """Returns what describes the elements of a gradient that one rank updates, one behind the other."""
    share = torch.empty(min(val.numel(), share_length(val.numel(), ranks)), dtype=val.dtype, device="meta")
    return {"val": share, "nbytes": aligned(share.nbytes)}


_VERBS = {all_reduce: ("reduce", "reduced"), reduce_scatter: ("scatter", "scattered"), broadcast: ("share", "shared")}


def _is_scattered(step: fx.GraphModule, updates: Updates | None, name: str, parameter: fx.Node, gradient: fx.Node) -> bool:
    """Tells whether nobody needs a gradient but the update of a part of its parameter: its norm needs all of it."""
    wanted = step.meta.get("updated")
    if updates is None or updates.held or not is_sharded(step, updates, name) or (wanted is not None and name not in wanted):
        return False
    return bool(gradient.meta["val"].stride() == parameter.meta["val"].stride())  # parts are of elements as they lie in memory


def is_sharded(step: fx.GraphModule, updates: Updates, name: str) -> bool:
    """Tells whether each rank updates a share of a parameter."""
    return step.meta["homes"].get(name) in updates.sharded


def gather_over_hosts(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Puts an all-gather behind each update of parameters of which hosts update parts."""
    if plan.updates is None or not plan.updates.sharded or step.meta["hosts"] == 1:
        return step
    gathered: dict[fx.Node, fx.Node] = {}
    for call in [call for call in calls(step) if call.target is update]:
        names: Any = call.meta["names"]
        parts = [
            item
            for item in results(call)
            if is_sharded(step, plan.updates, name := names[item.args[1]]) and step.meta["homes"][name] not in plan.parts
        ]
        if not parts:
            continue
        with step.graph.inserting_before(results(call)[-1].next):
            node = step.graph.create_node("call_function", all_gather, tuple(parts), name=f"gather_{call.name}")
            node.meta.update(phase=call.meta["phase"], block=call.meta["block"])
            node.meta["names"] = tuple(names[item.args[1]] for item in parts)
            items = add_call(step.graph, node, [(f"{item.name}_gathered", dict(item.meta)) for item in parts])
        gathered |= dict(zip(parts, items, strict=True))
    output = step.graph.output_node()
    output.args = (tuple(gathered.get(value, value) for value in output.args[0]),)
    return step


def check_reads(step: fx.GraphModule, schedule: Schedule) -> None:
    """Checks of a step whose parameters lie once for all ranks of a host (I7): every read of a parameter at home ends before
    its gradients are combined. A rank that has combined them may then update it at once: all others have read its old version
    for the last time. Raises SameComputationError, which names the first read that comes later."""
    place = {instruction.label: index for index, instruction in enumerate(schedule.instructions) if instruction.label}
    reductions = (call for call in calls(step) if call.target in (all_reduce, reduce_scatter))
    combined = {name: place[call.name] for call in reductions for name in call.meta["names"]}
    order = Order(schedule)
    for call in calls(step):
        if call.target is not update:
            continue
        homes = dict(zip((str(operand) for operand in call.args), call.meta["names"], strict=False))
        for index, instruction in enumerate(schedule.instructions):
            for home in homes.keys() & {*instruction.reads} if instruction.label != call.name else ():
                if call.meta["tier"] != "host" or not order.before(index, combined[homes[home]]):
                    raise SameComputationError(
                        f"I7: expected every read of {homes[home]} before its gradients are combined, and its update on the "
                        f"host, found that {instruction.label} reads it later: another rank may have updated it by then. "
                        "MT_RANKS_SHARE=0 gives each rank weights of its own"
                    )
