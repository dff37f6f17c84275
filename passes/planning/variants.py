"""Variants of a block: how many of the values that its forward saves are kept for its backward, from all to none."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from mtcompile.passes.analysis.cost import Machine, node_cost
from mtcompile.passes.analysis.kernels import saved_states
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.step_graph import body_outputs, is_random, is_view, kernel_of, results

_MANY = 48  # with more saved values, the order of dropping follows from each one's cost alone
_POINTS = 5  # variants kept of a block's trade-off, including its two ends


@dataclass(frozen=True, slots=True)
class Variant:
    """A choice of the saved values that a block keeps. ``positions``: which ones. ``nbytes``: bytes of these, and of the
    generator states that recomputing the others needs. ``time_us``: time to recompute the others, operation by operation."""

    positions: tuple[int, ...]
    nbytes: int
    time_us: float


def variants(step: fx.GraphModule, region: fx.Node, machine: Machine) -> tuple[Variant, ...]:
    """Returns the block's variants, from the fewest bytes to no recomputation, each with more bytes and less time than the one
    before.

    Starts from saving everything and drops the value that costs least time per byte, again and again. The lower convex hull of
    these points over (bytes, time) is what a planner needs.
    """
    body = kernel_of(step, region)
    outputs = body_outputs(body)
    saved = [outputs[int(item.args[1])] for item in saved_values(region)]
    sizes = [item.meta["nbytes"] for item in saved_values(region)]
    states = saved_states(body)
    state_nbytes = {name: _size(region, position) for name, position in states.items()}

    def variant(positions: Iterable[int]) -> Variant:
        positions = tuple(sorted(positions))
        again = _recomputed([n for i, n in enumerate(saved) if i not in positions], {saved[i] for i in positions})
        random = {node.meta["rng_state"] for node in again if is_random(node)}
        nbytes = sum(sizes[i] for i in positions) + sum(state_nbytes[name] for name in random)
        return Variant(positions, nbytes, sum(node_cost(node).time_us(machine) for node in again))

    points = [variant(range(len(saved)))]
    if len(saved) > _MANY:
        full = points[0]
        without = [variant(i for i in full.positions if i != dropped) for dropped in full.positions]
        cheapest_first = sorted(full.positions, key=lambda i: (without[i].time_us / max(1, sizes[i]), i))
        stride = -(-len(saved) // _MANY)
        points += [variant(cheapest_first[count:]) for count in range(1, len(saved) + 1, stride)]
        points += [variant(())] if points[-1].positions else []
    while points[-1].positions:
        last = points[-1]
        smaller = [variant(i for i in last.positions if i != dropped) for dropped in last.positions]
        points.append(min(smaller, key=lambda v: ((v.time_us - last.time_us) / max(1, last.nbytes - v.nbytes), v.positions)))
    return _thinned(_lower_hull(points[::-1]))


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
        again = _recomputed([saved[position]], {saved[i] for i in positions if i != position})
        if all(torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_random(node) for node in again):
            positions.discard(position)
    sizes = [item.meta["nbytes"] for item in saved_values(region)]
    return Variant(tuple(sorted(positions)), sum(sizes[i] for i in positions), 0.0)


def _size(region: fx.Node, position: int) -> int:
    return next((item.meta["nbytes"] for item in results(region) if item.args[1] == position), 0)


def _recomputed(wanted: list[fx.Node], given: set[fx.Node]) -> list[fx.Node]:
    """Returns the operations that make ``wanted`` from the body's inputs and ``given``, without views and getitems, which cost
    nothing."""
    operations: dict[fx.Node, None] = {}
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in given and node not in operations:
            operations[node] = None
            stack.extend(node.all_input_nodes)
    return [node for node in operations if not is_view(node) and node.target is not operator.getitem]


def _lower_hull(points: list[Variant]) -> list[Variant]:
    """Returns the lower convex hull of time over bytes, by rising bytes. The first point is not always to recompute all:
    replaying a random operation may keep a generator's state that is larger than its result."""
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


def _thinned(hull: list[Variant]) -> tuple[Variant, ...]:
    if len(hull) <= _POINTS:
        return tuple(hull)
    return tuple(hull[round(i * (len(hull) - 1) / (_POINTS - 1))] for i in range(_POINTS))
