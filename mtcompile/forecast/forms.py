"""The forms of a forecast's step: each is made once, for all budgets, and the fastest is taken."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from mtcompile import knobs
from mtcompile.capture.joint import trace_settings
from mtcompile.forecast.fastest import fastest, fastest_without_disk
from mtcompile.forecast.request import (
    ForecastRequest,
    SizedStep,
    budgets_of,
    exactly_in_form,
    in_form,
    sized_in_rows,
    sized_step,
)
from mtcompile.models.shapes import SHAPES
from mtcompile.passes import pipeline
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.fastest import fastest_form
from mtcompile.passes.cuts.form import Form, first_form
from mtcompile.passes.cuts.fragments.cut import Cut
from mtcompile.passes.planning.problem import DoesNotFit, Planned, no_progress


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
    settings = knobs.cache(), torch.get_num_threads(), trace_settings(torch.device("cpu")), pipeline()
    return asked, batch, seq, SHAPES[request.model], settings


def _within_limits(request: ForecastRequest, forms: StepForms) -> StepForms:
    """Returns forms that were made within other limits on the device and the host."""
    for sized in (*forms.by_form.values(), *forms.in_rows.values()):
        if sized is not None:
            problem = sized.candidates.problem
            sized.candidates.problem = replace(problem, budgets=budgets_of(request, sized))
            sized.candidates.progress = request.progress
    form = first_form(forms.first.captured, request.budgets.device)
    first = forms.by_form.get(form) or in_form(request, forms.first, form)
    forms.by_form[first.joint.form] = first
    return replace(forms, first=first)


def planned_form(request: ForecastRequest, forms: StepForms) -> tuple[SizedStep, Planned | DoesNotFit]:
    """Returns the step in the form that is fastest within the request's budgets, with its plan; where none fits, in that which
    needs least, with the refusal."""
    compared = fastest_form(_Forms(request, forms), request.allowed(forms.first.captured))
    return compared.told() or compared.refusal


@dataclass(frozen=True, slots=True)
class _Forms:
    """See ``cuts.forms.Forms``."""

    request: ForecastRequest
    known: StepForms

    @property
    def captured(self) -> fx.GraphModule:
        return self.known.first.captured

    @property
    def limits(self) -> Budgets:
        budgets = budgets_of(self.request, self.known.first)
        return budgets if self.request.on_disk else replace(budgets, disk=None)

    @property
    def first(self) -> SizedStep:
        return self.known.first

    def cut(self, form: Form) -> SizedStep | None:
        return _cut(self.request, self.known, form)

    def in_rows(self, step: SizedStep, embeddings: str) -> SizedStep | None:
        return _in_rows(self.request, self.known, step, embeddings)

    def may_take_all_rows(self, step: SizedStep, rows: SizedStep) -> bool:
        return True

    def allows(self, cut: Cut) -> bool:
        return True

    def find(self, step: SizedStep) -> Planned | None:
        within = step.candidates, self.limits.device, self.limits.host
        return fastest(*within) if self.request.on_disk else fastest_without_disk(*within)

    def without_disk(self) -> _Forms:
        request, form = replace(self.request, on_disk=False), self.first.joint.form
        return _Forms(request, StepForms(first := in_form(request, self.first, form), {form: first}))


def _cut(request: ForecastRequest, forms: StepForms, form: Form) -> SizedStep | None:
    """Returns the step in a form; None if it cannot be cut so."""
    if form not in forms.by_form:
        forms.by_form[form] = exactly_in_form(request, forms.first, form)
    return forms.by_form[form]


def _in_rows(request: ForecastRequest, forms: StepForms, sized: SizedStep, embeddings: str) -> SizedStep | None:
    """Returns a step in that form which takes few rows of ``embeddings``; None if it takes all."""
    if (key := (sized.joint.form, embeddings)) not in forms.in_rows:
        forms.in_rows[key] = sized_in_rows(request, sized, embeddings)
    return forms.in_rows[key]
