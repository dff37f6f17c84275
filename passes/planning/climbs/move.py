"""A move of a climb, and the turns in which moves are made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from mtcompile.passes.plan import Plan

FIRST, THEN, LAST = TURNS = range(3)  # of moves


class Moved(NamedTuple):
    """A plan after a move, made when it is asked for. ``name``: of the move, among those of its kind. ``turn``: such moves are
    made where none of an earlier turn helps: FIRST, those that gain most; THEN, those that gain little; LAST, those that seldom
    help."""

    name: Hashable
    turn: int
    make: Callable[[], Plan]


Move = Callable[[Plan], Iterator[Moved]]
