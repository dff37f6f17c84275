"""Refuses plans whose disk makes no sense: it would make the step too slow, or be worn out too soon."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.evaluate import evaluate
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from mtcompile.runtime.schedule import gib


class NotWorthwhile(DoesNotFit):
    """Raised when a plan fits, but its disk is too slow or wears out too soon. ``why``: with figures; ``ways``: what would
    help. ``minimum``: the bytes of host memory with which nothing goes to disk."""

    def __init__(self, why: str, ways: tuple[str, ...], host_nbytes: int) -> None:
        super().__init__("disk", host_nbytes, ())
        self.why, self.ways = why, ways


def check_worthwhile(problem: PlanningProblem, plan: Plan) -> None:
    """Raises NotWorthwhile if the step takes more than ``budgets.disk_slowdown`` times what it would with a disk that costs no
    time, or if the drive is written as often as it is rated for within ``budgets.disk_days``; 0: whatever it is."""
    budgets, machine = problem.budgets, problem.machine
    host = _host_without_nbytes(problem, plan)
    instead = f"host memory of {gib(host)} ({host} bytes), with which nothing goes to disk"
    written, step = f"{plan.disk_write_bytes / 1e9:.3g} GB", f"{plan.total_us / 1e6:.3g} s"
    if budgets.disk_slowdown:
        free = _without_cost_us(problem, plan)
        if (slowdown := plan.total_us / max(free, 1e-3)) > budgets.disk_slowdown:
            faster = (plan.total_us - free) / ((budgets.disk_slowdown - 1) * free) if budgets.disk_slowdown > 1 else inf
            raise NotWorthwhile(
                f"a step would take {step}, {slowdown:.3g} times the {free / 1e6:.3g} s with a disk that costs no time; "
                f"expected at most {budgets.disk_slowdown:g} times. A step reads {plan.disk_read_bytes / 1e9:.3g} GB at "
                f"{machine.disk_read_gbps:.3g} GB/s and writes {written} at {machine.disk_write_gbps:.3g} GB/s",
                (instead, f"a disk {faster:.2g} times as fast", f"MT_DISK_SLOWDOWN={ceil(slowdown)} takes it as it is"),
                host,
            )
    if budgets.disk_days and plan.disk_days is not None and plan.disk_days < budgets.disk_days:
        raise NotWorthwhile(
            f"after {plan.disk_days:.3g} days of such steps ({written} written in each, {step}), the drive would have been "
            f"written as often as it is rated for, {machine.disk_rated_nbytes / 1e12:.4g} TB; expected at least "
            f"{budgets.disk_days:g} days",
            (instead, "frozen weights, which are read and never written", "MT_DISK_DAYS=0 takes it as it is"),
            host,
        )


def _without_cost_us(problem: PlanningProblem, plan: Plan) -> float:
    """The time of a step by a plan if its disk took none."""
    machine = replace(problem.machine, disk_read_gbps=inf, disk_write_gbps=inf)
    return evaluate(replace(problem, machine=machine), plan).plan.total_us


def _host_without_nbytes(problem: PlanningProblem, plan: Plan) -> int:
    """The bytes of host memory that a plan would need if what it keeps on disk were there."""
    homes = {home: "host" if tier == "disk" else tier for home, tier in problem.fixed_homes.items()}
    at_home = evaluate(replace(problem, fixed_homes=homes), without_disk(plan)).plan
    return at_home.peak_bytes["host"]


def without_disk(plan: Plan) -> Plan:
    """Returns the plan with all that it keeps on disk on the host."""
    return replace(plan, decisions=tuple(replace(d, choice="host") if d.choice == "disk" else d for d in plan.decisions))
