"""Finds the fastest form of a step, with the widest choice of forms that its limits ask for, and first without its disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import tee

from mtcompile.passes.cuts.bounds import is_small, resident_is_fastest, whole_head_may_gain
from mtcompile.passes.cuts.compare import Comparison
from mtcompile.passes.cuts.form import Allowed, Form, chains_of_forms
from mtcompile.passes.cuts.forms import Forms, S, rows_of, taken_in_rows
from mtcompile.passes.cuts.fragments.cut import UNCUT, possible_cuts
from mtcompile.passes.planning.disk.more_homes import may_gain
from mtcompile.passes.planning.disk.without import may_fit_without
from mtcompile.passes.planning.planner import may_be_resident


def fastest_form(forms: Forms[S], allowed: Allowed) -> Comparison[S]:
    """Compares those of the allowed forms that the fastest may be among. Where there is a disk, compares them without it first,
    as far as plans may fit; then a few that could be faster with it."""
    candidates = forms.first.candidates
    problem = replace(candidates.problem, budgets=forms.limits)
    if forms.limits.disk is None or not may_fit_without(problem, candidates, inside=not is_small(candidates)):
        return _compared(Comparison(forms, allowed))
    without = _compared(Comparison(forms.without_disk(), replace(allowed, begins=UNCUT.begins)))
    if (best := without.best) is not None and not may_gain(best[0].candidates.problem, best[1]):
        return without
    return _compared(Comparison(forms, allowed).after(without))


def _compared(comparison: Comparison[S]) -> Comparison[S]:
    """Compares those of the allowed forms that the fastest may be among. Where none fits, or the fastest of them could be much
    slower than others, compares what is kept for that too: few rows of all embeddings, fragments, and, where none fits, then
    finer fragments than a disk could read."""
    forms, allowed, first = comparison.forms, comparison.allowed, comparison.forms.first
    now, last = (allowed.fragments, allowed.embeddings), (allowed.last_fragments, allowed.last_embeddings)
    if allowed.last_embeddings != allowed.embeddings and rows_of(forms, allowed.embeddings) == rows_of(forms, last[1]):
        last = allowed.last_fragments, allowed.embeddings  # so that nothing is compared twice
    for (fragments, embeddings), begins in dict.fromkeys(((now, allowed.begins), (last, allowed.begins), (last, UNCUT.begins))):
        takes_none = embeddings == "auto" and resident_is_fastest(first.candidates, forms.limits)
        rows = None if takes_none else forms.in_rows(first, embeddings)
        takes_all = rows is None or forms.may_take_all_rows(first, rows)
        comparison.hurries = allowed.in_fragments or fragments != allowed.fragments
        kinds = [(first, None)] * takes_all + ([] if rows is None else [(rows, embeddings)])
        if not may_be_resident(replace(first.candidates.problem, budgets=forms.limits)):
            kinds.reverse()  # few rows are likely to be faster
        finer = tee(_finer_forms(comparison, fragments, begins, comparison.lead is not None), len(kinds))
        comparison.compare([(form, _chains(comparison, each, taken)) for (form, taken), each in zip(kinds, finer, strict=True)])
        if comparison.lead is not None and (comparison.is_near or not allowed.compares_last):
            break
        if comparison.lead is None and not comparison.could_fit():
            break
    comparison.plan_waiting()
    if not comparison.fitting:
        comparison.plan_unlikely()
    elif (whole := _with_whole_head(comparison)) is not None:
        comparison.compare([(whole, ())])
        comparison.plan_waiting()
    return comparison


def _with_whole_head(comparison: Comparison[S]) -> S | None:
    """Returns the best form with its loss head whole, if that could be 2 % faster: where logits are large, forms begin in
    chunks."""
    if (fastest := comparison.best) is None:
        return None
    (best, _), forms, allowed = fastest, comparison.forms, comparison.allowed
    if (chunks := best.form.chunks) == 1 or allowed.chunks != "auto" or forms.limits.disk is not None:
        return None
    if not whole_head_may_gain(best.candidates, forms.limits, forms.captured, chunks):
        return None
    whole, taken = forms.cut(replace(best.form, chunks=1)), taken_in_rows(best)
    if whole is None or not taken:
        return whole
    in_rows = (forms.in_rows(whole, embeddings) for embeddings in (allowed.embeddings, allowed.last_embeddings))
    return next((form for form in in_rows if form is not None and taken_in_rows(form) == taken), None)


def _finer_forms(comparison: Comparison[S], fragments: str | None, begins: int, compared: bool) -> Iterator[list[Form]]:
    """Yields chains of finer and finer forms; finds them when the first is asked for. Those that are cut most come first:
    where some forms are ``compared``, most others then need no search. Where none fits yet, one is found sooner; but forms with
    other chunks alone, which are made soon, come before them."""
    forms, first = comparison.forms, comparison.forms.first
    cuts = possible_cuts(forms.captured, fragments, begins)[1:]
    chains = [each for each in chains_of_forms(comparison.allowed, first.form, cuts) if each != [first.form]]
    yield from reversed(chains) if compared else (*chains[:1], *reversed(chains[1:]))


def _chains(comparison: Comparison[S], finer: Iterable[list[Form]], taken: str | None) -> Iterator[Iterator[S]]:
    """Yields the steps of each chain, made when they are asked for. ``taken``: the embeddings of which they take few rows."""
    return (_steps_of(comparison, chain, taken) for chain in finer)


def _steps_of(comparison: Comparison[S], finer: Iterable[Form], taken: str | None) -> Iterator[S]:
    """Yields the steps of one chain: only forms that may be worth it, as far as there is something to cut."""
    forms, first = comparison.forms, comparison.forms.first
    for form in finer:
        if comparison.is_to_skip(form):
            return
        if not comparison.has_room_for(form):
            continue
        step = first if form == first.form else forms.cut(form)
        if step is not None and taken is not None:
            step = forms.in_rows(step, taken)
        if step is not None:
            yield step
        elif form.cut == UNCUT:  # there is nothing more to cut
            return
