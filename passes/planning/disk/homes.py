"""The homes that may go to disk, and what keeps a step off the host although they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtcompile.passes.analysis.state import (
    held_nbytes,
    param_nbytes,
    persistent_nbytes,
    trained_nbytes,
    update_staging_nbytes,
)
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.blocks import decided
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem


def may_move(problem: PlanningProblem) -> tuple[list[str], list[str]]:
    """The homes that may go to disk, in the order of the step: the frozen ones, and those that train, with their state, where
    updates run in the backward, a parameter at a time."""
    if problem.budgets.disk is None:
        return [], []
    fixed, takes = problem.fixed_homes, problem.budgets.disk_takes
    homes = dict.fromkeys(problem.step.meta["homes"].values())
    free = [home for home in homes if home not in fixed or (home in takes and fixed[home] != "disk")]
    nbytes = trained_nbytes(problem.step)
    trained = [home for home in free if nbytes.get(home)] if problem.budgets.disk_updates else []
    return [home for home in free if not nbytes.get(home)], trained


def dear(problem: PlanningProblem) -> list[str]:
    """Returns the homes that train whose updates on disk go through more of the host than is freed: those of the largest
    parameters, as many as leave least on the host once all others are on disk."""
    held, (_, trained) = held_nbytes(problem.step, problem.budgets, "host"), may_move(problem)
    through = {home: update_staging_nbytes(problem.step, _on_disk([home]), problem.budgets) for home in trained}
    order = sorted(trained, key=lambda home: -through[home])
    taken = [sum(held[home] for home in order[:count]) + through[home] for count, home in enumerate(order)]
    return order[: taken.index(min(taken))] if taken else []


def surely_short(problem: PlanningProblem) -> int:
    """Returns the bytes that the host lacks even if the device held nothing but training state."""
    budgets, base = problem.budgets, decided(problem, param_nbytes(problem.step))
    if budgets.host is None or budgets.device is None:
        return 0
    return persistent_nbytes(problem.step, base, budgets)["host"] - budgets.device - budgets.host


def is_hopeless(problem: PlanningProblem) -> bool:
    """Tells whether the host lacks room even if all homes that may go to disk are there, and the device holds nothing but
    training state."""
    there = [home for homes in may_move(problem) for home in homes]
    return surely_short(replace(problem, fixed_homes={**problem.fixed_homes, **dict.fromkeys(there, "disk")})) > 0


def causes(problem: PlanningProblem, plan: Plan, error: DoesNotFit) -> tuple[tuple[str, int], ...]:
    """Returns the bytes that the host holds although everything that may go to disk is there, by what holds them. ``plan``:
    the one that was refused."""
    held, trains = held_nbytes(problem.step, problem.budgets, "host"), trained_nbytes(problem.step)
    trained = sum(held[home] for home, tier in zip(held, plan.tiers(held), strict=True) if trains[home] and tier != "disk")
    slots = next((part for part in error.causes if "slots" in part[0]), ("placed slots", 0))
    updates = update_staging_nbytes(problem.step, plan, problem.budgets)
    beside = ("buffers of the disk's requests and updates", problem.budgets.disk_staging + updates)
    trained = min(trained, max(0, error.minimum - beside[1] - slots[1]))  # the others are on the device
    what = "weights that train, with gradients and optimizer state"
    if not problem.budgets.disk_updates:
        way = "an elementwise optimizer, such as AdamW" if problem.budgets.updates else 'update="backward"'
        what += f" (with {way}, they may go to disk)"
    return tuple(part for part in ((what, trained), beside, slots) if part[1])


def _on_disk(homes: Sequence[str]) -> Plan:
    return Plan(tuple(Decision("params", home, "disk", 0) for home in homes))
