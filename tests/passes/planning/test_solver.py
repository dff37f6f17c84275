"""Linear programs have the same solution whatever was solved before."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy

from mtcompile.passes.planning.linear.program import Solver

_COLUMNS, _EQUAL, _ROWS = 30, 4, 40


def program(seed: int) -> tuple[Any, Any, Any]:
    """A program that has solutions: the time (the first variable) is at least several sums of shares."""
    rnd = random.Random(seed)
    shares = range(1, _COLUMNS)
    equations: list[dict[int, float]] = [dict.fromkeys(rnd.sample(shares, 5), 1.0) for _ in range(_EQUAL)]
    rows = [{0: -1.0} | {v: rnd.uniform(0.5, 2.0) for v in rnd.sample(shares, 8)} for _ in range(_ROWS)]
    limits = numpy.array([1.0] * _EQUAL + [-rnd.uniform(0.0, 3.0) for _ in range(_ROWS)])
    bounds = numpy.array([(0.0, numpy.inf)] + [(0.0, 1.0)] * (_COLUMNS - 1))
    return [*equations, *rows], limits, bounds


def test_a_solution_depends_on_the_basis_it_begins_at_and_on_nothing_solved_before() -> None:
    for seed in range(20):
        rows, limits, bounds = program(seed)
        fresh, used = Solver(rows, _COLUMNS, _EQUAL), Solver(rows, _COLUMNS, _EQUAL)
        first = fresh(limits, bounds)
        for shift in (3.0, -2.0, 0.5):
            used(limits + shift, bounds)
        again = used(limits, bounds)
        assert first is not None and again is not None and numpy.array_equal(first.values, again.values)
        nearby = [one(limits * 1.1, bounds, first.basis) for one in (fresh, used)]
        assert nearby[0] is not None and nearby[1] is not None
        assert numpy.array_equal(nearby[0].values, nearby[1].values)


def test_rows_without_a_limit_bind_nothing() -> None:
    for seed in range(4):
        rows, limits, bounds = program(seed)
        limits[_EQUAL::3], large = numpy.inf, limits.copy()
        large[_EQUAL::3] = 1e6
        free, bound = Solver(rows, _COLUMNS, _EQUAL)(limits, bounds), Solver(rows, _COLUMNS, _EQUAL)(large, bounds)
        assert free is not None and bound is not None and abs(free.optimum - bound.optimum) < 1e-9
        assert len(free.prices) == len(limits) and not free.prices[_EQUAL::3].any()


def test_what_has_no_solution_says_so() -> None:
    rows, limits, bounds = program(0)
    bounds[1:, 1] = 0.0
    assert Solver(rows, _COLUMNS, _EQUAL)(limits, bounds) is None
    assert Solver(rows, _COLUMNS, _EQUAL)(limits, program(0)[2]) is not None


def test_a_basis_that_leads_nowhere_is_left() -> None:
    """After few steps it is, in some programs: the optimum is still the same, and what has no solution has none."""
    anew = 0
    for seed in range(10):
        rows, limits, bounds = program(seed)
        highs, nothing = Solver(rows, _COLUMNS, _EQUAL, most_steps=1), bounds.copy()
        nothing[1:, 1] = 0.0
        first = highs(limits, bounds)
        assert first is not None and highs(limits, nothing, first.basis) is None
        again, alone = highs(limits * 1.5, bounds, first.basis), Solver(rows, _COLUMNS, _EQUAL)(limits * 1.5, bounds)
        anew += highs._patience.left > 1
        assert again is not None and alone is not None and abs(again.optimum - alone.optimum) < 1e-9
    assert anew


def solved(threads: int | None = None) -> list[Any]:
    """A solution. ``threads``: those that HiGHS has in this process from then on; it has half as many as there are processors
    where its first run names no number."""
    if threads is not None:
        import highspy

        other: Any = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", threads)):
            other.setOptionValue(name, value)
        other.addVar(0.0, 1.0)
        other.run()
    rows, limits, bounds = program(0)
    highs = Solver(rows, _COLUMNS, _EQUAL)
    first = highs(limits, bounds)
    assert first is not None
    found: list[Any] = first.values.tolist()
    return found


def test_solutions_are_those_of_one_thread_where_a_process_has_several() -> None:
    code = "import json; from tests.passes.planning.test_solver import solved; print(json.dumps(solved(threads=4)))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == solved()
