"""Polishing: where a climb ends far above its bound, any home or block changes by itself, and so do neighbours together.

A climb's moves are few, as equal homes and blocks share them. In a step that waits now here, now there, what helps is often a
change in the middle of it. So moves are drawn at random, always the same ones, and each that makes the plan faster is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.ladders import (
    Block,
    WaitKind,
    activation_decision,
    blocks_alike,
    keeping,
    kept_positions,
    variant_decision,
    waiting,
)

_FAR, _NEAR, _HOPELESS = 1.07, 1.02, 1.35  # times the bound: from where on plans are polished, down to where; in vain
_TRIED, _MOST, _FEWEST = 180_000, 3000, 1200  # plans, times the regions of a step; at most; for fewer, a step is too large
_IN_VAIN, _GAIN = 400, 0.999  # plans after which polishing ends if none of them made the best one so much faster
_AHEAD = 8  # the most regions that fetches are ahead
_KEPT = 0.7  # the share of values between blocks that are kept rather than made again
_LONGEST = 4  # runs of up to 2 to this power blocks change together
Draw = Callable[[Plan], Plan | None]
Polish = Callable[["Climbing", float], None]  # takes a climb, and the bound in µs


class Climbing(Protocol):
    """A climb: its best plan so far, and how many plans it may still evaluate."""

    best: Plan
    remaining: float

    def is_better(self, plan: Plan) -> bool:
        """Takes a plan that is faster, and tells whether it was."""
        ...


def is_worth_polishing(plan: Plan, bound_us: float) -> bool:
    """Tells whether a plan is far above its bound, though not so far that single moves are in vain."""
    return _FAR * bound_us < plan.total_us < _HOPELESS * bound_us


def polish_of(blocks: Sequence[Block], sizes: Mapping[str, int], host: bool, regions: int) -> Polish | None:
    """Returns what polishes plans of a step with so many ``regions``: it tries what is drawn, until a plan is near the bound or
    hardly anything helps any more. None if the step is too large. For the others see ``Draws``."""
    most = min(_MOST, _TRIED // regions)

    def polish(climb: Climbing, bound_us: float) -> None:
        draws, climb.remaining = Draws(blocks, sizes, host), most
        us, until = climb.best.total_us, most - _IN_VAIN
        while climb.remaining > max(0, until) and climb.best.total_us > _NEAR * bound_us:
            if (plan := draws(climb.best)) is None:
                climb.remaining -= 1
            else:
                climb.is_better(plan)
            if climb.best.total_us < _GAIN * us:
                us, until = climb.best.total_us, climb.remaining - _IN_VAIN

    return polish if most >= _FEWEST else None


class Draws:
    """Draws plans that differ from one in a single place, always the same. ``blocks``: of the step; ``sizes``: bytes of homes
    whose tier is open; ``host``: whether activations may go home."""

    def __init__(self, blocks: Sequence[Block], sizes: Mapping[str, int], host: bool) -> None:
        self._random, self._sizes, self._homes, self._blocks, self._host = Random(0), sizes, list(sizes), blocks, host
        self._alike = {block.name: together for together in blocks_alike(blocks) for block in together}
        of_homes: list[Draw] = [self._move_home, self._exchange, self._exchange, self._wait] if sizes else []
        self._kinds: list[Draw] = [*of_homes, self._keep, self._keep, self._like_another, self._leave, self._ahead]

    def __call__(self, plan: Plan) -> Plan | None:
        """Returns another plan; None if what was drawn changes nothing."""
        draw: Draw = self._any(self._kinds)
        return draw(plan)

    def _any(self, choices: Sequence[Any]) -> Any:
        return choices[int(self._random.random() * len(choices))]

    def _decide(self, plan: Plan, kind: Any, choices: Mapping[str, Choice]) -> Plan:
        return plan.with_decisions([Decision(kind, home, choice, self._sizes[home]) for home, choice in choices.items()])

    def _move_home(self, plan: Plan) -> Plan | None:
        """Moves a home to the other tier, or lets it stay from the forward to the backward or not."""
        home = self._any(self._homes)
        if plan.params(home) == "device":
            return self._decide(plan, "params", {home: "host"})
        if self._random.random() < 0.5:
            return self._decide(plan, "params", {home: "device"})
        return self._decide(plan, "fetch", {home: "again" if plan.stays(home) else "keep"})

    def _exchange(self, plan: Plan) -> Plan | None:
        """Exchanges two homes of which one is on the device, or stays there from the forward to the backward."""
        one, other = self._any(self._homes), self._any(self._homes)
        tiers, stays = plan.tiers((one, other)), (plan.stays(one), plan.stays(other))
        if tiers[0] != tiers[1]:
            plan = self._decide(plan, "params", {one: tiers[1], other: tiers[0]})
        elif tiers[0] == "device" or stays[0] == stays[1]:
            return None
        fetches: list[Choice] = ["keep" if each else "again" for each in reversed(stays)]
        return self._decide(plan, "fetch", dict(zip((one, other), fetches, strict=True)))

    def _wait(self, plan: Plan) -> Plan | None:
        """Lets a home wait in the backward, or not."""
        home, kinds = self._any(self._homes), list[WaitKind](("return", "gradients"))
        kind: WaitKind = self._any(kinds)
        if plan.params(home) == "device" or not plan.lookahead:
            return None
        waits = plan.returns_late(home) if kind == "return" else plan.frees_early(home)
        return plan.with_decisions(waiting(kind, [home], self._sizes, not waits))

    def _run(self) -> list[Block]:
        """Draws a block, and maybe some of those alike behind it."""
        block = self._any(self._blocks)
        together = self._alike[block.name]
        first, count = together.index(block), 1 << int(self._random.random() ** 2 * (1 + _LONGEST))
        return together[first : first + count]

    def _tier(self) -> Choice:
        return "host" if self._host and self._random.random() < 0.5 else "device"

    def _keep(self, plan: Plan) -> Plan | None:
        """Lets blocks keep more or less, on the device or at home."""
        blocks, tier = self._run(), self._tier()
        if not blocks[0].saved:
            return None
        variant, decisions = self._any(blocks[0].variants), list[Decision]()
        for block in blocks:
            decisions += keeping(block, variant, tier)
        return plan.with_decisions(decisions)

    def _like_another(self, plan: Plan) -> Plan | None:
        """Lets a block keep what one alike does, and where."""
        block = self._any(self._blocks)
        other = self._any(self._alike[block.name])
        if not block.saved or other is block:
            return None
        positions = kept_positions(plan, other)
        if (variant := next((v for v in block.variants if v.positions == positions), None)) is None:
            return None
        tiers = {i: plan.activation(other.saved[i].name) for i in positions}
        places = [activation_decision(block.saved[i], tier) for i, tier in tiers.items()]
        return plan.with_decisions([variant_decision(block.name, block.saved, variant), *places])

    def _leave(self, plan: Plan) -> Plan | None:
        """Places what leaves blocks elsewhere, or makes it again."""
        blocks = self._run()
        tier: Choice = self._tier() if self._random.random() < _KEPT else "recompute"
        return plan.with_decisions([activation_decision(value, tier) for block in blocks for value in block.crossing])

    def _ahead(self, plan: Plan) -> Plan | None:
        """Fetches one region more or less ahead."""
        ahead = plan.lookahead + (1 if self._random.random() < 0.5 else -1)
        return plan.changed(lookahead=ahead) if 0 <= ahead <= _AHEAD else None
