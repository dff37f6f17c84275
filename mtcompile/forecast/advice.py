"""Advice about a step: which changes would gain most if it fits, and which would make room on the host if it does not.

Changes that gain time are estimated by the bounds of their linear programs. Changes that make room are planned: by a search,
except those with a disk, which are planned by few evaluations, so a search may find a faster plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import nn

from mtcompile.cache import search_store
from mtcompile.errors import MtcompileError
from mtcompile.forecast.request import (
    AssumedPlacement,
    ForecastRequest,
    SizedStep,
    fastest,
    in_form,
    in_micro_batches,
    sized_step,
    with_disk,
)
from mtcompile.forecast.result import Advice, Forecast
from mtcompile.optim.backward.checks import check_optimizer
from mtcompile.optim.state_sizes import optimizer_named, state_copies, update_workspace
from mtcompile.passes.analysis.state import Budgets, held_nbytes, trained_nbytes
from mtcompile.passes.cuts.quick import QuickCandidates
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.spill import within_disk
from mtcompile.passes.planning.evaluate import completed, shortfall
from mtcompile.passes.planning.frontier import fits
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem, Progress
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.trace import time_of
from mtcompile.torch_private import without_memory

_LEAST_GAIN = 0.03  # more tokens a second: estimates tell no less
_LEAST_PRICE = 1e-3  # of the bound: where the certificate's prices say that more of something gains less, it is not tried
_MOST_ADVICE, _LORA_RANK = 3, 16
_BUSY = 0.95  # of the step
_REFUSALS = (MtcompileError, DoesNotFit, ValueError, TypeError, NotImplementedError)  # of a model that allows no such change


class Change(NamedTuple):
    """A changed step. ``what``: as a user asks for it; ``problem``: makes its planning problem; ``times``: how many times as
    many tokens it has. Of the changes with the same ``aim``, only the best is told."""

    what: str
    problem: Callable[[], PlanningProblem]
    aim: str = ""
    times: int = 1


# ------------------------------------------------------------------------------------------------------------ if it fits


def most_helpful(request: ForecastRequest, sized: SizedStep, forecast: Forecast) -> tuple[Advice, ...]:
    """Returns the changes of a step that fits which gain most, at most three."""
    assert forecast.planned is not None
    plan, best = forecast.planned.plan, dict[str, Advice]()
    for change in _gains(request, sized, plan, forecast.busy or {}):
        request.progress(f"estimating {change.what}", 0, 0)
        if (step_time_us := _estimated_us(change, sized, plan)) is None:
            continue
        tokens_per_s = change.times * sized.tokens / step_time_us * 1e6
        advice = Advice(change.what, step_time_us, tokens_per_s, tokens_per_s / forecast.tokens_per_s - 1)
        if advice.gain - (best[change.aim].gain if change.aim in best else 0.0) >= _LEAST_GAIN:
            best[change.aim] = advice
    return tuple(sorted(best.values(), key=lambda each: -each.gain)[:_MOST_ADVICE])


def _estimated_us(change: Change, sized: SizedStep, plan: Plan) -> float | None:
    """Returns about the µs of a changed step: as far above its bound as the ``plan`` of the step is above its own, or what it
    takes with everything on the device, if that is less. None if the change is not possible or does not fit, or no bound is
    known. ``sized``: before the change."""
    with suppress(*_REFUSALS):
        problem = change.problem()
        candidates, budgets = Candidates.like(sized.candidates, problem), problem.budgets
        bound_us = candidates.bound_us(budgets.device, budgets.host)
        if plan.certificate is None or not 0.0 < bound_us < inf:
            return None
        step_time_us = bound_us * plan.total_us / plan.certificate.bound_us
        resident = candidates.resident.plan
        return min(step_time_us, resident.total_us) if fits(resident, budgets) else step_time_us
    return None


def _gains(request: ForecastRequest, sized: SizedStep, plan: Plan, busy: Mapping[str, float]) -> Iterator[Change]:
    """Yields the changes that may gain something, by the plan's certificate and by the share of the step in which queues are
    ``busy``."""
    problem = sized.candidates.problem
    budgets = replace(problem.budgets, device=request.budgets.device, host=request.budgets.host)

    def changed(what: str, aim: str, budgets: Budgets) -> Change:
        return Change(what, lambda: replace(problem, budgets=budgets), aim)

    if budgets.updates is None and plan.update_us >= _LEAST_GAIN * plan.total_us and _updates_by_parameter(request):
        yield changed('update="backward"', "update", _updating(request, budgets))
        yield changed('update="backward" with run_ahead=True', "update", _updating(request, budgets, run_ahead=True))
    elif budgets.updates is not None and not budgets.updates.run_ahead:
        yield changed("run_ahead=True", "update", replace(budgets, updates=replace(budgets.updates, run_ahead=True)))
    for tier, twice in (("device", _twice(budgets.device)), ("host", _twice(budgets.host))):
        if twice is not None and _is_priced(plan, f"{tier} memory"):
            more = replace(budgets, device=twice) if tier == "device" else replace(budgets, host=twice)
            yield changed(f"twice the {tier} memory, {gib(twice)}", f"{tier} memory", more)
    if busy["compute"] < _BUSY:  # else more tokens a step gain nothing
        what = f"twice the batch with accumulate={2 * request.accumulate} (half as many updates for the same tokens)"
        yield Change(what, lambda: in_micro_batches(request, sized, 2).candidates.problem, "batch", 2)


def _twice(nbytes: int | None) -> int | None:
    return None if nbytes is None else 2 * nbytes


def _is_priced(plan: Plan, resource: str) -> bool:
    certificate = plan.certificate
    return certificate is None or certificate.gains_us.get(resource, 0.0) > _LEAST_PRICE * certificate.bound_us


def _updating(request: ForecastRequest, budgets: Budgets, run_ahead: bool = False) -> Budgets:
    workspace = update_workspace(request.precision.split, request.optimizer != "sgd")
    return replace(budgets, updates=Updates(budgets.state_copies, workspace, run_ahead=run_ahead, checked=True))


def _updates_by_parameter(request: ForecastRequest) -> bool:
    """Tells whether the optimizer can update parameters in the backward."""
    if request.make_optimizer is None:
        return True
    with suppress(TypeError), without_memory():
        check_optimizer(request.make_optimizer([nn.Parameter(torch.empty(2, 2))]))
        return True
    return False


# ------------------------------------------------------------------------------------------------- if the host is too small


def ways_on_host(request: ForecastRequest, sized: SizedStep, budgets: Budgets, error: DoesNotFit) -> list[str]:
    """Returns what would help a step that does not fit the host, each with its own figures: first the changes that fit, the
    fastest of them first."""
    fitting, short, limit = [], [], budgets.host or 0
    for change in _savings(request, sized, budgets):
        request.progress(f"planning with {change.what}", 0, 0)
        with suppress(*_REFUSALS):
            problem = change.problem()
            try:
                plan = _plan(problem, request.progress)
            except DoesNotFit as short_of:
                if short_of.tier == "host" and short_of.minimum < error.minimum:
                    less = f"{gib(error.minimum - short_of.minimum)} less, but still {gib(short_of.minimum - limit)} short"
                    text = f"{change.what}: needs {gib(short_of.minimum)} of the host, {less}"
                    short.append((short_of.minimum, text))
                continue
            disk = f", {gib(plan.peak_bytes['disk'])} of a disk at {_disk_speeds(request)}" if "disk" in plan.peak_bytes else ""
            text = f"{change.what}: fits, {time_of(plan.total_us)} a step with {gib(plan.peak_bytes['host'])} of the host{disk}"
            fitting.append((plan.total_us, text))
    return [text for _, text in (*sorted(fitting), *sorted(short))]


def _savings(request: ForecastRequest, sized: SizedStep, budgets: Budgets) -> Iterator[Change]:
    """Yields the changes that leave less on the host, at most one of each kind."""
    problem = replace(sized.candidates.problem, budgets=budgets)
    trains = any(trained_nbytes(problem.step).values())
    backward = budgets.updates is None and trains and _updates_by_parameter(request)
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
        nbytes = request.machine.disk_nbytes or sum(held_nbytes(problem.step, budgets).values()) * 2
        on_disk = replace(request, budgets=with_disk(updating, nbytes, request.precision))
        yield Change(f"disk={also}", lambda: in_form(on_disk, sized, sized.joint.form).candidates.problem)


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
        less = replace(less, updates=replace(less.updates, state_copies=less.state_copies))
    return (name, less) if less.state_copies < 0.7 * budgets.state_copies else None


def _plan(problem: PlanningProblem, progress: Progress) -> Plan:
    """Plans a changed step: as it would be if it were asked for or, with a disk or where no plan can fit, by few evaluations.
    Raises DoesNotFit."""
    budgets = problem.budgets
    if budgets.disk is None:
        candidates = QuickCandidates(problem, progress, search_store(problem))
        if candidates.bound_us(budgets.device, budgets.host) == inf and (least := candidates.leanest()) is not None:
            raise shortfall(least, "host")
        return fastest(candidates, budgets.device, budgets.host).plan

    def find(fixed: PlanningProblem) -> tuple[PlanningProblem, Planned]:
        candidate = QuickCandidates(fixed).quickly()
        if candidate is None:
            raise DoesNotFit("device", 0, ())
        if not fits(candidate.plan, fixed.budgets):
            raise shortfall(candidate, "host")
        return fixed, completed(fixed, candidate, candidate.plan.peak_bytes["device"], None)

    return within_disk(problem, find)[1].plan
