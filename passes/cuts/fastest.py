"""Finds the fastest form of a step within its limits, by branch and bound.

    open     forms that are made and not planned yet, each with a bound: the optimum of the linear program of its step. No plan
             of it is faster, and none fits where that program has no solution
    chains   forms that are not made yet, finer and finer: each saves memory, and costs time if memory does not matter. The
             program of the last one that was made bounds them all, once it leaves out what a block's work needs while it runs

What promises most comes first: of a chain the next form is made, a form is planned. A chain ends where the bound does not fall:
what finer forms save is then worth less than they cost. All ends when what another form may still gain over the best plan in
the first thousand steps is less than the seconds that it takes to make and plan it. As long as nothing fits, a form that needs
fewer bytes promises more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic

from mtcompile.passes.analysis.rows import fetched_by_rows
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.form import Allowed, Form, chains_of_forms
from mtcompile.passes.cuts.forms import Forms, S
from mtcompile.passes.cuts.fragments.cut import UNCUT, possible_cuts
from mtcompile.passes.joint.loss_head import head_nbytes
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.more_homes import may_gain
from mtcompile.passes.planning.disk.spill import is_hopeless
from mtcompile.passes.planning.disk.without import may_fit_without
from mtcompile.passes.planning.frontier import fits
from mtcompile.passes.planning.problem import DoesNotFit, Planned, way_to_go
from mtcompile.passes.step_graph import kernel_of, regions

STEPS = {"quick": 100, "normal": 1_000, "thorough": 10_000}  # by effort: in which a form gains the time that comparing it takes
_OPERATION_US = 200.0  # that making a form, its linear program and its plan take for each operation of the step, on one core


@dataclass(frozen=True, slots=True)
class Compared(Generic[S]):
    """The forms of a step that were ``made``. ``fitting``: those with plans; ``refused``: those of which no plan fits."""

    forms: Forms[S]
    fitting: list[tuple[S, Planned]] = field(default_factory=list)
    refused: list[tuple[S, DoesNotFit]] = field(default_factory=list)
    made: list[S] = field(default_factory=list)

    @property
    def best(self) -> tuple[S, Planned] | None:
        """The fastest form, with its plan."""
        return min(self.fitting, key=lambda found: found[1].plan.total_us, default=None)

    @property
    def best_us(self) -> float:
        """The µs of the fastest plan; infinite if none fits."""
        return inf if (best := self.best) is None else best[1].plan.total_us

    @property
    def refusal(self) -> tuple[S, DoesNotFit]:
        """The form with the smallest way to go, with its refusal."""
        return min(self.refused, key=lambda refused: way_to_go(refused[1].tier, refused[1].minimum))

    def bound_us(self, form: S, inside: bool = True) -> float:
        """Returns the µs of the fastest plan that a form could have within the limits; infinite if there can be none.
        ``inside``: False for finer forms too."""
        return form.candidates.bound_us(self.forms.limits.device, self.forms.limits.host, inside)

    def told(self) -> tuple[S, Planned] | None:
        """Returns ``best``, whose certificate tells of the other forms that were made, too, as far as plans of them may fit."""
        if (best := self.best) is None or (certificate := best[1].plan.certificate) is None:
            return best
        bounds = [us for form in self.made if form is not best[0] and (us := self.bound_us(form)) < inf]
        certificate = replace(certificate, other_cuts=len(bounds), other_bound_us=min(bounds, default=0.0))
        return best[0], replace(best[1], plan=replace(best[1].plan, certificate=certificate))


def fastest_form(forms: Forms[S], allowed: Allowed, effort: str = "normal") -> Compared[S]:
    """Compares the forms that are ``allowed``. Where there is a disk, compares them without it first, as far as plans may fit;
    then with it, if that may be faster. ``effort``: a key of ``STEPS``."""
    steps, without = STEPS[effort], list[tuple[S, Planned]]()
    if forms.limits.disk is not None:
        candidates = forms.first.candidates
        if may_fit_without(replace(candidates.problem, budgets=forms.limits), candidates, inside=False):
            compared = _Comparison(Compared(forms.without_disk()), replace(allowed, begins=UNCUT.begins), steps).run()
            if (best := compared.best) is not None and not may_gain(best[0].candidates.problem, best[1]):
                return compared
            without = compared.fitting
    return _Comparison(Compared(forms, without), allowed, steps).run()


@dataclass(slots=True)
class _Chain(Generic[S]):
    """Forms that are not made yet, finer and finer. ``coarser``: the last one that was made."""

    coarser: S
    finer: Iterator[S]


class _Comparison(Generic[S]):
    """See above. ``steps``: in which another form gains the time that comparing it takes."""

    def __init__(self, compared: Compared[S], allowed: Allowed, steps: int) -> None:
        self.compared, self.forms, self.limits, self.allowed = compared, compared.forms, compared.forms.limits, allowed
        self.steps: float = inf if allowed.in_fragments else steps  # what was asked for is compared whatever that takes
        self.open, self.chains, self.ended = list[S](), list[_Chain[S]](), False

    def run(self) -> Compared[S]:
        """Compares what is allowed; then what is kept for steps that do not fit otherwise, and may be faster: few rows of all
        embeddings, and fragments; where nothing fits, then finer fragments than a disk could read."""
        allowed, compared, captured = self.allowed, self.compared, self.forms.captured
        now, last = (allowed.fragments, allowed.embeddings), (allowed.last_fragments, allowed.last_embeddings)
        if fetched_by_rows(captured, last[1]) == fetched_by_rows(captured, now[1]):
            last = last[0], now[1]
        self._compare(*now, allowed.begins)
        may_gain_more = allowed.compares_last and self._is_worth(self.forms.first.candidates, compared.best_us)
        if last != now and (compared.best is None or may_gain_more):
            self._compare(*last, allowed.begins)
        if compared.best is None and allowed.begins != UNCUT.begins:
            self._compare(*last, UNCUT.begins)
        while compared.best is None and self.open and not self.ended:
            form = min(self.open, key=lambda form: form.candidates.least_nbytes)
            if compared.refused and not self._may_need_less(form.candidates, compared.refusal[1]):
                break
            self._plan(form)
        return compared

    def _compare(self, fragments: str | None, embeddings: str, begins: int) -> None:
        """Adds forms with all rows of embeddings and with few, and chains of finer ones of that which promises more. Makes and
        plans forms until no other is worth it."""
        if self.ended:
            return
        forms, first = self.forms, self.forms.first
        takes_none = embeddings == "auto" and _resident_is_fastest(first.candidates, self.limits)
        rows = None if takes_none else forms.in_rows(first, embeddings)
        kinds = [] if rows is None else [(rows, embeddings)]
        if rows is None or forms.may_take_all_rows(first, rows):
            kinds.append((first, ""))
        for form, _ in kinds:
            self._add(form)
        coarsest, taken = kinds[0] if len(kinds) == 1 else min(kinds, key=lambda kind: self._promise(kind[0]))
        finer = chains_of_forms(self.allowed, first.form, possible_cuts(forms.captured, fragments, begins)[1:])
        self.chains = [_Chain(coarsest, self._steps(chain, taken)) for chain in finer]
        while not self.ended and (found := self._next()) is not None:
            if isinstance(found, _Chain):
                self._make(found)
            else:
                self._plan(found)

    def _next(self) -> S | _Chain[S] | None:
        """Returns what promises most: a chain, of which to make a form, or a form, to be planned. None if nothing is worth it.
        Until a plan is there to compare with, the bounds of forms are compared."""
        us = self.compared.best_us
        if us == inf and self.chains:
            us = min(map(self.compared.bound_us, self.open), default=inf)
        chains = [chain for chain in self.chains if self._is_worth_making(chain.coarser, us)]
        if chains:
            return min(chains, key=lambda chain: self.compared.bound_us(chain.coarser, inside=False))
        return min(filter(self._is_worth_planning, self.open), key=self._order, default=None)

    def _is_worth_making(self, coarser: S, us: float) -> bool:
        """Tells whether a form that is finer than another may be worth it beside one that takes ``us``: where there is none, if
        the state fits in any form."""
        if us == inf:
            return self._state_may_fit
        if self.limits.disk is not None:  # with one, plans are far above their bounds
            return False
        return self._is_worth(coarser.candidates, us, lambda: self.compared.bound_us(coarser, inside=False))

    def _is_worth_planning(self, form: S) -> bool:
        if (us := self.compared.best_us) < inf:
            return self._is_worth(form.candidates, us, lambda: self.compared.bound_us(form))
        return self._is_alone or self.compared.bound_us(form) < inf

    def _is_worth(self, candidates: Candidates, us: float, bound_us: Callable[[], float] | None = None) -> bool:
        """Tells whether what a form may gain over ``us`` is more than what it costs. ``bound_us``: its bound, asked for only if
        needed; default: what it takes however much memory there is."""
        cost_us = _OPERATION_US * operations(candidates)
        if self.steps * us <= cost_us or takes_at_least(candidates, us):
            return False
        return self.steps * (us - (least_us(candidates) if bound_us is None else bound_us())) > cost_us

    @property
    def _is_alone(self) -> bool:
        """True if there is nothing to compare a form with."""
        return len(self.compared.made) == 1 and not self.chains

    @functools.cached_property
    def _state_may_fit(self) -> bool:
        """False if what is held at all times has no room in any form."""
        if self.limits.host is None or self.limits.disk_updates:  # which weights may be on disk depends on how they are cut
            return True
        return not is_hopeless(replace(self.forms.first.candidates.problem, budgets=self.limits))

    def _promise(self, form: S) -> tuple[float, float]:
        """Orders forms: by their bounds; those that cannot fit by the bytes that they need."""
        us = self.compared.bound_us(form)
        return us, form.candidates.least_nbytes if us == inf else 0.0

    def _order(self, form: S) -> float:
        """Orders forms in which they are planned: by their bounds; once one did not fit, by the bytes that they need."""
        if self.compared.refused and self.compared.best is None:
            return form.candidates.least_nbytes
        return 0.0 if self._is_alone else self.compared.bound_us(form)

    def _add(self, form: S) -> bool:
        if is_new := all(form is not known for known in self.compared.made):
            self.compared.made.append(form)
            self.open.append(form)
        return is_new

    def _make(self, chain: _Chain[S]) -> None:
        """Makes the next form of a chain. The chain ends where that promises no more than the one before."""
        if (form := next(chain.finer, None)) is not None:
            self._add(form)
        if form is None or self._promise(form) >= self._promise(chain.coarser):
            self.chains.remove(chain)
        else:
            chain.coarser = form

    def _steps(self, chain: Sequence[Form], taken: str) -> Iterator[S]:
        """Yields the steps of a chain. ``taken``: the embeddings of which they take few rows."""
        for form in chain:
            if not self._has_room(form):
                continue
            step = self.forms.cut(form)
            if step is not None and taken:
                step = self.forms.in_rows(step, taken)
            if step is not None:
                yield step
            elif form.cut == UNCUT:  # there is nothing more to cut
                return

    def _has_room(self, form: Form) -> bool:
        """Tells whether a form may fit, or need less than those that are made, by its logits alone."""
        if (device := self.limits.device) is None or self.allowed.fuses:
            return True
        nbytes = head_nbytes(self.forms.captured) // form.chunks
        return nbytes <= device or nbytes <= min(made.candidates.least_nbytes for made in self.compared.made)

    def _plan(self, form: S) -> None:
        self.open.remove(form)
        if not self.forms.allows(form.form.cut):  # not asked before: it takes products on the device
            return
        try:
            planned = self.forms.find(form)
        except DoesNotFit as error:
            self.compared.refused.append((form, error))
            is_nearer = self.compared.refusal[1] is error
            self.ended = error.tier == "disk" or (error.tier == "host" and not is_nearer)
        else:
            if planned is not None:
                self.compared.fitting.append((form, planned))
                self.ended = self.limits.disk is not None  # others are compared only where the first does not fit

    def _may_need_less(self, candidates: Candidates, refusal: DoesNotFit) -> bool:
        """Tells whether a form that cannot fit may have a smaller way to go than one that was refused."""
        if refusal.tier == "device":
            return candidates.least_nbytes < refusal.minimum
        return candidates.bound_us(self.limits.device, None) < inf


def operations(candidates: Candidates) -> int:
    """Returns the number of operations of a step."""
    step = candidates.problem.step
    return sum(len(kernel_of(step, region).graph.nodes) for region in regions(step))


def least_us(candidates: Candidates) -> float:
    """Returns the µs that each plan of a step takes, however much memory there is."""
    return candidates.bound_us(None, None) if candidates.resident_may_be_slow else candidates.resident.plan.total_us


def takes_at_least(candidates: Candidates, us: float) -> bool:
    """Tells whether every plan of a step takes at least ``us``, whatever the memory. Solves no linear program if the plan with
    everything on the device is faster."""
    return candidates.resident.plan.total_us >= us and least_us(candidates) >= us


def _resident_is_fastest(candidates: Candidates, limits: Budgets) -> bool:
    """Tells whether the plan with everything on the device fits and none is faster."""
    resident = not candidates.problem.fixed_homes and fits(candidates.resident.plan, limits)
    return resident and not candidates.resident_may_be_slow
