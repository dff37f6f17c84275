"""Variants of a block: how much of what its forward saves is kept for its backward, from all of it to nothing."""

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

_MANY = 48  # saved values from which on the order of dropping is taken from each one's cost alone
_POINTS = 5  # of a block's trade-off, its two ends included


@dataclass(frozen=True, slots=True)
class Variant:
    """A choice of what a block saves. ``positions``: of what it keeps, among the block's saved values. ``nbytes``: the bytes of
    these, and of the generator states that the others need. ``time_us``: the time to make the others again, operation by
    operation."""

    positions: tuple[int, ...]
    nbytes: int
    time_us: float


def variants(step: fx.GraphModule, region: fx.Node, machine: Machine) -> tuple[Variant, ...]:
    """The block's variants from the fewest bytes to those that cost no time, each with more bytes and less time than the one
    before.

    From save-all downwards, the value that costs least time per byte is dropped next; of these points the lower convex hull
    over (bytes, time) is what a planner needs.
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
    """The variant that keeps everything."""
    saved = saved_values(region)
    return Variant(tuple(range(len(saved))), sum(item.meta["nbytes"] for item in saved), 0.0)


def fused_variant(step: fx.GraphModule, region: fx.Node) -> Variant:
    """The variant for kernels that fuse pointwise operations: what those alone make from other saved values or from inputs is
    not kept, since reading it would cost what making it again costs."""
    outputs = body_outputs(kernel_of(step, region))
    saved = [outputs[int(item.args[1])] for item in saved_values(region)]
    positions = set(range(len(saved)))
    for position in reversed(range(len(saved))):  # the last first: each from those before it
        again = _recomputed([saved[position]], {saved[i] for i in positions if i != position})
        if all(torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_random(node) for node in again):
            positions.discard(position)
    sizes = [item.meta["nbytes"] for item in saved_values(region)]
    return Variant(tuple(sorted(positions)), sum(sizes[i] for i in positions), 0.0)


def _size(region: fx.Node, position: int) -> int:
    return next((item.meta["nbytes"] for item in results(region) if item.args[1] == position), 0)


def _recomputed(wanted: list[fx.Node], given: set[fx.Node]) -> list[fx.Node]:
    """The operations that make ``wanted`` from the body's inputs and ``given``; views and getitems cost nothing and are left
    out."""
    operations: dict[fx.Node, None] = {}
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in given and node not in operations:
            operations[node] = None
            stack.extend(node.all_input_nodes)
    return [node for node in operations if not is_view(node) and node.target is not operator.getitem]


def _lower_hull(points: list[Variant]) -> list[Variant]:
    """The lower convex hull of time over bytes, from the fewest bytes on. That is not always recompute-all: replaying a
    random operation may keep a generator's state that weighs more than its result."""
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
