"""The needs of regions and homes under any plan: nothing that could be made again, moved narrow, or cast on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.cost import Cost, Machine, kernel_cost, kernel_us, node_cost
from mtcompile.passes.analysis.rows import rows_of
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.analysis.state import updated_on_disk_nbytes
from mtcompile.passes.generators import save_rng
from mtcompile.passes.lower import update_cost
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import (
    body_outputs,
    inputs_of,
    is_region,
    is_view,
    kernel_of,
    must_run,
    outputs_of,
    placeholders,
    regions,
    results,
)
from mtcompile.passes.step_graph import span_nbytes as nbytes_of
from mtcompile.runtime.schedule import PHASES, aligned


@dataclass(frozen=True, slots=True)
class Needs:
    """The least that a region needs. ``cost``: of its operations. By home: ``read``, bytes of the parameters that it reads, and
    ``stored``, of the gradients that leave it, as narrow as they may cross; ``grads``, of these gradients as they are;
    ``casts``: the cost of what the host may cast for it; ``cast_nbytes``: bytes that it then needs no room for. ``wider``,
    ``grads_wider``: bytes of parameters and gradients that cross more where the host does not cast them; ``host``,
    ``grads_host``: bytes that it reads and writes where it does."""

    cost: Cost
    read: Mapping[str, int]
    stored: Mapping[str, int]
    grads: Mapping[str, int]
    casts: Mapping[str, Cost]
    cast_nbytes: Mapping[str, int]
    wider: Mapping[str, int]
    host: Mapping[str, int]
    grads_wider: Mapping[str, int]
    grads_host: Mapping[str, int]

    def us(self, kernel: fx.GraphModule, machine: Machine) -> float:
        """The µs of the region. ``kernel``: its kernel, which may have been measured."""
        least, whole = self.cost.time_us(machine), kernel_cost(kernel).time_us(machine)
        return least if machine.measured is None or not whole else kernel_us(kernel, machine) * min(1.0, least / whole)

    def casts_us(self, machine: Machine) -> dict[str, float]:
        """Returns the most µs that the region saves, by home, where the host casts for it."""
        return {home: cost.time_us(machine) for home, cost in self.casts.items()}


def needs_of(step: fx.GraphModule) -> dict[fx.Node, Needs]:
    """Returns the needs of each region of a step graph before any rewrite."""
    homes: Mapping[str, str] = step.meta["homes"]
    grads = {value: homes[spec.name] for spec, value in outputs_of(step) if spec.kind == "grad" and spec.name in homes}
    bodies: dict[tuple[str, tuple[int, ...]], tuple[set[fx.Node], Cost]] = {}
    by_rows = {value: rows.nbytes for value, rows in rows_of(step).items()}
    only_cast = _cast_only(step)
    return {region: _needs(step, region, grads, by_rows, bodies, only_cast) for region in regions(step)}


def _cast_only(step: fx.GraphModule) -> frozenset[fx.Node]:
    """Returns the parameters that regions read through one narrowing cast and in no other way."""
    ways: dict[fx.Node, set[str]] = defaultdict(set)
    memo: dict[str, list[set[str]]] = {}
    for region in regions(step):
        key = str(region.target)
        if key not in memo:
            memo[key] = [_ways(inner) for inner in placeholders(kernel_of(step, region).graph)]
        for operand, these in zip(region.args, memo[key], strict=True):
            if isinstance(operand, fx.Node) and operand.meta.get("role") == "param":
                ways[operand] |= these
    return frozenset(value for value, these in ways.items() if len(these) == 1 and "" not in these)


def _ways(operand: fx.Node) -> set[str]:
    """How a body reads an operand: a narrowing cast by its dtype, anything else as an empty text."""
    narrow = set(narrowing_casts(operand))
    return {str(user.kwargs.get("dtype")) if user in narrow else "" for user in operand.users}


def narrowing_casts(operand: fx.Node) -> list[fx.Node]:
    """Returns the casts to narrower elements among the readers of an operand of a body. A small one may take no fewer bytes,
    but time on the device."""
    return [node for node in operand.users if _is_cast(node) and _is_narrower(node, operand)]


def param_homes(step: fx.GraphModule, region: fx.Node) -> dict[fx.Node, str]:
    """Returns the homes of the parameters that a region reads, by the placeholders of its body."""
    homes, inputs = step.meta["homes"], placeholders(kernel_of(step, region).graph)
    return {
        inner: homes[operand.meta["name"]]
        for operand, inner in zip(region.args, inputs, strict=True)
        if isinstance(operand, fx.Node) and operand.meta.get("role") == "param" and operand.meta.get("name") in homes
    }


def _needs(
    step: fx.GraphModule,
    region: fx.Node,
    grads: Mapping[fx.Node, str],
    by_rows: Mapping[fx.Node, int],
    bodies: dict[tuple[str, tuple[int, ...]], tuple[set[fx.Node], Cost]],
    only_cast: frozenset[fx.Node],
) -> Needs:
    kernel = kernel_of(step, region)
    outputs = body_outputs(kernel)
    saved = set(saved_values(region, partial(_reads, step))) if region.meta["phase"] == "forward" else set()
    wanted = [v for v in results(region) if v.users and v not in saved and v.meta["role"] != "rng"]
    key = (str(region.target), tuple(int(v.args[1]) for v in wanted))
    if key not in bodies:
        needed = closure([*(outputs[position] for position in key[1]), *filter(must_run, kernel.graph.nodes)])
        operations = (n for n in needed if n.op == "call_function" and not is_view(n) and n.target is not save_rng)
        bodies[key] = needed, sum(map(node_cost, operations), Cost())
    needed, cost = bodies[key]
    read, stored, wide, cast_nbytes = (defaultdict[str, int](int) for _ in range(4))
    wider, host, grads_wider, grads_host = (defaultdict[str, int](int) for _ in range(4))
    casts: dict[str, Cost] = defaultdict(Cost)
    given = dict(zip(placeholders(kernel.graph), region.args, strict=True))
    for operand, home in param_homes(step, region).items():
        if operand in needed:
            narrow = narrowing_casts(operand)
            least = min(map(_size, (operand, *narrow)))
            read[home] += by_rows.get(given[operand], least)
            if least < _size(operand) and given[operand] not in by_rows:
                wider[home] += _size(operand) - least
                host[home] += _size(operand) + least if given[operand] in only_cast else 0
            for cast in narrow:
                casts[home] += node_cost(cast) if cast in needed else Cost()
                cast_nbytes[home] += _size(cast)
    for value in wanted:
        if value in grads:
            home, output = grads[value], outputs[int(value.args[1])]
            wide[home] += value.meta["nbytes"]
            source: Any = output.args[0] if _is_cast(output) else output
            if isinstance(source, fx.Node) and "val" in source.meta and _is_narrower(source, output):
                stored[home] += _size(source)
                casts[home] += node_cost(output)
                cast_nbytes[home] += _size(source)
                if value not in by_rows:
                    grads_wider[home] += _size(output) - _size(source)
                    grads_host[home] += _size(output) + _size(source)
            else:
                stored[home] += by_rows.get(value, value.meta["nbytes"])
    return Needs(cost, read, stored, wide, casts, cast_nbytes, wider, host, grads_wider, grads_host)


def _reads(step: fx.GraphModule, user: fx.Node, value: fx.Node) -> bool:
    return not is_region(user) or value in needed_operands(step, user)


def needed_operands(step: fx.GraphModule, region: fx.Node) -> set[fx.Node]:
    """Returns the operands that operations of a region need. A view that only other regions read, which make it there, needs
    none."""
    memo, key = step.meta["memo"], ("needed", str(region.target))
    if key not in memo:
        body = kernel_of(step, region)
        needed = closure([*body_outputs(body), *filter(must_run, body.graph.nodes)])
        memo[key] = [inner in needed for inner in placeholders(body.graph)]
    operands: Any = zip(region.args, memo[key], strict=True)
    return {operand for operand, needed in operands if needed}


def closure(nodes: list[fx.Node]) -> set[fx.Node]:
    """Returns the nodes and all that they are made from."""
    needed, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default


def _is_narrower(node: fx.Node, other: fx.Node) -> bool:
    return bool(node.meta["val"].element_size() < other.meta["val"].element_size())


def _size(node: fx.Node) -> int:
    return aligned(nbytes_of(node.meta["val"]))


@dataclass(frozen=True, slots=True)
class HomeCost:
    """The least costs of a home in a step if it is on the host: µs of its fetches by phase, of the copies of its gradients and
    of its update there, and the bytes copied. ``device_update_us``, ``disk_update_us``: of its update if it is on the device or
    on disk; ``drive_us``: how long that keeps the drive busy. ``fetched``, ``stored``: bytes of the weights that fetches
    bring, by phase, and of their gradients, as narrow as they may cross; ``streamed``: that cross each way where the device
    updates it all the same. Fetches are of what regions read whatever is kept; see
    ``blocks`` for those of what is made again."""

    fetch_us: Mapping[str, float]
    store_us: float
    update_us: float
    device_update_us: float
    disk_update_us: float
    drive_us: float
    fetched: Mapping[str, int]
    stored: int
    streamed: int


def home_costs(problem: PlanningProblem, needs: Mapping[fx.Node, Needs]) -> dict[str, HomeCost]:
    """Adds up what homes cost at least: copies, by what regions need; updates, one for each region that makes gradients of the
    home. ``needs``: of the regions."""
    step, machine, updates, fixed = problem.step, problem.machine, problem.budgets.updates, problem.fixed_homes
    host_us, device_us, disk_us, drive_us = (defaultdict[str, float](float) for _ in range(4))
    streamed = defaultdict[str, int](int)
    for home, nbytes in _updates(step) if updates is not None else ():
        if (tier := fixed.get(home)) != "device":
            there_us = update_cost(updates, machine, "host", nbytes, nbytes)[1]
            host_us[home] += there_us if tier == "disk" else update_cost(updates, machine, "host", nbytes)[1]
            disk_us[home] += there_us
            drive_us[home] += machine.drive_us(*[updated_on_disk_nbytes(updates, nbytes)] * 2)
        streamed[home] += updates.streamed * nbytes
        if tier in (None, "device"):
            device_us[home] += update_cost(updates, machine, "compute", nbytes)[1]
    fetched = {phase: _total(n.read for r, n in needs.items() if r.meta["phase"] == phase) for phase in PHASES}
    stored = _total(need.stored for need in needs.values())
    return {
        home: HomeCost(
            {phase: machine.copy_us(fetched[phase][home], "h2d") for phase in PHASES},
            machine.copy_us(stored[home], "d2h"),
            host_us[home],
            device_us[home],
            disk_us[home],
            drive_us[home],
            {phase: fetched[phase][home] for phase in PHASES},
            stored[home],
            streamed[home],
        )
        for home in dict.fromkeys(step.meta["homes"].values())
    }


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = defaultdict[str, int](int)
    for part in parts:
        for home, nbytes in part.items():
            total[home] += nbytes
    return total


def _updates(step: fx.GraphModule) -> list[tuple[str, int]]:
    """Returns the home of each update, and the bytes of it that this changes."""
    homes, wanted, changed = step.meta["homes"], step.meta.get("updated"), defaultdict[tuple[fx.Node, str], int](int)
    params = {spec.index: (spec.name, node) for spec, node in inputs_of(step) if spec.role == "param" and spec.name in homes}
    for spec, value in outputs_of(step):
        if spec.kind == "grad" and spec.index in params:
            name, node = params[spec.index]
            if wanted is None or name in wanted:
                changed[value.args[0], homes[name]] += node.meta["nbytes"]
    return [(home, nbytes) for (_, home), nbytes in changed.items()]
