"""Moves of climbs about how long fetches, gradients and values at home wait in the backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial

from torch import fx

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.blocks import WAITS, Block, WaitKind, at_home_by_rank, crossing_by_size, loading, waiting
from mtcompile.passes.planning.climbs.move import FIRST, Move, Moved

_LARGEST = 2  # sizes of homes that may wait


def waits(by_size: Mapping[int, Sequence[str]], sizes: Mapping[str, int]) -> Move:
    """Lets the homes of one size wait less in the backward, or, of the largest sizes, more: these may be all that others have
    no room beside."""

    def neighbours(plan: Plan) -> Iterator[Moved]:
        kinds: tuple[tuple[WaitKind, Callable[[str], bool]], ...] = (
            ("return", plan.returns_late),
            ("gradients", plan.frees_early),
        )
        for rank, nbytes in enumerate(sorted(by_size, reverse=True)):
            homes = [home for home, tier in zip(by_size[nbytes], plan.tiers(by_size[nbytes]), strict=True) if tier != "device"]
            for kind, waits_now in kinds if homes else ():
                now = any(map(waits_now, homes))
                if now or rank < _LARGEST:
                    yield Moved((nbytes, kind), FIRST, partial(_waiting, plan, homes, sizes, not now, [kind]))

    return neighbours


def waits_together(sizes: Mapping[str, int]) -> Move:
    """Lets homes that follow one another in the step no longer wait in the backward: all of them, or a half, a quarter, and so
    on to one alone. There may be room beside some blocks, however large their homes are, and none beside others; and what a
    single home gains may be lost to the next one that waits."""
    homes, parts = list(sizes), [1 << power for power in range(len(sizes).bit_length())]
    spans = [homes[len(homes) * i // count : len(homes) * (i + 1) // count] for count in parts for i in range(count)]

    def neighbours(plan: Plan) -> Iterator[Moved]:
        tiers = dict(zip(homes, plan.tiers(homes), strict=True)) if plan.lookahead else {}
        waits = {
            home for home, tier in tiers.items() if tier != "device" and (plan.returns_late(home) or plan.frees_early(home))
        }
        for number, span in enumerate(spans):
            if waits & set(span):
                yield Moved(number, FIRST, partial(_waiting, plan, span, sizes, False))

    return neighbours


def loads_late(blocks: Sequence[Block]) -> Move:
    """Lets what all blocks keep at home, of one rank by size, or what leaves them and is equally large, come back ahead that
    comes late, or late that comes ahead."""

    def neighbours(plan: Plan) -> Iterator[Moved]:
        together: list[tuple[Hashable, Sequence[fx.Node]]] = []
        if plan.lookahead:
            together += enumerate(at_home_by_rank(plan, blocks))
            together += [(("crossing", values[0].meta["nbytes"]), values) for values in crossing_by_size(plan, blocks)]
        for late in (True, False):  # what comes late now, first
            for name, values in together:
                if any(plan.loads_late(value.name) for value in values) == late:
                    yield Moved((name, late), FIRST, partial(_loading, plan, values, not late))

    return neighbours


def _waiting(plan: Plan, homes: Sequence[str], sizes: Mapping[str, int], wait: bool, kinds: Sequence[WaitKind] = WAITS) -> Plan:
    return plan.with_decisions(waiting(homes, sizes, wait, kinds))


def _loading(plan: Plan, values: Sequence[fx.Node], late: bool) -> Plan:
    return plan.with_decisions(loading(values, late))
