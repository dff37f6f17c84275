"""A plan as tables in a terminal: bytes per tier as bars, decisions in groups."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from mtcompile.passes.plan import Plan, alike
from mtcompile.runtime.schedule import Schedule, gib, listed
from mtcompile.runtime.trace import time_of

_BAR_CHARACTERS = 40  # of a full bar
_SUBJECTS_SHOWN = 3  # of a group


def plan_tables(plan: Plan, schedule: Schedule) -> Group:
    """Returns the tables of a plan, for ``rich.print``."""
    return Group(_tiers(schedule), _decisions(plan), _summary(plan))


def parts(schedule: Schedule) -> dict[str, dict[str, int]]:
    """Returns tier -> part -> bytes at the tier's peak; the parts of a tier add up to it."""
    shares = {}
    for tier, peak in schedule.peak_nbytes.items():
        state, slots = schedule.resident_nbytes.get(tier, 0), schedule.arena_nbytes.get(tier, 0)
        shares[tier] = {"training state": state, "slots of copies": slots, "values and workspace": peak - state - slots}
    return shares


def _tiers(schedule: Schedule) -> Table:
    table = Table("tier", "part", "bytes", "of the budget, or of the peak where there is none", title="memory at its peak")
    for tier, shares in parts(schedule).items():
        peak, limit = schedule.peak_nbytes[tier], schedule.budget_nbytes.get(tier)
        whole = peak if limit is None else limit
        for part, nbytes in shares.items():
            if nbytes:
                table.add_row(tier, part, gib(nbytes), _bar(nbytes, whole))
        of = "no limit" if limit is None else gib(limit)
        table.add_row(tier, "peak", f"{gib(peak)} of {of}", _bar(peak, whole), end_section=True)
    return table


def _bar(nbytes: int, whole: int) -> str:
    share = nbytes / whole if whole else 0.0
    full = round(min(1.0, share) * _BAR_CHARACTERS)
    return "█" * full + "░" * (_BAR_CHARACTERS - full) + f" {share:.0%}"


def _decisions(plan: Plan) -> Table:
    table = Table("kind", "choice", "of", "bytes", "because", title="decisions")
    for same in alike(plan.decisions, plan.names):
        first, subjects = same.decisions[0], listed(same.subjects, _SUBJECTS_SHOWN)
        table.add_row(first.kind, first.choice, subjects, gib(sum(d.nbytes for d in same.decisions)), same.reason)
    return table


def _summary(plan: Plan) -> str:
    update = f", {time_of(plan.update_us)} of it the update" if plan.update_us else ""
    bound = f"; {plan.certificate.of(plan.total_us)}" if plan.certificate else ""
    return (
        f"step {time_of(plan.total_us)} predicted on {plan.machine}{update}, limited by {plan.limiting_resource}; parameters "
        f"of blocks without a decision are on the host, activations wait there, what a block saves is computed again{bound}"
    )
