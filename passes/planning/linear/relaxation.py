"""The planning problem as a linear program: what of each block to keep where, and which homes are resident.

Everything that overlaps perfectly is allowed to, memory is counted only where it must be live, and decisions may be taken in
part. So the optimum is a lower bound of every plan's time, and its prices say what more of each resource would give. Rounded to
whole decisions, it is a plan to start from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from torch import fx

from mtcompile.passes.analysis.state import streamable
from mtcompile.passes.plan import Certificate
from mtcompile.passes.planning.blocks import Block
from mtcompile.passes.planning.linear.needs import HomeCost, Needs, home_costs, needs_of
from mtcompile.passes.planning.linear.program import GIB, Counted, Solution, gains_us
from mtcompile.passes.planning.linear.rows import (
    Gap,
    Waits,
    gaps_between,
    gradients_at,
    hold_memory,
    live_at,
    place_casts,
    place_homes,
    send_on,
    take_time,
)
from mtcompile.passes.planning.linear.variables import Choices, Terms, place_blocks, terms_of
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.search import EFFORTS

_COUNTED = Counted()  # where the optimum is a bound


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The optimum. ``bound_us``: no plan is faster. ``resident``: home -> share on the device; ``staying``: share that is
    elsewhere and stays on the device from its forward to its backward; ``on_disk``: share there, if there is one;
    ``streamed``: share that is on the host and updated by the device. ``choices``: the variables of blocks, and ``values``:
    their shares. ``gains_us``: finds those of a Certificate. ``solution``: of the program."""

    bound_us: float
    resident: Mapping[str, float]
    staying: Mapping[str, float]
    on_disk: Mapping[str, float]
    streamed: Mapping[str, float]
    choices: Choices
    values: Sequence[float]
    gains_us: Callable[[], dict[str, float]]
    solution: Solution

    def away(self, block: int) -> float:
        """Returns the share on the host of all bytes that leave a block."""
        places = self.choices.crossing[block]
        return sum(nbytes * self.values[away] for nbytes, _, away in places) / max(1, sum(nbytes for nbytes, _, _ in places))

    def again(self, block: Block) -> float:
        """Returns the share of all bytes that leave a block in which calls of their own make them again."""
        again = self.choices.again
        nbytes = sum(value.meta["nbytes"] * self.values[again[value]] for value in block.crossing if value in again)
        return nbytes / max(1, sum(value.meta["nbytes"] for value in block.crossing))


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The linear program of a problem: a function that solves it for a limit in bytes per tier (None: no limit) and raises
    Infeasible. ``decided``: homes that are on the device (True) or on the host. ``ahead``: how many blocks ahead prefetches are
    in memory, beside what must be there; the optimum bounds all plans only if it is 0. ``like``: an optimum for the same tiers
    and similar limits, to begin at. ``inside``: False leaves out all that a block's work needs only while it runs, of which
    other forms of the step need less. ``streams``: whether the device may update what is at home on the host.

    ``_built``: by whether the optimum is to be a bound; ``_known``: optima, or that there is none, with what each began at,
    whose identity is in its key."""

    problem: PlanningProblem
    blocks: Sequence[Block]
    needs: Mapping[fx.Node, Needs]
    costs: Mapping[str, HomeCost]
    streams: bool = True
    _built: dict[bool, _Built] = field(default_factory=dict)
    _known: dict[object, tuple[Relaxed | None, Relaxed | None]] = field(default_factory=dict)

    def __call__(
        self,
        limits: Mapping[str, int | None],
        decided: Mapping[str, bool] = MappingProxyType({}),
        ahead: int = 0,
        like: Relaxed | None = None,
        inside: bool = True,
    ) -> Relaxed:
        counted = Counted(ahead, inside)
        key = *limits.items(), frozenset(decided.items()), counted, id(like), self.streams
        if key not in self._known:
            self._known[key] = self._solved(limits, decided, counted, like), like
        if (found := self._known[key][0]) is None:
            raise Infeasible("expected a solution of the linear program, found none")
        return found

    def _solved(
        self, limits: Mapping[str, int | None], decided: Mapping[str, bool], counted: Counted, like: Relaxed | None
    ) -> Relaxed | None:
        terms, choices, _, _ = self._counting(counted)
        fixed = {terms.away[home]: 0.0 if resident else 1.0 for home, resident in decided.items()}
        fixed |= {} if self.streams else dict.fromkeys(terms.streamed.values(), 0.0)
        found = terms.program.solve(limits, counted, fixed, None if like is None else like.solution)
        if found is None:
            return None
        solution, rows = found
        values: list[float] = solution.values.tolist()
        return Relaxed(
            solution.optimum,
            {home: 1.0 - values[variable] for home, variable in terms.away.items()},
            {home: values[variable] for home, variable in terms.staying.items()},
            {home: values[variable] for home, variable in terms.on_disk.items()},
            {home: values[variable] for home, variable in terms.streamed.items()},
            choices,
            values,
            partial(gains_us, rows, values, solution.prices[len(solution.prices) - len(rows) :]),
            solution,
        )

    def gains_by_streaming(self, limits: Mapping[str, int | None]) -> bool:
        """Tells whether updates on the device of what is at home on the host may gain what a search must."""
        if not self._counting(_COUNTED).terms.streamed:
            return False
        without = replace(self, streams=False)(limits).bound_us
        return self(limits).bound_us < (1 - EFFORTS[self.problem.effort].gain) * without

    def least_nbytes(self, tier: str, limits: Mapping[str, int | None]) -> int | None:
        """Returns bytes of a tier that any plan within ``limits`` on others needs at least, however long it takes; None if
        there can be no plan."""
        return self._counting(_COUNTED).terms.program.least_nbytes(tier, limits, _COUNTED)

    def _counting(self, counted: Counted) -> _Built:
        """The program, with the rows of memory that count so."""
        if (bounds := not counted.ahead) not in self._built:
            self._built[bounds] = _build(self, bounds)
        built = self._built[bounds]
        if counted not in built.terms.program.held:
            hold_memory(self.problem, self.blocks, built.terms, built.choices, built.waits, counted, built.gaps)
        return built


class Infeasible(Exception):
    """Raised when even the relaxed problem has no solution."""


class _Built(NamedTuple):
    """The program, but for the rows of memory."""

    terms: Terms
    choices: Choices
    gaps: Sequence[Gap]
    waits: Waits


def _build(of: Relaxation, bounds: bool) -> _Built:
    """Builds the program. ``bounds``: with the time between two backwards, which those that fetch ahead do without: they have
    the room for it, and a program with more variables has another of its optima."""
    problem, blocks, costs = of.problem, of.blocks, of.costs
    terms = terms_of(problem.step, of.needs, problem.budgets.disk is not None, streamable(problem.step, problem.budgets))
    place_homes(problem, costs, terms)
    place_casts(problem, terms)
    choices = place_blocks(problem, blocks, terms, bounds)
    if terms.on_disk and problem.budgets.host_activations:
        send_on(problem, terms, choices)
    gaps = gaps_between(problem, costs, terms, choices) if bounds else []
    take_time(problem, terms)
    return _Built(terms, choices, gaps, Waits(live_at(blocks, terms, choices), gradients_at(problem, terms)))


class Bounds:
    """The bounds of a problem on the time of its plans. ``solve``: its program."""

    def __init__(self, problem: PlanningProblem, blocks: Sequence[Block]) -> None:
        needs, updates = needs_of(problem.step), problem.budgets.updates
        self.solve = Relaxation(problem, blocks, needs, home_costs(problem, needs))
        self._held = updates is not None and updates.held

    def us(self, limits: Mapping[str, int | None], inside: bool = True, all_plans: bool = False) -> float:
        """The µs of the fastest plan that could be within ``limits``; infinite if there can be none. ``inside``: see
        ``Relaxation``. ``all_plans``: also of those that no search tries, in which the device updates what is on the host
        though that gains nothing."""
        try:
            streams = all_plans or self._held or self.solve.gains_by_streaming(limits)
            return replace(self.solve, streams=streams)(limits, inside=inside).bound_us
        except Infeasible:
            return inf

    def certificate(self, limits: Mapping[str, int | None]) -> Certificate | None:
        """How fast any plan within ``limits`` could be, in bytes per tier; None if there can be none."""
        with suppress(Infeasible):
            relaxed = self.solve(limits)
            gains_us = relaxed.gains_us()
            for tier, nbytes in limits.items():
                if nbytes is not None and tier != "disk":
                    more = self.solve({**limits, tier: nbytes + GIB}, like=relaxed)
                    gains_us[f"{tier} memory"] = relaxed.bound_us - more.bound_us
            return Certificate(relaxed.bound_us, {what: us for what, us in gains_us.items() if us > 1e-3})
        return None


def faster_than_resident(problem: PlanningProblem, solve: Relaxation, homes: Iterable[str], resident_us: float) -> bool:
    """Tells whether a step could be faster than with all ``homes`` on the device, however much memory there is: the host may
    update some while the device computes, or, where others are fixed elsewhere, these may be fetched better than in the plan
    that takes ``resident_us``."""
    unlimited: dict[str, int | None] = {"device": None, "host": None, "disk": problem.budgets.disk}
    with suppress(Infeasible):
        if all(tier == "device" for tier in problem.fixed_homes.values()):
            resident_us = solve(unlimited, dict.fromkeys(homes, True)).bound_us
        return solve(unlimited).bound_us < (1 - EFFORTS[problem.effort].gain) * resident_us
    return False
