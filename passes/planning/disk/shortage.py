"""Finds the bytes of the host that a problem lacks, by a few lean plans that are evaluated exactly, before any search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mtcompile.passes.analysis.state import param_nbytes, persistent_nbytes
from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.figures.lean import FEW_HOMES, leanest, orders_to_device, subsets
from mtcompile.passes.planning.ladders import decided
from mtcompile.passes.planning.problem import PlanningProblem


def surely_short(problem: PlanningProblem) -> int:
    """Returns the bytes that the host lacks even if the device held nothing but training state."""
    budgets, base = problem.budgets, decided(problem, param_nbytes(problem.step))
    if budgets.host is None or budgets.device is None:
        return 0
    return persistent_nbytes(problem.step, base, budgets)["host"] - budgets.device - budgets.host


def short_of_host(problem: PlanningProblem, known: Candidates, tiers: tuple[Choice, ...] = ("host", "device")) -> int:
    """Returns the bytes that the host lacks for plans that recompute everything, fetch nothing ahead, and have as many homes on
    the device as fit there, in a few orders; of few homes, any that fit. ``known``: of the same step; ``tiers``: where what
    crosses blocks may wait. 0 where none of them fits the device."""
    budgets, candidates = problem.budgets, Candidates.like(known, problem)
    if budgets.host is None or budgets.device is None:
        return 0
    sizes, needs = candidates.sizes, list[int]()
    homes = list(candidates.open_params)
    for tier in tiers:
        start = leanest(candidates.base).with_decision(Decision("activation", "*", tier, 0))

        def peaks(on_device: Iterable[str], start: Plan = start) -> Mapping[str, int]:
            there = [Decision("params", home, "device", sizes[home]) for home in on_device]
            return candidates.evaluate(start.with_decisions(there)).plan.peak_bytes

        for order in orders_to_device(homes, sizes):
            low, high = -1, len(order)
            while low < high:  # the most homes that fit
                count = (low + high + 1) // 2
                held = peaks(order[:count])
                if held["device"] <= budgets.device:
                    needs.append(held["host"])
                    low = count
                else:
                    high = count - 1
        if len(homes) <= FEW_HOMES and needs and min(needs) > budgets.host:
            needs += [held["host"] for held in map(peaks, subsets(homes)) if held["device"] <= budgets.device]
    return max(0, min(needs) - budgets.host) if needs else 0
