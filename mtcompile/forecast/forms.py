"""The forms of a forecast's step: each is made once, for all budgets, and the fastest is taken."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from mtcompile import knobs
from mtcompile.capture.joint import trace_settings
from mtcompile.forecast.request import (
    ForecastRequest,
    SizedStep,
    budgets_of,
    fastest,
    first_form,
    in_form,
    sized_in_rows,
    sized_step,
)
from mtcompile.models.decoders import SHAPES
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.compare import fastest_of_forms
from mtcompile.passes.cuts.form import Form, chains_of_forms
from mtcompile.passes.cuts.fragments.cut import possible_cuts
from mtcompile.passes.planning.planner import may_be_resident
from mtcompile.passes.planning.problem import DoesNotFit, Planned, no_progress, way_to_go


@dataclass(frozen=True, slots=True)
class StepForms:
    """A step of one size in all its forms. ``first``: the one to plan first. ``by_form``: those seen so far; None where
    nothing could be cut so. ``in_rows``: those with few rows of embeddings, by what they take."""

    first: SizedStep
    by_form: dict[Form, SizedStep | None] = field(default_factory=dict)
    in_rows: dict[tuple[Form, str], SizedStep | None] = field(default_factory=dict)


def forms_of(request: ForecastRequest, batch: int, seq: int) -> StepForms:
    """Captures a step of one size, unless it is the one that was planned before this, within other limits."""
    question = _question(request, batch, seq)
    if question is not None and _latest.step is not None and _latest.step[0] == question:
        return _within_limits(request, _latest.step[1])
    if _latest.step is not None:  # two would take twice the memory, and graphs refer to themselves
        _latest.step = None
        gc.collect()
    first = sized_step(request, batch, seq, compared=True)
    forms = StepForms(first, {first.joint.form: first})
    if question is not None:
        _latest.step = question, forms
    return forms


class _Latest(threading.local):
    """The step that this thread planned last, and all that its forms depend on. Another thread may plan within other limits."""

    step: tuple[object, StepForms] | None = None


_latest = _Latest()


def _question(request: ForecastRequest, batch: int, seq: int) -> object:
    """Returns all that the forms of a step depend on; None for a user's model, which may change, and where homes depend on
    limits."""
    if not isinstance(request.model, str) or request.make_optimizer or request.ranks.count > 1:
        return None
    if request.budgets.disk is not None:
        return None
    budgets = replace(request.budgets, device=None, host=None)
    asked = replace(request, budgets=budgets, policies=(), force=False, progress=no_progress)
    settings = knobs.cache(), torch.get_num_threads(), trace_settings(torch.device("cpu"))
    return asked, batch, seq, SHAPES[request.model], settings


def _within_limits(request: ForecastRequest, forms: StepForms) -> StepForms:
    """Returns forms that were made within other limits on the device and the host."""
    for sized in (*forms.by_form.values(), *forms.in_rows.values()):
        if sized is not None:
            problem = sized.candidates.problem
            sized.candidates.problem = replace(problem, budgets=budgets_of(request, sized))
            sized.candidates.progress = request.progress
    form = first_form(request, forms.first.captured, compared=True)
    first = forms.by_form.get(form) or in_form(request, forms.first, form)
    forms.by_form[first.joint.form] = first
    return replace(forms, first=first)


def planned_form(request: ForecastRequest, forms: StepForms) -> tuple[SizedStep, Planned | DoesNotFit]:
    """Returns the step in the form that is fastest within the request's budgets, with its plan; where none fits, in that which
    needs least, with the refusal."""
    limits, first = budgets_of(request, forms.first), forms.first
    rows = _in_rows(request, forms, first, "auto")
    takes_all = rows is None or may_be_resident(replace(first.candidates.problem, budgets=limits))

    def find(sized: SizedStep) -> Planned:
        return fastest(sized.candidates, limits.device, limits.host)

    def chain(finer: list[Form], in_rows: bool) -> Iterator[SizedStep]:
        for form in finer:
            sized = _cut(request, forms, form)
            if sized is not None and in_rows:
                sized = _in_rows(request, forms, sized, "auto" if rows is not None else "used")
            if sized is None:  # there is nothing more to cut
                return
            yield sized

    def chains(kinds: list[list[Form]]) -> Iterator[Iterator[SizedStep]]:
        return (chain(finer, in_rows) for in_rows in ((False, True) if takes_all else (True,)) for finer in kinds)

    asked_for = request.fragments not in (None, "auto")  # a training step goes with tiles or fragments
    cuts = possible_cuts(first.captured, request.cuts, request.fragments_begin(first.captured))[1:]
    kinds = list(chains_of_forms(cuts, tiles=not asked_for))
    coarsest = [each for each in (first if takes_all else None, rows) if each is not None]
    sized, planned = fastest_of_forms(coarsest, chains(kinds), find, limits, asked_for)
    if not isinstance(planned, DoesNotFit) or not cuts or not _may_fit_in_fragments(planned, limits):
        return sized, planned
    refused, finest = [(sized, planned)], possible_cuts(first.captured, request.cuts)[1:]
    for finer in dict.fromkeys((cuts, finest) if planned.tier == "host" else (finest,)):
        sized, fitting = fastest_of_forms([], chains([[Form(cut=cut) for cut in finer]]), find, limits)
        if not isinstance(fitting, DoesNotFit):
            return sized, fitting
        refused.append((sized, fitting))
    return min(refused, key=lambda each: way_to_go(each[1].tier, each[1].minimum))


def _may_fit_in_fragments(refusal: DoesNotFit, limits: Budgets) -> bool:
    """Tells whether fragments that no chain had could help: beside a disk, finer ones than it reads; for a host that has room
    for all but what passes through it, any."""
    if limits.disk is not None:
        return refusal.tier != "disk"
    return refusal.tier == "host" and dict(refusal.causes).get("persistent state", 0) <= (limits.host or 0)


def _cut(request: ForecastRequest, forms: StepForms, form: Form) -> SizedStep | None:
    """Returns the step in a form; None if it cannot be cut so."""
    if form not in forms.by_form:
        sized = in_form(request, forms.first, form)
        forms.by_form[form] = sized if sized.joint.form == form else None
    return forms.by_form[form]


def _in_rows(request: ForecastRequest, forms: StepForms, sized: SizedStep, embeddings: str) -> SizedStep | None:
    """Returns a step in that form which takes few rows of ``embeddings``; None if it takes all."""
    if (key := (sized.joint.form, embeddings)) not in forms.in_rows:
        forms.in_rows[key] = sized_in_rows(request, sized, embeddings)
    return forms.in_rows[key]
