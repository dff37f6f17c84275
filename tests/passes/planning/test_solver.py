"""Linear programs have the same optimum by both interfaces, and the same solution whatever was solved before."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy

from mtcompile.passes.planning.linear.solver import _Highs, _Scipy, matrix_of

_COLUMNS, _EQUAL, _ROWS = 30, 4, 40


def program(seed: int) -> tuple[Any, Any, Any]:
    """A program that has solutions: the time (the first variable) is at least several sums of shares."""
    rnd = random.Random(seed)
    shares = range(1, _COLUMNS)
    equations: list[dict[int, float]] = [dict.fromkeys(rnd.sample(shares, 5), 1.0) for _ in range(_EQUAL)]
    rows = [{0: -1.0} | {v: rnd.uniform(0.5, 2.0) for v in rnd.sample(shares, 8)} for _ in range(_ROWS)]
    limits = numpy.array([1.0] * _EQUAL + [-rnd.uniform(0.0, 3.0) for _ in range(_ROWS)])
    bounds = numpy.array([(0.0, numpy.inf)] + [(0.0, 1.0)] * (_COLUMNS - 1))
    return matrix_of([*equations, *rows], _COLUMNS), limits, bounds


def test_both_interfaces_find_the_same_optimum() -> None:
    for seed in range(20):
        matrix, limits, bounds = program(seed)
        one, other = _Highs(matrix, _EQUAL)(limits, bounds), _Scipy(matrix, _EQUAL)(limits, bounds)
        assert one is not None and other is not None
        assert abs(one.optimum - other.optimum) < 1e-6 and one.optimum > 0
        assert abs(float(one.prices @ limits) - float(other.prices @ limits)) < 1e-6


def test_a_solution_depends_on_the_basis_it_begins_at_and_on_nothing_solved_before() -> None:
    for seed in range(20):
        matrix, limits, bounds = program(seed)
        fresh, used = _Highs(matrix, _EQUAL), _Highs(matrix, _EQUAL)
        first = fresh(limits, bounds)
        for shift in (3.0, -2.0, 0.5):
            used(limits + shift, bounds)
        again = used(limits, bounds)
        assert first is not None and again is not None and numpy.array_equal(first.values, again.values)
        nearby = [one(limits * 1.1, bounds, first.basis) for one in (fresh, used)]
        assert nearby[0] is not None and nearby[1] is not None
        assert numpy.array_equal(nearby[0].values, nearby[1].values)


def test_what_has_no_solution_says_so() -> None:
    matrix, limits, bounds = program(0)
    bounds[1:, 1] = 0.0
    assert _Highs(matrix, _EQUAL)(limits, bounds) is None and _Scipy(matrix, _EQUAL)(limits, bounds) is None
    assert _Highs(matrix, _EQUAL)(limits, program(0)[2]) is not None


def test_both_interfaces_bound_a_program_with_whole_numbers() -> None:
    """The bound is not above the best of all whole numbers, and not far below it; later solutions are in parts again."""
    for seed in range(6):
        matrix, limits, bounds = program(seed)
        whole = random.Random(seed).sample(range(1, _COLUMNS), 5)
        best = numpy.inf
        for values in itertools.product((0.0, 1.0), repeat=len(whole)):
            decided = bounds.copy()
            decided[whole] = [(value, value) for value in values]
            if (solution := _Highs(matrix, _EQUAL)(limits, decided)) is not None:
                best = min(best, solution.optimum)
        for solver in (_Highs(matrix, _EQUAL), _Scipy(matrix, _EQUAL)):
            in_parts = solver(limits, bounds)
            least, found = solver.whole(limits, bounds, whole)
            again = solver(limits, bounds)
            assert in_parts is not None and again is not None and again.optimum == in_parts.optimum
            assert max(in_parts.optimum, 0.995 * best) <= least + 1e-9 and least <= best + 1e-9
            assert found is not None and all(abs(found[v] - round(found[v])) < 1e-6 for v in whole)
