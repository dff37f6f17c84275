"""Move casts to the side of the link where fewer bytes cross.

A parameter at home that a region only reads through one cast to fewer bytes (fp32 weights under autocast) is cast at home,
and what comes in is the narrow one. A gradient that a region widens as the last thing it does leaves narrow, and is widened at
home. The operation is the same one, so the values are; ``passes/check`` numbers both sides and finds the captured graph.
Resident values are left alone, and so is what a region needs in both widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.kernels import attach, drop_dead, install
from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.insert import add_call
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import (
    body_outputs,
    calls,
    convert,
    is_region,
    kernel_of,
    offload,
    placeholders,
    prefetch,
    results,
    span_nbytes,
)
from mtcompile.runtime.schedule import aligned

_CAST = torch.ops.aten._to_copy.default
Cast = Mapping[str, Any]  # keywords of _to_copy


def cast_on_host(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Casts parameters at home before they come in and gradients after they have left, where fewer bytes cross that way."""
    if plan.narrow:
        for call in [call for call in calls(step) if call.target is prefetch]:
            _narrow_prefetch(step, call)
        for call in [call for call in calls(step) if call.target is offload]:
            _narrow_offload(step, call)
    return step


def _narrow_prefetch(step: fx.GraphModule, call: fx.Node) -> None:
    """Lets what a prefetch brings in cross narrow, cast at home before, wherever that is all its readers want."""
    castable: list[tuple[fx.Node, Cast, torch.Tensor]] = []  # a value that comes in, its cast and what the cast makes
    for item in results(call):
        cast = _cast_of(step, item) if call.args[item.args[1]].op == "placeholder" else None
        if cast is not None:
            castable.append((item, *cast))
    if not castable:
        return
    values = [call.args[int(item.args[1])] for item, _, _ in castable]
    with step.graph.inserting_before(_before(call)):
        casts = tuple(dict(cast) for _, cast, _ in castable)
        node = step.graph.create_node("call_function", convert, tuple(values), {"casts": casts}, name=f"narrow_{call.name}")
        node.meta.update(phase=call.meta["phase"], block=call.meta["block"])
        outputs = [
            (f"{item.name}_narrow", {**value.meta, **_sized(val)})
            for value, (item, _, val) in zip(values, castable, strict=True)
        ]
        narrow_values = add_call(step.graph, node, outputs)
    narrow = {int(item.args[1]): value for (item, _, _), value in zip(castable, narrow_values, strict=True)}
    call.args = tuple(narrow.get(position, value) for position, value in enumerate(call.args))
    for item, _, val in castable:
        item.meta.update(_sized(val))
        for region in list(item.users):
            _take_narrow(step, region, item)


def _sized(val: torch.Tensor) -> dict[str, Any]:
    return {"val": val, "nbytes": aligned(span_nbytes(val))}


def _cast_of(step: fx.GraphModule, item: fx.Node) -> tuple[Cast, torch.Tensor] | None:
    """The one cast to fewer bytes that all readers of a value begin with, and what it makes; None where there is none."""
    readers: list[fx.Node] = []
    for region in item.users:
        inputs = placeholders(kernel_of(step, region).graph) if is_region(region) else []
        for operand, node in zip(region.args, inputs, strict=False):
            if operand is item:
                readers += node.users
        if not inputs:
            return None
    if not readers or any(node.target is not _CAST or node.kwargs != readers[0].kwargs for node in readers):
        return None
    cast = readers[0]
    val, before = cast.meta["val"], item.meta["val"]
    alike = _only_dtype(cast) and val.stride() == before.stride() and val.is_floating_point()
    return (cast.kwargs, val) if alike and val.element_size() < before.element_size() else None


def _only_dtype(cast: fx.Node) -> bool:
    """Says whether a cast changes nothing but the dtype (a backward's casts name layout and device as well)."""
    return {"dtype"} <= cast.kwargs.keys() <= {"dtype", "layout", "device"} and cast.args[0].meta["val"].is_floating_point()


def _before(call: fx.Node) -> fx.Node:
    """The call before which a cast is issued: a region earlier than the copy, so that one value is cast while the one before
    it is copied."""
    node = call.prev
    while node.op != "root":
        if is_region(node) and node.meta["phase"] == call.meta["phase"]:
            return node
        node = node.prev
    return call


def _take_narrow(step: fx.GraphModule, region: fx.Node, item: fx.Node) -> None:
    """Gives a region a kernel that takes ``item`` already cast."""
    positions = tuple(i for i, operand in enumerate(region.args) if operand is item)
    memo = step.meta["memo"]
    key = ("narrow", str(region.target), positions)
    if key not in memo:
        body = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        returned = body.graph_copy(kernel_of(step, region).graph, env)
        output = body.output(returned)
        inputs, returned_storages = placeholders(body), {owner(node) for node in returned}
        for position in positions:
            for cast in list(inputs[position].users):
                inputs[position].meta = {**inputs[position].meta, "val": cast.meta["val"]}
                if cast in returned_storages:  # what leaves has memory of its own
                    cast.target, cast.kwargs = torch.ops.aten.clone.default, {}
                else:
                    cast.replace_all_uses_with(inputs[position])
                    body.erase_node(cast)
        output.meta = {}
        memo[key] = step.get_submodule(install(step, step.meta["kernels"], body))
    region.target = attach(step, memo[key])


def _narrow_offload(step: fx.GraphModule, call: fx.Node) -> None:
    """Lets gradients that were widened last leave narrow, and widens them at home."""
    widened: list[tuple[fx.Node, Cast]] = []
    for item in results(call):
        value = call.args[int(item.args[1])]
        if value.meta["role"] == "grad" and len(value.users) == 1 and is_region(value.args[0]):
            cast = _leave_narrow(step, value.args[0], value)
            if cast is not None:
                widened.append((item, cast.kwargs))
                wide = item.meta["val"]
                item.meta.update(_sized(value.meta["val"]), wide=wide)
    if not widened:
        return
    with step.graph.inserting_before(results(call)[-1].next):
        casts = tuple(dict(cast) for _, cast in widened)
        operands = tuple(item for item, _ in widened)
        users = {item: list(item.users) for item in operands}
        node = step.graph.create_node("call_function", convert, operands, {"casts": casts}, name=f"widen_{call.name}")
        node.meta.update(phase=call.meta["phase"], block=call.meta["block"])
        metas = [{**item.meta, **_sized(item.meta.pop("wide"))} for item in operands]
        outputs = [(f"{item.name}_wide", meta) for item, meta in zip(operands, metas, strict=True)]
        wide_values = add_call(step.graph, node, outputs)
    for item, value in zip(operands, wide_values, strict=True):
        for user in users[item]:
            user.replace_input_with(item, value)


def _leave_narrow(step: fx.GraphModule, region: fx.Node, value: fx.Node) -> fx.Node | None:
    """Makes a region return what its last cast to ``value`` reads, if that is narrower and has memory of its own. Returns the
    cast, or None where nothing changed."""
    position = int(value.args[1])
    kernel = kernel_of(step, region)
    outputs = body_outputs(kernel)
    cast = outputs[position]
    if cast.target is not _CAST or not _only_dtype(cast):
        return None
    narrow = cast.args[0]
    val, wide = narrow.meta["val"], cast.meta["val"]
    roots = [owner(node) for node in (*outputs[:position], *outputs[position + 1 :])]
    whole = val.untyped_storage().nbytes() == val.numel() * val.element_size()
    own = narrow.op == "call_function" and owner(narrow).op == "call_function" and owner(narrow) not in roots
    if not (val.is_floating_point() and val.element_size() < wide.element_size() and val.stride() == wide.stride()):
        return None
    if not (own and whole):
        return None
    memo = step.meta["memo"]
    key = ("leaves narrow", str(region.target), position)
    if key not in memo:
        body = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        body.graph_copy(kernel.graph, env)
        body.output(tuple(env[narrow] if i == position else env[node] for i, node in enumerate(outputs))).meta = {}
        drop_dead(body)
        memo[key] = step.get_submodule(install(step, step.meta["kernels"], body))
    region.target = attach(step, memo[key])
    value.meta.update(val=val, nbytes=aligned(int(val.untyped_storage().nbytes())))
    return cast
