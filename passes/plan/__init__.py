"""The plan: every decision about a step, frozen, with a reason each. Never holds tensors."""

from mtcompile.passes.plan.decisions import Choice, Decision, Decisions, Kind
from mtcompile.passes.plan.listing import alike
from mtcompile.passes.plan.plan import NORM_COPIES, Certificate, Plan, Updates, disk_traffic
from mtcompile.passes.plan.text import checked, plan_from_json

__all__ = [
    "NORM_COPIES",
    "Certificate",
    "Choice",
    "Decision",
    "Decisions",
    "Kind",
    "Plan",
    "Updates",
    "alike",
    "checked",
    "disk_traffic",
    "plan_from_json",
]
