"""Plans to start from: solutions of the relaxed problem for budgets from the floor up, in whole decisions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.ladders import Block, variant_decision
from mtcompile.passes.planning.linear.blocks import Option
from mtcompile.passes.planning.linear.program import Infeasible
from mtcompile.passes.planning.linear.relaxation import Relaxed, Solve

T = TypeVar("T")
_WHY = "by the linear program"
_AHEAD = (1, 2, 3)  # blocks ahead that plans fetch
SOLUTIONS, _BETWEEN = 23, 4  # solutions, and plans between each two of them
_LAST = (SOLUTIONS - 1) * _BETWEEN  # the position of the last plan


class Optima:
    """Optima of the relaxed problem where homes are undecided, for ``device`` budgets from the first to the second and some
    blocks ``ahead``. Each solution begins at that for the next larger budget, and others begin at these: so all are the same
    whatever was asked before."""

    def __init__(self, solve: Solve, device: tuple[int, int], ahead: int) -> None:
        self.solve, (self.low, self.high), self.ahead = solve, device, ahead
        self._optima: dict[int, Relaxed | None] = {}

    def limits(self, position: int) -> dict[str, int | None]:
        """Returns the budgets at a position."""
        return {"device": round(self.low * (self.high / self.low) ** (position / _LAST)), "host": None}

    def near(self, position: int) -> Relaxed | None:
        """Returns the optimum at the first position of the grid from here up that has one; None if none has."""
        for place in range(_LAST, position - 1, -_BETWEEN):
            if place not in self._optima:
                above = self._optima.get(place + _BETWEEN)
                try:
                    self._optima[place] = self.solve(self.limits(place), ahead=self.ahead, like=above)
                except Infeasible:
                    self._optima[place] = above
        return self._optima[_LAST - (_LAST - position) // _BETWEEN * _BETWEEN]


class Rule(NamedTuple):
    """A rule about where homes are. ``decided``: those that are on the device (True) or on the host, whatever the program says.
    ``earliest``: of equal homes, those read first are on the device: they are updated last, and the next step would wait for
    them; otherwise those that the program prefers."""

    decided: Mapping[str, bool] = MappingProxyType({})
    earliest: bool = False


class Seeds(Sequence[Plan]):
    """Plans from the fewest device bytes to the most, each made when it is asked for. ``solve``: of the relaxed problem;
    ``optima``: of the same. They fetch as many blocks ahead as ``base`` does."""

    def __init__(
        self,
        solve: Solve,
        optima: Optima,
        base: Plan,
        blocks: Sequence[Block],
        sizes: Mapping[str, int],
        rule: Rule,
    ) -> None:
        self.solve, self.optima, self.base, self.blocks, self.sizes, self.rule = solve, optima, base, blocks, sizes, rule
        self._plans: dict[int, Plan] = {}

    def __len__(self) -> int:
        return 1 + _LAST

    def __getitem__(self, position: Any) -> Any:
        if position not in self._plans:
            limits, like = self.optima.limits(position), self.optima.near(position)
            self._plans[position] = seed(self.solve, limits, self.base, self.blocks, self.sizes, self.rule, like)
        return self._plans[position]


def seed(
    solve: Solve,
    limits: Mapping[str, int | None],
    base: Plan,
    blocks: Sequence[Block],
    sizes: Mapping[str, int],
    rule: Rule,
    like: Relaxed | None = None,
) -> Plan:
    """Returns the plan that decides as the optimum within ``limits`` does; ``base`` if there is none. ``like``: as for
    ``solve``; for the others see ``Seeds``."""
    try:
        relaxed = _with_whole_homes(solve, limits, base.lookahead, sizes, rule, like)
    except Infeasible:
        return base
    return rounded(relaxed, base, blocks, sizes, rule.earliest)


def _with_whole_homes(
    solve: Solve,
    limits: Mapping[str, int | None],
    ahead: int,
    sizes: Mapping[str, int],
    rule: Rule,
    like: Relaxed | None,
) -> Relaxed:
    """Solves again with every home wholly on one tier: homes are large, and what blocks keep must fit beside them. The number
    of homes on the device is the sum of their shares, rounded; if that does not fit, 1, 3, 7, ... fewer of them: those that
    are preferred least go first."""
    relaxed = solve(limits, rule.decided, ahead, like)
    places = {home: float(-place) for place, home in enumerate(relaxed.resident)}
    preferred = places if rule.earliest else relaxed.resident
    chosen = sorted(_chosen(relaxed.resident, sizes, preferred), key=lambda home: -preferred[home])
    fewer = 0
    while True:
        on_device = set(chosen[: max(0, len(chosen) - fewer)])
        whole = {home: home in on_device for home in relaxed.resident}
        try:
            return solve(limits, whole | dict(rule.decided), ahead, relaxed)
        except Infeasible:
            if not on_device:
                raise
        fewer = 2 * fewer + 1


def seed_ladders(
    solve: Solve, least: Plan, blocks: Sequence[Block], sizes: Mapping[str, int], device: tuple[int, int], homes: Sequence[str]
) -> list[Seeds]:
    """Returns seeds by a few rules about where homes are. ``least``: decides what the program does not; ``homes``: those whose
    tier is open; for the others see ``Seeds``."""
    bases = [replace(least, lookahead=ahead, pooled=True) for ahead in _AHEAD]
    # The first and the last home are updated last and read first: what they would keep waiting says little of the others.
    ends = [{homes[0]: True}, {homes[0]: True, homes[-1]: True}] if len(homes) > 1 else []
    rules = [Rule(decided) for decided in ({}, *ends, dict.fromkeys(homes, False))]
    rules += [Rule(earliest=True)] if len(homes) > 1 else []
    optima = {base.lookahead: Optima(solve, device, base.lookahead) for base in bases}
    return [Seeds(solve, optima[base.lookahead], base, blocks, sizes, rule) for rule, base in product(rules, bases)]


def _chosen(resident: Mapping[str, float], sizes: Mapping[str, int], preferred: Mapping[str, float]) -> set[str]:
    """The homes to keep on the device: of equal ones, as many as their shares add up to, the most ``preferred`` first."""
    chosen: set[str] = set()
    for homes in _alike(resident, sizes):
        count = round(sum(resident[home] for home in homes) + 1e-6)
        chosen |= set(sorted(homes, key=lambda home: -preferred[home])[:count])
    return chosen


def rounded(relaxed: Relaxed, base: Plan, blocks: Sequence[Block], sizes: Mapping[str, int], latest_stay: bool = False) -> Plan:
    """Returns the plan that decides as a solution does, in which homes are whole. Of equal blocks as many take each option as
    its shares add up to; those that send values home are spread evenly, so that copies never pile up, and the later ones, whose
    values live shortest, keep most. ``latest_stay``: of equal homes that stay from the forward to the backward, those read last
    do, for the same reason; otherwise those that the program prefers."""
    decisions = []
    for home, share in relaxed.resident.items():
        if base.params(home) == "disk":
            continue
        decisions.append(Decision("params", home, "device" if share > 0.5 else "host", sizes[home], _WHY))
    on_host = {home: share for home, share in relaxed.staying.items() if relaxed.resident[home] <= 0.5}
    places = {home: float(place) for place, home in enumerate(on_host)}
    staying = _chosen(on_host, sizes, places if latest_stay else on_host)
    decisions += [Decision("fetch", home, "keep", sizes[home], _WHY) for home in on_host if home in staying]
    alike: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        alike[id(block.variants)].append(block)
    for members in alike.values():
        totals: dict[Option, float] = defaultdict(float)
        away = round(sum(relaxed.crossing[block.index][1] for block in members))
        for block in members:
            for option, fraction in relaxed.options[block.index]:
                totals[option] += fraction
        options = _spread(_apportioned(totals, len(members)), lambda option: option.variant.nbytes * (option.tier == "host"))
        tiers: list[Choice] = ["device", "host"]
        places = _spread([tiers[n < away] for n in reversed(range(len(members)))], lambda place: place == "host")
        for block, option, place in zip(members, options, places, strict=True):
            decisions += _block_decisions(block, option, place)
    named = {(d.kind, d.subject) for d in decisions}
    others = [d for d in base.decisions if (d.kind, d.subject) not in named]
    return replace(base, decisions=(*others, *decisions))


def _alike(resident: Mapping[str, float], sizes: Mapping[str, int]) -> list[list[str]]:
    """Homes of equal size, together, except the first and the last: what they keep waiting is another."""
    homes = list(resident)
    alike: dict[object, list[str]] = defaultdict(list)
    for home in homes:
        alike[home if home in (homes[0], homes[-1]) else sizes[home]].append(home)
    return list(alike.values())


def _apportioned(totals: Mapping[Option, float], count: int) -> list[Option]:
    """Returns ``count`` options, each as often as its total, by the largest remainders; by rising bytes."""
    whole = {option: int(total + 1e-6) for option, total in totals.items()}
    by_remainder = sorted(totals, key=lambda option: (whole[option] - totals[option], option.variant.nbytes))
    for option in by_remainder[: count - sum(whole.values())]:
        whole[option] += 1
    return sorted((o for o, n in whole.items() for _ in range(n)), key=lambda option: (option.variant.nbytes, option.tier))


def _spread(choices: Sequence[T], weight: Callable[[T], float]) -> list[T]:
    """Returns the choices in an order in which their weights add up evenly; of equal weights, the first come first."""
    remaining, spread = list(choices), []
    total = sum(map(weight, choices))
    so_far = 0.0
    for place in range(1, len(choices) + 1):
        due = total * place / len(choices) - so_far
        choice = min(dict.fromkeys(remaining), key=lambda choice: abs(due - weight(choice)))
        so_far += weight(choice)
        remaining.remove(choice)
        spread.append(choice)
    return spread


def _block_decisions(block: Block, option: Option, place: Choice) -> list[Decision]:
    tier: Choice = "device" if option.tier == "device" else "host"
    decisions = [variant_decision(block.name, block.saved, option.variant, _WHY)]
    values = [(block.saved[i], tier) for i in option.variant.positions]
    values += [(value, place) for value in (*block.crossing, *block.others)]
    return decisions + [Decision("activation", value.name, where, value.meta["nbytes"], _WHY) for value, where in values]
