"""The planner: finds, among the candidate plans, the fastest whose lowered schedule fits.

``make_plan(problem) -> Planned`` is the interface; ``Candidates`` keeps evaluated plans for the next budget. Instead of a
search, ``plan_like`` takes the plan of the same step at other sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets, held_nbytes
from mtcompile.passes.lower import Workspace, lower
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.blocks import Block, everything, kept_positions, variant_decision
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.evaluate import completed
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.own_passes import plan_by_schedules
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.passes.planning.variants import Variant

_OF_HOMES = ("params", "fetch", "return", "gradients")  # kinds of decisions whose subject is a home


def make_plan(problem: PlanningProblem, policy: str = "fastest") -> Planned:
    """Returns the fastest plan that fits, or that of a fixed ``policy``, with its rewritten graph and schedule (deps derived,
    not yet proven). Raises DoesNotFit."""
    return plan_among(Candidates(problem), problem.budgets, policy)


def plan_among(candidates: Candidates, budgets: Budgets, policy: str, known: Plan | None = None) -> Planned:
    """Returns what ``make_plan`` does, from candidates that serve other budgets too. ``known``: as for ``Candidates.best``."""
    if policy != "fastest":
        planned = candidates.by_policy(policy, budgets)
        decisions = tuple(replace(each, reason=f"policy {policy}: {each.reason}") for each in planned.plan.decisions)
        return replace(planned, plan=replace(planned.plan, decisions=decisions))
    if candidates.problem.own_passes:
        return plan_by_schedules(candidates, budgets, known)
    return candidates.best(budgets.device, budgets.host, known)


def structure(joint: fx.GraphModule) -> bytes:
    """Returns a key of a joint graph that is equal for graphs of the same operations at other sizes."""
    nodes = [
        (node.op, node.name, str(node.target), [operand.name for operand in node.all_input_nodes]) for node in joint.graph.nodes
    ]
    return hashlib.blake2b(repr(nodes).encode(), digest_size=16).digest()


def plan_like(problem: PlanningProblem, similar: Plan) -> Planned | None:
    """Returns the plan that decides what ``similar`` does, which was searched for the same step at other sizes, cut alike. None
    where a search may give more: if the plan does not fit or is farther from its bound than there, or if everything fits."""
    candidates, limits = Candidates(problem), problem.budgets
    plan = resized(similar, candidates.base, candidates.blocks, candidates.sizes)
    if plan is None or fits(candidates.resident.plan, limits):
        return None
    candidate = candidates.evaluate(plan)
    certificate = candidates.certificate(limits.device, limits.host)
    if not fits(candidate.plan, limits) or certificate is None or similar.certificate is None:
        return None
    expected_us = certificate.bound_us * (1 + similar.certificate.gap(similar.total_us))
    if candidates.may_gain(candidate.plan.total_us, expected_us):
        return None
    return completed(problem, candidate, min(candidates.floor, candidate.plan.peak_bytes["device"]), certificate)


def resized(plan: Plan, base: Plan, blocks: Sequence[Block], params: Mapping[str, int]) -> Plan | None:
    """Returns ``base`` with what ``plan`` decides about the same step at other sizes, and the bytes of these. ``params``: bytes
    of the home blocks. None if it decides about what is not there."""
    by_name = {block.name: block for block in blocks}
    nbytes = {v.name: v.meta["nbytes"] for b in blocks for v in (*b.saved, *b.crossing, *b.others)} | {"*": 0}
    decisions = []
    for each in plan.decisions:
        if each.kind == "variant" and each.subject in by_name:
            saved, positions = by_name[each.subject].saved, kept_positions(plan, by_name[each.subject])
            variant = Variant(positions, sum(saved[i].meta["nbytes"] for i in positions), 0.0)
            decisions.append(variant_decision(each.subject, saved, variant))
        elif each.subject in (sizes := params if each.kind in _OF_HOMES else nbytes):
            if base.find(each.kind, each.subject) is None:
                decisions.append(replace(each, nbytes=sizes[each.subject]))
        else:
            return None
    together = (*base.decisions, *decisions)
    return replace(
        base,
        decisions=together,
        lookahead=plan.lookahead,
        span=plan.span,
        pooled=plan.pooled,
        narrow=plan.narrow,
        wide=plan.wide,
        updates=plan.updates,
    )


def resident_plan(problem: PlanningProblem) -> Planned | None:
    """Returns the plan with everything on the device and nothing recomputed except what is free in fused kernels; None if it
    does not fit."""
    candidates = Candidates(problem)
    plan = everything(problem.step, candidates.base, candidates.open_params, fused=True)
    if any(plan.params(block) != "device" for block in candidates.sizes):
        return None
    planned = candidates.evaluate(plan)
    if not fits(planned.plan, problem.budgets):
        return None
    return completed(problem, planned, planned.plan.peak_bytes["device"], None)


def may_be_resident(problem: PlanningProblem) -> bool:
    """Says whether the training state alone fits on the device."""
    budgets = problem.budgets
    return budgets.device is None or sum(held_nbytes(problem.step, budgets, "device").values()) <= budgets.device


def homes_of_rows(whole: PlanningProblem, rows: fx.GraphModule) -> set[str | None]:
    """Returns the home tiers of the embeddings of which a joint graph takes rows; None where a plan decides."""
    return {whole.fixed_homes.get(whole.step.meta["homes"].get(name, "")) for name in rows.meta["rows"]}


def relowered(planned: Planned, machine: Machine, workspace: Workspace, held: int = 0) -> Planned:
    """Lowers the same plan for other kernels. ``workspace``: bytes that these need beside their operands. ``held``: device
    bytes that they keep from call to call."""
    resident = dict(planned.schedule.resident_nbytes)
    resident["device"] = resident.get("device", 0) + held
    schedule = lower(planned.step, planned.plan, machine, resident, workspace)
    return Planned(replace(planned.plan, peak_bytes=dict(schedule.peak_nbytes)), planned.step, schedule)
