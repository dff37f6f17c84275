"""Move casts to the side of the link where fewer bytes cross.

A parameter at home that a region only reads through one cast to fewer bytes (fp32 weights under autocast) is cast at home,
and what comes in is the narrow one. A gradient that a region widens as the last thing it does leaves narrow, and is widened at
home. The operation is the same one, so the values are; ``passes/proof`` numbers both sides and finds the captured graph.
Resident values are left alone, and so is what a region needs in both widths.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.kernels import attach, drop_dead, install
from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.insert import add_call
from mtcompile.passes.plan import Plan
from mtcompile.passes.rewrites.trim import drop_unread, trim
from mtcompile.passes.step_graph import (
    body_outputs,
    calls,
    convert,
    is_convert,
    is_region,
    kernel_of,
    offload,
    placeholders,
    prefetch,
    results,
    source,
    span_nbytes,
)
from mtcompile.runtime.devices.arena import layout_of
from mtcompile.runtime.schedule import aligned

_CAST, _CLONE = torch.ops.aten._to_copy.default, torch.ops.aten.clone.default


def cast_on_host(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Casts parameters at home before they come in and gradients after they have left, where fewer bytes cross that way."""
    if plan.narrow:
        crossing = [call for call in calls(step) if call.meta.get("home") not in plan.wide]
        for call in [call for call in crossing if call.target is prefetch]:
            _narrow_prefetch(step, call)
        for call in [call for call in crossing if call.target is offload]:
            _narrow_offload(step, call)
        offloads = [call for call in calls(step) if call.target is offload]
        if waiting := {call: cast for call in offloads if (cast := _cast_that_leaves(step, call)) is not None}:
            for call, cast in waiting.items():
                _wait_as_cast(step, call, cast)
            trim(step, plan)
            for call in [call for call in calls(step) if call.target is prefetch]:
                _leave_out_unread(step, call)
    return step


def may_cast(step: fx.GraphModule) -> bool:
    """Tells whether a region casts anything, so that some plan may cast it at home."""
    kernels = {id(kernel): kernel for kernel in (kernel_of(step, call) for call in calls(step) if is_region(call))}
    return any(node.target is _CAST for kernel in kernels.values() for node in kernel.graph.nodes)


def sized(val: torch.Tensor) -> dict[str, Any]:
    return {"val": val, "nbytes": aligned(span_nbytes(val))}


def _only_dtype(cast: fx.Node) -> bool:
    """Says whether a cast changes nothing but the dtype (a backward's casts name layout and device as well)."""
    return {"dtype"} <= cast.kwargs.keys() <= {"dtype", "layout", "device"} and cast.args[0].meta["val"].is_floating_point()


# ------------------------------------------------------------------------------------------------------- what comes in


def _narrow_prefetch(step: fx.GraphModule, call: fx.Node) -> None:
    """Lets what a prefetch brings in cross narrow, cast at home before, wherever that is all its readers want."""
    castable: dict[fx.Node, fx.Node] = {}  # values that come in, and the cast of each
    for item in results(call):
        value = call.args[int(item.args[1])]
        at_home = value.op == "placeholder" and value.meta["tier"] != "disk"  # what is read from disk crosses as it is
        may_cross_narrow = at_home and value.meta["role"] != "buffer"  # whose new versions are the step's
        cast = _cast_of(step, item) if may_cross_narrow else None
        if cast is not None:
            castable[item] = cast
    if not castable:
        return
    values = [call.args[int(item.args[1])] for item in castable]
    with step.graph.inserting_before(_before(call)):
        casts = tuple(dict(cast.kwargs) for cast in castable.values())
        node = step.graph.create_node("call_function", convert, tuple(values), {"casts": casts}, name=f"narrow_{call.name}")
        node.meta.update(phase=call.meta["phase"], block=call.meta["block"])
        outputs = [
            (f"{item.name}_narrow", {**value.meta, **sized(cast.meta["val"])})
            for value, (item, cast) in zip(values, castable.items(), strict=True)
        ]
        narrow_values = add_call(step.graph, node, outputs)
    narrow = {int(item.args[1]): value for item, value in zip(castable, narrow_values, strict=True)}
    call.args = tuple(narrow.get(position, value) for position, value in enumerate(call.args))
    for item, cast in castable.items():
        item.meta.update(sized(cast.meta["val"]))
    for region in dict.fromkeys(region for item in castable for region in item.users):
        _take_narrow(step, region, tuple(i for i, operand in enumerate(region.args) if operand in castable))


def _cast_of(step: fx.GraphModule, item: fx.Node) -> fx.Node | None:
    """The cast to fewer bytes that all readers of a value begin with, one for all; None where there is none."""
    if not all(map(is_region, item.users)):
        return None
    readers = [(kernel_of(step, region), [i for i, o in enumerate(region.args) if o is item]) for region in item.users]
    return narrowing_cast(step, readers, item.meta["val"])


def narrowing_cast(
    step: fx.GraphModule, kernels: Iterable[tuple[fx.GraphModule, Iterable[int]]], before: torch.Tensor
) -> fx.Node | None:
    """Returns the cast to fewer bytes that all readers of a value begin with, one for all; None where there is none.
    ``kernels``: those that read it, each with its positions among the operands."""
    readers = [node for kernel, positions in kernels for i in positions for node in _users_of_inputs(step, kernel)[i]]
    if not readers or any(node.target is not _CAST or node.kwargs != readers[0].kwargs for node in readers):
        return None
    cast = readers[0]
    val = cast.meta["val"]
    alike = _only_dtype(cast) and val.stride() == before.stride() and val.is_floating_point()
    return cast if alike and val.element_size() < before.element_size() else None


def _users_of_inputs(step: fx.GraphModule, kernel: fx.GraphModule) -> list[list[fx.Node]]:
    """The readers of each operand in a kernel."""
    memo, key = step.meta["memo"], ("users of inputs", str(kernel.meta["name"]))
    if key not in memo:
        memo[key] = [list(node.users) for node in placeholders(kernel.graph)]
    users: list[list[fx.Node]] = memo[key]
    return users


def _before(call: fx.Node) -> fx.Node:
    """The call before which a cast is issued: a region earlier than the copy, so that one value is cast while the one before
    it is copied."""
    node = call.prev
    while node.op != "root":
        if is_region(node) and node.meta["phase"] == call.meta["phase"]:
            return node
        node = node.prev
    return call


def _take_narrow(step: fx.GraphModule, region: fx.Node, positions: tuple[int, ...]) -> None:
    """Gives a region a kernel that takes the operands at ``positions`` already cast."""
    region.target = attach(step, taking_narrow(step, kernel_of(step, region), positions))


def taking_narrow(step: fx.GraphModule, kernel: fx.GraphModule, positions: tuple[int, ...]) -> fx.GraphModule:
    """Returns a kernel that takes the operands at ``positions`` already cast."""
    memo, key = step.meta["memo"], ("narrow", str(kernel.meta["name"]), positions)
    if key not in memo:
        body = fx.Graph()
        returned = body.graph_copy(kernel.graph, {})
        output = body.output(returned)
        inputs, returned_storages = placeholders(body), {owner(node) for node in returned}
        for position in positions:
            for cast in list(inputs[position].users):
                inputs[position].meta = {**inputs[position].meta, "val": cast.meta["val"]}
                if cast in returned_storages:  # what leaves has memory of its own
                    cast.target, cast.kwargs = _CLONE, {}
                else:
                    cast.replace_all_uses_with(inputs[position])
                    body.erase_node(cast)
        output.meta = {}
        memo[key] = step.get_submodule(install(step, step.meta["kernels"], body))
    narrow: fx.GraphModule = memo[key]
    return narrow


def _cast_that_leaves(step: fx.GraphModule, call: fx.Node) -> fx.Node | None:
    """The value at home, as the host has cast it, of which an offload for the backward sends a copy there; else None."""
    (value, *others), (item, *_) = call.args, results(call)
    if others or any(user.target is not prefetch for user in item.users) or not is_region(value.args[0]):
        return None
    region, position = value.args
    if (place := cloned_operand(kernel_of(step, region), position)) is None:
        return None
    came_in = region.args[place]
    if came_in.target is not operator.getitem or came_in.args[0].target is not prefetch:
        return None
    fetch, place = came_in.args
    cast: fx.Node = fetch.args[place]
    if cast.target is not operator.getitem or not is_convert(cast.args[0]):
        return None
    # A clone may be strided in another way.
    return cast if layout_of(cast.meta["val"]) == layout_of(item.meta["val"]) else None


def cloned_operand(kernel: fx.GraphModule, position: int) -> int | None:
    """Returns the position of the operand that a result of a kernel is a clone of; None if it is no clone."""
    output = body_outputs(kernel)[position]
    if output.target is not _CLONE or output.args[0].op != "placeholder":
        return None
    return placeholders(output.graph).index(output.args[0])


def _wait_as_cast(step: fx.GraphModule, call: fx.Node, cast: fx.Node) -> None:
    """Lets a cast wait at home for the backward in place of the copy that an offload sends there."""
    (item,) = results(call)
    for load in item.users:
        for back in results(load):
            if load.args[back.args[1]] is item:
                back.meta = dict(cast.meta, tier="device", pooled=back.meta["pooled"])
    item.replace_all_uses_with(cast)
    for node in (item, call):
        step.graph.erase_node(node)


def _leave_out_unread(step: fx.GraphModule, call: fx.Node) -> None:
    """Leaves out of a prefetch what nothing reads."""
    values = tuple(call.args[int(item.args[1])] for item in results(call) if item.users)
    if len(values) < len(call.args):
        drop_unread(step, call)
        call.args = values
        if not values:
            step.graph.erase_node(call)


# -------------------------------------------------------------------------------------------------------- what leaves


def _narrow_offload(step: fx.GraphModule, call: fx.Node) -> None:
    """Lets gradients that were widened last leave narrow, and widens them at home."""
    leaving: dict[fx.Node, dict[int, fx.Node]] = {}  # region -> its results among what leaves, by position
    for value in call.args:
        if value.meta["role"] == "grad" and len(value.users) == 1 and is_region(value.args[0]):
            leaving.setdefault(value.args[0], {})[int(value.args[1])] = value
    casts: dict[fx.Node, fx.Node] = {}  # values that leave narrow now, and what widened them
    for region, values in leaving.items():
        casts |= {values[position]: cast for position, cast in _leave_narrow(step, region, tuple(values)).items()}
    if not casts:
        return
    sources = {item: source(item) for item in results(call)}
    widened = [(item, casts[value]) for item, value in sources.items() if value in casts]
    wide = {item: sized(item.meta["val"]) for item, _ in widened}
    for item, cast in widened:
        val = cast.args[0].meta["val"]
        sources[item].meta.update(val=val, nbytes=made_nbytes(val))
        item.meta.update(sized(val))
    with step.graph.inserting_before(results(call)[-1].next):
        users = {item: list(item.users) for item in wide}
        keywords = tuple(dict(cast.kwargs) for _, cast in widened)
        node = step.graph.create_node("call_function", convert, tuple(wide), {"casts": keywords}, name=f"widen_{call.name}")
        node.meta.update(phase=call.meta["phase"], block=call.meta["block"])
        outputs = [(f"{item.name}_wide", {**item.meta, **sized}) for item, sized in wide.items()]
        wide_values = add_call(step.graph, node, outputs)
    for item, value in zip(wide, wide_values, strict=True):
        for user in users[item]:
            user.replace_input_with(item, value)


def made_nbytes(val: torch.Tensor) -> int:
    """The bytes of a value where a region makes it."""
    return aligned(int(val.untyped_storage().nbytes()))


def _leave_narrow(step: fx.GraphModule, region: fx.Node, positions: tuple[int, ...]) -> dict[int, fx.Node]:
    """Makes a region return results as ``leaving_narrow`` does. Returns the casts by position."""
    kernel, casts = leaving_narrow(step, kernel_of(step, region), positions)
    region.target = attach(step, kernel)
    return casts


def leaving_narrow(
    step: fx.GraphModule, kernel: fx.GraphModule, positions: tuple[int, ...]
) -> tuple[fx.GraphModule, dict[int, fx.Node]]:
    """Returns a kernel that returns, of its results at ``positions``, what the last cast to each reads, where that is narrower
    and has memory of its own; and these casts by position."""
    memo, key = step.meta["memo"], ("leaves narrow", str(kernel.meta["name"]), positions)
    if key not in memo:
        outputs, casts = body_outputs(kernel), dict[int, fx.Node]()
        for position in positions:
            cast = outputs[position]
            if _widens_last(outputs, position):
                outputs[position], casts[position] = cast.args[0], cast
        body = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        if casts:
            body.graph_copy(kernel.graph, env)
            body.output(tuple(env[node] for node in outputs)).meta = {}
            drop_dead(body)
            kernel = step.get_submodule(install(step, step.meta["kernels"], body))
        memo[key] = kernel, casts
    left: tuple[fx.GraphModule, dict[int, fx.Node]] = memo[key]
    return left


def _widens_last(outputs: list[fx.Node], position: int) -> bool:
    """Says whether an output is a cast of something narrower that has memory of its own, which no other output shares."""
    cast = outputs[position]
    if cast.target is not _CAST or not _only_dtype(cast):
        return False
    narrow = cast.args[0]
    val, wide = narrow.meta["val"], cast.meta["val"]
    if not (val.is_floating_point() and val.element_size() < wide.element_size() and val.stride() == wide.stride()):
        return False
    roots = [owner(node) for node in (*outputs[:position], *outputs[position + 1 :])]
    whole = val.untyped_storage().nbytes() == val.numel() * val.element_size()
    own = narrow.op == "call_function" and owner(narrow).op == "call_function" and owner(narrow) not in roots
    return own and whole
