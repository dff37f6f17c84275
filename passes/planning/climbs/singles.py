"""Moves of climbs about one home, one block or one value by itself, for steps that have few of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from mtcompile.passes.plan import Choice, Kind, Plan
from mtcompile.passes.planning.blocks import Block, about_homes, all_others, kept_positions, variant_decision
from mtcompile.passes.planning.climbs.move import LAST, Move, Moved
from mtcompile.passes.planning.climbs.moves import kept, placed
from mtcompile.passes.planning.variants import Variant

_FEW = 4  # saved values of a block of which each is tried by itself


def singles(blocks: Sequence[Block], sizes: Mapping[str, int], host: bool, most: int) -> list[Move]:
    """Returns the moves: none where there are more than ``most``. ``sizes``: bytes of the homes whose tier is open; ``host``:
    whether activations may go home."""
    tiers: tuple[Choice, ...] = ("device", "host") if host else ("device",)
    choices = {block.name: _choices(block) for block in blocks}
    exchanges = len(sizes) ** 2 // 4
    if exchanges + 2 * len(sizes) + sum(len(tiers) * len(each) for each in choices.values()) > most:
        return []
    rest = [_of_the_rest] if host else []
    return [partial(_of_homes, sizes), *rest, *(partial(_of_block, block, choices[block.name], tiers) for block in blocks)]


def _choices(block: Block) -> list[Variant]:
    """Returns what a block may keep: what a variant does, or any of a few values."""
    saved = block.saved
    few = range(len(saved) + 1) if len(saved) <= _FEW else ()
    every = itertools.chain.from_iterable(itertools.combinations(range(len(saved)), count) for count in few)
    others = (Variant(positions, sum(saved[i].meta["nbytes"] for i in positions), 0.0) for positions in every)
    return list({variant.positions: variant for variant in (*others, *block.variants)}.values())


def _of_the_rest(plan: Plan) -> Iterator[Moved]:
    """Lets all values without decisions of their own wait on the device, or at home."""
    other: Choice = "host" if plan.activation("*") == "device" else "device"
    yield Moved("*", LAST, lambda: plan.with_decision(all_others(other)))


def _of_homes(sizes: Mapping[str, int], plan: Plan) -> Iterator[Moved]:
    """Moves a home, lets it stay from the forward to the backward or not, or exchanges it with another."""

    def decided(choices: Mapping[str, Choice], kind: Kind) -> Plan:
        return plan.with_decisions(about_homes(kind, choices, sizes))

    tiers = dict(zip(sizes, plan.tiers(sizes), strict=True))
    for home, tier in tiers.items():
        other: Choice = "host" if tier == "device" else "device"
        yield Moved(home, LAST, partial(decided, {home: other}, "params"))
        if tier != "device":
            yield Moved((home, "stays"), LAST, partial(decided, {home: "again" if plan.stays(home) else "keep"}, "fetch"))
    for one, other_home in itertools.combinations(sizes, 2):
        if tiers[one] != tiers[other_home]:
            exchanged = {one: tiers[other_home], other_home: tiers[one]}
            yield Moved((one, other_home), LAST, partial(decided, exchanged, "params"))


def _of_block(block: Block, choices: Sequence[Variant], tiers: Sequence[Choice], plan: Plan) -> Iterator[Moved]:
    """Lets a block keep other values, or places what leaves it elsewhere, or makes that again."""
    now = kept_positions(plan, block)
    for variant, tier in itertools.product(choices, tiers):
        there = all(plan.activation(block.saved[i].name) == tier for i in now)
        if (variant.positions != now or not there) and (variant.positions or tier == "device"):
            yield Moved((variant.positions, tier), LAST, partial(kept, plan, [block], variant, tier))
    for variant in choices if "host" in tiers else ():
        if variant.positions != now:  # what it keeps waits where it does
            decision = variant_decision(block.name, block.saved, variant)
            yield Moved(variant.positions, LAST, partial(plan.with_decision, decision))
    for values, everywhere in ((block.crossing, (*tiers, "recompute")), (block.others, tiers)):
        for choice in everywhere:
            if any(plan.activation(value.name) != choice for value in values):
                yield Moved((values, choice), LAST, partial(placed, plan, values, choice))
