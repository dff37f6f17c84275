"""Builds a step graph from a normalized joint graph: one call per region, views made where they are used."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mtcompile.passes.analysis.kernels import Operand, Shared, attach, copy_meta, install
from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.analysis.slices import grouped_operands, read_by_slices, rows_of, slice_nbytes
from mtcompile.passes.generators import generator_nbytes, save_rng
from mtcompile.passes.insert import add_call
from mtcompile.passes.joint.regions import assign, cut_by, in_order
from mtcompile.passes.joint.shapes import in_row_major_order
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.passes.step_graph import (
    fragments_of,
    inputs_of,
    is_random,
    is_seed,
    is_view,
    iter_tensors,
    new_node,
    outputs_of,
    span_nbytes,
    step_outputs,
    storage_nbytes,
)
from mtcompile.runtime.schedule import aligned

RegionId = tuple[str, int]


@dataclass(frozen=True, slots=True)
class InputHomes:
    """The homes of a step's inputs. ``known``: home by parameter, where earlier programs of the same model have decided it; any
    other parameter is at home in the block that reads it first, or by itself if it is large. ``all_on_device``: every input is
    on the device and no parameter has a home that a plan could move. ``updated``: the parameters that a plan with updates in
    the backward updates; None: all that have gradients. ``frozen_apart``: frozen parameters have homes of their own, which have
    no gradients and no optimizer state. ``experts``: which experts are fetched: "all"; "used", those that tokens of the batch
    chose; or "auto", as "used" where that surely spares enough to be worth the wait.
    ``ranks``: how many train together, on ``hosts``."""

    known: Mapping[str, str] = field(default_factory=dict)
    all_on_device: bool = False
    updated: Collection[str] | None = None
    frozen_apart: bool = False
    experts: str = "auto"
    ranks: int = 1
    hosts: int = 1


FROZEN = ".frozen"  # behind the name of a block: the home of its frozen parameters
_WORTH_A_WAIT = 1 << 22  # bytes: they take a link of 50 GB/s about as long as the host takes to wait for the device once
_LARGE = 1 << 28  # bytes from which a parameter has a home of its own: part of a block can stay, and its copies overlap
ROLE_OF_RESULT = {"output": "output", "grad": "grad", "mutation": "buffer"}  # by an output's kind
AT_HOME = InputHomes()  # nothing is known yet


def built_once(
    joint: fx.GraphModule, whole: bool, like: fx.GraphModule | None, homes: InputHomes, shared: Shared | None
) -> fx.GraphModule:
    """Returns the step graph that ``build`` makes, or has made of the same joint graph for the same homes."""
    known = [] if whole or like is not None or shared is None else shared.built
    step = next((each for of, where, each in known if of is joint and where == homes), None)
    if step is None:
        step = build(joint, whole, like, homes, shared)
        known.append((joint, homes, step))
    return step


def build(
    joint: fx.GraphModule,
    whole: bool = False,
    like: fx.GraphModule | None = None,
    input_homes: InputHomes = AT_HOME,
    shared: Shared | None = None,
) -> fx.GraphModule:
    """The step graph of ``joint`` (normalized): nothing moved, nothing recomputed, every value on the device except
    the placeholders, which are at home on the host (tangents arrive on the device).

    ``whole``: one region per phase; parameters are at home in the same blocks all the same. ``like``: cut as this graph of the
    same operations at other sizes would be. Raises ValueError where ``like`` has other operations. ``shared``: with steps of
    other forms.
    """
    device = joint.meta["device"]
    sliced = {} if input_homes.all_on_device else fetched_by_slices(like or joint, input_homes.experts)
    if "cut" in joint.meta:  # it was put together from regions
        region: Mapping[fx.Node, RegionId] = {n: n.meta["region"] for n in joint.graph.nodes if "region" in n.meta}
        blocks = joint.meta["cut"]
    else:
        region, blocks = assign(
            (like or joint).graph, _starts(like or joint, sliced), cut_by(like or joint, input_homes.ranks > 1)
        )
    if like is not None:
        region = _cut_alike(joint.graph, like.graph, region)
    homes = {} if input_homes.all_on_device else _homes(joint, region, blocks, input_homes)
    if whole:
        region, blocks = {node: (phase, 0) for node, (phase, _) in region.items()}, ("model",)
    ordered = in_order(joint.graph, region)
    outputs = step_outputs(joint)
    training = any(phase == "backward" for (phase, _), _ in ordered)

    needed = {rid: _externals(nodes, rid, region) for rid, nodes in ordered}
    exported = {node for nodes in needed.values() for node in nodes if node.op != "placeholder"} | set(outputs)
    roles = {node: ROLE_OF_RESULT[spec.kind] for spec, node in outputs_of(joint)}

    rows: Mapping[str, Rows] = joint.meta.get("rows", {})
    root = torch.nn.Module()
    shared = shared or Shared()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for spec, node in inputs_of(joint):
        env[node] = graph.placeholder(node.name)
        tier = "device" if input_homes.all_on_device or spec.role == "tangent" else spec.tier
        val = node.meta["val"]
        if spec.role == "param" and spec.name in rows:  # at home it is whole
            env[node].meta["held"] = val
            val = val.new_empty((rows[spec.name].rows, *val.shape[1:]))
        env[node].meta.update(val=val, nbytes=aligned(span_nbytes(val)), role=spec.role, tier=tier, name=spec.name)
        env[node].meta["origin"] = node.name
    for rid, nodes in ordered:
        phase, block = rid
        leaving = [node for node in nodes if node in exported and not (is_view(node) and node not in roles)]
        states_of = device if training and phase == "forward" and any(map(is_random, nodes)) else None
        origin = None if states_of is not None else _origin(nodes, needed[rid], leaving)
        if origin is not None and origin in shared.bodies:
            known, cloned = shared.bodies[origin]
            kernel = attach(root, known)
            values = [_cloned(node) if alone else node.meta["val"] for node, alone in zip(leaving, cloned, strict=True)]
            returned = list(zip(leaving, values, strict=True))
        else:
            body, returned = _body(nodes, needed[rid], leaving, states_of)
            kernel = install(root, shared.kernels, body)
            if origin is not None:
                shared.bodies[origin] = root.get_submodule(kernel), [val is not node.meta["val"] for node, val in returned]
        call = graph.create_node(
            "call_module",
            kernel,
            tuple(env[n] for n in needed[rid]),
            name=f"{blocks[block].replace('.', '_')}_{phase}",
        )
        call.meta.update(phase=phase, block=block)
        items = add_call(graph, call, [(node.name, _value_meta(node, val, roles)) for node, val in returned])
        for (node, _), item in zip(returned, items, strict=True):
            item.meta["origin"] = item.name
            if node in exported:
                env[node] = item
    graph.output(tuple(env[node] for node in outputs))

    step = LazyGraphModule(root, graph, class_name="Step")
    step.meta.update(
        inputs=joint.meta["inputs"], outputs=joint.meta["outputs"], constants=joint.meta["constants"], blocks=blocks
    )
    step.meta.update(kernels=shared.kernels, device=device, homes=homes, memo=shared.memo)
    step.meta["sliced"] = tuple(sliced)
    step.meta["rows"] = dict(rows)
    step.meta.update(ranks=input_homes.ranks, hosts=input_homes.hosts)
    if input_homes.updated is not None:
        step.meta["updated"] = input_homes.updated
    step.graph.lint()
    return step


def fetched_by_slices(joint: fx.GraphModule, experts: str) -> dict[str, fx.Node]:
    """Returns the parameters of which only the slices with rows are fetched, each with the value that says where the rows end.

    With "auto", these are parameters of which at least ``_WORTH_A_WAIT`` bytes surely have no rows, since there are fewer rows
    than slices."""
    sliced: dict[str, fx.Node] = {}
    if experts == "all":
        return sliced
    ends = read_by_slices(joint.graph)
    for spec, node in inputs_of(joint):
        if spec.role == "param" and node in ends and ends[node].op == "call_function":
            val = node.meta["val"]
            spared = slice_nbytes(val) * max(0, val.shape[0] - rows_of(ends[node]))
            if experts == "used" or spared >= _WORTH_A_WAIT:
                sliced[spec.name] = ends[node]
    return sliced


def _starts(joint: fx.GraphModule, sliced: Mapping[str, fx.Node]) -> set[fx.Node]:
    """Returns the first forward product of each set of slices: a block starts there, so that an earlier one has told which
    slices have rows before they are fetched."""
    forward = [node for node in joint.graph.nodes if node.op == "call_function" and node.meta["phase"] == "forward"]
    first: dict[fx.Node, fx.Node] = {}
    for node in forward:
        if (operands := grouped_operands(node)) is not None and operands[1] in sliced.values():
            first.setdefault(operands[1], node)
    return set(first.values())


def _homes(
    joint: fx.GraphModule, region: Mapping[fx.Node, RegionId], blocks: Sequence[str], input_homes: InputHomes
) -> dict[str, str]:
    """The home of each parameter that a region reads: the known one, its own name if it is large, or the block of the first
    region that reads it (tied weights have one home). Those of a block are in the order in which they lie there: what the same
    regions read is together, and what most of them read comes first, so that few copies fetch it."""
    names = {node: spec.name for spec, node in inputs_of(joint) if spec.role == "param"}
    wholes = {name: fragment.parameter for name, fragment in fragments_of(joint).items()}  # which have one home each
    frozen = {spec.name for spec in joint.meta["inputs"] if input_homes.frozen_apart and not spec.differentiable}
    homes: dict[str, str] = {}
    readers: dict[str, list[int]] = {}
    for at, (rid, nodes) in enumerate(in_order(joint.graph, region)):
        for operand in _externals(nodes, rid, region):
            if name := names.get(operand):
                readers.setdefault(name, []).append(at)
                whole = wholes.get(name, name)
                alone = span_nbytes(operand.meta["val"]) >= _LARGE and name not in blocks
                block = whole if alone else blocks[rid[1]] + (FROZEN if name in frozen else "")
                if name in joint.meta.get("rows", {}):  # on the host, whatever becomes of the block
                    block = name if name not in blocks else f"{name}.rows"
                if name in wholes:
                    block = whole if whole not in blocks else f"{whole}.fragments"
                homes.setdefault(name, input_homes.known.get(whole, block))
    blocks_in_order = {block: position for position, block in enumerate(dict.fromkeys(homes.values()))}
    ordered = sorted(homes, key=lambda name: (blocks_in_order[homes[name]], -len(readers[name]), readers[name]))
    return {name: homes[name] for name in ordered}


def _externals(nodes: list[fx.Node], rid: RegionId, region: Mapping[fx.Node, RegionId]) -> list[fx.Node]:
    """The values that a region takes from outside: placeholders and results of others; views are traced back to what they
    view."""
    externals: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()

    def visit(operand: fx.Node) -> None:
        if operand in seen or region.get(operand) == rid:
            return
        seen.add(operand)
        if is_view(operand):
            for base in operand.all_input_nodes:
                visit(base)
        else:
            externals[operand] = None

    for node in nodes:
        for operand in node.all_input_nodes:
            visit(operand)
    return list(externals)


def _body(
    nodes: list[fx.Node], inputs: list[fx.Node], leaving: list[fx.Node], states_of: str | None
) -> tuple[fx.Graph, list[tuple[fx.Node, Any]]]:
    """The region's ATen graph and what it returns: (node of the joint graph, its fake tensor); a generator state is a
    node of the body. ``states_of``: the device whose generator's states are saved, if any."""
    body = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = body.placeholder(node.name)
        env[node].meta = copy_meta(node)

    def local(operand: fx.Node) -> fx.Node:
        if operand not in env:  # a view made elsewhere: make it here too, so that no view crosses a cut
            env[operand] = body.create_node(
                "call_function", operand.target, *map_arg((operand.args, operand.kwargs), local), name=operand.name
            )
            env[operand].meta = copy_meta(operand)
        return env[operand]

    states: list[fx.Node] = []
    for node in nodes:
        if states_of is not None and is_random(node):
            state = body.create_node("call_function", save_rng, (states_of,), name=f"rng_{len(states)}")
            state.meta.update(val=torch.empty(generator_nbytes(states_of), dtype=torch.uint8, device="meta"), role="rng")
            states.append(state)
        copied = new_node(body, "call_function", node.target, *map_arg((node.args, node.kwargs), local), node.name)
        copied.meta = copy_meta(node)
        if states_of is not None and is_random(node):
            copied.meta.update(rng_state=states[-1].name, rng_device=states_of)
        env[node] = copied

    taken: set[fx.Node] = set()
    returned = []
    for node in leaving:
        value = env[node]
        if is_view(node) and not _owns_storage(node, nodes, leaving, taken):
            value = body.call_function(torch.ops.aten.clone.default, (value,))
            value.meta["val"] = _cloned(node)
        returned.append(value)
    body.output((*returned, *states))
    vals = [value.meta["val"] for value in returned]
    return body, [*zip(leaving, vals, strict=True), *((state, state.meta["val"]) for state in states)]


def _cloned(node: fx.Node) -> torch.Tensor:
    val = node.meta["val"]
    if in_row_major_order(val):  # without empty_like, which loads the package of symbolic numbers
        return torch.empty(val.shape, dtype=val.dtype, device="meta")
    return torch.empty_like(val, device="meta")


def _origin(nodes: list[fx.Node], inputs: list[fx.Node], leaving: list[fx.Node]) -> Hashable:
    """Returns what is equal only for regions whose bodies are one kernel and return the same: equal blocks need one body. No
    generator's state is saved in them."""
    number: dict[fx.Node, int] = {}
    rows: list[Hashable] = []

    def note(node: fx.Node, arguments: Any) -> None:
        values = [(v.shape, v.dtype, v.stride(), storage_nbytes(v)) for v in iter_tensors(node)]
        number[node] = len(rows)
        rows.append((node.target if node.op == "call_function" else None, repr(arguments), tuple(values)))

    def local(operand: fx.Node) -> Operand:
        if operand not in number:  # as in a body
            note(operand, map_arg((operand.args, operand.kwargs), local))
        return Operand(number[operand])

    for node in inputs:
        note(node, ())
    for node in nodes:
        note(node, map_arg((node.args, node.kwargs), local))
    return tuple(rows), tuple(number[node] for node in leaving)


def _owns_storage(view: fx.Node, nodes: list[fx.Node], leaving: list[fx.Node], taken: set[fx.Node]) -> bool:
    """True when a returned view may be handed out as it is: it covers storage made in this region that nothing else
    returned shares."""
    base, val = owner(view), view.meta["val"]
    alone = base in nodes and base not in leaving and base not in taken
    if base.target is operator.getitem or not isinstance(base.meta.get("val"), torch.Tensor):
        alone = False
    taken.add(base)
    return alone and storage_nbytes(base.meta["val"]) == val.numel() * val.element_size()


def _cut_alike(graph: fx.Graph, other: fx.Graph, region: Mapping[fx.Node, RegionId]) -> dict[fx.Node, RegionId]:
    """``region``, a cut of ``other``, for the same operations in ``graph``. Raises ValueError where they are not the same."""
    one, two = list(graph.nodes), list(other.nodes)
    if [(node.op, node.target) for node in one] != [(node.op, node.target) for node in two]:
        raise ValueError("expected the same operations at other sizes, found others: the model does other things there")
    return {node: region[twin] for node, twin in zip(one, two, strict=True) if twin in region}


def _value_meta(node: fx.Node, val: torch.Tensor, roles: Mapping[fx.Node, str]) -> dict[str, Any]:
    role = node.meta.get("role", "rng" if is_seed(node) else "activation")
    return {
        "val": val,
        "nbytes": aligned(storage_nbytes(val)),
        "role": roles.get(node, role),
        "tier": "device",
        "module_path": node.meta.get("module_path", ""),
    }
