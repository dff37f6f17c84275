"""Corruptions of a rewritten step graph, as by a pass that got one thing wrong; what is lowered from them agrees with them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import fx

from mtcompile.passes.step_graph import (
    body_outputs,
    calls,
    convert,
    copy_step,
    gradient_norms,
    gradient_scale,
    is_move,
    is_region,
    is_update,
    kernel_of,
    placeholders,
    prefetch,
    results,
    storage_nbytes,
    update,
)
from mtcompile.runtime.schedule import ALIGNMENT, aligned

Site = Callable[[], fx.GraphModule]
Edit = Callable[..., None]


def mutants(step: fx.GraphModule, seed: int, per_kind: int = 4) -> Iterator[tuple[str, fx.GraphModule]]:
    """Up to ``per_kind`` mutants of every kind, named, the same ones for the same seed."""
    rng = Random(seed)
    for kind, sites in KINDS.items():
        candidates = list(sites(step, rng))
        for site in rng.sample(candidates, min(per_kind, len(candidates))):
            yield kind, site()


def _edited(step: fx.GraphModule, edit: Edit, *arguments: Any) -> fx.GraphModule:
    """A copy on which ``edit(copy, nodes by name, *arguments)`` was done."""
    copied = copy_step(step)
    edit(copied, {node.name: node for node in copied.graph.nodes}, *arguments)
    copied.recompile()
    return copied


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _updates(step: fx.GraphModule) -> list[fx.Node]:
    return [call for call in calls(step) if call.target is update]


# ------------------------------------------------------------------------------------------------------------------ names


def _set_spec(step: fx.GraphModule, nodes: Any, table: str, changes: dict[int, dict[str, Any]]) -> None:
    step.meta[table] = tuple(replace(spec, **changes.get(at, {})) for at, spec in enumerate(step.meta[table]))


def exchange_inputs(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """The indices, the names, or both, of two inputs of one layout."""
    rows = list(enumerate(zip(step.meta["inputs"], placeholders(step.graph), strict=True)))
    for at, (spec, node) in rows:
        others = [(i, s) for i, (s, n) in rows if i != at and s.role == spec.role and _alike(n, node)]
        if others:
            other_at, other = rng.choice(others)
            for keys in (("index",), ("name",), ("index", "name")):
                changes = {at: {k: getattr(other, k) for k in keys}, other_at: {k: getattr(spec, k) for k in keys}}
                yield partial(_edited, step, _set_spec, "inputs", changes)


def exchange_outputs(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    rows = list(enumerate(zip(step.meta["outputs"], step.graph.output_node().args[0], strict=True)))
    for at, (spec, node) in rows:
        others = [(i, s) for i, (s, n) in rows if i != at and s.kind == spec.kind and _alike(n, node)]
        if others:
            other_at, other = rng.choice(others)
            for keys in (("index",), ("name",), ("index", "name")):
                changes = {at: {k: getattr(other, k) for k in keys}, other_at: {k: getattr(spec, k) for k in keys}}
                yield partial(_edited, step, _set_spec, "outputs", changes)


def change_a_spec(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    for at, spec in enumerate(step.meta["inputs"]):
        if spec.role not in ("tangent", "constant"):
            yield partial(_edited, step, _set_spec, "inputs", {at: {"tier": "device" if spec.tier == "host" else "host"}})
            yield partial(_edited, step, _set_spec, "inputs", {at: {"index": spec.index + 1}})
    for at, spec in enumerate(step.meta["outputs"]):
        kind = rng.choice([kind for kind in ("output", "grad", "mutation", "update") if kind != spec.kind])
        yield partial(_edited, step, _set_spec, "outputs", {at: {"kind": kind}})


def exchange_constants(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    def edit(copied: fx.GraphModule, nodes: Any, one: str, other: str) -> None:
        constants = copied.meta["constants"]
        copied.meta["constants"] = {**constants, one: constants[other], other: constants[one]}

    names = sorted(step.meta["constants"])
    for one, other in itertools.pairwise(names):
        if step.meta["constants"][one].shape == step.meta["constants"][other].shape:
            yield partial(_edited, step, edit, one, other)


def exchange_results_at_the_end(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """Two values change places among the outputs."""

    def edit(copied: fx.GraphModule, nodes: Any, one: int, other: int) -> None:
        output = copied.graph.output_node()
        values = list(output.args[0])
        values[one], values[other] = values[other], values[one]
        output.args = (tuple(values),)

    rows = list(enumerate(step.graph.output_node().args[0]))
    for at, node in rows:
        others = [i for i, n in rows if i > at and _alike(n, node)]
        if others:
            yield partial(_edited, step, edit, at, rng.choice(others))


# ---------------------------------------------------------------------------------------------------------------- updates


def drop_a_scale(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """One update is not clipped."""

    def edit(copied: fx.GraphModule, nodes: Any, name: str) -> None:
        node = nodes[name]
        node.args = node.args[: 2 * node.kwargs["count"]]

    scaled = [node for node in _updates(step) if len(node.args) > 2 * node.kwargs["count"]]
    if len(scaled) > 1:
        yield from (partial(_edited, step, edit, node.name) for node in scaled)


def drop_all_scales(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """Nothing is clipped, and what would have made the scale is gone."""

    def edit(copied: fx.GraphModule, nodes: Any) -> None:
        for node in _updates(copied):
            node.args = node.args[: 2 * node.kwargs["count"]]
        for node in reversed(list(copied.graph.nodes)):
            made = node.target in (gradient_norms, gradient_scale) or is_move(node) or node.target is operator.getitem
            if made and not node.users:
                copied.graph.erase_node(node)

    if any(len(node.args) > 2 * node.kwargs["count"] for node in _updates(step)):
        yield partial(_edited, step, edit)


def exchange_update_names(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """An update finds the state of other parameters, within one call or of two."""

    def edit(copied: fx.GraphModule, nodes: Any, names: dict[str, tuple[str, ...]]) -> None:
        for call, given in names.items():
            nodes[call].meta["names"] = given

    rows = [node for node in calls(step) if is_update(node)]
    for node in rows:
        names = node.meta["names"]
        if len(names) > 1:
            a, b = rng.sample(range(len(names)), 2)
            swapped = list(names)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield partial(_edited, step, edit, {node.name: tuple(swapped)})
        yield partial(_edited, step, edit, {node.name: names[1:]})
    for one, other in itertools.pairwise(rows):
        if len(one.meta["names"]) == len(other.meta["names"]) and one.meta["names"] != other.meta["names"]:
            yield partial(_edited, step, edit, {one.name: other.meta["names"], other.name: one.meta["names"]})


def exchange_update_operands(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """Two gradients, or two parameters with their names, of one layout."""

    def edit(copied: fx.GraphModule, nodes: Any, name: str, places: list[tuple[int, int]]) -> None:
        node = nodes[name]
        for a, b in places:
            args = list(node.args)
            args[a], args[b] = args[b], args[a]
            node.args = tuple(args)

    for node in _updates(step):
        count: Any = node.kwargs["count"]
        for a in range(count):
            for b in range(a):
                if _alike(node.args[a], node.args[b]):
                    yield partial(_edited, step, edit, node.name, [(a, b)])
                    yield partial(_edited, step, edit, node.name, [(count + a, count + b)])


def forget_a_norm(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """The scale is made of fewer norms."""

    def edit(copied: fx.GraphModule, nodes: Any, at: int) -> None:
        (node,) = (node for node in copied.graph.nodes if node.target is gradient_scale)
        gone = node.args[at]
        while gone.target is operator.getitem and is_move(gone.args[0]):
            gone = gone.args[0].args[gone.args[1]]
        names = gone.args[0].meta["names"]
        node.args = tuple(arg for position, arg in enumerate(node.args) if position != at)
        node.meta["names"] = tuple(name for name in node.meta["names"] if name not in names)
        copied.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))

    for node in step.graph.nodes:
        if node.target is gradient_scale and len(node.args) > 1:
            yield from (partial(_edited, step, edit, at) for at in range(len(node.args)))


def forget_an_update(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """A parameter is returned as it was, in place of its next version."""

    def edit(copied: fx.GraphModule, nodes: Any, name: str) -> None:
        node = nodes[name]
        for item in results(node):
            item.replace_all_uses_with(node.args[item.args[1]])
            copied.graph.erase_node(item)
        copied.graph.erase_node(node)

    yield from (partial(_edited, step, edit, node.name) for node in _updates(step))


def update_twice(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    def edit(copied: fx.GraphModule, nodes: Any, name: str) -> None:
        node = nodes[name]
        with copied.graph.inserting_before(node):
            again = copied.graph.create_node("call_function", update, node.args, node.kwargs, name=f"{name}_too")
            again.meta.update(node.meta)
            for item in results(node):
                twin = copied.graph.create_node("call_function", operator.getitem, (again, item.args[1]))
                twin.meta.update(item.meta)

    yield from (partial(_edited, step, edit, node.name) for node in _updates(step))


# ----------------------------------------------------------------------------------------------------- what is said of values


def _set_meta(step: fx.GraphModule, nodes: Any, names: tuple[str, ...], changes: dict[str, Any]) -> None:
    for name in names:
        nodes[name].meta.update(changes)


def _values(step: fx.GraphModule) -> list[fx.Node]:
    return [*placeholders(step.graph), *(item for call in calls(step) for item in results(call))]


def _of_one_value(step: fx.GraphModule, value: fx.Node) -> tuple[str, ...]:
    """A value and its copies."""
    names, waiting = [], [value]
    while waiting:
        node = waiting.pop()
        names.append(node.name)
        for call in node.users:
            if is_move(call):
                waiting += [item for item in results(call) if call.args[item.args[1]] is node]
    return tuple(names)


def change_a_dtype(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """A slot of another dtype, of as many bytes where there is one: a cast's, above all."""
    others = {torch.bfloat16: torch.float16, torch.float32: torch.int32, torch.int64: torch.float64, torch.float64: torch.int64}
    for value in _values(step):
        val = value.meta["val"]
        if val.dtype in others:
            changed = torch.empty_strided(tuple(val.shape), tuple(val.stride()), dtype=others[val.dtype], device="meta")
            yield partial(_edited, step, _set_meta, _of_one_value(step, value), {"val": changed})


def change_a_casts_dtype(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    others = {torch.bfloat16: torch.float16, torch.float32: torch.int32}
    for call in calls(step):
        for item in results(call) if call.target is convert else ():
            val = item.meta["val"]
            changed = torch.empty_strided(tuple(val.shape), tuple(val.stride()), dtype=others[val.dtype], device="meta")
            yield partial(_edited, step, _set_meta, _of_one_value(step, item), {"val": changed})


def change_strides(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    for value in _values(step):
        val = value.meta["val"]
        if val.dim() > 1 and val.numel() and min(val.shape) > 1:
            changed = torch.empty(tuple(reversed(val.shape)), dtype=val.dtype, device="meta").permute(
                *reversed(range(val.dim()))
            )
            if changed.stride() != val.stride():
                yield partial(_edited, step, _set_meta, _of_one_value(step, value), {"val": changed})


def change_bytes(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    for value in _values(step):
        if nbytes := value.meta["nbytes"]:
            yield partial(_edited, step, _set_meta, _of_one_value(step, value), {"nbytes": nbytes - ALIGNMENT})
            yield partial(_edited, step, _set_meta, (value.name,), {"nbytes": nbytes + ALIGNMENT})


def change_a_role(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    roles = ("param", "grad", "state", "activation", "input", "buffer", "constant", "tangent", "rng")
    for value in _values(step):
        role = rng.choice([role for role in roles if role != value.meta["role"]])
        yield partial(_edited, step, _set_meta, _of_one_value(step, value), {"role": role})


def change_a_tier(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    for value in _values(step):
        tier = rng.choice([tier for tier in ("device", "host", "disk") if tier != value.meta["tier"]])
        yield partial(_edited, step, _set_meta, (value.name,), {"tier": tier})


def change_a_phase(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    order = calls(step)
    first = next((i for i, call in enumerate(order) if call.meta["phase"] == "backward"), None)
    if first is not None:
        for count in (1, 2, 3):
            names = tuple(call.name for call in order[first - count : first])
            yield partial(_edited, step, _set_meta, names, {"phase": "backward"})
            names = tuple(call.name for call in order[first : first + count])
            yield partial(_edited, step, _set_meta, names, {"phase": "forward"})


def exchange_operands(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """Two operands of one layout, of a region, a copy or a cast."""

    def edit(copied: fx.GraphModule, nodes: Any, name: str, a: int, b: int) -> None:
        args = list(nodes[name].args)
        args[a], args[b] = args[b], args[a]
        nodes[name].args = tuple(args)

    for call in calls(step):
        pairs = [(a, b) for a in range(len(call.args)) for b in range(a) if _alike(call.args[a], call.args[b])]
        if pairs and not is_update(call):
            yield partial(_edited, step, edit, call.name, *rng.choice(pairs))


def forget_a_clone(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """A kernel returns a view of an operand, or of another result, in place of a copy of it."""

    def edit(copied: fx.GraphModule, nodes: Any, name: str, position: int) -> None:
        region = nodes[name]
        kernel = kernel_of(copied, region)
        body = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        outputs = list(body.graph_copy(kernel.graph, env))
        outputs[position] = outputs[position].args[0]
        body.output(tuple(outputs))
        aliasing = fx.GraphModule(torch.nn.Module(), body, class_name=f"{region.target}_aliasing")
        aliasing.meta.update(kernel.meta, name=f"{region.target}_aliasing")
        copied.add_module(f"{region.target}_aliasing", aliasing)
        region.target = f"{region.target}_aliasing"
        (item,) = (item for item in results(region) if item.args[1] == position)
        val = outputs[position].meta["val"]
        item.meta.update(val=val, nbytes=aligned(storage_nbytes(val)))

    for call in filter(is_region, calls(step)):
        for position, output in enumerate(body_outputs(kernel_of(step, call))):
            if output.target is torch.ops.aten.clone.default and any(item.args[1] == position for item in results(call)):
                yield partial(_edited, step, edit, call.name, position)


# --------------------------------------------------------------------------------------------------- what nothing needs


def fetch_for_nothing(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """A kernel takes one more operand, which it never reads and which is fetched for it."""

    def edit(copied: fx.GraphModule, nodes: Any, region_name: str, value_name: str) -> None:
        region, value = nodes[region_name], nodes[value_name]
        with copied.graph.inserting_before(region):
            move = copied.graph.create_node("call_function", prefetch, (value,), name=f"fetch_for_{region_name}")
            move.meta.update(phase=region.meta["phase"], block=region.meta["block"])
            item = copied.graph.create_node(
                "call_function", operator.getitem, (move, 0), name=f"{value_name}_for_{region_name}"
            )
            item.meta.update(value.meta, tier="device")
        kernel = kernel_of(copied, region)
        body = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        outputs = body.graph_copy(kernel.graph, env)
        last = [node for node in body.nodes if node.op == "placeholder"]
        body.output(outputs).meta = {}
        with body.inserting_after(last[-1]) if last else body.inserting_before(next(iter(body.nodes))):
            taken = body.placeholder("unread")
        taken.meta["val"] = value.meta["val"]
        larger = fx.GraphModule(torch.nn.Module(), body, class_name=f"{region.target}_larger")
        larger.meta.update(kernel.meta, name=f"{region.target}_larger")
        copied.add_module(f"{region.target}_larger", larger)
        region.target = f"{region.target}_larger"
        region.args = (*region.args, item)

    at_home = [node for node in placeholders(step.graph) if node.meta["tier"] == "host"]
    for region in calls(step):
        if is_region(region) and at_home and len(body_outputs(kernel_of(step, region))):
            yield partial(_edited, step, edit, region.name, rng.choice(at_home).name)


def fetch_and_drop(step: fx.GraphModule, rng: Random) -> Iterator[Site]:
    """A copy that nothing reads."""

    def edit(copied: fx.GraphModule, nodes: Any, region_name: str, value_name: str) -> None:
        region, value = nodes[region_name], nodes[value_name]
        with copied.graph.inserting_before(region):
            move = copied.graph.create_node("call_function", prefetch, (value,), name="fetch_for_nobody")
            move.meta.update(phase=region.meta["phase"], block=region.meta["block"])
            item = copied.graph.create_node("call_function", operator.getitem, (move, 0), name=f"{value_name}_for_nobody")
            item.meta.update(value.meta, tier="device", nbytes=aligned(value.meta["nbytes"]))

    at_home = [node for node in placeholders(step.graph) if node.meta["tier"] == "host"]
    for region in calls(step):
        if is_region(region) and at_home:
            yield partial(_edited, step, edit, region.name, rng.choice(at_home).name)


_FUNCTIONS: tuple[Callable[[fx.GraphModule, Random], Iterator[Site]], ...] = (
    exchange_inputs, exchange_outputs, change_a_spec, exchange_constants, exchange_results_at_the_end, drop_a_scale,
    drop_all_scales, exchange_update_names, exchange_update_operands, forget_a_norm, forget_an_update, update_twice,
    change_a_dtype, change_a_casts_dtype, change_strides, change_bytes, change_a_role, change_a_tier, change_a_phase,
    exchange_operands, forget_a_clone, fetch_for_nothing, fetch_and_drop,
)  # fmt: skip
KINDS = {function.__name__: function for function in _FUNCTIONS}
