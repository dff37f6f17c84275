"""Tells what a form of a step can give at best, by the bounds of its linear program."""

from __future__ import annotations

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.form import SMALL
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.step_graph import kernel_of, regions

PROMISE = 0.998  # of the best form's bound: others that promise less are not searched


def could_be_faster(candidates: Candidates, limits: Budgets, us: float) -> bool:
    """Tells whether any plan of a step within the limits could be faster than one of another form, which takes ``us``."""
    if least_us(candidates) >= us:
        return False
    return candidates.bound_us(limits.device, limits.host) < us


def promises_more(candidates: Candidates, limits: Budgets, best: Candidates) -> bool:
    """Tells whether a form is worth a search beside the ``best`` one: its plans are about as far from its bound as those of the
    best one from theirs."""
    return candidates.bound_us(limits.device, limits.host) <= PROMISE * best.bound_us(limits.device, limits.host)


def is_small(candidates: Candidates) -> bool:
    """Tells whether other forms of a step are made and searched in about a second each."""
    step = candidates.problem.step
    return sum(len(kernel_of(step, region).graph.nodes) for region in regions(step)) <= SMALL


def least_us(candidates: Candidates) -> float:
    """Returns the µs that each plan of a step takes, however much memory there is."""
    return candidates.bound_us(None, None) if candidates.resident_may_be_slow else candidates.resident.plan.total_us
