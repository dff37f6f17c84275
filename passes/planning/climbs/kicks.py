"""Kicks: moves that climbs make whatever they cost, where no other makes a plan faster, to climb on from there."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.ladders import Block, WaitKind, blocks_alike, waiting

MOST_AHEAD = 4
_ALONE = 2  # homes of equal size, at most, that no other move exchanges
_NEARLY_ALL = 0.75  # of the blocks: the others are embeddings, norms and the chunks of a loss head
_KICKS = 6  # homes, the largest first, of which plans decide otherwise
_FARTHER, _WAITING = (1, 2), (2, 4)  # how many regions more fetches are ahead, and how many of these homes wait then
FIRST, THEN, LAST = TURNS = range(3)  # of moves


class Moved(NamedTuple):
    """A plan after a move, made when it is asked for. ``name``: of the move, among those of its kind. ``turn``: such moves are
    made where none of an earlier turn helps: FIRST, those that gain most; THEN, those that gain little; LAST, those that seldom
    help."""

    name: Hashable
    turn: int
    make: Callable[[], Plan]


Move = Callable[[Plan], Iterator[Moved]]
Kick = Callable[[Plan], Iterator[Plan]]


def kicks(blocks: Sequence[Block], sizes: Mapping[str, int]) -> Kick | None:
    """Returns the kicks of a step. Each of its largest homes is on the other tier: the updates on the host and what the device
    computes may be equally long, so that no move about one of them makes a step faster. And fetches are farther ahead, while
    some of the largest homes wait in the backward, where they have no room then. Where most blocks are alike, other moves
    exchange homes of equal size, and only those of which there are one or two have kicks."""
    homes = sorted(sizes, key=lambda home: -sizes[home])[:_KICKS]
    if not differ(blocks):
        alike = Counter(sizes.values())
        alone = [home for home in homes if alike[sizes[home]] <= _ALONE]
        return partial(_flipped, alone, sizes) if alone else None
    kinds: tuple[WaitKind, ...] = ("return", "gradients")

    def neighbours(plan: Plan) -> Iterator[Plan]:
        yield from _flipped(homes, sizes, plan)
        for farther, count in itertools.product(_FARTHER, _WAITING):
            if (ahead := plan.lookahead + farther) <= MOST_AHEAD:
                decisions = [each for kind in kinds for each in waiting(kind, homes[:count], sizes, True)]
                yield plan.changed(lookahead=ahead).with_decisions(decisions)

    return neighbours


def _flipped(homes: Sequence[str], sizes: Mapping[str, int], plan: Plan) -> Iterator[Plan]:
    """Yields plans in which one of the homes is on the other tier."""
    for home, tier in zip(homes, plan.tiers(homes), strict=True):
        other: Choice = "host" if tier == "device" else "device"
        yield plan.with_decision(Decision("params", home, other, sizes[home]))


def differ(blocks: Sequence[Block]) -> bool:
    """Tells whether most blocks differ from all others."""
    return 2 * len(blocks_alike(blocks)) > len(blocks)


def are_equal(blocks: Sequence[Block]) -> bool:
    """Tells whether nearly all blocks are equal."""
    return max(map(len, blocks_alike(blocks)), default=0) >= _NEARLY_ALL * len(blocks)
