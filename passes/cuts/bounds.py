"""Tells what a form of a step can give at best, by the bounds of its linear program."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from torch import fx

from mtcompile.passes.analysis.cost import node_cost
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.form import SMALL, Form
from mtcompile.passes.cuts.fragments.cut import UNCUT
from mtcompile.passes.joint.loss_head import head_nbytes, recomputed_products
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.spill import is_hopeless
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.problem import DoesNotFit
from mtcompile.passes.step_graph import kernel_of, regions

PROMISE = 0.998  # of the best form's bound: others that promise less are not searched
_WORTH_A_WHOLE_HEAD = 0.98  # of a form's bound: if the same one with its loss head whole promises less, it is made, too
_HARDLY_LESS = 0.98  # of a coarser form's bytes: fragments that do not fit and need more than this are not made finer


def could_be_faster(candidates: Candidates, limits: Budgets, us: float) -> bool:
    """Tells whether any plan of a step within the limits could be faster than one of another form, which takes ``us``."""
    return not takes_at_least(candidates, us) and candidates.bound_us(limits.device, limits.host) < us


def promises_more(candidates: Candidates, limits: Budgets, best: Candidates) -> bool:
    """Tells whether a form is worth a search beside the ``best`` one: its plans are about as far from its bound as those of the
    best one from theirs."""
    return candidates.bound_us(limits.device, limits.host) <= PROMISE * best.bound_us(limits.device, limits.host)


def is_small(candidates: Candidates) -> bool:
    """Tells whether other forms of a step are made and searched in about a second each."""
    step = candidates.problem.step
    return sum(len(kernel_of(step, region).graph.nodes) for region in regions(step)) <= SMALL


def may_fit(candidates: Candidates, limits: Budgets) -> bool:
    """Tells whether some plan may be within the device's bytes, by its linear program."""
    return candidates.bound_us(limits.device, None) < inf


def finer_is_hopeless(candidates: Candidates, form: Form, limits: Budgets, leanest_nbytes: float) -> bool:
    """Tells whether finer forms are hopeless, too: this one does not fit the device, and needs at least as much of it as the
    leanest coarser one. Finer fragments may still save memory while a block works, so this form in fragments must also not fit
    if that took none."""
    if form.cut == UNCUT:
        return candidates.least_nbytes >= leanest_nbytes
    could_fit = candidates.bound_us(limits.device, limits.host, inside=False) < inf
    return not could_fit and candidates.least_nbytes >= _HARDLY_LESS * leanest_nbytes


def whole_head_may_gain(candidates: Candidates, limits: Budgets, captured: fx.GraphModule, chunks: int) -> bool:
    """Tells whether a form with its loss head in ``chunks`` could be 2 % faster with a whole head: logits are then computed
    once, but are on the device all at once. Estimates this without making that form. ``captured``: before any rewrite."""
    device, bound_us = limits.device, candidates.bound_us(limits.device, limits.host)
    again_us = sum(node_cost(product).time_us(candidates.problem.machine) for product in recomputed_products(captured))
    if again_us <= (1 - _WORTH_A_WHOLE_HEAD) * bound_us:
        return False
    more_nbytes = head_nbytes(captured) * (chunks - 1) // chunks
    if device is not None and device <= more_nbytes:
        return False
    whole_us = candidates.bound_us(None if device is None else device - more_nbytes, limits.host) - again_us
    return 0.0 < whole_us < _WORTH_A_WHOLE_HEAD * bound_us


def least_us(candidates: Candidates) -> float:
    """Returns the µs that each plan of a step takes, however much memory there is."""
    return candidates.bound_us(None, None) if candidates.resident_may_be_slow else candidates.resident.plan.total_us


def takes_at_least(candidates: Candidates, us: float) -> bool:
    """Tells whether every plan of a step takes at least ``us``, whatever the memory. Solves no linear program if the plan with
    everything on the device is faster."""
    return candidates.resident.plan.total_us >= us and least_us(candidates) >= us


def resident_is_fastest(candidates: Candidates, limits: Budgets) -> bool:
    """Tells whether the plan with everything on the device fits and none is faster."""
    resident = not candidates.problem.fixed_homes and fits(candidates.resident.plan, limits)
    return resident and not candidates.resident_may_be_slow


def host_is_too_small(candidates: Candidates, limits: Budgets, refusal: DoesNotFit) -> bool:
    """Tells whether the host, with the disk if there is one, has no room for what is held at all times, in any form. Never
    for a small step without a disk: all its forms are planned, so that the refusal names the smallest host that works."""
    problem = candidates.problem
    if limits.disk is None:
        return not is_small(candidates) and dict(refusal.causes).get("persistent state", 0) > (limits.host or 0)
    if problem.budgets.disk_updates:  # which weights may be on disk depends on how they are cut
        return False
    budgets = replace(problem.budgets, device=limits.device, host=limits.host, disk=limits.disk)
    return is_hopeless(replace(problem, budgets=budgets))
