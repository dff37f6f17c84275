"""Room for a move: a plan that is above a limit keeps less elsewhere, in one of a few ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.blocks import (
    Block,
    activation_decision,
    at_home_by_rank,
    kept_positions,
    loading,
    variant_decision,
    waiting,
)
from mtcompile.passes.planning.variants import Variant

# Takes a plan, the plan that it was moved from, and the bytes that are missing. Returns a plan that keeps as many bytes less on
# the device than the first, or more, by decisions that both share; None if it cannot.
Room = Callable[[Plan, Plan, int], Plan | None]
Fill = Callable[[Plan, int], Iterator[Plan]]  # takes a plan and the bytes that it leaves free; yields plans that may use them
_Freed = Iterator[tuple[int, Sequence[Decision]]]  # bytes that decisions free, the cheapest first
# To a lighter variant: µs for each byte that it keeps less than the one before, the steps to it, these bytes, and the decision.
_Step = tuple[float, int, int, Decision]


def rooms(blocks: Sequence[Block], sizes: Mapping[str, int], held: Mapping[str, int], host: bool) -> dict[str, list[Room]]:
    """Returns the ways to make room, by the tier that needs it. ``sizes``: bytes of the homes whose tier is open; ``held``:
    with their optimizer state; ``host``: whether activations may go home."""
    homes = list(sizes)
    lighter: dict[tuple[int, tuple[int, ...]], list[_Step]] = {}  # by block and what it keeps

    def again(plan: Plan, before: Plan) -> _Freed:
        """Fetches homes again for the backward, those first that would stay longest."""
        fetches = zip(sizes, plan.choices("fetch", sizes), before.choices("fetch", sizes), strict=True)
        for home in [home for home, now, then in fetches if now == then == "keep"]:
            if plan.params(home) != "device" != before.params(home):
                yield sizes[home], [Decision("fetch", home, "again", sizes[home])]

    def away(plan: Plan, before: Plan) -> _Freed:
        """Moves homes to the host, those last that the next step reads first."""
        tiers = zip(homes, plan.tiers(homes), before.tiers(homes), strict=True)
        for home in reversed([home for home, now, then in tiers if now == then == "device"]):
            yield held[home], [Decision("params", home, "host", sizes[home])]

    def recomputed(plan: Plan, before: Plan) -> _Freed:
        """Recomputes more, where a byte takes least time."""
        steps: list[_Step] = []
        for block in blocks:
            if plan.find("variant", block.name) is before.find("variant", block.name):
                key = block.index, kept_positions(plan, block)
                if key not in lighter:
                    lighter[key] = list(_lighter(block, key[1]))
                steps += lighter[key]
        for _, _, nbytes, decision in sorted(steps, key=lambda step: step[:2]):
            yield nbytes, [decision]

    def home(plan: Plan, before: Plan) -> _Freed:
        """Sends what blocks keep home, that of the first blocks first: it would wait longest."""
        for block in blocks:
            saved_now = [block.saved[i] for i in kept_positions(plan, block)]
            for values in (saved_now, block.crossing):
                here = [v for v in values if plan.activation(v.name) == "device" == before.activation(v.name)]
                sent = [activation_decision(value, "host") for value in here]
                yield sum(decision.nbytes for decision in sent), sent

    def later(plan: Plan, before: Plan) -> _Freed:
        """Lets what waits at home come back late, the largest values first: they are not beside another block then."""
        for values in at_home_by_rank(plan, blocks) if plan.lookahead else ():
            if ahead := [value for value in values if not plan.loads_late(value.name)]:
                yield max(value.meta["nbytes"] for value in ahead), loading(ahead, True)

    def alone(plan: Plan, before: Plan) -> _Freed:
        """Lets homes come back late and their gradients go home at once, the largest first: none is beside another then."""
        for nbytes in sorted({*sizes.values()}, reverse=True):
            if alike := [home for home, size in sizes.items() if size == nbytes and not plan.returns_late(home)]:
                yield nbytes, waiting(alike, sizes, True)

    def here(plan: Plan, before: Plan) -> _Freed:
        """Moves homes to the device, those first that the next step reads first."""
        tiers = zip(homes, plan.tiers(homes), before.tiers(homes), strict=True)
        for home in [home for home, now, then in tiers if now == then == "host"]:
            yield held[home], [Decision("params", home, "device", sizes[home])]

    def less_at_home(plan: Plan, before: Plan) -> _Freed:
        """Keeps on the device what waits at home, that of the last blocks first: it waits shortest there."""
        for block in reversed(blocks):
            saved_now = [block.saved[i] for i in kept_positions(plan, block)]
            for values in (saved_now, block.crossing):
                at_home = [v for v in values if plan.activation(v.name) == "host" == before.activation(v.name)]
                stay = [activation_decision(value, "device") for value in at_home]
                yield sum(decision.nbytes for decision in stay), stay

    on_device = (later, alone, again, home, away, recomputed) if host else (alone, again, recomputed, away)
    on_host = (less_at_home, recomputed, here) if host else (here,)
    return {"device": list(map(_until_enough, on_device)), "host": list(map(_until_enough, on_host))}


def filling(sizes: Mapping[str, int], held: Mapping[str, int]) -> Fill:
    """Returns what moves homes to the device together, as many as the room that is left holds, of each size as large a share:
    spread evenly over the step, or those that the next step reads first. For the others see ``rooms``."""

    def fill(plan: Plan, unused: int) -> Iterator[Plan]:
        alike: dict[int, list[str]] = {}
        for home, tier in zip(sizes, plan.tiers(sizes), strict=True):
            if tier == "host":
                alike.setdefault(sizes[home], []).append(home)
        share = unused / max(1, sum(held[home] for homes in alike.values() for home in homes))
        counted = [(homes, int(share * len(homes))) for homes in alike.values()] if 0 < share < 1 else []
        if sum(count for _, count in counted) > 1:
            spread = [homes[(2 * i + 1) * len(homes) // (2 * count)] for homes, count in counted for i in range(count)]
            for chosen in (spread, [home for homes, count in counted for home in homes[:count]]):
                yield plan.with_decisions([Decision("params", home, "device", sizes[home]) for home in chosen])

    return fill


def _until_enough(way: Callable[[Plan, Plan], _Freed]) -> Room:
    def room(plan: Plan, before: Plan, missing: int) -> Plan | None:
        decisions: list[Decision] = []
        for nbytes, freeing in way(plan, before):
            decisions += freeing
            missing -= nbytes
            if missing <= 0:
                return plan.with_decisions(decisions)
        return None

    return room


def _lighter(block: Block, positions: tuple[int, ...]) -> Iterator[_Step]:
    """Yields the steps to each variant of a block with fewer bytes than what it keeps at some ``positions``."""
    nbytes = sum(block.saved[i].meta["nbytes"] for i in positions)
    us = next((v.time_us for v in block.variants if v.positions == positions), 0.0)
    before, price, lighter = Variant(positions, nbytes, us), 0.0, [v for v in block.variants if v.nbytes < nbytes]
    for count, variant in enumerate(sorted(lighter, key=lambda v: -v.nbytes)):
        freed = before.nbytes - variant.nbytes
        price = max(price, (variant.time_us - before.time_us) / max(1, freed))
        yield price, count, freed, variant_decision(block.name, block.saved, variant)
        before = variant
