"""Local search over plans: tries those that differ from a good plan in one decision.

It does not depend on a budget: it improves the frontier over (peak, time), from which every budget then chooses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.frontier import Point, most_promising, most_promising_gap
from mtcompile.passes.planning.ladders import Block, activation_decision, kept_positions, variant_decision
from mtcompile.passes.planning.problem import Progress
from mtcompile.passes.planning.variants import Variant

LOOKAHEADS = (0, 1, 2)
_FEW = 4  # homes that are exchanged in pairs, and saved values of a block of which each is tried by itself


def spread(count: int, most: int) -> list[int]:
    """Returns positions from the first to the last of so many, evenly spaced: all, or ``most`` of them."""
    some = min(count, most)
    return sorted({round(i * (count - 1) / max(1, some - 1)) for i in range(some)})


class Searching(NamedTuple):
    """``evaluate``: gives a plan its figures; ``progress``: is told of each."""

    evaluate: Callable[[Plan], Plan]
    progress: Progress


def sample(
    points: list[Point], ladders: Sequence[Sequence[Plan]], per_ladder: int, remaining: int, searching: Searching
) -> None:
    """Adds plans to ``points``, spread over every ladder: at most ``per_ladder`` of each. ``remaining``: how many follow."""
    sampled = [(ladder, position) for ladder in ladders for position in spread(len(ladder), per_ladder)]
    for done, (ladder, position) in enumerate(sampled):
        searching.progress("planning", done, len(sampled) + remaining)
        points.append(Point(searching.evaluate(ladder[position]), ladder, position))


def refine(points: list[Point], most: int, searching: Searching) -> None:
    """Adds plans to ``points``, each between two of a ladder where most seems to be gained, at most ``most`` of them."""
    for done in range(most):
        if (between := most_promising_gap(points)) is None:
            return
        searching.progress("planning", done, most)
        low, high = between
        position = (low.position + high.position) // 2
        points.append(Point(searching.evaluate(low.ladder[position]), low.ladder, position))


def vary(points: list[Point], most: int, neighbours: Iterator[Plan], searching: Searching) -> None:
    """Adds plans to ``points`` that differ from these by one decision, at most ``most`` of them. ``neighbours``: yields each
    (see ``unseen_neighbours``)."""
    for left, plan in zip(range(most, 0, -1), neighbours, strict=False):
        searching.progress("planning", len(points), len(points) + left)
        points.append(Point((evaluated := searching.evaluate(plan)), (evaluated,), 0))


def signature(plan: Plan, blocks: Sequence[Block], param_nbytes: Mapping[str, int]) -> tuple[object, ...]:
    """Returns a key that is equal for plans that decide the same, whatever their reasons and however they express it."""
    homes = tuple(plan.params(home) for home in param_nbytes)
    values = []
    for block in blocks:
        saved = [block.saved[i] for i in kept_positions(plan, block)]
        values.append(tuple((v.name, plan.activation(v.name)) for v in (*saved, *block.crossing, *block.others)))
    staying = tuple(plan.stays(home) for home in param_nbytes)
    waiting = tuple((plan.returns_late(home), plan.frees_early(home)) for home in param_nbytes)
    return plan.lookahead, plan.span, plan.pooled, homes, staying, waiting, tuple(values)


def unseen_neighbours(
    points: list[Point], blocks: list[Block], sizes: Mapping[str, int], movable: Mapping[str, int], host: bool
) -> Iterator[Plan]:
    """Yields plans that differ by one decision from the most promising point, and decide as no point does. The caller adds each
    to ``points`` before it asks for the next. ``sizes``: bytes by home; for the others see ``neighbours``."""
    seen = {signature(point.plan, blocks, sizes) for point in points}
    unvaried = list(points)
    while unvaried:
        point = most_promising(points, unvaried)
        unvaried = [other for other in unvaried if (other.peak, other.time_us) != (point.peak, point.time_us)]
        for plan in neighbours(point.plan, blocks, movable, host):
            if (key := signature(plan, blocks, sizes)) not in seen:
                seen.add(key)
                yield plan
                unvaried.append(points[-1])


def neighbours(plan: Plan, blocks: Sequence[Block], param_nbytes: Mapping[str, int], host: bool) -> Iterator[Plan]:
    """Yields plans that differ from ``plan`` in one decision about one block, or in how far ahead they fetch. ``host``: whether
    activations may go home."""
    for home, nbytes in param_nbytes.items():
        other: Choice = "host" if plan.params(home) == "device" else "device"
        yield plan.with_decision(Decision("params", home, other, nbytes))
        if plan.params(home) == "host":
            other = "again" if plan.stays(home) else "keep"
            yield plan.with_decision(Decision("fetch", home, other, nbytes))
    for one, other in itertools.combinations(param_nbytes, 2) if len(param_nbytes) <= _FEW else ():
        if plan.params(one) != plan.params(other):
            exchanged = plan.with_decision(Decision("params", one, plan.params(other), param_nbytes[one]))
            yield exchanged.with_decision(Decision("params", other, plan.params(one), param_nbytes[other]))
    for block in reversed(blocks):
        yield from _block_neighbours(plan, block, host)
    for lookahead in LOOKAHEADS:
        if lookahead != plan.lookahead:
            yield replace(plan, lookahead=lookahead)
    yield replace(plan, pooled=not plan.pooled)


def _block_neighbours(plan: Plan, block: Block, host: bool) -> Iterator[Plan]:
    positions = kept_positions(plan, block)
    one_more_or_less = (tuple(sorted({*positions} ^ {i})) for i in range(len(block.saved)) if len(block.saved) <= _FEW)
    choices = dict.fromkeys((*(variant.positions for variant in block.variants), *one_more_or_less))
    for others in choices:
        if others != positions:
            saved = tuple(block.saved[i] for i in others)
            nbytes = sum(value.meta["nbytes"] for value in saved)
            varied = plan.with_decision(variant_decision(block.name, block.saved, Variant(others, nbytes, 0.0)))
            yield _with_activations(varied, saved, "device")
            if others and host:
                yield _with_activations(varied, saved, "host")
    groups = (tuple(block.saved[i] for i in positions), block.crossing, block.others)
    for values in groups:
        tiers: tuple[Choice, ...] = ("device", "host", "recompute") if host else ("device", "recompute")
        for choice in tiers:
            elsewhere = [value for value in values if plan.activation(value.name) != choice]
            if elsewhere and (choice != "recompute" or values is block.crossing):
                yield _with_activations(plan, values, choice)


def _with_activations(plan: Plan, values: tuple[fx.Node, ...], choice: Choice) -> Plan:
    return plan.with_decisions([activation_decision(value, choice) for value in values])
