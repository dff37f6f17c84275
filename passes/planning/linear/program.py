"""A linear program in rows that say what takes time and what holds bytes, solved by HiGHS.

The programs of one search differ in bytes and in what is decided, so few steps lead from one optimum to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy

GIB = 1 << 30
_NBYTES = -1  # the variable, before the first, that is minimized in place of it: bytes of a tier, in GiB
Array = Any  # of numpy
_SETTINGS: Mapping[str, Any] = {
    **{"output_flag": False, "presolve": "off", "solver": "simplex", "parallel": "off", "threads": 1},
}
Equation = tuple[dict[int, float], float]  # the sum of its terms, and what it is
Work = tuple[Mapping[int, float], float]  # µs per unit of each variable, and constant µs


class Solution(NamedTuple):
    """An optimum: ``values`` of the variables; ``prices``: by row, what a unit more of its limit would spare. ``basis``: what
    another solution may begin at."""

    optimum: float
    values: Array
    prices: Array
    basis: Any


@dataclass(slots=True)
class _Patience:
    """Stops the solver once no steps are ``left``: it asks at each whether to go on."""

    left: float = inf

    def __call__(self, event: Any) -> None:
        self.left -= 1
        if event.data_in is not None:
            event.data_in.user_interrupt = self.left < 0  # HiGHS remembers the answer


@dataclass(slots=True)
class Solver:
    """Minimizes the first of ``columns`` variables in programs with ``rows``, which give the factor of each variable, and of
    which the first ``equal`` are equations. Presolving takes several times as long as solving, and shortens no program of this
    kind. ``most_steps``: from a basis; then it begins anew without one, as a basis may lead round and round where there is no
    solution. HiGHS's own limit of iterations does not end that: it went on for 20 s. Default: one for each row."""

    rows: Sequence[Mapping[int, float]]
    columns: int
    equal: int
    most_steps: int | None = None
    _highs: Any = field(init=False)
    _module: Any = field(init=False)
    _bounds: Array = field(init=False)  # of the program that was solved last
    _patience: _Patience = field(init=False)

    def __post_init__(self) -> None:
        import highspy

        rows, columns, program = len(self.rows), self.columns, highspy.HighsLp()
        program.num_col_, program.num_row_ = columns, rows
        program.col_cost_ = numpy.eye(1, columns)[0]
        program.col_lower_, program.col_upper_ = numpy.zeros(columns), numpy.zeros(columns)
        program.row_lower_, program.row_upper_ = numpy.zeros(rows), numpy.zeros(rows)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = numpy.cumsum([0, *map(len, self.rows)], dtype=numpy.int32)
        program.a_matrix_.index_ = numpy.array([variable for row in self.rows for variable in row], dtype=numpy.int32)
        program.a_matrix_.value_ = numpy.array([factor for row in self.rows for factor in row.values()], dtype=float)
        new: Any = highspy.Highs
        self._module, self._highs = highspy, new()
        for name, value in _SETTINGS.items():
            self._highs.setOptionValue(name, value)
        # Steepest edges need as many solutions as a program has rows where it begins at the basis of another; Devex needs none.
        devex = highspy.simplex_constants.SimplexEdgeWeightStrategy.kSimplexEdgeWeightStrategyDevex
        self._highs.setOptionValue("simplex_dual_edge_weight_strategy", int(devex))
        self._patience = _Patience()
        self._highs.cbSimplexInterrupt += self._patience
        self._highs.passModel(program)
        self._bounds = numpy.zeros((columns, 2))

    def __call__(self, limits: Array, bounds: Array, like: Any = None) -> Solution | None:
        """Solves a program; None if there is no solution. ``limits``: what each row is at most, the first ones also at least.
        ``bounds``: the lowest and highest value of each variable. ``like``: a basis to begin at."""
        highs, statuses = self._highs, self._module.HighsModelStatus
        self._set(limits, bounds)
        if like is not None:
            highs.setBasis(like)
            self._run(len(self.rows) if self.most_steps is None else self.most_steps)
        if like is None or highs.getModelStatus() not in (statuses.kOptimal, statuses.kInfeasible):
            highs.clearSolver()
            self._run()
        if highs.getModelStatus() != statuses.kOptimal:
            return None
        solution = highs.getSolution()
        optimum = float(highs.getInfo().objective_function_value)
        return Solution(optimum, numpy.array(solution.col_value), -numpy.array(solution.row_dual), highs.getBasis())

    @property
    def tolerance(self) -> float:
        """By how much a solution may break a row."""
        return float(self._highs.getOptionValue("primal_feasibility_tolerance")[1])

    def _run(self, most_steps: float = inf) -> None:
        """Solves the program. HiGHS has as many threads as its first run in this process, and refuses another number."""
        self._patience.left = most_steps
        if self._highs.run() == self._module.HighsStatus.kError:
            self._highs.setOptionValue("threads", 0)  # as many as there are: results are those of one
            self._highs.run()

    def _set(self, limits: Array, bounds: Array) -> None:
        highs, rows = self._highs, len(limits)
        lowest = numpy.full(rows, -numpy.inf)
        lowest[: self.equal] = limits[: self.equal]
        changed = numpy.flatnonzero((bounds != self._bounds).any(axis=1)).astype(numpy.int32)
        self._bounds = bounds
        highs.clearSolver()  # what was solved before must not show: of several optima, the same one is taken every time
        highs.changeColsBounds(len(changed), changed, *(numpy.ascontiguousarray(bounds[changed, side]) for side in (0, 1)))
        highs.changeRowsBounds(rows, numpy.arange(rows, dtype=numpy.int32), lowest, limits)


class Counted(NamedTuple):
    """Says what rows of memory count: what blocks fetch ``ahead``; whether anything is that a block's own work needs while it
    runs (``inside``)."""

    ahead: int = 0
    inside: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """The sum of ``terms`` is at most ``limit``, plus the budget of ``tier`` in GiB if there is one. ``work``: by resource, the
    µs that more of it would shorten."""

    terms: dict[int, float]
    limit: float
    tier: str | None
    work: Mapping[str, Work]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The program as a solver takes it, made once for all budgets: equations first, then the ``rows``; ``limits`` of both, to
    which the places ``of_tier`` add a budget in GiB; the lowest and the highest value of each variable. ``start``: the basis of
    the solution without budgets."""

    solver: Solver
    rows: Sequence[Row]
    limits: Any
    of_tier: Mapping[str, Sequence[int]]
    bounds: Any
    start: Any


@dataclass(slots=True)
class Program:
    """Minimize the first variable, so that every row's sum is at most its limit. Variables are at least zero but for those
    that are ``signed``, the sums. ``held``: rows of memory, by what they count (see ``Relaxation``); all others are the same
    for all of these."""

    upper: list[float | None] = field(default_factory=lambda: [None])
    signed: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    equal: list[Equation] = field(default_factory=list)
    held: dict[Counted, list[Row]] = field(default_factory=lambda: defaultdict(list))
    _prepared: dict[tuple[Counted, tuple[str, ...]], _Prepared] = field(default_factory=dict)

    def variable(self, upper: float | None = 1.0) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def summed(self, terms: Mapping[int, float], unit: float = 1.0) -> dict[int, float]:
        """Returns a sum as one new variable, in ``unit``: rows that share it stay short."""
        if len(terms) < 2:
            return dict(terms)
        variable = self.variable(None)
        self.signed.append(variable)
        self.equal.append(({variable: -1.0} | {v: factor / unit for v, factor in terms.items()}, 0.0))
        return {variable: unit}

    def takes(self, span: Mapping[int, float], work: Mapping[str, Work], *beside: Mapping[int, float]) -> None:
        """Adds a row: ``work`` by resource, and what is ``beside``, take no longer than ``span`` altogether."""
        terms = added({variable: -factor for variable, factor in span.items()}, *(us for us, _ in work.values()), *beside)
        self.rows.append(Row(terms, -sum(fixed for _, fixed in work.values()), None, work))

    def at_most(self, terms: dict[int, float], limit: float = 0.0) -> None:
        """Adds a row: a sum that takes neither time nor memory."""
        self.rows.append(Row(terms, limit, None, {}))

    def holds(self, counted: Counted, tier: str, terms: Mapping[int, float], fixed: float) -> None:
        """Adds a row: bytes that a tier holds."""
        in_gib = {variable: nbytes / GIB for variable, nbytes in terms.items()}  # about as large as other rows' factors
        self.held[counted].append(Row(in_gib, -fixed / GIB, tier, {}))

    def solve(
        self,
        budgets: Mapping[str, int | None],
        counted: Counted,
        fixed: Mapping[int, float] = MappingProxyType({}),
        like: Solution | None = None,
    ) -> tuple[Solution, Sequence[Row]] | None:
        """Solves the program without the rows of tiers that have no budget, with some variables ``fixed``. ``like``: a solution
        for the same tiers to begin at; it is left out if its program had another number of rows. Returns the solution, if there
        is one, and the rows, whose prices are its last ones. No variable and no row may be added any more."""
        prepared, limits = self._within(budgets, counted)
        bounds = prepared.bounds.copy()
        for variable, value in fixed.items():
            bounds[variable] = value
        basis = prepared.start if like is None or len(like.prices) != len(limits) else like.basis
        solution = prepared.solver(limits, bounds, basis)
        return None if solution is None else (solution, prepared.rows)

    def least_nbytes(self, tier: str, budgets: Mapping[str, int | None], counted: Counted) -> int | None:
        """Returns bytes of a tier that the program has no solution with fewer of, within ``budgets`` of others and in any time;
        None if it has none at all."""
        limited = {each: nbytes for each, nbytes in budgets.items() if nbytes is not None and each != tier}
        rows = [*self.rows, *(row for row in self.held[counted] if row.tier in (tier, *limited))]
        in_gib = [{_NBYTES: -1.0} if row.tier == tier else {} for row in rows]
        terms = [*(terms for terms, _ in self.equal), *(row.terms | more for row, more in zip(rows, in_gib, strict=True))]
        by_column = [{1 + variable: factor for variable, factor in each.items()} for each in terms]
        limits = [limit for _, limit in self.equal] + [row.limit + limited.get(row.tier or "", 0) / GIB for row in rows]
        bounds = numpy.concatenate([[[0.0, numpy.inf]], self._bounds()])
        solver = Solver(by_column, len(bounds), len(self.equal))
        solution = solver(numpy.array(limits, dtype=float), bounds)
        return None if solution is None else max(0, int((solution.optimum - solver.tolerance) * GIB))

    def _within(self, budgets: Mapping[str, int | None], counted: Counted) -> tuple[_Prepared, Any]:
        """The program without the rows of tiers that have no budget, and the limits of its rows."""
        limited = tuple(tier for tier, nbytes in budgets.items() if nbytes is not None)
        if (counted, limited) not in self._prepared:
            rows = [*self.rows, *(row for row in self.held[counted] if row.tier in limited)]
            self._prepared[counted, limited] = self._prepare(rows)
        prepared = self._prepared[counted, limited]
        limits = prepared.limits.copy()
        for tier in limited:
            limits[prepared.of_tier[tier]] += (budgets[tier] or 0) / GIB
        return prepared, limits

    def _prepare(self, rows: Sequence[Row]) -> _Prepared:
        equal, bounds = self.equal, self._bounds()
        by_tier: dict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(rows, len(equal)):
            by_tier[row.tier or ""].append(number)
        limits = numpy.array([limit for _, limit in equal] + [row.limit for row in rows], dtype=float)
        terms = [*(terms for terms, _ in equal), *(row.terms for row in rows)]
        solve = Solver(terms, len(bounds), len(equal))
        unlimited = limits.copy()
        for tier in by_tier.keys() - {""}:
            unlimited[by_tier[tier]] = numpy.inf
        first = solve(unlimited, bounds)
        return _Prepared(solve, rows, limits, by_tier, bounds, None if first is None else first.basis)

    def _bounds(self) -> Any:
        """The lowest and the highest value of each variable."""
        bounds = numpy.zeros((len(self.upper), 2))
        bounds[:, 1] = [numpy.inf if upper is None else upper for upper in self.upper]
        bounds[self.signed, 0] = -numpy.inf
        return bounds


def gains_us(rows: Sequence[Row], values: Any, prices: Any) -> dict[str, float]:
    """Returns what a tenth more of each resource that takes time saves, by the prices of its rows."""
    gains: dict[str, float] = defaultdict(float)
    for row, price in zip(rows, prices, strict=True):
        for resource, (us, fixed) in row.work.items():
            work = sum(factor * values[variable] for variable, factor in us.items()) + fixed
            gains[resource] += float(price) * work * (1 - 1 / 1.1)
    return {resource: float(gain) for resource, gain in gains.items() if gain > 1e-3}


def added(*parts: Mapping[int, float]) -> dict[int, float]:
    total: dict[int, float] = defaultdict(float)
    for part in parts:
        for variable, factor in part.items():
            total[variable] += factor
    return total
