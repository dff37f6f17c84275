"""Insert collectives: what the ranks of a job combine, each right after it has come home.

Every rank has the gradients of its own batch. Their mean takes the place of each gradient from where it is on the host, so that
updates, norms and ``p.grad`` see the same bits on all ranks. New versions of buffers (the statistics of a batch norm) are those
of the first rank. Collectives are listed in the order in which the backward makes gradients, whatever a plan decides.
"""

from __future__ import annotations

from torch import fx

from mtcompile.passes.check import SameComputationError
from mtcompile.passes.insert import add_call
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import all_reduce, broadcast, calls, is_collective, outputs_of, ranks_of, results, update
from mtcompile.runtime.happens_before import Order
from mtcompile.runtime.schedule import Schedule


def combine_over_ranks(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Puts an all-reduce behind each offload of gradients of parameters, and a broadcast behind each offload of buffers. Does
    nothing for one rank, or for a step without gradients."""
    if ranks_of(step) == 1 or not any(spec.kind == "grad" for spec in step.meta["outputs"]):
        return step
    roles = {spec.index: spec.role for spec in step.meta["inputs"] if spec.role != "tangent"}
    combined: dict[tuple[fx.Node, bool], list[int]] = {}  # (offload, of gradients) -> positions among the outputs
    for position, (spec, value) in enumerate(outputs_of(step)):
        shared = roles.get(spec.index) == ("param" if spec.kind == "grad" else "buffer")
        if spec.kind != "output" and shared:
            combined.setdefault((value.args[0], spec.kind == "grad"), []).append(position)
    output = step.graph.output_node()
    values = list(output.args[0])
    for (call, of_gradients), positions in combined.items():
        operands = [values[position] for position in positions]
        with step.graph.inserting_before(results(call)[-1].next):
            target, verb = (all_reduce, "reduce") if of_gradients else (broadcast, "share")
            name = f"{verb}_{call.name.removeprefix('store_')}"
            node = step.graph.create_node("call_function", target, tuple(operands), name=name)
            names = tuple(step.meta["outputs"][position].name for position in positions)
            node.meta.update(phase=call.meta["phase"], block=call.meta["block"], names=names)
            items = add_call(step.graph, node, [(f"{value.name}_{verb}d", dict(value.meta)) for value in operands])
        for position, item in zip(positions, items, strict=True):
            values[position] = item
    output.args = (tuple(values),)
    return step


def check_reads(step: fx.GraphModule, schedule: Schedule) -> None:
    """Checks of a step whose parameters lie once for all ranks of a host (I7): every read of a parameter at home ends before
    its gradients are combined. A rank that has combined them may then update it at once: all others have read its old version
    for the last time. Raises SameComputationError, which names the first read that comes later."""
    place = {instruction.label: index for index, instruction in enumerate(schedule.instructions) if instruction.label}
    combined = {name: place[call.name] for call in calls(step) if is_collective(call) for name in call.meta["names"]}
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
