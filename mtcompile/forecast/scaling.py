"""How a step scales over ranks: what all of them do in a second, beside one alone, and what keeps them from more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mtcompile.distributed.layout import RankLayout
from mtcompile.forecast.request import ForecastRequest
from mtcompile.forecast.result import Forecast, Scaling
from mtcompile.passes.analysis.cost import Machine

_LINKS = ("h2d", "d2h")


def with_scaling(request: ForecastRequest, forecast: Forecast, whole: Machine, plan_alone: Callable[[], Forecast]) -> Forecast:
    """Adds to the forecast of one of several ranks what all of them reach, and makes bytes of the host those of all its ranks.
    ``whole``: the machine with one rank alone, which ``plan_alone`` plans."""
    layout, forecast = request.ranks, _of_host(forecast, request.ranks.gpus)
    totals = replace(forecast, tokens=forecast.tokens * layout.count, tokens_per_s=forecast.tokens_per_s * layout.count)
    if not forecast.feasible:
        return totals
    alone = plan_alone()
    speedup = layout.count * alone.step_time_us / forecast.step_time_us
    limit = _limit(forecast, layout, whole, request.machine)
    scaling = Scaling(layout.gpus, layout.hosts, alone.step_time_us, speedup, limit, forecast.peak_bytes["host"])
    return replace(totals, scaling=scaling)


def _of_host(forecast: Forecast, ranks: int) -> Forecast:
    """Returns a forecast with the bytes of the host of all its ranks; a plan has those of one."""
    budget, peak = dict(forecast.budget_bytes), dict(forecast.peak_bytes)
    for nbytes in (budget, peak):
        if (of_one := nbytes.get("host")) is not None:
            nbytes["host"] = of_one * ranks
    ledger = None if forecast.ledger is None else dict(forecast.ledger)
    if ledger is not None:
        ledger["host"] = {part: nbytes * ranks for part, nbytes in ledger["host"].items()}
    state = forecast.state_bytes * ranks
    return replace(forecast, budget_bytes=budget, peak_bytes=peak, ledger=ledger, state_bytes=state)


def _limit(forecast: Forecast, layout: RankLayout, whole: Machine, own: Machine) -> str:
    """Says in words which resource is busy for the longest. The host's memory is, while anything goes through it: copies, sums
    of gradients and updates."""
    busy_us = {name: share * forecast.step_time_us for name, share in (forecast.busy or {}).items()}
    queue = max(busy_us, key=lambda name: busy_us[name], default="compute")
    shared = f"the host's memory, whose {whole.host_gbps:g} GB/s {layout.gpus} ranks share"
    if layout.gpus > 1 and _through_host_us(forecast, own) >= busy_us.get(queue, 0.0):
        return shared
    if queue == "compute":
        return "compute, of which each rank has its own"
    if queue in _LINKS:
        narrowed = layout.gpus > 1 and own.host_gbps <= min(whole.h2d_gbps, whole.d2h_gbps)
        return shared if narrowed else f"the link of each rank ({queue})"
    between = 2 * (layout.hosts - 1) / layout.hosts / own.network_gbps
    if queue == "network" and between > 1 / own.host_gbps:
        return f"the network between hosts ({own.network_gbps:g} GB/s)"
    return shared if layout.gpus > 1 else f"the host's memory ({whole.host_gbps:g} GB/s)"


def _through_host_us(forecast: Forecast, own: Machine) -> float:
    """Returns the microseconds that a step's traffic takes on the part of the host's memory that a rank has, without waits for
    the network between hosts."""
    total_us = 0.0
    for instruction in forecast.planned.schedule.instructions if forecast.planned is not None else ():
        if instruction.queue in _LINKS:
            total_us += instruction.nbytes / own.host_gbps / 1e3
        elif instruction.queue == "host":
            total_us += instruction.time_us
        elif instruction.work == "collective":
            total_us += own.collective_us(instruction.nbytes, 1, "all_reduce")
    return total_us
