"""The planner: from the floor (everything at home, every block recomputed) upwards, one rule for spending a budget.

The rule: of all that could be kept on the device, keep what saves most time first, as long as the lowered schedule
still fits. ``make_plan(step graph, machine, budgets) -> Planned`` is the interface; better planners follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from mtcompile.passes import rewrite
from mtcompile.passes.cost import Machine, body_cost
from mtcompile.passes.lower import Workspace, lower
from mtcompile.passes.memory import workspace_nbytes
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.recompute import recomputable
from mtcompile.passes.step_graph import calls, is_region, kernel_of, placeholders, regions, results
from mtcompile.runtime.schedule import ALIGNMENT, Schedule, aligned, gib
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us, span_us

_SCALAR_STATE_NBYTES = ALIGNMENT  # step counters of a parameter's optimizer state, on the host wherever the rest is
_ROUNDS = 3  # of bisection over the options; a limit in evaluations, so that the same input gives the same plan


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes per tier; None is unlimited. ``state_copies``: optimizer state per parameter, in parameter sizes."""

    device: int | None = None
    host: int | None = None
    state_copies: float = 2.0


@dataclass(frozen=True, slots=True)
class Planned:
    plan: Plan
    step: fx.GraphModule
    schedule: Schedule


class DoesNotFit(Exception):
    """Even the floor needs more. ``minimum`` bytes of ``tier`` are the least that works; ``causes`` the largest parts."""

    def __init__(self, tier: str, minimum: int, causes: tuple[tuple[str, int], ...]) -> None:
        super().__init__(f"{tier}: needs {minimum}")
        self.tier, self.minimum, self.causes = tier, minimum, causes


def make_plan(
    step: fx.GraphModule,
    machine: Machine,
    budgets: Budgets,
    workspace: Workspace = workspace_nbytes,
    fixed_params: Mapping[str, str] | None = None,
) -> Planned:
    """The plan for ``step``, with its rewritten graph and schedule (deps derived, not yet proven).

    ``fixed_params``: home tier per block where earlier programs of the same model have decided it. Raises DoesNotFit.
    """
    blocks = list(dict.fromkeys(step.meta["homes"].values()))
    sizes = _param_nbytes(step)
    fixed = tuple(
        Decision("params", b, fixed_params.get(b, "host"), sizes.get(b, 0), "decided by the model's first program")
        for b in blocks
        if fixed_params is not None
    )
    base = Plan(
        decisions=fixed,
        budget_bytes={"device": budgets.device, "host": budgets.host},
        machine=machine.name,
        numerics="dtypes as the module's; every value, gradient and update bit-equal to plain PyTorch (eager kernels)",
    )

    def evaluate(plan: Plan) -> Planned:
        rewritten = rewrite(step, plan)
        resident = resident_nbytes(sizes, plan, budgets.state_copies)
        resident["host"] += len(step.meta["homes"]) * _SCALAR_STATE_NBYTES
        schedule = lower(rewritten, plan, machine, resident, workspace)
        return Planned(plan, rewritten, schedule)

    def fits(candidate: Planned) -> bool:
        limits = {"device": budgets.device, "host": budgets.host}
        return all(n is None or candidate.schedule.peak_nbytes[tier] <= n for tier, n in limits.items())

    floor = _floor(base, step, evaluate)
    minimum = floor.schedule.peak_nbytes["device"]
    if budgets.device is not None and minimum > budgets.device:
        raise DoesNotFit("device", minimum, causes(floor, "device"))
    best = _spend(floor, step, machine, sizes, evaluate, fits, fixed_params is None)
    if not fits(best):
        raise DoesNotFit("host", best.schedule.peak_nbytes["host"], causes(best, "host"))
    trace = simulate(best.schedule)
    busy = busy_us(trace)
    plan = replace(
        best.plan,
        peak_bytes=dict(best.schedule.peak_nbytes),
        minimum_device_bytes=minimum,
        state_bytes=int(sum(sizes.values()) * (2 + budgets.state_copies)),
        step_time_us=span_us(trace),
        limiting_resource=max(busy, key=lambda q: busy[q]) if busy else "",
    )
    return Planned(plan, best.step, best.schedule)


def _floor(base: Plan, step: fx.GraphModule, evaluate: Callable[[Plan], Planned]) -> Planned:
    """The least device memory: every block recomputed, or none where recomputing costs more than it frees."""
    saving = base
    for block in recomputable(step):
        name = step.meta["blocks"][block]
        saving = saving.having(Decision("variant", name, "save", 0, "recomputing it would need more memory"))
    candidates = [evaluate(base), evaluate(saving)]
    return min(candidates, key=lambda planned: planned.schedule.peak_nbytes["device"])


def _spend(
    floor: Planned,
    step: fx.GraphModule,
    machine: Machine,
    sizes: Mapping[str, int],
    evaluate: Callable[[Plan], Planned],
    fits: Callable[[Planned], bool],
    choose_params: bool,
) -> Planned:
    """Everything at once if it fits; else one decision after the other, the largest saving first."""
    options = _options(step, machine, sizes, choose_params)
    everything = replace(floor.plan, lookahead=1)
    for _, decision in options:
        everything = everything.having(decision)
    full = evaluate(everything)
    if fits(full):
        return full
    best = floor
    ahead = evaluate(replace(best.plan, lookahead=1))
    if fits(ahead) or not fits(best):
        best = ahead if fits(ahead) else best
    rest = [decision for _, decision in options]
    for _ in range(_ROUNDS):
        best, taken = _longest_prefix(best, rest, evaluate, fits)
        rest = rest[taken + 1 :]  # the one after the prefix does not fit; what is smaller may
        if not rest:
            break
    return best


def _longest_prefix(
    best: Planned, rest: list[Decision], evaluate: Callable[[Plan], Planned], fits: Callable[[Planned], bool]
) -> tuple[Planned, int]:
    """As many of ``rest`` from its start as fit, found by bisection, and how many."""
    low, high, found = 0, len(rest) + 1, best
    while high - low > 1:
        middle = (low + high) // 2
        plan = best.plan
        for decision in rest[:middle]:
            plan = plan.having(decision)
        candidate = evaluate(plan)
        if fits(candidate):
            low, found = middle, candidate
        else:
            high = middle
    return found, low


def _options(
    step: fx.GraphModule, machine: Machine, sizes: Mapping[str, int], choose_params: bool
) -> list[tuple[float, Decision]]:
    """(microseconds saved, decision), most saved first; ties by name, so that the same input gives the same plan."""
    found: list[tuple[float, Decision]] = []
    names = step.meta["blocks"]
    saved = recomputable(step)
    for region in regions(step):
        if region.meta["phase"] == "forward" and region.meta["block"] in saved:
            cost = body_cost(kernel_of(step, region).graph)
            gain = machine.run_us(cost.flops, cost.nbytes, cost.operations)
            block, nbytes = names[region.meta["block"]], saved[region.meta["block"]]
            why = f"{gib(nbytes)} kept saves {gain / 1e3:.3f} ms of recomputation"
            found.append((gain, Decision("variant", block, "save", nbytes, why)))
    waiting = sum(
        item.meta["nbytes"]
        for call in calls(step)
        if is_region(call)
        for item in results(call)
        if item.meta["role"] == "activation"
    )
    gain = machine.copy_us(waiting, "d2h") + machine.copy_us(waiting, "h2d")
    why = f"kept on the device saves up to {gain / 1e3:.3f} ms of transfers"
    found.append((gain, Decision("activation", "*", "device", waiting, why)))
    for block, nbytes in sizes.items() if choose_params else ():
        gain = 2 * machine.copy_us(nbytes, "h2d") + machine.copy_us(nbytes, "d2h")
        why = f"resident saves {gain / 1e3:.3f} ms of transfers"
        found.append((gain, Decision("params", block, "device", nbytes, why)))
    return sorted(found, key=lambda item: (-item[0], item[1].kind, item[1].subject))


def _param_nbytes(step: fx.GraphModule) -> dict[str, int]:
    """Bytes of parameters per home block."""
    sizes: dict[str, int] = {}
    for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True):
        if spec.role == "param" and spec.name in step.meta["homes"]:
            block = step.meta["homes"][spec.name]
            sizes[block] = sizes.get(block, 0) + aligned(node.meta["nbytes"])
    return sizes


def resident_nbytes(sizes: Mapping[str, int], plan: Plan, state_copies: float) -> dict[str, int]:
    """Persistent bytes per tier: weights, one gradient (an older one may be held while a new one is made) and
    optimizer state, at the home of their block."""
    totals = {"device": 0, "host": 0}
    for block, nbytes in sizes.items():
        totals["device" if plan.params(block) == "device" else "host"] += int(nbytes * (2 + state_copies))
    return totals


def causes(planned: Planned, tier: str) -> tuple[tuple[str, int], ...]:
    """The three largest parts of a tier's peak."""
    schedule = planned.schedule
    parts = [("placed slots (weights and values in transit)", schedule.arena_nbytes.get(tier, 0))]
    parts.append(("persistent state", schedule.resident_nbytes.get(tier, 0)))
    if tier == "device":
        runs = [i for i in schedule.instructions if i.op == "run"]
        for run in sorted(runs, key=lambda i: -i.workspace)[:2]:
            parts.append((f"workspace of {run.label}", run.workspace))
        pooled = sorted((b for b in schedule.buffers.values() if b.kind == "pooled"), key=lambda b: -b.nbytes)
        parts += [(f"{b.role} {b.name}", b.nbytes) for b in pooled[:2]]
    return tuple(sorted(parts, key=lambda part: -part[1])[:3])
