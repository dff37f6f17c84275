"""The bytes within which a plan must stay, and whether it does."""

from __future__ import annotations

from typing import NamedTuple

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.runtime.schedule import Tier


class Limits(NamedTuple):
    """The most bytes on each tier; None: no limit there. ``least``: the tier of which a plan is to need least, rather than be
    fast."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    least: Tier | None = None

    @property
    def nbytes(self) -> dict[str, int | None]:
        """The most bytes, by tier."""
        return {"device": self.device, "host": self.host, "disk": self.disk}

    def missing(self, plan: Plan) -> dict[str, int]:
        """Returns by how many bytes a plan is above the limits, by tier: the device first."""
        above = {tier: plan.peak_bytes.get(tier, 0) - most for tier, most in self.nbytes.items() if most is not None}
        return {tier: nbytes for tier, nbytes in above.items() if nbytes > 0}


NO_LIMITS = Limits()


def limits_of(budgets: Budgets) -> Limits:
    """Returns the limits that budgets set."""
    return Limits(budgets.device, budgets.host, budgets.disk)


def order(plan: Plan, limits: Limits) -> tuple[int, int, float]:
    """A key by which the best plan within limits comes first, and then those that are least above them."""
    least = 0 if limits.least is None else plan.peak_bytes.get(limits.least, 0)
    return sum(limits.missing(plan).values()), least, plan.total_us


def fits(plan: Plan, budgets: Budgets) -> bool:
    """Says whether the plan's peaks are within the budgets."""
    return missing_nbytes(plan, budgets) == 0


def missing_nbytes(plan: Plan, budgets: Budgets) -> int:
    """Returns by how many bytes the plan's peaks are above the budgets, of all tiers together."""
    return sum(limits_of(budgets).missing(plan).values())
