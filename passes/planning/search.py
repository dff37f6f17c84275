"""Local search over plans: tries those that differ from a good plan in one decision.

It does not depend on a budget: it improves the frontier over (peak, time), from which every budget then chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.ladders import Block, variant_decision

LOOKAHEADS = (0, 1, 2)
_WHY = "found by local search"


def signature(plan: Plan, blocks: Sequence[Block], param_nbytes: Mapping[str, int]) -> tuple[object, ...]:
    """Returns a key that is equal for plans that decide the same, whatever their reasons and however they express it."""
    homes = tuple(plan.params(home) for home in param_nbytes)
    values = []
    for block in blocks:
        saved = [value for value in block.saved if plan.keeps(block.name, value.name)]
        values.append(tuple((v.name, plan.activation(v.name)) for v in (*saved, *block.crossing, *block.others)))
    return plan.lookahead, plan.span, homes, tuple(values)


def neighbours(plan: Plan, blocks: Sequence[Block], param_nbytes: Mapping[str, int], host: bool) -> Iterator[Plan]:
    """Yields plans that differ from ``plan`` in one decision about one block, or in how far ahead they fetch. ``host``: whether
    activations may go home."""
    for home, nbytes in param_nbytes.items():
        other: Choice = "host" if plan.params(home) == "device" else "device"
        yield plan.with_decision(Decision("params", home, other, nbytes, _WHY))
    for block in reversed(blocks):
        yield from _block_neighbours(plan, block, host)
    for lookahead in LOOKAHEADS:
        if lookahead != plan.lookahead:
            yield replace(plan, lookahead=lookahead)


def _block_neighbours(plan: Plan, block: Block, host: bool) -> Iterator[Plan]:
    positions = tuple(i for i, value in enumerate(block.saved) if plan.keeps(block.name, value.name))
    for variant in block.variants:
        if variant.positions != positions:
            varied = plan.with_decision(variant_decision(block.name, block.saved, variant, _WHY))
            saved = tuple(block.saved[i] for i in variant.positions)
            yield _with_activations(varied, saved, "device")
            if variant.positions and host:
                yield _with_activations(varied, saved, "host")
    groups = (tuple(block.saved[i] for i in positions), block.crossing, block.others)
    for values in groups:
        choices: tuple[Choice, ...] = ("device", "host", "recompute") if host else ("device", "recompute")
        for choice in choices:
            elsewhere = [value for value in values if plan.activation(value.name) != choice]
            if elsewhere and (choice != "recompute" or values is block.crossing):
                yield _with_activations(plan, values, choice)


def _with_activations(plan: Plan, values: tuple[fx.Node, ...], choice: Choice) -> Plan:
    for value in values:
        plan = plan.with_decision(Decision("activation", value.name, choice, value.meta["nbytes"], _WHY))
    return plan
