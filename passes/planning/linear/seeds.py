"""Plans to begin a search at: solutions of the relaxed problem within its limits, in whole decisions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.blocks import Block, all_others, blocks_alike, variant_decision
from mtcompile.passes.planning.disk.spacing import spaced
from mtcompile.passes.planning.linear.relaxation import Infeasible, Relaxation, Relaxed
from mtcompile.passes.planning.linear.variables import Option

T = TypeVar("T")
_AHEAD = (1, 2, 3)  # blocks ahead that plans fetch
_TRIES = 3  # plans that are made within limits on both tiers, each within fewer bytes than the one before


def _with_whole_homes(
    solve: Relaxation, limits: Mapping[str, int | None], ahead: int, sizes: Mapping[str, int], relaxed: Relaxed
) -> Relaxed:
    """Solves again with every home wholly on one tier: homes are large, and what blocks keep must fit beside them. The number
    of homes on the device is the sum of their shares, rounded; if that does not fit, 1, 3, 7, ... fewer of them: those that
    are preferred least go first. ``relaxed``: the optimum before."""
    some = _chosen(relaxed.resident, sizes, relaxed.resident)
    chosen = sorted((home for home in relaxed.resident if home in some), key=lambda home: -relaxed.resident[home])
    fewer = 0
    while True:
        on_device = set(chosen[: max(0, len(chosen) - fewer)])
        whole = {home: home in on_device for home in relaxed.resident}
        try:
            return solve(limits, whole, ahead, relaxed)
        except Infeasible:
            if not on_device:
                raise
        fewer = 2 * fewer + 1


class Within(NamedTuple):
    """Seeds within limits on the device and on the host, which may have none (None). ``solve``: see ``Relaxation``;
    ``least``: decides what the program does not; ``held``: bytes by home, with its state."""

    solve: Relaxation
    least: Plan
    rounding: Rounding
    held: Mapping[str, int]

    def plans(self, limits: Mapping[str, int | None], evaluate: Callable[[Plan], Plan]) -> Iterator[Plan]:
        """Yields plans with their figures that are near ``limits``: those in which nothing is streamed for its update, and
        others if that may gain something. ``evaluate``: gives a plan its figures."""
        yield from self._replace(solve=replace(self.solve, streams=False))._plans(limits, evaluate)
        with suppress(Infeasible):
            if self.solve.gains_by_streaming(limits):
                yield from self._plans(limits, evaluate)

    def _plans(self, limits: Mapping[str, int | None], evaluate: Callable[[Plan], Plan]) -> Iterator[Plan]:
        """Yields plans with their figures, a few for each number of blocks that fetches are ahead: as long as one is above a
        limit, the next is made for as many bytes less, and so is, without a limit on the host, the first one for each later
        number."""
        first, aim = None, dict(limits)
        for ahead in _AHEAD:
            within, base, near = dict(aim), self.least.changed(lookahead=ahead, pooled=True), first
            for tries in range(1, _TRIES + 1):
                try:
                    near = self.solve(within, ahead=ahead, like=near)
                    if tries == 1:
                        first = near
                    plan = evaluate(self._rounded(within, base, near))
                except Infeasible:
                    break
                yield plan
                above = {t: plan.peak_bytes.get(t, 0) - most for t, most in limits.items() if most is not None}
                if max(above.values(), default=0) <= 0:
                    break
                for tier, nbytes in above.items():
                    within[tier] = (within[tier] or 0) - tries * max(0, nbytes)
                if tries == 1 and limits["host"] is None:
                    aim = dict(within)

    def _rounded(self, limits: Mapping[str, int | None], base: Plan, optimum: Relaxed) -> Plan:
        """Returns a plan with as many homes on the device as the optimum has there, or, without a limit on the host, a few
        fewer where so many have no room; and at least as many as the host has no room for. Raises Infeasible."""
        if limits["host"] is None:
            fitting = _with_whole_homes(self.solve, limits, base.lookahead, self.rounding.sizes, optimum)
            return self.rounding(fitting, base)
        some = _chosen(optimum.resident, self.rounding.sizes, optimum.resident)
        movable = self.rounding.movable if limits.get("disk") else ()
        order = sorted(optimum.resident, key=lambda home: (home not in some, -optimum.resident[home]))
        count, on_host = len(some), sum(self.held[home] for home in order[len(some) :] if home not in movable)
        while on_host > limits["host"] and count < len(order):
            on_host -= 0 if order[count] in movable else self.held[order[count]]
            count += 1
        whole = {home: place < count for place, home in enumerate(order)}
        return self.rounding(self.solve(limits, whole, base.lookahead, optimum), base)


def _chosen(resident: Mapping[str, float], sizes: Mapping[str, int], preferred: Mapping[str, float]) -> set[str]:
    """The homes to keep on the device: of equal ones, as many as their shares add up to, the most ``preferred`` first."""
    chosen: set[str] = set()
    for homes in _alike(resident, sizes):
        count = round(sum(resident[home] for home in homes) + 1e-6)
        chosen |= set(sorted(homes, key=lambda home: -preferred[home])[:count])
    return chosen


class Rounding:
    """Makes plans of solutions in which homes are whole. ``blocks``: of the step; ``sizes``: bytes of its homes;
    ``movable``: those that may go to disk."""

    def __init__(self, blocks: Sequence[Block], sizes: Mapping[str, int], movable: Sequence[str] = ()) -> None:
        self.sizes, self.movable = sizes, movable
        self._alike = blocks_alike(blocks)
        self._decisions: dict[tuple[int, Option, Choice], list[Decision]] = {}  # about a block: most plans share them

    def __call__(self, relaxed: Relaxed, base: Plan) -> Plan:
        """Returns the plan that decides as a solution does. Of equal blocks as many take each option as its shares add up to;
        those that send values home are spread evenly, so that copies never pile up, and the later ones, whose values live
        shortest, keep most, while the first make values again."""
        decisions, sizes, values = [], self.sizes, relaxed.values
        for home, share in relaxed.resident.items():
            if base.params(home) == "disk":
                continue
            decisions.append(Decision("params", home, "device" if share > 0.5 else "host", sizes[home]))
        there = self._on_disk(relaxed)
        decisions += [Decision("params", home, "disk", sizes[home]) for home in there]
        streaming = {h: share for h, share in relaxed.streamed.items() if relaxed.resident[h] <= 0.5 and h not in there}
        for homes in _alike(streaming, sizes):
            count = round(sum(streaming[home] for home in homes))
            decisions += [Decision("update", home, "device", sizes[home]) for home in spaced(homes, count, 0)]
        on_host = {home: share for home, share in relaxed.staying.items() if relaxed.resident[home] <= 0.5}
        staying = _chosen(on_host, sizes, on_host)
        decisions += [Decision("fetch", home, "keep", sizes[home]) for home in on_host if home in staying]
        if any(values[again] > 0.0 for again in relaxed.choices.again.values()):
            # What a call makes again waits for the backward where it is.
            decisions.append(all_others("device"))
        for members in self._alike:
            totals: dict[Option, float] = defaultdict(float)
            away = round(sum(relaxed.away(block.index) for block in members))
            again = min(len(members) - away, round(sum(map(relaxed.again, members))))
            for block in members:
                for option, variable in relaxed.choices.options[block.index]:
                    totals[option] += values[variable]
            chosen = _apportioned(totals, len(members))
            options = _spread(chosen, lambda option: option.variant.nbytes * (option.tier == "host"))
            somewhere: list[Choice] = ["device"] * (len(members) - away - again) + ["host"] * away
            places = _apart(_spread(somewhere, lambda place: place == "host"), again)
            for block, option, place in zip(members, options, places, strict=True):
                decisions += self._about(block, option, place)
        named = {(d.kind, d.subject) for d in decisions}
        decisions = list({(d.kind, d.subject): d for d in decisions}.values())  # the last one of each
        others = [d for d in base.decisions if (d.kind, d.subject) not in named]
        base = replace(base, disk_lookahead=max(1, base.disk_lookahead)) if there else base
        return replace(base, decisions=(*others, *decisions))

    def _on_disk(self, relaxed: Relaxed) -> list[str]:
        """The homes that are on disk: of equal ones that are not on the device, as many as their shares add up to, spread
        evenly over the step."""
        outside = {h: relaxed.on_disk.get(h, 0.0) for h in self.sizes if h in self.movable and relaxed.resident[h] <= 0.5}
        alike = [homes for homes in _alike(outside, self.sizes) if sum(outside[home] for home in homes) >= 0.5]
        return [h for homes in alike for h in spaced(homes, round(sum(outside[home] for home in homes)), 0)]

    def _about(self, block: Block, option: Option, place: Choice) -> list[Decision]:
        key = block.index, option, place
        if key not in self._decisions:
            self._decisions[key] = _block_decisions(block, option, place)
        return self._decisions[key]


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


def _apart(kept: Sequence[Choice], again: int) -> list[Choice]:
    """Returns the places of ``kept`` values as far apart as they can be, with ``again`` that are made again between them."""
    places, count = list[Choice](["recompute"] * (len(kept) + again)), len(kept) + again
    for number, place in enumerate(kept, 1):
        places[(count + 1) * number // (len(kept) + 1) - 1] = place
    return places


def _block_decisions(block: Block, option: Option, place: Choice) -> list[Decision]:
    tier: Choice = "device" if option.tier == "device" else "host"
    decisions = [variant_decision(block.name, block.saved, option.variant)]
    values = [(block.saved[i], tier) for i in option.variant.positions]
    values += [(value, place) for value in block.crossing]
    values += [(value, place if block.saved else "device") for value in block.others]  # calls in between would send those home
    return decisions + [Decision("activation", value.name, where, value.meta["nbytes"]) for value, where in values]
