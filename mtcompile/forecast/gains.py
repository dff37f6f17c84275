"""Estimates what would make a forecast's step faster: see ``changes``, and more memory or a disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from mtcompile.forecast.advice import disk_problem, may_update_in_backward
from mtcompile.forecast.changes import LEAST_GAIN, Change, Setting, changes
from mtcompile.forecast.request import ForecastRequest, SizedStep, budgets_of, may_accumulate
from mtcompile.forecast.result import Advice, Forecast
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.limits import fits
from mtcompile.runtime.schedule import gib

_LEAST_PRICE = 1e-3  # of the bound: where the certificate's prices say that more of something gains less, it is not tried


def gains_of(request: ForecastRequest, sized: SizedStep, forecast: Forecast) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Returns the changes of a step that fits which gain 3 % or more, the best first, then a disk, and
    those that gain less."""
    assert forecast.planned is not None
    gaining, idle = list[Advice](), list[str]()
    for change in _changes(request, sized, forecast):
        tokens_per_s = change.times * sized.tokens / change.step_time_us * 1e6
        advice = Advice(change.what, change.step_time_us, tokens_per_s, change.gain(forecast.step_time_us))
        if advice.gain >= LEAST_GAIN:
            gaining.append(advice)
        else:
            idle.append(change.what)
    gaining.sort(key=lambda each: -each.gain)
    if budgets_of(request, sized).disk is None:
        us = _with_disk_us(request, sized, forecast.planned.plan)
        if us is not None and (gain := forecast.step_time_us / us - 1) >= LEAST_GAIN:
            gaining.append(Advice("disk= (at most: plan with it to see)", us, sized.tokens / us * 1e6, gain, at_most=True))
        else:
            idle.append("disk= (there is room without one)" if us is None else "disk=")
    return tuple(gaining), tuple(idle)


def _changes(request: ForecastRequest, sized: SizedStep, forecast: Forecast) -> Iterator[Change]:
    """Yields the changes that may gain something."""
    assert forecast.planned is not None
    plan, budgets = forecast.planned.plan, budgets_of(request, sized)
    may_update = budgets.updates is None and may_update_in_backward(request)
    setting = Setting(
        sized.candidates,
        forecast.planned,
        budgets,
        request.accumulate,
        may_update,
        may_fuse=True,
        may_accumulate=lambda: may_accumulate(request, sized),
    )
    yield from changes(setting)
    for tier in ("device", "host"):
        if (limit := budgets.nbytes.get(tier)) is not None:
            more = replace(budgets, device=2 * limit) if tier == "device" else replace(budgets, host=2 * limit)
            if (us := _with_more_us(sized.candidates, plan, tier, more)) is not None:
                yield Change(f"twice the {tier} memory, {gib(2 * limit)}", us)


def _with_disk_us(request: ForecastRequest, sized: SizedStep, plan: Plan) -> float | None:
    """Returns the least µs that the step could take with a disk, cut as it is; how long it takes, only a plan says. None where
    the host is not short of room, which is all that a disk gives."""
    budgets = budgets_of(request, sized)
    if budgets.host is None or not _is_short(plan, "host"):
        return None
    return Candidates(disk_problem(request, sized, budgets)).bound_us(budgets.device, budgets.host)


def _with_more_us(candidates: Candidates, plan: Plan, tier: str, more: Budgets) -> float | None:
    """Returns about the µs of the step with ``more`` memory in a tier: as far above its bound as the plan is above its own, or
    what it takes with everything on the device, if that is less. None where the certificate's prices promise little."""
    certificate = plan.certificate
    if certificate is None or not _is_short(plan, tier):
        return None
    bound_us, resident = candidates.bound_us(more.device, more.host), candidates.resident.plan
    if not 0.0 < bound_us < inf:
        return None
    step_time_us = bound_us * plan.total_us / certificate.bound_us
    return min(step_time_us, resident.total_us) if fits(resident, more) else step_time_us


def _is_short(plan: Plan, tier: str) -> bool:
    """Tells whether a step may be faster with more of a tier, by its certificate."""
    certificate = plan.certificate
    return certificate is not None and certificate.gains_us.get(f"{tier} memory", 0.0) > _LEAST_PRICE * certificate.bound_us
