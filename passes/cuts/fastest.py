"""Finds the fastest form of a step within its limits, by branch and bound.

    open     forms that are made and not planned yet, each with a bound: the optimum of the linear program of its step. No plan
             of it is faster, and none fits where that program has no solution
    chains   forms that are not made yet, finer and finer: each saves memory, and costs time if memory does not matter. The
             program of the last one that was made bounds them all, once it leaves out what a block's work needs while it runs

What promises most comes first: of a chain the next form is made, a form is planned. A chain ends where the bound does not fall:
what finer forms save is then worth less than they cost. All ends when what another form may still gain over the best plan in
the first thousand steps, or another number for another effort, is less than the seconds that it takes to make and plan it. As
long as nothing fits, a form that needs fewer bytes promises more, and a chain ends where no finer form may fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Generic

from mtcompile.passes.analysis.rows import fetched_by_rows
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.form import Allowed, Form, chains_of_forms
from mtcompile.passes.cuts.forms import Forms, S
from mtcompile.passes.cuts.fragments.cut import UNCUT, possible_cuts
from mtcompile.passes.joint.loss_head import head_nbytes
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.homes import is_hopeless
from mtcompile.passes.planning.disk.within import may_fit_without
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.problem import DoesNotFit, Planned, way_to_go
from mtcompile.passes.planning.search import Effort, is_worth
from mtcompile.passes.step_graph import kernel_of, regions

_OPERATION_US = 200.0  # that making a form, its linear program and its plan take for each operation of the step, on one core
_NEAR = 1.2  # of its bound: a plan that is about as near to it as plans are
_REFUSED_US = 1_000.0  # of a step, that a refusal which names fewer bytes is worth


def fastest_form(forms: Forms[S], allowed: Allowed) -> Comparison[S]:
    """Compares the forms that are ``allowed``. Where there is a disk, compares them without it first, as far as plans may fit;
    then with it, if that may be faster."""
    effort, without = forms.first.candidates.effort, list[tuple[S, Planned]]()
    if forms.limits.disk is not None:
        candidates = forms.first.candidates
        if may_fit_without(replace(candidates.problem, budgets=forms.limits), candidates, inside=False):
            compared = Comparison(forms.without_disk(), replace(allowed, begins=UNCUT.begins), effort).run()
            if (best := compared.best) is not None:
                gain_us = best[1].plan.total_us - candidates.bound_us(forms.limits.device, forms.limits.host)
                if not is_worth(effort, _OPERATION_US * operations(candidates), best[1].plan.total_us, gain_us):
                    return compared
            without = compared.fitting
    return Comparison(forms, allowed, effort, without).run()


@dataclass(slots=True, eq=False)
class _Chain(Generic[S]):
    """Forms that are not made yet, finer and finer. ``coarser``: the last one that was made."""

    coarser: S
    finer: Iterator[S]


class Comparison(Generic[S]):
    """Compares the forms of a step. ``made``: these; ``fitting``: those with plans; ``refused``: those of which no plan fits.
    ``effort``: says what another form must gain."""

    def __init__(self, forms: Forms[S], allowed: Allowed, effort: Effort, fitting: Sequence[tuple[S, Planned]] = ()) -> None:
        self.forms, self.limits, self.allowed = forms, forms.limits, allowed
        # What was asked for is compared whatever that takes.
        self.effort = effort._replace(steps=inf, gain=0.0) if allowed.in_fragments else effort
        self.made, self.fitting, self.refused = list[S](), [*fitting], list[tuple[S, DoesNotFit]]()
        self._open, self._chains, self._kinds, self._ended = list[S](), list[_Chain[S]](), set[object](), False
        self._left = list[_Chain[S]]()  # that have ended
        self._begin: Callable[[], list[_Chain[S]]] = list

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
        return form.candidates.bound_us(self.limits.device, self.limits.host, inside)

    def told(self) -> tuple[S, Planned] | None:
        """Returns ``best``, whose certificate tells of the other forms that were made, too, as far as plans of them may fit."""
        if (best := self.best) is None or (certificate := best[1].plan.certificate) is None:
            return best
        limits, others = (self.limits.device, self.limits.host), [form for form in self.made if form is not best[0]]
        bounds = [us for form in others if (us := form.candidates.bound_us(*limits, all_plans=True)) < inf]
        certificate = replace(certificate, other_cuts=len(bounds), other_bound_us=min(bounds, default=0.0))
        return best[0], replace(best[1], plan=replace(best[1].plan, certificate=certificate))

    def run(self) -> Comparison[S]:
        """Compares what is allowed; then what is kept for steps that do not fit otherwise, and may be faster: few rows of all
        embeddings, and fragments; where nothing fits, then finer fragments than a disk could read."""
        allowed, first, captured = self.allowed, self.forms.first, self.forms.captured
        now, last = (allowed.fragments, allowed.embeddings), (allowed.last_fragments, allowed.last_embeddings)
        if fetched_by_rows(captured, last[1]) == fetched_by_rows(captured, now[1]):
            last = last[0], now[1]
        if not self._state_may_fit and not self._is_worth_refusing(first):  # no form fits: this one says how far
            self._add(first)
            self._plan(first)
            if self.refused and self.refusal[1].tier == "host":
                return self
        self._compare(first, *now, allowed.begins)
        compares_last = last != now and allowed.compares_last and self.limits.disk is None
        if self.best is None:
            self._compare(first, *last, allowed.begins)
        elif compares_last and self._is_worth(first.candidates, self.best_us):
            best = self.best[0].form
            self.allowed = replace(allowed, chunks=best.chunks, tiles=best.tiles)
            self._compare(self.forms.cut(best) or first, *last, allowed.begins)
        if self.best is None:
            self._compare(first, *last, UNCUT.begins)
        while self.best is None and self._open and not self._ended:
            form = min(self._open, key=lambda form: form.candidates.least_nbytes)
            is_worth = self.bound_us(form) < inf or self._is_worth_refusing(form)
            if self.refused and not (is_worth and self._may_need_less(form.candidates, self.refusal[1])):
                break
            self._plan(form)
        return self

    def _compare(self, coarsest: S, fragments: str | None, embeddings: str, begins: int) -> None:
        """Adds a form with all rows of embeddings and with few, and chains of finer ones of that which promises more. Makes and
        plans forms until no other is worth it."""
        if self._ended or (kind := (coarsest.form, fragments, embeddings, begins)) in self._kinds:
            return
        self._kinds.add(kind)
        forms = self.forms
        takes_none = embeddings == "auto" and _resident_is_fastest(coarsest.candidates, self.limits)
        rows = None if takes_none else forms.in_rows(coarsest, embeddings)
        kinds = [] if rows is None else [(rows, embeddings)]
        if rows is None or forms.may_take_all_rows(coarsest, rows):
            kinds.append((coarsest, ""))
        for form, _ in kinds:
            self._add(form)
        coarsest, taken = kinds[0] if len(kinds) == 1 else min(kinds, key=lambda kind: self._promise(kind[0]))
        finer = [*chains_of_forms(self.allowed, coarsest.form, possible_cuts(forms.captured, fragments, begins)[1:])]
        self._begin = lambda: [_Chain(coarsest, self._steps(chain, taken)) for chain in finer]
        self._chains = self._begin()
        while not self._ended and (found := self._next()) is not None:
            if isinstance(found, _Chain):
                self._make(found)
            else:
                self._plan(found)

    def _next(self) -> S | _Chain[S] | None:
        """Returns what promises most: a chain, of which to make a form, or a form, to be planned. None if nothing is worth it.
        Until a plan is there to compare with, bounds are compared with bounds."""
        us = self.best_us
        if us == inf and self._chains:
            us = min(map(self.bound_us, self._open), default=inf)
        chains = [chain for chain in self._chains if self._is_worth_making(chain.coarser, us)]
        if chains:
            return min(chains, key=lambda chain: self.bound_us(chain.coarser, inside=False))
        return min(filter(self._is_worth_planning, self._open), key=self._promise, default=None)

    def _is_worth_making(self, coarser: S, us: float) -> bool:
        """Tells whether a form that is finer than another may be worth it beside one that takes ``us``. Where there is none, it
        may fit; where the state fits in no form, the refusal may name fewer bytes."""
        if us == inf:
            return self._state_may_fit or self._is_worth_refusing(coarser)
        if self.limits.disk is not None:  # with one, plans are far above their bounds
            return False
        return self._is_worth(coarser.candidates, us, lambda: self._expected_us(coarser, inside=False))

    def _is_worth_refusing(self, form: S) -> bool:
        """Tells whether a refusal that names fewer bytes is worth what planning a form costs that cannot fit."""
        return self.effort.steps * _REFUSED_US > _OPERATION_US * operations(form.candidates)

    def _is_worth_planning(self, form: S) -> bool:
        if (us := self.best_us) < inf:
            return self._is_worth(form.candidates, us, lambda: self._expected_us(form))
        return self._is_alone or self.bound_us(form) < inf

    def _is_worth(self, candidates: Candidates, us: float, bound_us: Callable[[], float] | None = None) -> bool:
        """Tells whether what a form may gain over ``us`` is more than what it costs. ``bound_us``: its bound, asked for only if
        needed; default: what it takes however much memory there is."""
        cost_us = _OPERATION_US * operations(candidates)
        if self.effort.steps * us <= cost_us or takes_at_least(candidates, us):
            return False
        return is_worth(self.effort, cost_us, us, us - (least_us(candidates) if bound_us is None else bound_us()))

    def _expected_us(self, form: S, inside: bool = True) -> float:
        """Returns what the fastest plan of a form is expected to take: it is as far above its bound as the best plan is, if
        that is near. With finer fragments it may be nearer: more of them overlap, and bounds let everything do so."""
        bound_us, best = self.bound_us(form, inside), self.best
        if best is None or 0 < form.form.cut.nbytes <= best[0].form.cut.nbytes:
            return bound_us
        best_bound_us = self.bound_us(best[0])
        return bound_us * self.best_us / best_bound_us if best_bound_us < self.best_us <= _NEAR * best_bound_us else bound_us

    @property
    def _is_alone(self) -> bool:
        """True if there is nothing to compare a form with."""
        return len(self.made) == 1 and not self._chains

    @functools.cached_property
    def _state_may_fit(self) -> bool:
        """False if what is held at all times has no room in any form."""
        if self.limits.host is None or self.limits.disk_updates:  # which weights may be on disk depends on how they are cut
            return True
        return not is_hopeless(replace(self.forms.first.candidates.problem, budgets=self.limits))

    def _promise(self, form: S) -> tuple[float, float]:
        """Orders forms: by their bounds; those that cannot fit, and all once one did not, by the bytes that they need."""
        if self._is_alone:
            return 0.0, 0.0
        us = inf if self.refused and self.best is None else self.bound_us(form)
        return us, form.candidates.least_nbytes if us == inf else 0.0

    def _add(self, form: S) -> None:
        if all(form is not known for known in self.made):
            self.made.append(form)
            self._open.append(form)

    def _make(self, chain: _Chain[S]) -> None:
        """Makes the next form of a chain. The chain ends where that promises no more than the one before, unless its plan turns
        out to be the fastest; but as long as none fits, only where no finer one may."""
        if (form := next(chain.finer, None)) is None:
            self._chains.remove(chain)
            return
        self._add(form)
        us, _ = promise = self._promise(form)
        finer_may_fit = us == inf and self.bound_us(form, inside=False) < inf
        if promise >= self._promise(chain.coarser) and not finer_may_fit and self.effort.steps < inf:
            self._chains.remove(chain)
            self._left.append(chain)
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
        return nbytes <= device or nbytes <= min(made.candidates.least_nbytes for made in self.made)

    def _plan(self, form: S) -> None:
        self._open.remove(form)
        if not self.forms.allows(form.form.cut):  # not asked before: it takes products on the device
            return
        try:
            planned = self.forms.find(form)
        except DoesNotFit as error:
            self.refused.append((form, error))
            nearest = self.refusal[1]  # as near as the nearest is near enough: a finer form may be nearer
            is_nearer = way_to_go(error.tier, error.minimum) == way_to_go(nearest.tier, nearest.minimum)
            if self.limits.disk is None:
                self._ended = error.tier == "host" and not is_nearer and self.bound_us(form) == inf
            else:  # to plan with one takes long
                self._ended = error.tier == "disk" or (error.tier == "host" and not (is_nearer and self._state_may_fit))
            if len(self.refused) == 1 and self.best is None:  # where chains end is another question now
                self._chains = self._begin()
        else:
            if planned is not None:
                if planned.plan.total_us < self.best_us:
                    self._chains += [chain for chain in self._left if chain.coarser is form and chain not in self._chains]
                self.fitting.append((form, planned))
                self._ended = self.limits.disk is not None  # others are compared only where the first does not fit

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
