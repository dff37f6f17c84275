"""Variants of a block: how many of the values that its forward saves are kept for its backward, from all to none."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from networkx.algorithms import flow
from torch import fx

from mtcompile.passes.analysis.cost import Cost, Machine, kernel_cost, node_cost
from mtcompile.passes.analysis.kernels import saved_states
from mtcompile.passes.analysis.saved import made_again_inside, saved_values
from mtcompile.passes.step_graph import body_outputs, is_random, is_region, is_view, kernel_of, results

_FEW = 0.01  # of a forward's time: what runs again anyway and takes less is left out of trade-offs, such as casts of tables
_POINTS = 7  # variants kept of a block's trade-off, including its two ends


@dataclass(frozen=True, slots=True)
class Variant:
    """A choice of the saved values that a block keeps. ``positions``: which ones. ``nbytes``: bytes of these, and of the
    generator states that recomputing the others needs. ``time_us``: what recomputing the others adds to a backward."""

    positions: tuple[int, ...]
    nbytes: int
    time_us: float


def trade_off(
    step: fx.GraphModule, region: fx.Node, machine: Machine, always: frozenset[int] = frozenset()
) -> tuple[Variant, ...]:
    """Returns the lower convex hull of (bytes kept, time to recompute) over the choices of a block's saved values that keep
    those in the positions of ``always``, by rising bytes. Each point is a minimum cut: with a byte priced at the slope between
    two points, the cheapest choice lies between them, or there is none. The first point does not always recompute all:
    replaying a random operation may keep a generator's state that is larger than its result."""
    speeds = machine.rates, machine.memory_gbps, machine.issue_us, machine.fuses, machine.scale("compute")
    key = "trade-off", likeness(region), always, speeds
    memo = step.meta["memo"]
    if key not in memo:  # equal blocks, and machines that differ in their links alone, have the same
        memo[key] = _trade_off(step, region, _reader(region), machine, always)
    hull: tuple[Variant, ...] = memo[key]
    return hull


def likeness(region: fx.Node) -> tuple[Hashable, ...]:
    """Returns what blocks share if recomputing costs the same in them: their kernel, which of its results are saved and which
    are made again inside, and the kernel that first reads what is saved."""
    reader = _reader(region)
    positions = (tuple(int(value.args[1]) for value in of(region)) for of in (saved_values, made_again_inside))
    return str(region.target), *positions, reader and str(reader.target)


def recomputing(step: fx.GraphModule, region: fx.Node, machine: Machine) -> Callable[[Iterable[int]], Variant]:
    """Returns a function that prices a choice of a block's saved values: it returns the variant that keeps those in the
    given positions."""
    return _pricing(step, region, _reader(region), machine)[0]


def _pricing(
    step: fx.GraphModule, region: fx.Node, reader: fx.Node | None, machine: Machine
) -> tuple[Callable[[Iterable[int]], Variant], set[fx.Node]]:
    """Returns what ``recomputing`` returns, and the operations that run again whichever values are not kept."""
    body, items = kernel_of(step, region), saved_values(region)
    outputs = body_outputs(body)
    saved = [outputs[int(item.args[1])] for item in items]
    inside = [outputs[int(value.args[1])] for value in made_again_inside(region)]
    anyway = set(recomputed(inside, set(saved), True))
    if sum(map(node_cost, anyway), Cost()).time_us(machine) < _FEW * kernel_cost(body).time_us(machine):
        inside, anyway = [], set()
    states = {name: _size(region, position) for name, position in saved_states(body).items()}
    alone = Cost() if reader is None else kernel_cost(kernel_of(step, reader))
    cost_of = functools.cache(node_cost)  # each operation is made again by many variants

    def variant(positions: Iterable[int]) -> Variant:
        positions = tuple(sorted(positions))
        wanted = [n for i, n in enumerate(saved) if i not in positions]
        again = recomputed([*wanted, *inside] if wanted else [], {saved[i] for i in positions})
        random = {node.meta["rng_state"] for node in again if is_random(node)}
        nbytes = sum(items[i].meta["nbytes"] for i in positions) + sum(states[name] for name in random)
        together = sum(map(cost_of, again), alone)
        return Variant(positions, nbytes, together.time_us(machine) - alone.time_us(machine))

    return variant, anyway


def _reader(region: fx.Node) -> fx.Node | None:
    """The backward region that first reads what a block saves."""
    return min((user for item in saved_values(region) for user in item.users if is_region(user)), default=None)


def _trade_off(
    step: fx.GraphModule, region: fx.Node, reader: fx.Node | None, machine: Machine, always: frozenset[int]
) -> tuple[Variant, ...]:
    body, items = kernel_of(step, region), saved_values(region)
    outputs = body_outputs(body)
    saved = [outputs[int(item.args[1])] for item in items]
    sizes = [item.meta["nbytes"] for item in items]
    states = {name: _size(region, position) for name, position in saved_states(body).items()}
    variant, anyway = _pricing(step, region, reader, machine)
    cost_of = functools.cache(node_cost)

    everything = variant(range(len(saved)))
    points = [variant(always), everything]
    again = recomputed([n for i, n in enumerate(saved) if i not in always], {saved[i] for i in always}, True)
    again = [node for node in again if node not in anyway]
    open_sizes: dict[fx.Node, int] = {}
    for position, node in enumerate(saved):
        if position not in always:
            open_sizes[node] = open_sizes.get(node, 0) + sizes[position]
    together = _together(again, open_sizes)
    work = {
        makes: sum(round(1e3 * cost_of(node).time_us(machine)) for node in nodes) for makes, nodes in together.items()
    }  # ns

    def cheapest(ns: int, nbytes: int) -> tuple[Variant, int]:
        """The choice that costs least if keeping ``nbytes`` costs ``ns``, and the ns of what it recomputes."""
        chosen = _cheapest(work, together, open_sizes, states, ns, nbytes)
        cut = variant(i for i, node in enumerate(saved) if node not in chosen)
        return cut, sum(ns for makes, ns in work.items() if makes & chosen)

    todo = [(cheapest(sum(work.values()) + 1, 1), (everything, 0))]
    points.append(todo[0][0][0])
    while todo:
        (light, more), (heavy, less) = todo.pop()
        if more <= less or heavy.nbytes - light.nbytes <= 1:
            continue
        middle = cheapest(more - less, heavy.nbytes - light.nbytes)
        if light.nbytes < middle[0].nbytes < heavy.nbytes:
            points.append(middle[0])
            todo += [((light, more), middle), (middle, (heavy, less))]
    return tuple(_lower_hull(points))


_Makes = frozenset[fx.Node]  # saved values: what makes them runs again if any of them is not kept


def _together(again: list[fx.Node], saved: Mapping[fx.Node, int]) -> dict[_Makes, list[fx.Node]]:
    """Returns the operations by the ``saved`` values that are made by them, and not from another saved value."""
    operations, made = set(again), dict[fx.Node, _Makes]()
    together: dict[_Makes, list[fx.Node]] = {}
    for node in sorted(operations, reverse=True):
        users = (made[user] for user in node.users if user in operations)
        made[node] = frozenset((node,)) if node in saved else frozenset().union(*users)
        together.setdefault(made[node], []).append(node)
    return together


def _cheapest(
    work: Mapping[_Makes, int],
    together: Mapping[_Makes, list[fx.Node]],
    saved: Mapping[fx.Node, int],
    states: Mapping[str, int],
    ns: int,
    nbytes: int,
) -> set[fx.Node]:
    """Returns the ``saved`` values to make again, where keeping ``nbytes`` costs ``ns``: the source's side of a minimum cut. A
    saved value is cut from the source for its bytes; what makes it is cut from the sink for its time, with the generator's
    states that this replays."""
    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for node, size in saved.items():
        graph.add_edge("source", node, capacity=size * ns)
    for makes, cost in work.items():
        needs = dict.fromkeys(node.meta["rng_state"] for node in together[makes] if is_random(node))
        if cost or needs:
            graph.add_edge(makes, "sink", capacity=cost * nbytes)
            for node in makes:
                graph.add_edge(node, makes)  # without capacity: never cut
            for state in needs:
                graph.add_edge(makes, state)
                graph.add_edge(state, "sink", capacity=states[state] * ns)
    # All algorithms give the same cut, as the sink's side is what reaches it. This one is the fastest here.
    _, (again, _) = networkx.minimum_cut(graph, "source", "sink", flow_func=flow.boykov_kolmogorov)
    return {node for node in again if isinstance(node, fx.Node)}


def save_all(region: fx.Node) -> Variant:
    """Returns the variant that keeps everything."""
    saved = saved_values(region)
    return Variant(tuple(range(len(saved))), sum(item.meta["nbytes"] for item in saved), 0.0)


def fused_variant(step: fx.GraphModule, region: fx.Node) -> Variant:
    """Returns the variant for kernels that fuse pointwise operations. It does not keep values that such operations alone make
    from other saved values or inputs: recomputing them costs no more than reading them."""
    outputs = body_outputs(kernel_of(step, region))
    saved = [outputs[int(item.args[1])] for item in saved_values(region)]
    positions = set(range(len(saved)))
    for position in reversed(range(len(saved))):  # last first: each is recomputed from those before it
        again = recomputed([saved[position]], {saved[i] for i in positions if i != position})
        if all(torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_random(node) for node in again):
            positions.discard(position)
    sizes = [item.meta["nbytes"] for item in saved_values(region)]
    return Variant(tuple(sorted(positions)), sum(sizes[i] for i in positions), 0.0)


def _size(region: fx.Node, position: int) -> int:
    return next((item.meta["nbytes"] for item in results(region) if item.args[1] == position), 0)


def recomputed(wanted: list[fx.Node], given: set[fx.Node], free: bool = False) -> list[fx.Node]:
    """Returns the operations that make ``wanted`` from the body's inputs and ``given``; with ``free``, also those that cost
    nothing."""
    operations: dict[fx.Node, None] = {}
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in given and node not in operations:
            operations[node] = None
            stack.extend(node.all_input_nodes)
    return [node for node in operations if free or not _is_free(node)]


def _is_free(node: fx.Node) -> bool:
    return is_view(node) or node.target is operator.getitem


def _lower_hull(points: list[Variant]) -> list[Variant]:
    """Returns the lower convex hull of time over bytes, by rising bytes."""
    hull: list[Variant] = []
    for point in sorted(points, key=lambda v: (v.nbytes, v.time_us, len(v.positions))):
        if hull and point.time_us >= hull[-1].time_us:
            continue
        while len(hull) >= 2 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(one: Variant, other: Variant) -> float:
    return (other.time_us - one.time_us) / max(1, other.nbytes - one.nbytes)


def thinned(hull: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Returns few points of a block's trade-off: drops inner ones, those nearest to the line between their neighbours first."""
    points = list(hull)

    def gap(index: int) -> float:
        before, point, after = points[index - 1 : index + 2]
        return (after.nbytes - before.nbytes) * (before.time_us - point.time_us) - (point.nbytes - before.nbytes) * (
            before.time_us - after.time_us
        )

    while len(points) > _POINTS:
        del points[min(range(1, len(points) - 1), key=gap)]
    return tuple(points)
