"""Finds what else a plan could have done with some values, and what that would cost, by changing one decision of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mtcompile.passes.analysis.names import value_names
from mtcompile.passes.analysis.saved import crossing_values, saved_values
from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.evaluate import judged
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.passes.step_graph import regions, results
from mtcompile.runtime.schedule import listed


@dataclass(frozen=True, slots=True)
class Alternative:
    """The plan with ``what`` changed. ``more_bytes`` (device), ``more_us``: the difference to the plan itself, evaluated in the
    same way. ``fits``: within the plan's budgets."""

    kind: str
    what: str
    peak_bytes: Mapping[str, int]
    step_time_us: float
    more_bytes: int
    more_us: float
    fits: bool


def alternatives(
    planned: Planned, problem: PlanningProblem, decisions: Iterable[Decision], values: Sequence[str]
) -> tuple[bool, tuple[Alternative, ...]]:
    """Returns whether evaluating the plan itself again gives the peaks and the time that it has, and at most eight
    alternatives, each of which changes all the blocks and values at once."""
    candidates = Candidates(problem)
    current = judged(problem, candidates.evaluate(planned.plan))
    rows = []
    for kind, what, plan in _others(planned.plan, problem, list(decisions), values):
        changed = judged(problem, candidates.evaluate(plan))
        peaks, time_us = dict(changed.plan.peak_bytes), changed.plan.total_us
        fits = all(n is None or peaks[tier] <= n for tier, n in planned.plan.budget_bytes.items())
        more = peaks["device"] - current.plan.peak_bytes["device"]
        rows.append(Alternative(kind, what, peaks, time_us, more, time_us - current.plan.total_us, fits))
    same = current.plan.peak_bytes == planned.schedule.peak_nbytes and current.plan.total_us == planned.plan.total_us
    return same, tuple(rows)


def _others(
    plan: Plan, problem: PlanningProblem, decisions: list[Decision], values: Sequence[str]
) -> Iterator[tuple[str, str, Plan]]:
    blocks = {kind: dict.fromkeys(d.subject for d in decisions if d.kind == kind) for kind in ("params", "variant")}
    tiers: tuple[Choice, ...] = ("device", "host") if problem.budgets.host_activations else ("device",)
    tiers += ("disk",) if problem.budgets.host_activations and problem.budgets.disk is not None else ()
    sizes = {d.subject: d.nbytes for d in decisions}
    homes: tuple[Choice, ...] = ("device", "host")
    for tier in homes:
        if any(plan.params(block) != tier for block in blocks["params"]):
            homes_there = (Decision("params", block, tier, sizes[block]) for block in blocks["params"])
            what = f"parameters, gradients and optimizer state of {listed(blocks['params'], 2)} on the {tier}"
            yield "params", what, _with(plan, homes_there)
    names, called = problem.step.meta["blocks"], value_names(problem.step)
    forward = [r for r in regions(problem.step) if r.meta["phase"] == "forward"]
    ours = [(names[r.meta["block"]], saved_values(r)) for r in forward if names[r.meta["block"]] in blocks["variant"]]
    for tier in tiers:
        if any(not plan.keeps(block, v.name) for block, saved in ours for v in saved):
            new = [v for block, saved in ours for v in saved if not plan.keeps(block, v.name)]
            save_all = (_variant(block, "save", saved) for block, saved in ours)
            what = f"nothing of {listed(blocks['variant'], 2)} recomputed, saved on the {tier}"
            yield "variant", what, _waiting(_with(plan, save_all), new, tier)
    if any(plan.keeps(block, v.name) for block, saved in ours for v in saved):
        recompute_all = (_variant(block, "recompute", saved) for block, saved in ours)
        yield "variant", f"all of {listed(blocks['variant'], 2)} recomputed", _with(plan, recompute_all)
    waiting = {d.subject for d in decisions if d.kind == "activation"}
    wanted = [v for r in regions(problem.step) for v in results(r) if v.name in values and v.meta["role"] == "activation"]
    waiting_values = [v for v in wanted if v.name in waiting or "*" in waiting]
    waiting_values = [v for v in waiting_values if v not in {s for _, saved in ours for s in saved} or _keeps(plan, ours, v)]
    for tier in tiers:
        if any(plan.activation(v.name) != tier for v in waiting_values):
            what = f"{listed((called[v.name] for v in waiting_values), 2)} waiting on the {tier}"
            yield "activation", what, _waiting(plan, waiting_values, tier)
    between = [v for r in forward for v in crossing_values(r) if v in waiting_values and plan.activation(v.name) != "recompute"]
    if between:
        what = f"{listed((called[v.name] for v in between), 2)} recomputed by running their regions once more"
        yield "activation", what, _waiting(plan, between, "recompute")


def _keeps(plan: Plan, ours: Iterable[tuple[str, list[fx.Node]]], value: fx.Node) -> bool:
    return any(value in saved and plan.keeps(block, value.name) for block, saved in ours)


def _variant(block: str, choice: Choice, saved: Sequence[fx.Node]) -> Decision:
    nbytes = sum(v.meta["nbytes"] for v in saved) if choice == "save" else 0
    return Decision("variant", block, choice, nbytes)


def _with(plan: Plan, decisions: Iterable[Decision]) -> Plan:
    for decision in decisions:
        plan = plan.with_decision(decision)
    return plan


def _waiting(plan: Plan, values: Iterable[fx.Node], tier: Choice) -> Plan:
    return _with(plan, (Decision("activation", v.name, tier, v.meta["nbytes"]) for v in values))
