"""Solves linear programs with HiGHS, each from the solution of a similar one.

The programs of one search differ in bytes and in what is decided, so few steps lead from one optimum to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy

Array = Any  # of numpy
# Steepest edges need as many solutions as a program has rows where it begins at the basis of another; Devex needs none.
_DEVEX = 1
_SETTINGS: Mapping[str, Any] = {
    **{"output_flag": False, "presolve": "off", "solver": "simplex", "parallel": "off", "threads": 1},
    "simplex_dual_edge_weight_strategy": _DEVEX,
}
# Where a program has no solution, the basis of another one may lead the simplex method round and round. It asks at each step
# whether it is to go on: after so many, it begins anew without a basis. Few programs need as many. HiGHS's own limit of
# iterations does not end this: it went on for 20 s.
_MOST_STEPS = 500


class Solution(NamedTuple):
    """An optimum: ``values`` of the variables; ``prices``: by row, what a unit more of its limit would spare. ``basis``: what
    another solution may begin at."""

    optimum: float
    values: Array
    prices: Array
    basis: Any


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Rows of a sparse matrix with ``columns`` columns, one behind the other: where each begins, its variables and factors."""

    columns: int
    starts: Array
    variables: Array
    factors: Array


def matrix_of(rows: Sequence[Mapping[int, float]], columns: int) -> Matrix:
    """Returns the matrix of rows that give the factor of each variable."""
    variables = numpy.array([variable for row in rows for variable in row], dtype=numpy.int32)
    factors = numpy.array([factor for row in rows for factor in row.values()], dtype=float)
    return Matrix(columns, numpy.cumsum([0, *map(len, rows)], dtype=numpy.int32), variables, factors)


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
    """Minimizes the first variable of programs with the rows of ``matrix``, of which the first ``equal`` are equations.
    Presolving takes several times as long as solving, and shortens no program of this kind."""

    matrix: Matrix
    equal: int
    _highs: Any = field(init=False)
    _module: Any = field(init=False)
    _bounds: Array = field(init=False)  # of the program that was solved last
    _patience: _Patience = field(init=False)

    def __post_init__(self) -> None:
        import highspy

        matrix, program = self.matrix, highspy.HighsLp()
        rows = len(matrix.starts) - 1
        program.num_col_, program.num_row_ = matrix.columns, rows
        program.col_cost_ = numpy.concatenate([[1.0], numpy.zeros(matrix.columns - 1)])
        program.col_lower_, program.col_upper_ = numpy.zeros(matrix.columns), numpy.zeros(matrix.columns)
        program.row_lower_, program.row_upper_ = numpy.zeros(rows), numpy.zeros(rows)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_, program.a_matrix_.index_ = matrix.starts, matrix.variables
        program.a_matrix_.value_ = matrix.factors
        new: Any = highspy.Highs
        self._module, self._highs = highspy, new()
        for name, value in _SETTINGS.items():
            self._highs.setOptionValue(name, value)
        self._patience = _Patience()
        self._highs.cbSimplexInterrupt += self._patience
        self._highs.passModel(program)
        self._bounds = numpy.zeros((matrix.columns, 2))

    def __call__(self, limits: Array, bounds: Array, like: Any = None) -> Solution | None:
        """Solves a program; None if there is no solution. ``limits``: what each row is at most, the first ones also at least.
        ``bounds``: the lowest and highest value of each variable. ``like``: a basis to begin at."""
        highs, statuses = self._highs, self._module.HighsModelStatus
        self._set(limits, bounds)
        if like is not None:
            highs.setBasis(like)
            self._run(_MOST_STEPS)
        if like is None or highs.getModelStatus() not in (statuses.kOptimal, statuses.kInfeasible):
            highs.clearSolver()
            self._run()
        if highs.getModelStatus() != statuses.kOptimal:
            return None
        solution = highs.getSolution()
        optimum = float(highs.getInfo().objective_function_value)
        return Solution(optimum, numpy.array(solution.col_value), -numpy.array(solution.row_dual), highs.getBasis())

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
