"""Computes what a whole run costs: days, energy, and what it writes to a drive."""

from __future__ import annotations

from dataclasses import dataclass

from mtcompile.forecast.request import ForecastRequest
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.runtime.trace import time_of
from mtcompile.sizes import three_digits

_UNITS = (("days", 1), ("hours", 24), ("minutes", 1440))


@dataclass(frozen=True, slots=True)
class RunCost:
    """The costs of training on so many ``tokens``, in steps as predicted. ``kwh``: of all devices at the power that they may
    draw, without their hosts, so more than a device that waits takes; None where that is not known. ``disk_write_bytes``: to
    the drive; ``rated_share``: of the writes that it is rated for, None where nothing is written or that is not known."""

    tokens: int
    days: float
    kwh: float | None
    disk_write_bytes: int
    rated_share: float | None

    def __str__(self) -> str:
        times = (f"{three_digits(self.days * n)} {unit}" for unit, n in _UNITS if self.days * n >= 1)
        told = [next(times, time_of(self.days * 86_400e6))]
        told.append("energy not known" if self.kwh is None else f"at most {three_digits(self.kwh)} kWh, host not counted")
        if self.disk_write_bytes:
            rated = "how much it is rated for is not known"
            if self.rated_share is not None:
                rated = f"{self.rated_share:.1%} of what it is rated for"
            told.append(f"{three_digits(self.disk_write_bytes / 1e12)} TB written to the drive, {rated}")
        return ", ".join(told)


def run_cost(
    tokens: int, step_tokens: int, step_us: float, disk_write_bytes: int, machine: Machine, devices: int = 1
) -> RunCost:
    """Returns the costs of a run. ``step_tokens``, ``step_us``, ``disk_write_bytes``: of a step of all ``devices``."""
    steps = -(-tokens // step_tokens)
    days = steps * step_us / 86_400e6
    written, rated = steps * disk_write_bytes, machine.disk_rated_nbytes
    kwh = machine.watts * devices * days * 24 / 1000 if machine.watts else None
    return RunCost(tokens, days, kwh, written, written / rated if written and rated else None)


def told_run(request: ForecastRequest, step_tokens: int, plan: Plan) -> str:
    """Returns what the run that a request is about costs with another plan, after a semicolon; empty if it is about none."""
    if request.run_tokens is None:
        return ""
    ranks = request.ranks.count
    written = plan.disk_write_bytes * ranks
    return f"; the run: {run_cost(request.run_tokens, step_tokens * ranks, plan.total_us, written, request.machine, ranks)}"
