"""Insert prefetch and offload nodes: parameters stream in before use, gradients leave as they are made, and the activations
that the plan sends home, to the host or on to the disk, go there and come back."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from mtcompile.passes.analysis.rows import rows_of
from mtcompile.passes.analysis.slices import read_by_slices
from mtcompile.passes.insert import add_call, add_move, add_offload_of_rows, add_prefetch_of_rows
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import (
    all_gather,
    fragments_of,
    inputs_of,
    is_region,
    kernel_of,
    offload,
    placeholders,
    prefetch,
    prefetch_rows,
    prefetch_slices,
    read,
    regions,
    results,
    updated_names,
    write,
)
from mtcompile.runtime.schedule import PHASES, Phase

_FETCHES: tuple[object, ...] = prefetch, prefetch_slices, prefetch_rows, read


def stream_params(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Puts before each region one prefetch per home block of the host values it reads (parameters, buffers, inputs), and one
    read before the prefetch of what is on disk, or one all-gather where each host has a part. Under ``disk_direct``, the
    prefetch itself reads what is on disk, unless only rows or slices of it cross.

    A region that reads several fragments of a weight, for its input's gradient, follows those that make their gradients, the
    last fragment's first. Each fragment comes for itself, a region earlier than the one before it: so it is at home no longer
    needed when its gradient arrives there, and a disk reads them one after the other.

    Parameters whose home is the device are marked so and read in place. Those that stay are not fetched again in the backward:
    it reads what the forward fetched last.
    """
    homes = step.meta["homes"]
    order_at_home = {name: position for position, name in enumerate(homes)}
    for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True):
        home = homes.get(spec.name)  # none: nothing that counts reads it
        if spec.role == "param" and home is not None and (tier := plan.params(home)) in ("device", "disk"):
            node.meta["tier"] = tier
        node.meta["part"] = spec.role == "param" and home in plan.parts
    order, rows, fragments = regions(step), _rows(step), fragments_of(step)
    staying: dict[fx.Node, fx.Node] = {}  # parameters, and what the forward fetched of them
    for position, region in enumerate(order):
        # By home, by how many fragments of it are before, and by what says which parts are fetched.
        groups: dict[tuple[str, int, tuple[fx.Node, ...]], list[fx.Node]] = {}
        counts: dict[str, int] = {}  # of the fragments of each home that this region fetches
        ends, backward = _ends_of_slices(step, region), region.meta["phase"] == PHASES[1]
        for operand in region.all_input_nodes:
            if backward and operand in staying:
                region.replace_input_with(operand, staying[operand])
            elif operand.op == "placeholder" and operand.meta["tier"] != "device":
                home = homes.get(operand.meta["name"], "")
                by = (ends[operand],) if operand in ends else (operand,) if operand in rows else ()
                before = 0
                if operand.meta["name"] in fragments:
                    before = counts[home] = counts.get(home, -1) + 1
                groups.setdefault((home, before, by), []).append(operand)
        for (home, before, by), values in groups.items():
            end, taken = ends.get(values[0]), rows.get(values[0])
            values.sort(key=lambda value: order_at_home.get(value.meta["name"], -1))  # neighbours cross together
            name, about = home.replace(".", "_") or "inputs", (region.meta["phase"], region.meta["block"])
            at_home, lookahead = values, before + (0 if backward and plan.returns_late(home) else plan.lookahead)
            if values[0].meta["tier"] == "disk" and not (plan.disk_direct and not by):
                with step.graph.inserting_before(_issue_point(order, position, lookahead + plan.disk_lookahead)):
                    at_home = add_move(step.graph, read, values, about, f"read_{name}")
            elif values[0].meta["part"]:  # one region before the copy, so that one is gathered while another crosses
                with step.graph.inserting_before(_issue_point(order, position, before + plan.lookahead + 1)):
                    at_home = _gathered(step.graph, values, about, f"gather_{name}")
            # Which slices have rows is known once the region has run that computes it.
            ahead = lookahead if end is None else min(lookahead, position - order.index(end.args[0]) - 1)
            with step.graph.inserting_before(_issue_point(order, position, ahead)):
                stays = not backward and end is None and bool(home) and plan.stays(home)
                pooled = plan.pooled or stays
                if taken is not None:
                    moved = add_prefetch_of_rows(step.graph, at_home[0], *taken[:2], about, f"fetch_{name}", pooled)
                else:
                    target = prefetch if end is None else prefetch_slices
                    moved = add_move(step.graph, target, at_home, about, f"fetch_{name}", by, pooled)
            moved[0].args[0].meta["home"] = home
            for value, arrived in zip(values, moved, strict=True):
                region.replace_input_with(value, arrived)
                if stays:
                    staying[value] = arrived
    return step


def _gathered(graph: fx.Graph, values: list[fx.Node], about: tuple[Phase, int], name: str) -> list[fx.Node]:
    """Appends an all-gather of parameters of which each host has a part, and returns them whole, on the host."""
    call = graph.create_node("call_function", all_gather, tuple(values), name=name)
    call.meta.update(phase=about[0], block=about[1], names=tuple(value.meta["name"] for value in values))
    return add_call(graph, call, [(f"{value.name}_whole", {**value.meta, "part": False}) for value in values])


def _ends_of_slices(step: fx.GraphModule, region: fx.Node) -> dict[fx.Node, fx.Node]:
    """Returns the parameters that a region reads slice by slice and that are to be fetched so, each with the value that says
    where the rows of the slices end. It is a result of an earlier region; one that this region computes would come too late."""
    if not step.meta.get("sliced"):
        return {}
    memo, key = step.meta["memo"], ("slices", str(region.target))
    if key not in memo:
        body = kernel_of(step, region).graph
        place = {node: position for position, node in enumerate(placeholders(body))}
        memo[key] = {place[node]: place[end] for node, end in read_by_slices(body).items() if end in place}
    pairs = [(region.args[value], region.args[end]) for value, end in memo[key].items()]
    return {
        value: end
        for value, end in pairs
        if value.meta.get("name") in step.meta["sliced"] and end.op != "placeholder" and is_region(end.args[0])
    }


def _rows(step: fx.GraphModule) -> dict[fx.Node, tuple[tuple[fx.Node, ...], int, int]]:
    """Returns the parameters of which only rows cross, each with the inputs that name them, how many rows the device holds, and
    how many there are."""
    taken = rows_of(step)
    inputs = {spec.name: node for spec, node in inputs_of(step) if spec.role == "input"} if taken else {}
    return {node: (tuple(inputs[name] for name in each.indices), each.held, each.rows) for node, each in taken.items()}


def offload_activations(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Sends the activations that the plan keeps at home there after their last use in a row, and back before each later use.
    Those whose home is the disk pass through the host both ways."""
    order = {region: position for position, region in enumerate(regions(step))}
    for producer in order:
        for value in results(producer):
            if value.meta["role"] != "activation" or plan.activation(value.name) not in ("host", "disk"):
                continue
            uses = sorted((u for u in value.users if is_region(u)), key=order.__getitem__)
            _offload_between(step, value, producer, uses, order, plan)
    return step


def _offload_between(
    step: fx.GraphModule,
    value: fx.Node,
    producer: fx.Node,
    uses: list[fx.Node],
    order: Mapping[fx.Node, int],
    plan: Plan,
) -> None:
    """Puts one offload after the production, and a prefetch where the gap since the last use is more than one region or where
    a prefetched copy would have to wait from one phase to the other. For the disk, puts one write behind the offload, and a
    read before each prefetch."""
    previous, current, at_home, regions_in_order = producer, value, None, list(order)
    ahead_on_disk = plan.disk_lookahead if plan.activation(value.name) == "disk" else None
    for use in uses:
        same_phase = previous.meta["phase"] == use.meta["phase"]
        near = order[use] - order[previous] <= 1 and (same_phase or current is value)
        if not near:
            about, between = (use.meta["phase"], use.meta["block"]), order[use] - order[previous] - 1
            late = ahead_on_disk is None and use.meta["phase"] == PHASES[1] and plan.loads_late(value.name)
            ahead = 0 if late else min(plan.lookahead, between)
            before = _before_fetches(use) if late else _issue_point(regions_in_order, order[use], ahead)
            read_before = _issue_point(regions_in_order, order[use], min(ahead + (ahead_on_disk or 0), between))
            if at_home is None:
                about_producer = producer.meta["phase"], producer.meta["block"]
                # The copy on the host waits for its write beside later ones, so that the disk keeps none of them waiting.
                until = _issued_until(regions_in_order, order[producer], ahead_on_disk or 0, order[read_before])
                with step.graph.inserting_before(results(producer)[-1].next):
                    (at_home,) = add_move(step.graph, offload, [value], about_producer, f"save_{value.name}")
                if ahead_on_disk is not None:
                    with step.graph.inserting_before(at_home.next if until is producer else _behind(until)):
                        (at_home,) = add_move(step.graph, write, [at_home], about_producer, f"spill_{value.name}")
            arriving = at_home
            if ahead_on_disk is not None:
                with step.graph.inserting_before(read_before):
                    (arriving,) = add_move(step.graph, read, [at_home], about, f"read_{value.name}")
            with step.graph.inserting_before(before):
                (current,) = add_move(step.graph, prefetch, [arriving], about, f"load_{value.name}", pooled=plan.pooled)
        if current is not value:
            use.replace_input_with(value, current)
        previous = use


def _before_fetches(region: fx.Node) -> fx.Node:
    """The first of the fetches that are issued before a region: what it waits for goes before what comes ahead for others."""
    first = region
    while (call := first.prev.args[0] if first.prev.target is operator.getitem else first.prev).target in _FETCHES:
        first = call
    return first


def _issued_until(order: list[fx.Node], position: int, delay: int, end: int) -> fx.Node:
    """The region behind which a write of what ``order[position]`` made is issued: at most ``delay`` later, same phase, and
    before the region ``end``."""
    phase, last = order[position].meta["phase"], position
    while last < min(position + delay, end - 1) and order[last + 1].meta["phase"] == phase:
        last += 1
    return order[last]


def _behind(region: fx.Node) -> fx.Node:
    """The node behind a region and its results."""
    return (results(region) or [region])[-1].next


def offload_gradients(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Sends gradients and new buffer versions home right after the region that makes them, in one offload per region and home,
    and one for each gradient that crosses by rows; a gradient whose parameter lives on the device stays there and leaves with
    the outputs, and so does one whose parameter the device will update."""
    output, homes = step.graph.output_node(), step.meta["homes"]
    values = list(output.args[0])
    specs = step.meta["outputs"]
    inputs = {
        spec.index: node
        for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True)
        if spec.index >= 0 and spec.role != "tangent"
    }
    rows = {node.meta["name"]: taken for node, taken in _rows(step).items()}
    # region -> home, and what is apart -> positions of its results among the outputs
    leaving: dict[fx.Node, dict[tuple[str, str], list[int]]] = {}
    updated = updated_names(step)
    for position, (spec, value) in enumerate(zip(specs, values, strict=True)):
        home = inputs[spec.index].meta["tier"] if spec.kind != "output" else "device"
        if spec.kind == "grad" and spec.name in updated and plan.streams(homes.get(spec.name, "")):
            continue
        if spec.kind != "output" and home != "device":
            by_rows = spec.name if spec.name in rows else ""
            leaving.setdefault(value.args[0], {}).setdefault((homes.get(spec.name, ""), by_rows), []).append(position)
    for region, by_home in leaving.items():
        behind = results(region)[-1].next
        for (home, by_rows), positions in by_home.items():
            name = f"store_{region.name}" + (f"_{(by_rows or home).replace('.', '_')}" if len(by_home) > 1 else "")
            with step.graph.inserting_before(behind):
                gradients = [values[position] for position in positions]
                about = region.meta["phase"], region.meta["block"]
                if by_rows:
                    indices, _, count = rows[by_rows]
                    moved = add_offload_of_rows(step.graph, gradients[0], indices, count, about, name)
                else:
                    moved = add_move(step.graph, offload, gradients, about, name)
            moved[0].args[0].meta["home"] = home
            if plan.frees_early(home):
                moved[0].args[0].meta["early"] = True
            for position, at_home in zip(positions, moved, strict=True):
                values[position] = at_home
    output.args = (tuple(values),)
    return step


def _issue_point(order: list[fx.Node], position: int, lookahead: int) -> fx.Node:
    """The region before which a prefetch for ``order[position]`` is issued: at most ``lookahead`` earlier, same phase."""
    phase = order[position].meta["phase"]
    first = position
    while first > position - lookahead and first > 0 and order[first - 1].meta["phase"] == phase:
        first -= 1
    return order[first]
