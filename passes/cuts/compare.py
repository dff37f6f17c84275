"""Compares the forms of a step within a budget: of those that could be the fastest, each is planned, and no others are.

A form is left out if no plan of it can be faster than the best one: by the bound of its linear program, or by its time with
everything on the device. Others than the first are not made where it is so near to what any form could give that they are not
worth it; there, a little more memory can be predicted to be slower by as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol, TypeVar

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.form import Form
from mtcompile.passes.cuts.fragments.cut import UNCUT
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import DoesNotFit, Planned, way_to_go
from mtcompile.passes.step_graph import kernel_of, regions

SMALL = 3000  # operations of a step whose other forms are made in about a second each
_NEAR, _NEAR_LARGE = 1.02, 1.1  # of what any form could give: then others are not made of a small step, or of a large one
_STREAMED = 0.95  # of the time with everything on the device that is not fixed elsewhere: fetching farther ahead gains less
_HALVINGS = 12  # between nothing and what a form's floor needs


class FormOfStep(Protocol):
    """A step in one form."""

    @property
    def form(self) -> Form: ...

    @property
    def candidates(self) -> Candidates: ...


S = TypeVar("S", bound=FormOfStep)


def fastest_of_forms(
    first: Iterable[S],
    chains: Iterable[Iterable[S]],
    find: Callable[[S], Planned],
    limits: Budgets,
    always: bool = False,
) -> tuple[S, Planned | DoesNotFit]:
    """Returns the form that is fastest within the limits, with its plan; if none fits, the form with the smallest way to go,
    with its refusal. ``first``: the coarsest forms. ``chains``: of finer and finer forms, each of which takes longer than the
    one before if memory does not matter. ``find``: plans a form, or raises DoesNotFit. ``always``: compares
    forms even if the first is near to what any could give."""
    best: tuple[S, Planned] | None = None
    refused, unlikely, considered = list[tuple[S, DoesNotFit]](), list[S](), dict[int, S]()
    fewest = dict[int, int]()

    def least_nbytes(form: S) -> int:
        if id(form) not in fewest:
            fewest[id(form)] = _least_nbytes(form.candidates)
        return fewest[id(form)]

    def attempt(form: S) -> None:
        nonlocal best
        try:
            planned = find(form)
        except DoesNotFit as error:
            refused.append((form, error))
        else:
            if best is None or planned.plan.total_us < best[1].plan.total_us:
                best = form, planned

    def consider(form: S) -> None:
        if id(form) in considered:
            return
        considered[id(form)] = form
        if best is not None:
            if could_be_faster(form.candidates, limits, best[1].plan):
                attempt(form)
        elif form.candidates.bound_us(limits.device, None) == inf:
            unlikely.append(form)
        else:
            attempt(form)

    for form in first:
        consider(form)
        if best is not None and best[1].plan.all_resident:
            return best
    if best is not None and not always and is_near(best[0].candidates, limits, best[1].plan):
        return best
    if best is None and any(error.tier != "device" for _, error in refused):
        return min(refused, key=lambda each: way_to_go(each[1].tier, each[1].minimum))
    for chain in chains:
        leanest = inf
        for form in chain:
            if best is not None and least_us(form.candidates) >= best[1].plan.total_us:
                break
            if best is None:
                nbytes = least_nbytes(form)
                if nbytes >= leanest and form.form.cut == UNCUT:  # more chunks or tiles need no less
                    break
                leanest = min(leanest, nbytes)
            consider(form)
    return best or _least(refused, [(form, least_nbytes(form)) for form in unlikely], find)


def could_be_faster(candidates: Candidates, limits: Budgets, plan: Plan) -> bool:
    """Tells whether any plan of a step within the limits could be faster than ``plan``, which is of another form."""
    if least_us(candidates) >= plan.total_us:
        return False
    return candidates.bound_us(limits.device, limits.host) < plan.total_us


def is_near(candidates: Candidates, limits: Budgets, plan: Plan) -> bool:
    """Tells whether no other form could be much faster than a step's ``plan``. Another form may need as much less memory as the
    leanest plan takes, for the same work. Beside a disk, forms are compared only where the first does not fit."""
    if plan.all_resident or limits.disk is not None:
        return True
    step = candidates.problem.step
    operations = sum(len(kernel_of(step, region).graph.nodes) for region in regions(step))
    more = None if limits.device is None else limits.device + candidates.floor
    return plan.total_us <= (_NEAR if operations <= SMALL else _NEAR_LARGE) * candidates.bound_us(more, limits.host)


def least_us(candidates: Candidates) -> float:
    """Returns the µs that each plan of a step takes, however much memory there is."""
    return candidates.resident.plan.total_us * (_STREAMED if candidates.problem.fixed_homes else 1.0)


def _least(
    refused: list[tuple[S, DoesNotFit]], unlikely: list[tuple[S, int]], find: Callable[[S], Planned]
) -> tuple[S, Planned | DoesNotFit]:
    """Returns the form with the smallest way to go, with its refusal. ``unlikely``: forms that were not planned since they
    cannot fit the device: those that need less of it by their linear programs come first, until none can need less."""
    best = min(refused, key=lambda each: way_to_go(each[1].tier, each[1].minimum), default=None)
    if best is not None and best[1].tier != "device":
        return best
    for form, nbytes in sorted(unlikely, key=lambda each: each[1]):
        if best is not None and nbytes >= best[1].minimum:
            break
        try:
            return form, find(form)
        except DoesNotFit as error:
            if best is None or error.minimum < best[1].minimum:
                best = form, error
    assert best is not None, "expected a form"
    return best


def _least_nbytes(candidates: Candidates) -> int:
    """Returns about the most device bytes with which no plan of a step fits, by its linear program; never more."""
    low, high = 0, candidates.floor
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        low, high = (middle, high) if candidates.bound_us(middle, None) == inf else (low, middle)
    return low
