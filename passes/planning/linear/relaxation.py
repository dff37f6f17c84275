"""The planning problem as a linear program: what of each block to keep where, and which homes are resident.

Everything that overlaps perfectly is allowed to, memory is counted only where it must be live, and decisions may be taken in
part. So the optimum is a lower bound of every plan's time, and its prices say what more of each resource would give. Rounded to
whole decisions, it is a plan to start from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import MappingProxyType
from typing import NamedTuple, Protocol

from mtcompile.passes.analysis.state import held_nbytes, on_disk_nbytes, trained_nbytes
from mtcompile.passes.plan import Certificate
from mtcompile.passes.planning.blocks import Block
from mtcompile.passes.planning.linear.blocks import Choices, place_blocks
from mtcompile.passes.planning.linear.exposed import Gap, gaps_between
from mtcompile.passes.planning.linear.homes import HomeCost, home_costs, place_casts
from mtcompile.passes.planning.linear.memory import Waits, hold_memory, waiting
from mtcompile.passes.planning.linear.program import Counted, Infeasible, added, gains_us
from mtcompile.passes.planning.linear.queues import take_time
from mtcompile.passes.planning.linear.solver import Solution
from mtcompile.passes.planning.linear.terms import Load, Terms, terms_of
from mtcompile.passes.planning.problem import Candidate, PlanningProblem
from mtcompile.runtime.schedule import PHASES, Schedule

_GIB = 1 << 30
_COUNTED = Counted()  # where the optimum is a bound
_FASTER = 0.999  # of the µs: less is not worth a search


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The optimum. ``bound_us``: no plan is faster. ``resident``: home -> share on the device; ``staying``: share that is
    elsewhere and stays on the device from its forward to its backward; ``on_disk``: share there, if there is one. ``choices``:
    the variables of blocks, and ``values``: their shares. ``gains_us``: finds those of a Certificate. ``solution``: of the
    program."""

    bound_us: float
    resident: Mapping[str, float]
    staying: Mapping[str, float]
    on_disk: Mapping[str, float]
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


class Solve(Protocol):
    """See ``Relaxation``."""

    def __call__(
        self,
        limits: Mapping[str, int | None],
        decided: Mapping[str, bool] = MappingProxyType({}),
        ahead: int = 0,
        like: Relaxed | None = None,
        inside: bool = True,
    ) -> Relaxed: ...


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The linear program of a problem: a function that solves it for a limit in bytes per tier (None: no limit) and raises
    Infeasible. ``decided``: homes that are on the device (True) or on the host. ``ahead``: how many blocks ahead prefetches are
    in memory, beside what must be there; the optimum bounds all plans only if it is 0. ``like``: an optimum for the same tiers
    and similar limits, to begin at. ``inside``: False leaves out all that a block's work needs only while it runs, of which
    other forms of the step need less.

    ``_built``: by whether the optimum is to be a bound; ``_known``: optima, with what each began at, whose identity is in its
    key."""

    problem: PlanningProblem
    blocks: Sequence[Block]
    costs: Mapping[str, HomeCost]
    _built: dict[bool, _Built] = field(default_factory=dict)
    _known: dict[object, tuple[Relaxed, Relaxed | None]] = field(default_factory=dict)

    def __call__(
        self,
        limits: Mapping[str, int | None],
        decided: Mapping[str, bool] = MappingProxyType({}),
        ahead: int = 0,
        like: Relaxed | None = None,
        inside: bool = True,
    ) -> Relaxed:
        counted = Counted(ahead, inside)
        key = *limits.items(), frozenset(decided.items()), counted, id(like)
        if key in self._known:
            return self._known[key][0]
        terms, choices, _, _ = self._counting(counted)
        fixed = {terms.away[home]: 0.0 if resident else 1.0 for home, resident in decided.items()}
        solution, rows = terms.program.solve(limits, counted, fixed, None if like is None else like.solution)
        values: list[float] = solution.values.tolist()
        relaxed = Relaxed(
            solution.optimum,
            {home: 1.0 - values[variable] for home, variable in terms.away.items()},
            {home: values[variable] for home, variable in terms.staying.items()},
            {home: values[variable] for home, variable in terms.on_disk.items()},
            choices,
            values,
            partial(gains_us, rows, values, solution.prices[len(solution.prices) - len(rows) :]),
            solution,
        )
        self._known[key] = relaxed, like
        return relaxed

    def least_nbytes(self, tier: str, limits: Mapping[str, int | None]) -> int | None:
        """Returns bytes of a tier that any plan within ``limits`` on others needs at least, however long it takes; None if
        there can be no plan."""
        try:
            return self._counting(_COUNTED).terms.program.least_nbytes(tier, limits, _COUNTED)
        except Infeasible:
            return None

    def _counting(self, counted: Counted) -> _Built:
        """The program, with the rows of memory that count so."""
        if (bounds := not counted.ahead) not in self._built:
            self._built[bounds] = _build(self.problem, self.blocks, self.costs, bounds)
        built = self._built[bounds]
        if counted not in built.terms.program.held:
            hold_memory(self.problem, self.blocks, built.terms, built.choices, built.waits, counted, built.gaps)
        return built


class _Built(NamedTuple):
    """The program, but for the rows of memory."""

    terms: Terms
    choices: Choices
    gaps: Sequence[Gap]
    waits: Waits


def _build(problem: PlanningProblem, blocks: Sequence[Block], costs: Mapping[str, HomeCost], bounds: bool) -> _Built:
    """Builds the program. ``bounds``: with the time between two backwards, which those that fetch ahead do without: they have
    the room for it, and a program with more variables has another of its optima."""
    terms = terms_of(problem.step, problem.budgets.disk is not None)
    _place_homes(problem, costs, terms)
    place_casts(problem, terms)
    choices = place_blocks(problem, blocks, terms, bounds)
    if terms.on_disk and problem.budgets.host_activations:
        _send_on(problem, terms, choices)
    gaps = gaps_between(problem, costs, terms, choices) if bounds else []
    take_time(problem, terms)
    return _Built(terms, choices, gaps, waiting(problem, blocks, terms, choices))


class Bounds:
    """The bounds of a problem on the time of its plans. ``streamed``: a schedule with every home on the host, with casts there;
    ``resident``: the plan with everything on the device; ``solve``: its program."""

    def __init__(self, problem: PlanningProblem, blocks: Sequence[Block], streamed: Schedule, resident: Candidate) -> None:
        self.problem, self.blocks = problem, blocks
        self.costs = home_costs(problem, streamed, resident.schedule)
        self.solve = Relaxation(problem, blocks, self.costs)
        self._outside: dict[object, Relaxed] = {}  # by limits, as they were asked for

    def us(self, limits: Mapping[str, int | None], inside: bool = True) -> float:
        """The µs of the fastest plan that could be within ``limits``; infinite if there can be none.
        ``inside``: see ``Relaxation``."""
        try:
            return (self.solve(limits) if inside else self._without_insides(limits)).bound_us
        except Infeasible:
            return inf

    def _without_insides(self, limits: Mapping[str, int | None]) -> Relaxed:
        if (key := tuple(limits.items())) not in self._outside:
            last = next(reversed(self._outside.values()), None)  # of several optima, any will do: only their µs are used
            self._outside[key] = self.solve(limits, inside=False, like=last)
        return self._outside[key]

    def certificate(self, limits: Mapping[str, int | None]) -> Certificate | None:
        """How fast any plan within ``limits`` could be, in bytes per tier; None if there can be none."""
        with suppress(Infeasible):
            relaxed = self.solve(limits)
            gains_us = relaxed.gains_us()
            for tier, nbytes in limits.items():
                if nbytes is not None and tier != "disk":
                    more = self.solve({**limits, tier: nbytes + _GIB}, like=relaxed)
                    gains_us[f"{tier} memory"] = relaxed.bound_us - more.bound_us
            return Certificate(relaxed.bound_us, {what: us for what, us in gains_us.items() if us > 1e-3})
        return None


def faster_than_resident(problem: PlanningProblem, solve: Solve, homes: Iterable[str], resident_us: float) -> bool:
    """Tells whether a step could be faster than with all ``homes`` on the device, however much memory there is: the host may
    update some while the device computes, or, where others are fixed elsewhere, these may be fetched better than in the plan
    that takes ``resident_us``."""
    unlimited: dict[str, int | None] = {"device": None, "host": None, "disk": problem.budgets.disk}
    with suppress(Infeasible):
        if all(tier == "device" for tier in problem.fixed_homes.values()):
            resident_us = solve(unlimited, dict.fromkeys(homes, True)).bound_us
        return solve(unlimited).bound_us < _FASTER * resident_us
    return False


def _place_homes(problem: PlanningProblem, costs: Mapping[str, HomeCost], terms: Terms) -> None:
    """Adds what the share of each home that is on the host costs, and what it leaves free on the device."""
    held = held_nbytes(problem.step, problem.budgets)
    for home, tier in problem.fixed_homes.items():
        if home in terms.away:
            terms.program.equal.append(({terms.away[home]: 1.0}, 0.0 if tier == "device" else 1.0))
    for home, variable in terms.away.items():
        cost, low, high, stays = costs[home], *terms.blocks[home], terms.staying[home]
        terms.program.at_most({stays: 1.0, variable: -1.0})
        for phase in PHASES:
            fetches = {variable: 1.0} if phase == "forward" else {variable: 1.0, stays: -1.0}
            terms.loads["h2d", phase].append(Load(low, high, {v: n * cost.fetch_us[phase] for v, n in fetches.items()}))
            for v, n in fetches.items():
                terms.copied[phase][v] += n * cost.fetched[phase]
        terms.copied["backward"][variable] += cost.stored
        terms.loads["d2h", "backward"].append(Load(low, high, {variable: cost.store_us}))
        terms.loads["host", "backward"].append(Load(low, high, {variable: cost.update_us}))
        # Updates on the device run beside a block's other work, held ones last of all: only all blocks together count them.
        terms.loads["compute", "backward"].append(Load(-1, high, {variable: -cost.device_update_us}, cost.device_update_us))
        terms.held["device"][variable] -= held[home]
        terms.held["host"][variable] += held[home]
        if home in terms.on_disk:
            _place_on_disk(problem, home, cost, terms)


def _place_on_disk(problem: PlanningProblem, home: str, cost: HomeCost, terms: Terms) -> None:
    """Adds what the share of a home that is on disk costs beside what it would on the host, and what it leaves free there."""
    step, machine, budgets, program = problem.step, problem.machine, problem.budgets, terms.program
    variable, away, stays, again = terms.on_disk[home], terms.away[home], terms.staying[home], program.variable()
    (low, high), trained, tier = terms.blocks[home], trained_nbytes(step)[home], problem.fixed_homes.get(home)
    program.at_most({variable: 1.0, away: -1.0})
    program.at_most({variable: 1.0, stays: -1.0, again: -1.0})
    may_move = home in budgets.disk_takes or tier is None
    if tier == "disk" or not may_move or (trained and not budgets.disk_updates):
        program.equal.append(({variable: 1.0}, 1.0 if tier == "disk" else 0.0))
    for phase, read in (("forward", variable), ("backward", again)):
        us = machine.copy_us(cost.fetched[phase], "disk_read")
        terms.loads["disk_read", phase].append(Load(low, high, {read: us}))
    more_us = max(0.0, cost.disk_update_us - cost.update_us)
    terms.loads["disk", "backward"].append(Load(low, high, {variable: more_us}))
    terms.loads["drive", "backward"].append(Load(low, high, {variable: cost.drive_us}))
    terms.held["host"][variable] -= held_nbytes(step, budgets)[home]
    terms.held["disk"][variable] += on_disk_nbytes(step, budgets)[home]


def _send_on(problem: PlanningProblem, terms: Terms, choices: Choices) -> None:
    """Adds the bytes of activations that wait on the host and go on to the disk, all together: each is written once, and read
    once by the backward."""
    machine, nbytes = problem.machine, terms.program.variable(None)  # in GiB
    waiting = added(*choices.back.values(), *({away: n for n, _, away in places} for places in choices.crossing.values()))
    terms.program.at_most({nbytes: 1.0, **{variable: -n / _GIB for variable, n in waiting.items()}})
    terms.loads["disk_read", "backward"].append(Load(-1, 1 << 29, {nbytes: machine.copy_us(_GIB, "disk_read")}))
    terms.program.takes(dict.fromkeys(terms.span.values(), 1.0), {"disk": ({nbytes: machine.copy_us(_GIB, "disk_write")}, 0.0)})
    terms.held["host"][nbytes] -= _GIB
    terms.held["disk"][nbytes] += _GIB
