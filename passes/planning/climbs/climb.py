"""One climb: a plan is improved by moves (see ``moves.py``) as long as it gets faster."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import NamedTuple, Protocol

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.climbs.move import FIRST, LAST, TURNS, Move, Moved
from mtcompile.passes.planning.climbs.room import Fill, Room
from mtcompile.passes.planning.limits import Limits, order


class Evaluate(Protocol):
    """Gives a plan its figures. Those of a plan that cannot be faster than ``us`` may be of a worse order of its updates."""

    def __call__(self, plan: Plan, us: float = inf) -> Plan: ...


class Ways(NamedTuple):
    """The moves of climbs, what makes room by tier for those that need it, and what fills room that is left."""

    kinds: Sequence[Move] = ()
    rooms: Mapping[str, Sequence[Room]] = MappingProxyType({})
    fill: Fill = lambda plan, unused: iter(())


class Failed(NamedTuple):
    """The plan that a move did not make faster; whether it made it slower (``harmed``); ``partly``: some of what could make
    room for the move was put off."""

    plan: Plan
    harmed: bool
    partly: bool = False


@dataclass(slots=True)
class Climb:
    """One climb up to ``limits``: the ``best`` plan so far, and how many plans it has left to evaluate."""

    limits: Limits
    ways: Ways
    evaluate: Evaluate
    best: Plan
    remaining: float = 0
    failed: dict[Hashable, Failed] = field(default_factory=dict)  # by kind and name of a move, or by these and a room
    listed: dict[Move, tuple[Plan, list[Moved]]] = field(default_factory=dict)  # by kind: the moves from a plan

    def go_on(self, most: float) -> None:
        """Makes moves of all kinds as long as plans get faster, and no more than ``most`` plans are evaluated. Moves of a later
        turn, and last those that made a plan slower, are tried where no others help."""
        self.remaining, turn = most, FIRST
        self.make_room()
        while self.remaining > 0 and turn in TURNS:
            before = self.best
            for kind in self.ways.kinds:
                while self._moves(kind, turn):
                    pass
            if turn == FIRST:
                self._fill()
            turn = turn + 1 if self.best is before else FIRST

    def make_room(self) -> None:
        """Makes room for a plan that is above the limits, in the first way that makes enough. What makes room on one tier may
        take it on another, where room is made then."""
        tight = [self.best]
        for _ in range(1 + len(self.limits.missing(self.best))):
            made = list[Plan]()
            for plan in tight:
                for tier, nbytes in self.limits.missing(plan).items():
                    for room in self.ways.rooms.get(tier, ()):
                        if self.limits.missing(self.best) and (less := room(plan, plan, nbytes)) is not None:
                            made.append(self._evaluated(less))
            tight = sorted(made, key=lambda plan: order(plan, self.limits))[:1]

    def _fill(self) -> None:
        """Moves as many homes to the device at once as it has room for: where steps wait for many, one alone gains nothing."""
        if self.limits.device is not None:
            for plan in self.ways.fill(self.best, self.limits.device - self.best.peak_bytes["device"]):
                self._evaluated(plan)

    def _moves(self, kind: Move, turn: int) -> bool:
        """Makes the first move of a kind and ``turn`` that makes the plan faster, and goes on that way: 1, 2, 4, ... such moves
        at once, as long as that helps. Tells whether any did."""
        if kind not in self.listed or self.listed[kind][0] is not self.best:
            self.listed[kind] = self.best, list(kind(self.best))
        for moved in self.listed[kind][1]:
            if self.remaining <= 0:
                return False
            move = kind, moved.name
            if self._is_due(move, moved.turn, turn) and self._tries(moved.make(), move, turn):
                times = 1
                while self.remaining > 0 and (farther := repeated(kind, moved.name, self.best, times)) is not None:
                    if not self._tries(farther, move, turn, note=times == 1):
                        break
                    times *= 2
                return True
        return False

    def _is_due(self, move: Hashable, first: int, turn: int) -> bool:
        """Tells whether to try a move in this turn; ``first``: its own. One that made a plan slower waits for LAST. None is
        tried twice from one plan, except in LAST if some of what makes room for it was put off."""
        if (failed := self.failed.get(move)) is None:
            return turn == first
        if failed.plan is self.best:
            return turn == LAST and failed.partly
        return turn == (LAST if failed.harmed else first)

    def _tries(self, plan: Plan, move: Hashable, turn: int, note: bool = True) -> bool:
        """Takes a plan that is faster, if need be with room made for it, and tells whether it was. ``move``: what led to the
        plan; ``note``: whether to remember what fails."""
        before, evaluated = self.best, self._evaluated(plan)
        promises = evaluated.total_us < before.total_us and not self.limits.missing(before)
        missing = self.limits.missing(evaluated) if promises else {}
        tier, nbytes = next(iter(missing.items()), ("", 0))
        partly = False
        for room in self.ways.rooms.get(tier, ()):
            if self.best is not before or self.remaining <= 0:
                break
            if not self._is_due((move, room), turn, turn):
                partly = partly or self.failed[move, room].plan is not before
            elif (less := room(plan, before, nbytes)) is not None:
                less = self._evaluated(less)
                if note:
                    self._note((move, room), less, before)
        if self.best is before and note and self.remaining > 0:  # with none left, some rooms may be untried
            self._note(move, evaluated, before, partly)
        return self.best is not before

    def _note(self, move: Hashable, evaluated: Plan, before: Plan, partly: bool = False) -> None:
        self.failed[move] = Failed(before, evaluated.total_us > before.total_us, partly)

    def _evaluated(self, plan: Plan) -> Plan:
        """Returns the plan with its figures; it is the best from now on if it is within the limits and faster, or above them
        by less."""
        self.remaining -= 1
        evaluated = self.evaluate(plan, inf if self.limits.missing(self.best) else self.best.total_us)
        if order(evaluated, self.limits) < order(self.best, self.limits):
            self.best = evaluated
        return evaluated


def repeated(kind: Move, name: Hashable, plan: Plan, times: int) -> Plan | None:
    """Returns the plan after the move of a kind with that name, several times; None if it has none that often."""
    for _ in range(times):
        if (moved := next((moved for moved in kind(plan) if moved.name == name), None)) is None:
            return None
        plan = moved.make()
    return plan
