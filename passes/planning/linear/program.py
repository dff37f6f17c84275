"""A linear program in rows that say what takes time and what holds bytes, solved by HiGHS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy

_GIB = 1 << 30
Work = tuple[Mapping[int, float], float]  # µs per unit of each variable, and constant µs


@dataclass(frozen=True, slots=True)
class Row:
    """The sum of ``terms`` is at most ``limit``, plus the budget of ``tier`` in GiB if there is one. ``work``: by resource, the
    µs that more of it would shorten."""

    terms: dict[int, float]
    limit: float
    tier: str | None
    work: Mapping[str, Work]


@dataclass(slots=True)
class Program:
    """Minimize the first variable, so that every row's sum is at most its limit."""

    upper: list[float | None] = field(default_factory=lambda: [None])
    rows: list[Row] = field(default_factory=list)
    equal: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def variable(self, upper: float | None = 1.0) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def takes(self, span: Mapping[int, float], work: Mapping[str, Work], *beside: Mapping[int, float]) -> None:
        """Adds a row: ``work`` by resource, and what is ``beside``, take no longer than ``span`` altogether."""
        terms = added({variable: -factor for variable, factor in span.items()}, *(us for us, _ in work.values()), *beside)
        self.rows.append(Row(terms, -sum(fixed for _, fixed in work.values()), None, work))

    def at_most(self, terms: dict[int, float], limit: float = 0.0) -> None:
        """Adds a row: a sum that takes neither time nor memory."""
        self.rows.append(Row(terms, limit, None, {}))

    def holds(self, tier: str, terms: Mapping[int, float], fixed: float) -> None:
        """Adds a row: bytes that a tier holds."""
        in_gib = {variable: nbytes / _GIB for variable, nbytes in terms.items()}  # about as large as other rows' factors
        self.rows.append(Row(in_gib, -fixed / _GIB, tier, {}))

    def solve(
        self, budgets: Mapping[str, int | None], fixed: Mapping[int, float] = MappingProxyType({})
    ) -> tuple[Any, list[Row]]:
        """Solves the program without the rows of tiers that have no budget, with some variables ``fixed``. Returns HiGHS's
        result, and its rows."""
        try:
            from scipy.optimize import linprog
        except ImportError as error:  # an installation without dependencies: plans have no certificate, and are searched for
            raise Infeasible("expected scipy") from error
        rows = [row for row in self.rows if row.tier is None or budgets[row.tier] is not None]
        objective = numpy.zeros(len(self.upper))
        objective[0] = 1.0
        result = linprog(
            objective,
            A_ub=self._matrix([row.terms for row in rows]),
            b_ub=[row.limit + ((budgets[row.tier] or 0) / _GIB if row.tier else 0) for row in rows],
            A_eq=self._matrix([terms for terms, _ in self.equal]),
            b_eq=[limit for _, limit in self.equal],
            bounds=[(fixed[v], fixed[v]) if v in fixed else (0, upper) for v, upper in enumerate(self.upper)],
            method="highs",
        )
        return result, rows

    def _matrix(self, rows: Sequence[Mapping[int, float]]) -> Any:
        from scipy.sparse import csr_array

        lengths = [len(row) for row in rows]
        columns = [variable for row in rows for variable in row]
        factors = [factor for row in rows for factor in row.values()]
        return csr_array((factors, columns, numpy.cumsum([0, *lengths])), shape=(len(rows), len(self.upper)), dtype=float)


def gains_us(rows: Sequence[Row], values: Any, prices: Any) -> dict[str, float]:
    """Returns what a tenth more of each resource that takes time saves, by the prices of its rows."""
    gains: dict[str, float] = defaultdict(float)
    for row, price in zip(rows, prices, strict=True):
        for resource, (us, fixed) in row.work.items():
            work = sum(factor * values[variable] for variable, factor in us.items()) + fixed
            gains[resource] += float(price) * work * (1 - 1 / 1.1)
    return {resource: float(gain) for resource, gain in gains.items() if gain > 1e-3}


class Infeasible(Exception):
    """Raised when even the relaxed problem has no solution."""


def added(*parts: Mapping[int, float]) -> dict[int, float]:
    total: dict[int, float] = defaultdict(float)
    for part in parts:
        for variable, factor in part.items():
            total[variable] += factor
    return total
