"""Compares the forms of a step within a budget: of those that could be the fastest, each is planned, and no others are.

A form is left out if no plan of it can be faster than the best one, by the bound of its linear program. One of a large step
is not searched either if that bound is hardly lower than the best form's; finer ones are not made once the bound rises, or
once it hardly falls and short climbs are slower. Of those that are left, short climbs and bounds tell which is likely to be
the fastest: where they do, it alone is searched. Others than the first are not made where it is so near to what any form could
give that they are not worth it; nor are tiles and fragments where the bound of the best form is. A bound far below its own plan
says little, and rules out no others. By as much as these differences, and no more, a little more memory can be predicted to be
slower: a form that is taken because no other fits is compared where others fit, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Generic

from mtcompile.passes.analysis.state import held_nbytes
from mtcompile.passes.cuts.bounds import (
    PROMISE,
    could_be_faster,
    finer_is_hopeless,
    host_is_too_small,
    is_small,
    may_fit,
    promises_more,
    takes_at_least,
)
from mtcompile.passes.cuts.form import Allowed, Form
from mtcompile.passes.cuts.forms import Forms, S, rows_of, taken_in_rows
from mtcompile.passes.cuts.fragments.figures import streaming
from mtcompile.passes.joint.loss_head import head_nbytes
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.problem import DoesNotFit, Planned, way_to_go

_NEAR, _NEAR_LARGE = 1.02, 1.1  # of what any form could give: then others are not made of a small step, or of a large one
_FEW_FINER = 1.06  # times what any form could give: with a bound below, a large step is not made in tiles or fragments
_FAR = 1.05  # times what finer forms could give: with a bound above, a form waits for their short climbs
_HOPELESS = 1.2  # times the best plan: what plans that need a little more memory take of forms that are not searched
_ENOUGH = 1.05  # of what another form could give: in each compilation, fragments that gain less are not searched
_TO_BOUND = 1 / 3  # of the way from what short climbs find to the bound: what forms are compared by
_TIED = 1.003  # times what another form is likely to take: one that promises more is searched, too
_ABOUT = 0.999  # of the bytes that a form needs: others that need these are not made finer where none fits
_TELLING = 1.1  # times its bound: if a plan takes longer, that bound does not rule out other forms
_TELLING_FINER = 1.2  # the same of forms that take long to make: tiles and fragments
_CLOSE = 1.05  # times what short climbs take with all rows, or with few: finer forms of the other are compared too


class Comparison(Generic[S]):
    """Compares forms. ``fitting``: those planned so far that fit; ``refused``: those that do not.
    ``hurries``: whether forms that could be a few percent faster are not worth a search."""

    def __init__(self, forms: Forms[S], allowed: Allowed) -> None:
        self.forms, self.allowed = forms, allowed
        self.fitting, self.refused = list[tuple[S, Planned]](), list[tuple[S, DoesNotFit]]()
        self._unlikely, self._considered = list[S](), dict[int, S]()
        self.hurries, self._too_many_chunks, self._too_few_chunks = False, inf, 0
        self._coarsest, self._compared, self._waiting, self._left_out = list[S](), dict[int, S](), list[S](), list[S]()

    def after(self, other: Comparison[S]) -> Comparison[S]:
        """Returns this comparison, to begin with what was planned and fits in another."""
        self.fitting += other.fitting
        self._compared |= other._compared
        return self

    @property
    def best(self) -> tuple[S, Planned] | None:
        """The fastest form so far, with its plan."""
        return min(self.fitting, key=lambda each: each[1].plan.total_us, default=None)

    def told(self) -> tuple[S, Planned] | None:
        """Returns ``best``, whose certificate tells of the other forms that were made, too, as far as plans of them may fit."""
        if (best := self.best) is None or (certificate := best[1].plan.certificate) is None:
            return best
        bounds = [us for form in self._compared.values() if form is not best[0] and (us := self._bound_us(form)) < inf]
        certificate = replace(certificate, other_cuts=len(bounds), other_bound_us=min(bounds, default=0.0))
        return best[0], replace(best[1], plan=replace(best[1].plan, certificate=certificate))

    @property
    def refusal(self) -> tuple[S, DoesNotFit]:
        """The form with the smallest way to go, with its refusal."""
        return min(self.refused, key=lambda each: way_to_go(each[1].tier, each[1].minimum))

    @property
    def lead(self) -> tuple[float, S] | None:
        """The form with the fastest plan so far, and its µs: found by a search, or by short climbs where a search follows."""
        searched = [(planned.plan.total_us, planned.plan.total_us, form) for form, planned in self.fitting]
        waiting = [(self._likely_us(form), self._climbed_us(form), form) for form in self._waiting]
        return min(searched + waiting, key=lambda each: each[0])[1:] if searched or waiting else None

    @property
    def is_near(self) -> bool:
        """True if no other form could be much faster than the best one."""
        if (lead := self.lead) is None:
            return False
        us, form = lead
        all_resident = any(planned.plan.all_resident for each, planned in self.fitting if each is form)
        if all_resident or self.forms.limits.disk is not None:  # with a disk, only where the first does not fit
            return True
        least_us = min(map(self._finer_us, self._coarsest))
        promises_little = self._is_telling(form, us, _TELLING_FINER) and least_us > PROMISE * self._bound_us(form)
        return promises_little or us <= (_NEAR if is_small(form.candidates) else _NEAR_LARGE) * least_us

    def _finer_us(self, form: S) -> float:
        """Returns the µs of the fastest plan that could be of a form and of all finer ones: as if what a block's work needs
        while it runs took no memory, nor what others may take few rows of."""
        device, host = self._device_and_host
        step = form.candidates.problem.step
        names = self._may_be_in_rows.difference(*map(taken_in_rows, self._coarsest))
        held = held_nbytes(step, form.candidates.problem.budgets)
        more = sum(held[home] for home in {step.meta["homes"][name] for name in names if name in step.meta["homes"]})
        return form.candidates.bound_us(None if device is None else device + more, host, inside=False)

    @functools.cached_property
    def _may_be_in_rows(self) -> frozenset[str]:
        """The embeddings of which some form takes few rows."""
        return rows_of(self.forms, self.allowed.last_embeddings)

    @property
    def _device_and_host(self) -> tuple[int | None, int | None]:
        return self.forms.limits.device, self.forms.limits.host

    def _bound_us(self, form: S) -> float:
        """Returns the µs of the fastest plan that a form could have within the device's and the host's bytes."""
        return form.candidates.bound_us(*self._device_and_host)

    @property
    def _alone(self) -> bool:
        """True if there is nothing to compare a form with."""
        return self.allowed.alone and not self.fitting

    def compare(self, kinds: Sequence[tuple[S, Iterable[Iterable[S]]]]) -> None:
        """Compares some forms. ``kinds``: that take all rows of embeddings and few: the coarsest form of each, and chains of
        finer and finer ones, each of which takes longer than the one before if memory does not matter."""
        coarsest = [form for form, _ in kinds]
        self._compared |= {id(form): form for form in coarsest}
        if len(coarsest) > 1 and all(map(self._can_wait, coarsest)):
            less = [form for form in coarsest if self._promises_less(form, coarsest)]
            self._coarsest, self._left_out = self._coarsest + less, self._left_out + less
            coarsest = [form for form in coarsest if form not in less]
        if len(coarsest) > 1 and all(map(self._can_wait, coarsest)):
            coarsest.sort(key=self._likely_us)
        for form in coarsest:  # how good its plan is says which others to make
            self._coarsest.append(form)
            self._consider(form, may_wait=len(coarsest) > 1 or self._is_far(form))
            if (best := self.best) is not None and best[1].plan.all_resident:
                if not self.allowed.in_fragments or not streaming(best[1].schedule).staging_nbytes:
                    return
            if self.lead is None and not self.could_fit():
                return
        if self.is_near and not self.allowed.in_fragments:
            return
        left_out = {id(form) for form in self._left_out}
        remaining = [(form, enumerate(chains)) for form, chains in kinds if id(form) not in left_out]
        for most in (1, None):  # the first chain of each kind: tiles and fragments take long to make
            for place, (form, chains) in enumerate(remaining):
                is_behind = most is None and self._is_behind(form)
                if is_behind or self._finer_is_hopeless(form, [other for other, _ in remaining[:place]]):
                    continue
                for number, chain in islice(chains, most):
                    if not (number and self._gains_little_from_finer()) and not self._compare_finer(chain):
                        return

    def _finer_is_hopeless(self, form: S, before: Sequence[S]) -> bool:
        """Tells whether no form fits the device so far and one needs about as much of it as another ``before`` it, or more."""
        if self.lead is not None or self._alone or any(error.tier != "device" for _, error in self.refused):
            return False
        return any(_ABOUT * other.candidates.least_nbytes <= form.candidates.least_nbytes for other in before)

    def _compare_finer(self, chain: Iterable[S]) -> bool:
        """Compares a chain of finer and finer forms. Tells whether others could fit."""
        leanest, before = inf, None
        for form in chain:
            self._compared[id(form)] = form
            if (lead := self.lead) is not None:
                if self._promises_less_than_in_chunks(form):
                    self._too_few_chunks = max(self._too_few_chunks, form.form.chunks)
                    break
                if takes_at_least(form.candidates, lead[0]):
                    break
                bound_us, before_us = map(self._bound_us, (form, before or form))
                if self._is_telling(lead[1], lead[0]) and before_us < bound_us < inf:  # what finer forms spare is worth less
                    self._leave_out_finer(form)
                    break
                if before is not None and bound_us == before_us == inf and self.forms.limits.host is not None:
                    break  # two in a row cannot fit: finer forms will hardly fit either
            if lead is None and self._host_is_too_small():
                return False
            if lead is None and not self._alone and not may_fit(form.candidates, self.forms.limits):
                if finer_is_hopeless(form.candidates, form.form, self.forms.limits, leanest):
                    break
                leanest = min(leanest, form.candidates.least_nbytes)
            self._consider(form, may_wait=True)
            if lead is not None:
                if before is not None and self._is_behind_another(form, before, _TIED):
                    self._leave_out_finer(form)
                    break
                if not form.form.is_in_chunks_alone and self._is_behind_another(form, lead[1], _CLOSE):
                    break
                before = form
        return True

    def _leave_out_finer(self, form: S) -> None:
        """Leaves out forms with as many chunks as this one or more, if only its loss head is cut."""
        if form.form.is_in_chunks_alone:
            self._too_many_chunks = min(self._too_many_chunks, form.form.chunks)

    def _is_behind_another(self, form: S, other: S, times: float) -> bool:
        """Tells whether a form's bound is not clearly lower than another's, and it is likely over ``times`` as slow."""
        promises_less = self._goes_by_bounds(form) and not promises_more(form.candidates, self.forms.limits, other.candidates)
        return promises_less and self._is_likely_slower(form, other, times)

    def _promises_less_than_in_chunks(self, form: S) -> bool:
        """Tells whether a finer form of a large step has no lower bound than the same one with more chunks. Then other finer
        forms with as few chunks are taken not to have one either."""
        if form.form.is_in_chunks_alone or not self._goes_by_bounds(form):
            return False
        in_more = [other for other in self._compared.values() if other.form.chunks > form.form.chunks]
        cut_alike = [other for other in in_more if replace(other.form, chunks=form.form.chunks) == form.form]
        alike = [other for other in cut_alike if taken_in_rows(other) == taken_in_rows(form)]
        return any(self._bound_us(other) <= self._bound_us(form) for other in alike)

    def _promises_less(self, rows: S, coarsest: Sequence[S]) -> bool:
        """Tells whether a form that takes few rows, and goes by bounds, promises no more than one that takes all: to take rows
        takes time, and its bound leaves out some of that."""
        if not self._goes_by_bounds(rows) or not taken_in_rows(rows):
            return False
        limits, others = self.forms.limits, [form for form in coarsest if not taken_in_rows(form)]
        return any(not promises_more(rows.candidates, limits, form.candidates) for form in others)

    def _is_far(self, form: S) -> bool:
        """Tells whether finer forms could be much faster than a form that goes by bounds and may wait."""
        return self._goes_by_bounds(form) and self._can_wait(form) and self._bound_us(form) > _FAR * self._finer_us(form)

    def _gains_little_from_finer(self) -> bool:
        """Tells whether tiles and fragments, which take long to make of a large step, could make it little faster."""
        if (lead := self.lead) is None or not self._is_telling(lead[1], lead[0], _TELLING_FINER):
            return False
        ahead = [form.candidates for form in self._coarsest if not self._is_behind(form)]
        least_us = min((candidates.bound_us(*self._device_and_host, inside=False) for candidates in ahead), default=0.0)
        return self._bound_us(lead[1]) <= _FEW_FINER * least_us

    def could_fit(self) -> bool:
        """Tells whether other forms could fit: not if the disk is too slow or small, or the host for what it always holds."""
        return not self.refused or (self.refusal[1].tier != "disk" and not self._host_is_too_small())

    def _host_is_too_small(self) -> bool:
        """Tells whether to give up, since the host has no room for what is held at all times, in any form."""
        if not self.refused or self.refusal[1].tier != "host":
            return False
        form, error = self.refusal
        return host_is_too_small(form.candidates, self.forms.limits, error)

    def is_to_skip(self, form: Form) -> bool:
        """Tells whether to skip a form that is not made yet: it has too many chunks for what they spare, or tiles or fragments
        and too few chunks."""
        return form.chunks >= self._too_many_chunks or (form.chunks <= self._too_few_chunks and not form.is_in_chunks_alone)

    def has_room_for(self, form: Form) -> bool:
        """Tells whether a form that is not made yet could fit, or need less than those that did not, by its logits alone."""
        if (device := self.forms.limits.device) is None or self.allowed.fuses:
            return True
        needed = [error.minimum for _, error in self.refused if error.tier == "device"]
        needed += [form.candidates.floor for form in self._unlikely[:1]]
        return head_nbytes(self.forms.captured) // form.chunks <= max(device, min(needed, default=0))

    def plan_unlikely(self) -> None:
        """Plans forms that cannot fit the device: those that need less of it by their linear programs come first, until one
        fits or none can need less."""
        could_help = not self.refused or self.refusal[1].tier == "device"
        for form in sorted(self._unlikely, key=lambda form: form.candidates.least_nbytes) if could_help else ():
            least = form.candidates.least_nbytes
            if self.fitting or (self.refused and least >= min(error.minimum for _, error in self.refused)):
                return
            if self.forms.allows(form.form.cut):
                self._attempt(form)

    def _consider(self, form: S, may_wait: bool) -> None:
        if id(form) in self._considered:
            return
        self._considered[id(form)] = form
        lead = self.lead
        if lead is None and self._must_fit(form) and not may_fit(form.candidates, self.forms.limits):
            self._unlikely.append(form)
        elif lead is not None and not self._is_worth_a_search(form, *lead):
            self._left_out.append(form)
        elif not self.forms.allows(form.form.cut):  # not asked before: it takes products on the device
            return
        elif may_wait and self._waits(form):
            self._waiting.append(form)
        else:
            self._attempt(form)

    def _is_worth_a_search(self, form: S, us: float, best: S) -> bool:
        """Tells whether a form may have a plan that is faster than the ``us`` of one of the ``best`` form."""
        enough, limits, alike = _ENOUGH if self.hurries else 1.0, self.forms.limits, self._takes_rows_like(form)
        if not alike:  # the coarsest that takes other rows: bounds of these say little of each other
            compares_quickly = limits.host is None or is_small(form.candidates)
            enough = inf if limits.disk is not None else _NEAR if compares_quickly else _ENOUGH
        if not could_be_faster(form.candidates, limits, us / enough):
            return False
        if not alike:
            return limits.host is not None or not self._is_likely_slower(form, best, _CLOSE)
        if not self._goes_by_bounds(form):
            return True
        like_us, like_best = min(alike, key=lambda each: each[0])
        is_telling = self._is_telling(like_best, us if like_best is best else like_us)
        if is_telling and not promises_more(form.candidates, limits, like_best.candidates):
            return False
        return not self._is_compared_by_climbs(form) or not self._is_hopeless(form, _HOPELESS * us)

    def _is_likely_slower(self, form: S, best: S, times: float) -> bool:
        """Tells whether short climbs of a form take longer than some ``times`` those of another."""
        return times * self._likely_us(best) < self._likely_us(form) < inf

    def _is_hopeless(self, form: S, us: float) -> bool:
        """Tells whether short climbs of a form take more than some µs, or, where no plan of these is within the device's bytes,
        plans that need a little more."""
        if (climbed_us := self._climbed_us(form)) < inf or self.forms.limits.device is None:
            return us < climbed_us < inf
        return us < form.candidates.above_us(self.forms.limits.device) < inf

    def _is_behind(self, form: S) -> bool:
        """Tells whether a form, and others that take as few rows, are likely much slower than the fastest one."""
        alike, likely_us = self._takes_rows_like(form), [us for us, _ in self._likely]
        return self._goes_by_bounds(form) and bool(alike) and min(us for us, _ in alike) > _CLOSE * min(likely_us)

    def _takes_rows_like(self, form: S) -> list[tuple[float, S]]:
        """Returns the forms with plans, and their µs, that take few rows of the same embeddings as a form does."""
        return [one for one in self._likely if taken_in_rows(one[1]) == taken_in_rows(form)]

    @property
    def _likely(self) -> list[tuple[float, S]]:
        """The forms with plans, and their µs, or about those that a search finds."""
        planned = [(planned.plan.total_us, each) for each, planned in self.fitting]
        return planned + [(self._likely_us(each), each) for each in self._waiting]

    def _waits(self, form: S) -> bool:
        """Tells whether a form is searched when it is known which is likely to be the fastest."""
        may_wait = self._can_wait(form) and self._is_compared_by_climbs(form)
        return may_wait and (bool(self._waiting) or self._likely_us(form) < inf)

    def _is_compared_by_climbs(self, form: S) -> bool:
        """Tells whether short climbs say whether to search a form."""
        return not self._alone and self._goes_by_bounds(form) and self.forms.limits.disk is None

    def _likely_us(self, form: S) -> float:
        """Returns about the µs, beside those of other forms, that a search of a form finds: what short climbs find, a third of
        the way to its bound, as that tells how much they may have missed. Infinite where that is unknown."""
        us, bound_us = self._climbed_us(form), self._bound_us(form)
        return us ** (1 - _TO_BOUND) * bound_us**_TO_BOUND if us < inf and bound_us else us

    def _climbed_us(self, form: S) -> float:
        """Returns the µs that short climbs of a form find, whatever their plans need of the host; infinite if none fits."""
        limits = self.forms.limits
        return inf if limits.device is None or limits.disk is not None else form.candidates.climbed_us(limits.device)

    def _can_wait(self, form: S) -> bool:
        """Tells whether to search a form when short climbs of all are known: not where their plans may not fit, as they do not
        count what these need of the host."""
        return self.forms.limits.host is None and not fits(form.candidates.resident.plan, self.forms.limits)

    def plan_waiting(self) -> None:
        """Plans the forms that wait: the one that is likely the fastest and others, where that is a tie or unknown, or their
        short climbs found a faster plan. If none of them can be run, plans what was left out because of them."""
        waiting, self._waiting = sorted(self._waiting, key=self._likely_us), []
        for form in waiting:
            best = self.best
            slower = best and self._climbed_us(form) >= best[1].plan.total_us and self._is_likely_slower(form, best[0], _TIED)
            if best is None or (not slower and self._is_worth_a_search(form, best[1].plan.total_us, best[0])):
                self._attempt(form)
        for form in self._left_out if waiting and not self.fitting else ():
            self._attempt(form)

    def _goes_by_bounds(self, form: S) -> bool:
        """Tells whether forms are left out by what they promise: not those of small steps, whose plans may be far from their
        bounds, one farther than another, and not where fragments were asked for."""
        return not self.allowed.in_fragments and not is_small(form.candidates)

    def _is_telling(self, form: S, us: float, times: float = _TELLING) -> bool:
        """Tells whether the bound of a form whose plan takes ``us`` rules out other forms: that of a large step does unless the
        plan takes that many ``times`` as long."""
        return self._goes_by_bounds(form) and us <= times * self._bound_us(form)

    def _must_fit(self, form: S) -> bool:
        """Tells whether to search a form only if it has a plan within the limits: not where there is no other, or where some of
        the device may be freed for it."""
        return not self._alone and "device" not in form.candidates.problem.fixed_homes.values()

    def _attempt(self, form: S) -> None:
        try:
            planned = self.forms.find(form)
        except DoesNotFit as error:
            self.refused.append((form, error))
        else:
            if planned is not None:
                self.fitting.append((form, planned))
