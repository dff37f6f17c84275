"""How a step scales over ranks: what all of them do in a second, beside one alone, and what keeps them from more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mtcompile.distributed.layout import ALONE, RankLayout
from mtcompile.forecast.request import ForecastRequest
from mtcompile.forecast.result import Forecast, Scaling
from mtcompile.passes.analysis.cost import Machine

_LINKS = ("h2d", "d2h")


def with_scaling(
    request: ForecastRequest, forecast: Forecast, whole: Machine, plan_alone: Callable[[ForecastRequest], Forecast]
) -> Forecast:
    """Adds to the forecast of one of several ranks what all of them reach. ``whole``: the machine with one rank alone, which
    ``plan_alone`` plans."""
    layout = request.ranks
    totals = replace(forecast, tokens=forecast.tokens * layout.count, tokens_per_s=forecast.tokens_per_s * layout.count)
    if not forecast.feasible:
        return totals
    host = None if request.budgets.host is None else request.budgets.host * layout.gpus
    budgets = replace(request.budgets, host=host, exchange=0)
    alone = plan_alone(replace(request, machine=whole, budgets=budgets, ranks=ALONE))
    speedup = layout.count * alone.step_time_us / forecast.step_time_us
    host_nbytes = forecast.peak_bytes["host"] * layout.gpus
    limit = _limit(forecast, layout, whole, request.machine)
    return replace(totals, scaling=Scaling(layout.gpus, layout.hosts, alone.step_time_us, speedup, limit, host_nbytes))


def _limit(forecast: Forecast, layout: RankLayout, whole: Machine, own: Machine) -> str:
    """Says in words which resource is busy for the longest."""
    busy = forecast.busy or {}
    queue = max(busy, key=lambda name: busy[name], default="compute")
    shared = f"the host's memory, whose {whole.host_gbps:g} GB/s {layout.gpus} ranks share"
    if queue == "compute":
        return "compute, of which each rank has its own"
    if queue in _LINKS:
        narrowed = layout.gpus > 1 and own.host_gbps <= min(whole.h2d_gbps, whole.d2h_gbps)
        return shared if narrowed else f"the link of each rank ({queue})"
    between = 2 * (layout.hosts - 1) / layout.hosts / own.network_gbps
    if queue == "network" and between > 1 / own.host_gbps:
        return f"the network between hosts ({own.network_gbps:g} GB/s)"
    return shared if layout.gpus > 1 else f"the host's memory ({whole.host_gbps:g} GB/s)"
