"""A linear program in rows that say what takes time and what holds bytes, solved by HiGHS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy


@dataclass(frozen=True, slots=True)
class Row:
    """At most ``limit``, and the bytes of ``tier`` besides. ``resource``: a tenth more of it would shorten ``work`` and what is
    fixed."""

    resource: str
    terms: dict[int, float]
    limit: float
    tier: str | None
    work: dict[int, float]


@dataclass(slots=True)
class Program:
    """Minimize the first variable, so that every row's sum is at most its limit."""

    upper: list[float | None] = field(default_factory=lambda: [None])
    rows: list[Row] = field(default_factory=list)
    equal: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def variable(self, upper: float | None = 1.0) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def takes(
        self,
        resource: str,
        span: Mapping[int, float],
        work: Mapping[int, float],
        fixed: float = 0.0,
        *beside: Mapping[int, float],
    ) -> None:
        """Adds a row: ``work`` and ``fixed``, in µs, and what is ``beside`` take no longer than ``span``."""
        terms = added({variable: -factor for variable, factor in span.items()}, work, *beside)
        self.rows.append(Row(resource, terms, -fixed, None, dict(work)))

    def holds(self, tier: str, terms: Mapping[int, float], fixed: float) -> None:
        """Adds a row: bytes that a tier holds."""
        self.rows.append(Row(f"{tier} memory", dict(terms), -fixed, tier, {}))

    def solve(self, budgets: Mapping[str, int | None]) -> tuple[Any, list[Row]]:
        """Solves the program without the rows of tiers that have no budget. Returns HiGHS's result, and its rows."""
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
            b_ub=[row.limit + (budgets[row.tier] or 0 if row.tier else 0) for row in rows],
            A_eq=self._matrix([terms for terms, _ in self.equal]),
            b_eq=[limit for _, limit in self.equal],
            bounds=[(0, upper) for upper in self.upper],
            method="highs",
        )
        return result, rows

    def _matrix(self, rows: Sequence[Mapping[int, float]]) -> Any:
        dense = numpy.zeros((len(rows), len(self.upper)))
        for number, terms in enumerate(rows):
            dense[number, list(terms)] = list(terms.values())
        return dense


def gains_us(rows: Sequence[Row], values: Any, prices: Any) -> dict[str, float]:
    """What a tenth more of each resource that takes time saves, by the prices of its rows."""
    gains: dict[str, float] = defaultdict(float)
    for row, price in zip(rows, prices, strict=True):
        if not row.tier:
            work = sum(factor * values[variable] for variable, factor in row.work.items()) - row.limit
            gains[row.resource] += float(price) * work * (1 - 1 / 1.1)
    return {resource: float(gain) for resource, gain in gains.items() if resource and gain > 1e-3}


class Infeasible(Exception):
    """Raised when even the relaxed problem has no solution."""


def added(*parts: Mapping[int, float]) -> dict[int, float]:
    total: dict[int, float] = defaultdict(float)
    for part in parts:
        for variable, factor in part.items():
            total[variable] += factor
    return total
