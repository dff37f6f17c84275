"""Advice about a step that the host has no room for: which changes would make room.

These are planned by few evaluations, so a search may find a faster plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from mtcompile.errors import MtcompileError
from mtcompile.forecast.fastest import fastest
from mtcompile.forecast.request import (
    AssumedPlacement,
    ForecastRequest,
    SizedStep,
    in_form,
    sized_step,
    with_disk,
)
from mtcompile.forecast.run_cost import told_run
from mtcompile.optim.backward.checks import updates_by_parameter
from mtcompile.optim.state_sizes import FORECAST_STATES, optimizer_named, state_copies, streamed_copies, update_workspace
from mtcompile.passes.analysis.state import Budgets, held_nbytes, trained_nbytes
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.homes import surely_short
from mtcompile.passes.planning.disk.within import within_disk
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem, Progress
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.trace import time_of
from mtcompile.torch_private import without_memory

_LORA_RANK = 16
_REFUSALS = (MtcompileError, DoesNotFit, ValueError, TypeError, NotImplementedError)  # of a model that allows no such change


class Change(NamedTuple):
    """A changed step. ``what``: as a user asks for it; ``problem``: makes its planning problem."""

    what: str
    problem: Callable[[], PlanningProblem]


def _updating(request: ForecastRequest, budgets: Budgets) -> Budgets:
    split, states = request.precision.split, FORECAST_STATES.get(str(request.optimizer), 0)
    workspace, streamed = update_workspace(split, request.optimizer != "sgd"), streamed_copies(split, states)
    return replace(budgets, updates=Updates(budgets.state_copies, workspace, checked=True, streamed=streamed))


def may_update_in_backward(request: ForecastRequest) -> bool:
    """Tells whether the optimizer can update parameters in the backward."""
    if request.make_optimizer is None:
        return True
    with without_memory():
        return updates_by_parameter(request.make_optimizer([nn.Parameter(torch.empty(2, 2))]))


def ways_on_host(request: ForecastRequest, sized: SizedStep, budgets: Budgets, error: DoesNotFit) -> list[str]:
    """Returns what would help a step that does not fit the host, each with its own figures: first the changes that fit, the
    fastest of them first. A change that leaves more training state than there is memory is not planned."""
    fitting, short, limit = [], [], budgets.host or 0
    for change in _savings(request, sized, budgets):
        request.progress(f"planning with {change.what}", 0, 0)
        with suppress(*_REFUSALS):
            problem = change.problem()
            if problem.budgets.disk is None and (lacking := surely_short(problem)) > 0:
                if (least := limit + lacking) < error.minimum:
                    text = f"{change.what}: needs at least {gib(least)} of the host, still at least {gib(lacking)} short"
                    short.append((least, text))
                continue
            try:
                plan = _plan(problem, request.progress)
            except DoesNotFit as short_of:
                if short_of.tier == "host" and short_of.minimum < error.minimum:
                    less = f"{gib(error.minimum - short_of.minimum)} less, but still {gib(short_of.minimum - limit)} short"
                    text = f"{change.what}: needs at most {gib(short_of.minimum)} of the host, {less}"
                    short.append((short_of.minimum, text))
                continue
            if plan.peak_bytes.get("disk") == 0:  # it fits without a disk, as another change says
                continue
            disk = f", {gib(plan.peak_bytes['disk'])} of a disk at {_disk_speeds(request)}" if "disk" in plan.peak_bytes else ""
            text = f"{change.what}: fits, {time_of(plan.total_us)} a step with {gib(plan.peak_bytes['host'])} of the host{disk}"
            text += told_run(request, sized.tokens, plan)
            fitting.append((plan.total_us, text))
    return [text for _, text in (*sorted(fitting), *sorted(short))]


def _savings(request: ForecastRequest, sized: SizedStep, budgets: Budgets) -> Iterator[Change]:
    """Yields the changes that leave less on the host, at most one of each kind."""
    problem = replace(sized.candidates.problem, budgets=budgets)
    trains = any(trained_nbytes(problem.step).values())
    backward = budgets.updates is None and trains and may_update_in_backward(request)
    also = ' with update="backward"' if backward else ""
    if backward:
        yield Change('update="backward"', lambda: replace(problem, budgets=_updating(request, budgets)))
    if (lean := _less_state(request, problem)) is not None:
        name, less = lean
        less = _updating(request, less) if backward else less
        yield Change(f'optimizer="{name}"{also}', lambda: replace(problem, budgets=less))
    if trains and not request.lora:
        adapters = replace(request, lora=_LORA_RANK)
        yield Change(f"lora={_LORA_RANK}", lambda: sized_step(adapters, *sized.size).candidates.problem)
    if budgets.disk is None and (not trains or backward or budgets.updates is not None):
        updating = _updating(request, budgets) if backward else budgets
        yield Change(f"disk={also}", lambda: disk_problem(request, sized, updating))


def disk_problem(request: ForecastRequest, sized: SizedStep, budgets: Budgets) -> PlanningProblem:
    """Returns the problem of the same step with a disk of the machine's size."""
    nbytes = request.machine.disk_nbytes or sum(held_nbytes(sized.candidates.problem.step, budgets, "host").values()) * 2
    on_disk = replace(request, budgets=with_disk(budgets, nbytes, request.precision))
    return in_form(on_disk, sized, sized.joint.form).candidates.problem


def _disk_speeds(request: ForecastRequest) -> str:
    return f"{request.machine.disk_read_gbps:g} GB/s (writes: {request.machine.disk_write_gbps:g})"


def _less_state(request: ForecastRequest, problem: PlanningProblem) -> tuple[str, Budgets] | None:
    """Returns an optimizer with less state and the budgets with it; None if there is hardly any state."""
    budgets, split = problem.budgets, request.precision.split
    name = "sgd-momentum" if split else "adafactor"
    if split:
        less = replace(budgets, state=None, state_copies=state_copies(request.precision, name))
    else:
        less = AssumedPlacement(replace(budgets, state=None), optimizer_named(name)).constraints(problem.step)[0]
    if less.updates is not None:
        streamed = streamed_copies(split, FORECAST_STATES.get(name, 0))
        less = replace(less, updates=replace(less.updates, state_copies=less.state_copies, streamed=streamed))
    return (name, less) if less.state_copies < 0.7 * budgets.state_copies else None


def _plan(problem: PlanningProblem, progress: Progress) -> Plan:
    """Plans a changed step, by few evaluations; by more where these find no plan. Raises DoesNotFit."""
    quick, budgets = replace(problem, effort="quick"), problem.budgets
    if budgets.disk is not None:
        return within_disk(quick, lambda fixed: (fixed, make_plan(fixed)))[1].plan
    with suppress(DoesNotFit):
        return fastest(Candidates(quick, progress), budgets.device, budgets.host).plan
    return fastest(Candidates(problem, progress), budgets.device, budgets.host).plan
