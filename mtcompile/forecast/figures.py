"""The figures of a forecast: the bytes and time of a plan, or what is missing and what would help."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from mtcompile.execution.memory.fragment_figures import told_whole
from mtcompile.forecast.advice import ways_on_host
from mtcompile.forecast.request import ForecastRequest, SizedStep, budgets_of
from mtcompile.forecast.result import Forecast, Row
from mtcompile.forecast.run_cost import run_cost, told_run
from mtcompile.optim.precision import PRECISIONS
from mtcompile.options import FASTEST
from mtcompile.passes.analysis.cost import kernel_cost, uncounted
from mtcompile.passes.analysis.state import (
    Budgets,
    held_by_tier,
    held_nbytes,
    resident_nbytes,
    state_nbytes,
    state_on_disk_nbytes,
    trained_nbytes,
    weights_nbytes,
    weights_on_disk_nbytes,
)
from mtcompile.passes.cuts.form import told_head
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.limits import NotWorthwhile
from mtcompile.passes.planning.evaluate import judged
from mtcompile.passes.planning.limits import Limits
from mtcompile.passes.planning.planner import plan_among
from mtcompile.passes.planning.problem import DoesNotFit, Planned
from mtcompile.passes.proof.same_computation import same_computation
from mtcompile.passes.registered import blaming
from mtcompile.passes.step_graph import fragments_of, inputs_of
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us, exposed_us, time_of
from mtcompile.runtime.usage import most_in_slots, pooled_nbytes, walk
from mtcompile.runtime.verify import verify


def figures(request: ForecastRequest, sized: SizedStep, planned: Planned | DoesNotFit) -> Forecast:
    """Returns the bytes and time of a step's plan within the request's budgets; if nothing fits, what would help."""
    candidates, model = sized.candidates, request.model
    budgets = budgets_of(request, sized)
    unplanned = Forecast(
        model=model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__),
        machine=request.machine.name,
        feasible=False,
        parameters=sum(  # bytes are two of 4 bits
            p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in _parameters(sized.candidates.problem.step)
        ),
        tokens=sized.tokens,
        state_bytes=sum(held_nbytes(candidates.problem.step, budgets, "host").values()),
        budget_bytes=budgets.nbytes,
        peak_bytes={},
        minimum_device_bytes=0,
        precision=request.precision.name,
        optimizer=request.optimizer,
        update="step" if budgets.updates is None else "backward",
        accumulate=request.accumulate,
        numerics=candidates.base.numerics,
        rows=tuple(_row(candidates, policy, budgets) for policy in request.policies),
        joint=sized.joint.graph,
        problem=candidates.problem,
    )
    if isinstance(planned, DoesNotFit):
        refused = _refused(request, sized, unplanned, budgets, planned)
        head = told_head(sized.captured, budgets.device) if planned.tier == "device" else []
        refused = replace(refused, notes=(*head, *_notes(request, sized, candidates.problem.step)))
        if not request.force:
            return refused
        least = candidates.least()
        forced = _with_plan(refused, candidates, least)
        return replace(forced, feasible=False, minimum_device_bytes=least.schedule.peak_nbytes["device"])
    with blaming(own := candidates.problem.own_passes, "made a step that is not proven"):
        if own:
            same_computation(sized.joint.graph, planned.step)
        verify(planned.schedule)
    return _with_plan(replace(unplanned, feasible=True), candidates, _with_notes(request, sized, planned))


def _with_notes(request: ForecastRequest, sized: SizedStep, planned: Planned) -> Planned:
    """Adds to a plan which operations count no FLOPs and, in fragments, which large weights stay whole, and why."""
    notes = _notes(request, sized, planned.step)
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, *notes))) if notes else planned


def _notes(request: ForecastRequest, sized: SizedStep, step: fx.GraphModule) -> tuple[str, ...]:
    notes = uncounted(step)
    if fragments_of(step):
        notes += told_whole(sized.captured, sized.form.cut, step, request.allowed(sized.captured).begins)
    return tuple(notes)


def _parameters(step: fx.GraphModule) -> list[torch.Tensor]:
    return [node.meta["val"] for spec, node in inputs_of(step) if spec.role == "param"]


def _row(candidates: Candidates, policy: str, budgets: Budgets) -> Row:
    plan = judged(candidates.problem, candidates.of_policy(policy, budgets)).plan
    peaks, time_us = dict(plan.peak_bytes), plan.total_us
    for tier, limit in budgets.nbytes.items():
        if limit is not None and peaks[tier] > limit:
            return Row(policy, False, peaks, time_us, peaks[tier] - limit, tier)
    return Row(policy, True, peaks, time_us)


def _loaded_nbytes(unplanned: Forecast, sizes: Collection[int]) -> int:
    """Returns the host bytes that loading takes: all weights of these sizes, and the largest once more. Masters that will be
    split are read as fp32."""
    loaded = sum(sizes) + max(sizes, default=0)
    return 2 * loaded if PRECISIONS[unplanned.precision].split else loaded


def _with_plan(unplanned: Forecast, candidates: Candidates, planned: Planned) -> Forecast:
    plan, schedule = planned.plan, planned.schedule
    bodies: dict[str, Any] = dict(planned.step.named_children())
    flops = sum(kernel_cost(bodies[i.kernel]).flops for i in schedule.instructions if i.kernel in bodies)
    trace = simulate(schedule)
    worked_us = busy_us(trace)
    busy: dict[str, float] = {queue: us / plan.total_us for queue, us in worked_us.items()}
    return replace(
        unplanned,
        peak_bytes=dict(schedule.peak_nbytes),
        minimum_device_bytes=plan.minimum_device_bytes,
        step_time_us=plan.total_us,
        update_us=plan.update_us,
        tokens_per_s=unplanned.tokens / plan.total_us * 1e6,
        tflops=flops / plan.total_us / 1e6,
        limiting_resource=plan.limiting_resource,
        busy=busy,
        exposed_us={queue: exposed_us(trace, queue) for queue in worked_us if queue != "compute"},
        ledger=_ledger(unplanned, candidates, planned),
        load_host_bytes=_loaded_nbytes(unplanned, candidates.sizes.values()),
        disk_read_bytes=plan.disk_read_bytes,
        disk_write_bytes=plan.disk_write_bytes,
        disk_days=plan.disk_days,
        disk_direct=plan.disk_direct,
        certificate=plan.certificate,
        gap=plan.gap,
        notes=(*unplanned.notes, *plan.notes),
        planned=planned,
    )


def _ledger(unplanned: Forecast, candidates: Candidates, planned: Planned) -> dict[str, dict[str, int]]:
    """Returns tier -> part -> bytes at the moment when the tier is fullest. The parts of a tier add up to its peak.
    ``other``: what is held at all times beside training state: a generator's state, the step counters of optimizers."""
    schedule, step, budgets = planned.schedule, candidates.problem.step, candidates.problem.budgets
    by_block = weights_nbytes(step, budgets), trained_nbytes(step), state_nbytes(step, budgets)
    own = [{block: budgets.part_of(block, nbytes) for block, nbytes in part.items()} for part in by_block]
    by_tier: list[dict[str, dict[str, int]]] = [{"device": part, "host": part} for part in own]
    if budgets.disk is not None:
        weights_there, trained_there = weights_on_disk_nbytes(step), weights_on_disk_nbytes(step, trained=True)
        on_disk = weights_there, trained_there, state_on_disk_nbytes(step, budgets)
        by_tier = [{**part, "disk": there} for part, there in zip(by_tier, on_disk, strict=True)]
    by_tier.append(held_by_tier(step, budgets))
    weights, trained, state, held = (resident_nbytes(part, planned.plan) for part in by_tier)
    split = PRECISIONS[unplanned.precision].split
    fullest = max(walk(schedule), key=lambda usage: usage.pooled + usage.tangents + usage.workspace)
    ledger: dict[str, dict[str, int]] = {}
    for tier, nbytes in weights.items():
        masters = trained[tier] // budgets.hosts if split else 0
        parts = {"weights": nbytes, "master": masters, "optimizer": state[tier] - masters}
        parts["gradients"] = held[tier] - sum(parts.values()) if budgets.grad_copies(tier) else 0
        parts["optimizer"] += held[tier] - sum(parts.values())  # of what ranks share, what rounding leaves
        arena = schedule.arena_nbytes.get(tier, 0)
        if tier == "host":
            slots = min(arena, most_in_slots(schedule, "host", "grad"))
            parts["gradients"], arena = parts["gradients"] + slots, arena - slots
            if planned.plan.disk_read_bytes:
                parts["staging"] = min(arena, most_in_slots(schedule, "host", "param"))
                arena -= parts["staging"]
        parts["staging" if tier == "device" else "activations"] = arena
        if tier == "device":
            fetched, made = (pooled_nbytes(schedule, fullest.index, role) for role in ("param", "grad"))
            parts["staging"] += fetched
            parts["gradients"] += made
            parts |= {"activations": fullest.pooled - fetched - made + fullest.tangents, "workspace": fullest.workspace}
        parts["other"] = schedule.resident_nbytes[tier] - held[tier]
        assert sum(parts.values()) == schedule.peak_nbytes[tier], "expected parts that add up to the peak"
        ledger[tier] = parts
    return ledger


def with_run_cost(request: ForecastRequest, forecast: Forecast) -> Forecast:
    """Returns the forecast with the costs of the run, if they were asked for, for its plan and for each advice."""
    if (tokens := request.run_tokens) is None or not forecast.step_time_us:
        return forecast
    machine, ranks, advice = request.machine, request.ranks.count, forecast.advice
    if advice is not None:
        advice = tuple(replace(a, run=run_cost(tokens, 1, 1e6 / a.tokens_per_s, 0, machine, ranks)) for a in advice)
    written = forecast.disk_write_bytes * ranks
    run = run_cost(tokens, forecast.tokens, forecast.step_time_us, written, machine, ranks)
    return replace(forecast, advice=advice, run=run)


def _time_with_more(request: ForecastRequest, sized: SizedStep, budgets: Budgets, error: DoesNotFit) -> str:
    """Tells what a step takes with as much of a tier as it needs; empty where it does not fit then either."""
    candidates = sized.candidates
    with contextlib.suppress(DoesNotFit):  # it may take a disk, or more of the host, too
        if error.tier == "device":
            fastest = plan_among(candidates, replace(budgets, device=error.minimum), FASTEST).plan
            return f": {time_of(fastest.total_us)} a step then{told_run(request, sized.tokens, fastest)}"
        lean = candidates.leanest("host", Limits(budgets.device))
        if lean.peak_bytes["host"] == error.minimum:
            return f": {time_of(lean.total_us)} a step then, and faster with more{told_run(request, sized.tokens, lean)}"
    return ""


def _refused(request: ForecastRequest, sized: SizedStep, unplanned: Forecast, budgets: Budgets, error: DoesNotFit) -> Forecast:
    """Adds how many bytes are missing, and the ways out: three of a device that is too small, and all of such a host."""
    candidates = sized.candidates
    if isinstance(error, NotWorthwhile):
        return replace(unplanned, refusal=error.why, ways_out=error.ways)
    tier = error.tier
    limit = budgets.nbytes[tier] or 0
    other: Literal["device", "host"] = "host" if tier == "device" else "device"
    ranks = {"host": request.ranks.gpus}  # of which each has a part of the host
    minimum = error.minimum * ranks.get(tier, 1)
    short = minimum - limit * ranks.get(tier, 1)
    parts = ", ".join(f"{what} {gib(nbytes)}" for what, nbytes in error.causes)
    if tier != "device" and budgets.disk is not None:
        ways = [f"{tier} memory of at most {gib(minimum)} ({minimum} bytes)"]
        if not budgets.disk_updates:
            what = 'update="backward"' if budgets.updates is None else "an elementwise optimizer, such as AdamW"
            ways.append(f"{what}: weights that train may then go to disk, with their state")
        return replace(unplanned, short_bytes=short, ways_out=(*ways, f"less in one of the largest parts: {parts}"))
    ways = ways_on_host(request, sized, budgets, error) if tier == "host" else []
    within = Limits(device=limit) if tier == "device" else Limits(host=limit)
    if not within.missing(leanest := candidates.leanest(other, within)):
        more = leanest.peak_bytes[other] * ranks.get(other, 1)
        ways.append(f"{other} memory of {gib(more)} ({more} bytes) takes what the {tier} cannot")
    needed = f"{tier} memory of at most {gib(minimum)} ({minimum} bytes)"
    ways.append(needed + _time_with_more(request, sized, budgets, error))
    if tier == "host":
        return replace(unplanned, short_bytes=short, ways_out=tuple(ways))
    ways.append('fewer tokens a step: solve="batch" or solve="seq" finds how many fit')
    ways.append(f"less in one of the largest parts: {parts}")
    return replace(unplanned, short_bytes=short, minimum_device_bytes=error.minimum, ways_out=tuple(ways[:3]))
