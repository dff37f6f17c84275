"""The rows of the linear program that say which copies cannot hide: those behind a backward that leaves no room for them.

What a backward needs is on the device before it starts. What of it began to cross while the backward before was running is in
memory beside all that this one needs; the rest crosses between the two. In the same way, gradients that are not home when
the next backward starts are beside what that needs. Meanwhile the device may only recompute blocks or update parameters:

    backward of p | copies that had no room beside p, or have none beside r | backward of r
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from mtcompile.passes.planning.linear.blocks import Choices
from mtcompile.passes.planning.linear.homes import HomeCost
from mtcompile.passes.planning.linear.program import added
from mtcompile.passes.planning.linear.terms import Load, Terms
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.runtime.schedule import PHASES


@dataclass(frozen=True, slots=True)
class Gap:
    """The gap between two backwards, of the blocks ``first`` and ``then``. ``us``: the variables for its µs, idle and not.
    ``fetched``: bytes, by variable, that the second needs and the first does not; ``stored``: of the gradients of the first."""

    first: int
    then: int
    us: tuple[int, int]
    fetched: Mapping[int, float]
    stored: Mapping[int, float]


def gaps_between(problem: PlanningProblem, costs: Mapping[str, HomeCost], terms: Terms, choices: Choices) -> list[Gap]:
    """Adds the µs that compute waits between two backwards, each one region, to its load. None where something else could run
    meanwhile."""
    if problem.budgets.updates is not None and problem.budgets.updates.held:
        return []
    gaps, backwards = list[Gap](), terms.of_phase(PHASES[1])
    for first, then in itertools.pairwise(backwards):
        low, high = then.meta["block"], first.meta["block"]
        if low >= high or len(terms.backwards[low]) > 1 or len(terms.backwards[high]) > 1:
            continue
        idle, busy = terms.program.variable(None), terms.program.variable(None)
        terms.loads["exposed", PHASES[1]].append(Load(low, high, {idle: 1.0}))
        needs, shared = terms.needs[then], terms.needs[first]
        apart = {home: nbytes for home, nbytes in needs.read.items() if home not in (*shared.read, *shared.stored)}
        fetched = added(terms.again(terms.by_share(apart)), choices.back[low], choices.given_first[low])
        gaps.append(Gap(high, low, (idle, busy), fetched, terms.by_share(shared.stored)))
    elsewhere = {gap.us[1]: 1.0 for gap in gaps}
    updates_us = {home: costs[home].device_update_us for home in terms.away}
    updated = {terms.away[home]: us for home, us in updates_us.items()}  # what is on the host is not updated on the device
    repeated = dict.fromkeys(choices.repeated, -1.0)
    terms.program.at_most(added(elsewhere, repeated, updated), sum(updates_us.values()))
    return gaps
