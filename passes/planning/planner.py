"""The planner: of a fixed set of candidate plans (``paths``), the fastest whose lowered schedule fits.

Candidates are judged by the simulator. They and their order do not depend on the budget: over (peak, time) they form
one frontier, of which a budget takes the last point it can pay for. So a larger budget is never slower, and the peak
grows with it. ``make_plan(step graph, machine, budgets) -> Planned`` is the interface; better planners follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from torch import fx

from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.state import SCALAR_STATE_NBYTES, Budgets, param_nbytes, resident_nbytes, times_us
from mtcompile.passes.lower import Workspace, lower
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.frontier import Point, choose, fits, most_promising, pareto, points_from_json, points_to_json
from mtcompile.passes.planning.ladders import Path, blocks_of, everything, paths
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.search import neighbours, signature
from mtcompile.passes.step_graph import calls, is_convert, kernel_of, regions
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us

# Limits in evaluations, not seconds: the same input gives the same plan. One costs time in proportion to the regions.
_REGIONS_PER_PATH = 150  # evaluated, but ...
_FEWEST_POINTS, _MOST_POINTS = 6, 12  # ... at least and at most so many plans of each
_SEARCHED, _MOST_SEARCHED = 4_000_000, 300  # local search: so many plans over the square of a step's operations, at most


@dataclass(frozen=True, slots=True)
class Planned:
    plan: Plan
    step: fx.GraphModule
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Source:
    """What a plan was made of, so that somebody may ask what another plan would give. ``step``: not rewritten."""

    step: fx.GraphModule
    machine: Machine
    budgets: Budgets
    workspace: Workspace

    def candidates(self) -> Candidates:
        return Candidates(self.step, self.machine, self.budgets, self.workspace)


Tell = Callable[[str, int, int], None]  # what is being done, how many are done, of how many (0: nobody knows)


def silent(what: str, done: int, of: int) -> None:
    """Tells nobody."""


class DoesNotFit(Exception):
    """Even the floor needs more. ``minimum`` bytes of ``tier`` are the least that works; ``causes`` the largest parts."""

    def __init__(self, tier: str, minimum: int, causes: tuple[tuple[str, int], ...]) -> None:
        super().__init__(f"{tier}: needs {minimum}")
        self.tier, self.minimum, self.causes = tier, minimum, causes


BIT_EQUAL = "every value and gradient bit-equal to plain PyTorch (eager kernels)"
FUSED = "kernels by Inductor: within rounding of plain PyTorch, and the same bits whatever moves (for the same variants)"


def make_plan(
    step: fx.GraphModule,
    machine: Machine,
    budgets: Budgets,
    workspace: Workspace = workspace_nbytes,
    fixed_params: Mapping[str, str] | None = None,
    numerics: str = BIT_EQUAL,
    known: Plan | None = None,
    policy: str = "fastest",
    store: Store | None = None,
) -> Planned:
    """The plan for ``step``, with its rewritten graph and schedule (deps derived, not yet proven): the fastest that fits, or
    that of a fixed ``policy``.

    ``fixed_params``: home tier per block where earlier programs of the same model have decided it. ``known``: as for
    ``Candidates.best``; ``store``: as for ``Candidates``. Raises DoesNotFit.
    """
    candidates = Candidates(step, machine, budgets, workspace, fixed_params, numerics, store=store)
    if policy != "fastest":
        return candidates.by_policy(policy, budgets)
    return candidates.best(budgets.device, budgets.host, known)


class Store(Protocol):
    """Where what a search found is kept; text goes in and comes out."""

    def read(self) -> str | None: ...

    def write(self, text: str) -> None: ...


class _Stale(Exception):
    """What was kept of an earlier search is not what an evaluation gives now."""


class Candidates:
    """The candidate plans of one step, each evaluated once: ``best`` chooses among them, budget after budget. ``store``: where
    they are kept between runs, for these sources, this step, machine and state, and whatever device and host bytes."""

    def __init__(
        self,
        step: fx.GraphModule,
        machine: Machine,
        budgets: Budgets,
        workspace: Workspace = workspace_nbytes,
        fixed_params: Mapping[str, str] | None = None,
        numerics: str = BIT_EQUAL,
        tell: Tell = silent,
        store: Store | None = None,
    ) -> None:
        self.step, self.machine, self.budgets, self.tell, self.store = step, machine, budgets, tell, store
        self.sizes = param_nbytes(step)
        self.open_params = self.sizes if fixed_params is None else {}
        self.base = _base(step, self.sizes, machine, budgets, fixed_params, numerics)
        self._evaluate = _evaluator(step, self.sizes, machine, budgets, workspace)
        self.evaluations = 0
        self._points: list[Point] = []

    def evaluate(self, plan: Plan) -> Planned:
        self.evaluations += 1
        return self._evaluate(plan)

    @cached_property
    def ways(self) -> tuple[Path, ...]:
        ways = paths(self.step, self.base, self.machine, self.open_params, self.budgets.host_activations)
        if self.budgets.host_activations:  # so that no fixed policy is ever better
            made = (policy(self.step, self.base, self.open_params) for name, policy in POLICIES.items() if name != "resident")
            ways += tuple((plan,) for plan in made)
        return ways

    def best(self, device: int | None, host: int | None, known: Plan | None = None) -> Planned:
        """The fastest within these bytes. ``known``: the plan found for all of this before; taken without a search if it still
        fits. Raises DoesNotFit."""
        budgets = replace(self.budgets, device=device, host=host)
        if known is not None and fits((again := self.evaluate(known)).plan, budgets):
            return _finished(again, self.sizes, budgets, known.minimum_device_bytes)
        if not self._points:
            full = self.evaluate(everything(self.step, self.base, self.open_params))
            if fits(full.plan, budgets):  # nothing need be searched; the floor is said all the same
                least = self.evaluate(self.ways[0][0]).plan
                minimum = min(least.peak_bytes["device"], full.plan.peak_bytes["device"])
                return _finished(self._run_ahead(full, budgets), self.sizes, budgets, minimum)
            self._points = self._kept() or self._searched(full.plan)
        try:
            return self._best(budgets)
        except _Stale:
            self._points = self._searched(self.evaluate(everything(self.step, self.base, self.open_params)).plan)
            return self._best(budgets)

    def _best(self, budgets: Budgets) -> Planned:
        frontier = self._frontier(budgets)
        chosen = choose(frontier, self._points, lambda plan: self.evaluate(plan).plan, budgets)
        best = self._run_ahead(self._wide(self._planned(chosen), budgets), budgets)
        minimum = min(frontier[0].peak, best.plan.peak_bytes["device"])
        return _finished(best, self.sizes, budgets, minimum)

    def _planned(self, point: Point) -> Planned:
        """Its graph and schedule. Raises _Stale."""
        made = self.evaluate(point.plan)
        if (made.plan.peak_bytes, made.plan.total_us) != (point.plan.peak_bytes, point.time_us):
            raise _Stale
        return made

    def _frontier(self, budgets: Budgets) -> list[Point]:
        """Points by rising peak, each faster than all before it. Raises DoesNotFit when no candidate fits."""
        points = self._points
        least = min(points, key=lambda point: point.peak)
        if budgets.device is not None and least.peak > budgets.device:
            raise DoesNotFit("device", least.peak, causes(self._planned(least), "device"))
        at_home = [p for p in points if budgets.host is None or p.plan.peak_bytes["host"] <= budgets.host]
        if not any(fits(p.plan, budgets) for p in at_home):
            within = (p for p in points if budgets.device is None or p.peak <= budgets.device)
            cheapest = min(within, key=lambda p: p.plan.peak_bytes["host"])
            raise DoesNotFit("host", cheapest.plan.peak_bytes["host"], causes(self._planned(cheapest), "host"))
        return pareto(at_home)

    def _wide(self, planned: Planned, budgets: Budgets) -> Planned:
        """With casts where they were captured, if the host is busier than the link."""
        if not any(is_convert(call) for call in calls(planned.step)):
            return planned
        wide = self.evaluate(replace(planned.plan, narrow=False))
        return wide if fits(wide.plan, budgets) and wide.plan.total_us < planned.plan.total_us else planned

    def _run_ahead(self, planned: Planned, budgets: Budgets) -> Planned:
        """With as many updates left until after the backward as is fastest."""
        updates = planned.plan.updates
        if updates is None or not updates.run_ahead or updates.held:
            return planned
        most = sum(i.op == "run" and i.queue == "host" for i in planned.schedule.instructions)
        numbers = sorted({most, *(most // part for part in (2, 3, 4, 6, 8, 12, 16))} - {0})
        made = [planned, *(self.evaluate(replace(planned.plan, updates=replace(updates, behind=n))) for n in numbers)]
        return min((each for each in made if fits(each.plan, budgets)), key=lambda each: each.plan.total_us)

    def least(self) -> Planned:
        """The plan that needs least of the device, whatever the budgets."""
        with contextlib.suppress(DoesNotFit):
            self.best(0, None)
        least = self.evaluate(min(self._points, key=lambda point: (point.peak, point.time_us)).plan)
        return _finished(least, self.sizes, self.budgets, least.plan.peak_bytes["device"])

    def needs(self, tier: str, limits: Mapping[str, int]) -> int | None:
        """The fewest bytes of a tier with which some plan keeps to ``limits`` of others; after ``best`` found none."""
        peaks = [point.plan.peak_bytes for point in self._points]
        return min((p[tier] for p in peaks if all(p[other] <= n for other, n in limits.items())), default=None)

    def by_policy(self, policy: str, budgets: Budgets) -> Planned:
        """The plan of a fixed policy. Raises DoesNotFit."""
        planned = self.evaluate(POLICIES[policy](self.step, self.base, self.open_params))
        return _by_policy(planned, self.sizes, budgets)

    def _kept(self) -> list[Point]:
        """What an earlier search found, if it is there."""
        text = self.store.read() if self.store else None
        with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            return points_from_json(text, self.ways) if text else []
        return []

    def _searched(self, full: Plan) -> list[Point]:
        each = min(max(_FEWEST_POINTS, _REGIONS_PER_PATH // len(regions(self.step))), _MOST_POINTS)
        points = [Point(full, (full,), 0)]
        sampled = []
        for way in self.ways:
            last, count = len(way) - 1, min(len(way), each)
            sampled += [(way, position) for position in sorted({round(i * last / max(1, count - 1)) for i in range(count)})]
        operations = sum(len(kernel_of(self.step, region).graph.nodes) for region in regions(self.step))
        left = min(_MOST_SEARCHED, _SEARCHED // operations**2)
        for done, (way, position) in enumerate(sampled):
            self.tell("planning", done, len(sampled) + left)
            points.append(Point(self.evaluate(way[position]).plan, way, position))
        self._explore(points, left)
        if self.store:
            self.store.write(points_to_json(points, self.ways))
        return points

    def _explore(self, points: list[Point], left: int) -> None:
        """Adds what local search finds in so many evaluations."""
        blocks = blocks_of(self.step, self.machine)
        seen = {signature(point.plan, blocks, self.sizes) for point in points}
        unvaried = list(points)
        while left > 0 and unvaried:
            point = most_promising(points, unvaried)
            unvaried = [other for other in unvaried if (other.peak, other.time_us) != (point.peak, point.time_us)]
            for plan in neighbours(point.plan, blocks, self.open_params, self.budgets.host_activations):
                key = signature(plan, blocks, self.sizes)
                if key not in seen and left > 0:
                    seen.add(key)
                    self.tell("planning", len(points), len(points) + left)
                    left -= 1
                    made = self.evaluate(plan).plan
                    points.append(Point(made, (made,), 0))
                    unvaried.append(points[-1])


def _by_policy(planned: Planned, sizes: Mapping[str, int], budgets: Budgets) -> Planned:
    peaks = planned.schedule.peak_nbytes
    for tier, limit in budgets.limits.items():
        if limit is not None and peaks[tier] > limit:
            raise DoesNotFit(tier, peaks[tier], causes(planned, tier))
    return _finished(planned, sizes, budgets, peaks["device"])


def resident_plan(
    step: fx.GraphModule,
    machine: Machine,
    budgets: Budgets,
    workspace: Workspace = workspace_nbytes,
    fixed_params: Mapping[str, str] | None = None,
    numerics: str = FUSED,
) -> Planned | None:
    """Everything on the device and nothing recomputed but what is free in fused kernels; None when that does not fit."""
    own = Candidates(step, machine, budgets, workspace, fixed_params, numerics)
    plan = everything(step, own.base, own.open_params, fused=True)
    if any(plan.params(block) != "device" for block in own.sizes):
        return None
    full = own.evaluate(plan)
    return _finished(full, own.sizes, budgets, full.schedule.peak_nbytes["device"]) if fits(full.plan, budgets) else None


def may_be_resident(step: fx.GraphModule, budgets: Budgets) -> bool:
    """Whether the training state alone fits on the device."""
    copies = (2 if budgets.updates is None else 1) + budgets.state_copies
    return budgets.device is None or sum(param_nbytes(step).values()) * copies <= budgets.device


def relowered(planned: Planned, machine: Machine, workspace: Workspace, held: int = 0) -> Planned:
    """The same plan with other kernels: what they need beside their operands is measured anew; ``held``: device bytes that
    they keep from call to call."""
    before = planned.schedule.resident_nbytes
    resident = {**before, "device": before.get("device", 0) + held}
    schedule = lower(planned.step, planned.plan, machine, resident, workspace)
    return Planned(replace(planned.plan, peak_bytes=dict(schedule.peak_nbytes)), planned.step, schedule)


def _base(
    step: fx.GraphModule,
    sizes: Mapping[str, int],
    machine: Machine,
    budgets: Budgets,
    fixed_params: Mapping[str, str] | None,
    numerics: str,
) -> Plan:
    fixed = tuple(
        Decision("params", b, fixed_params.get(b, "host"), sizes.get(b, 0), "decided by the model's first program")
        for b in dict.fromkeys(step.meta["homes"].values())
        if fixed_params is not None
    )
    plan = Plan(decisions=fixed, budget_bytes=budgets.limits, machine=machine.name, numerics=numerics)
    return replace(plan, updates=budgets.updates)


def _evaluator(
    step: fx.GraphModule, sizes: Mapping[str, int], machine: Machine, budgets: Budgets, workspace: Workspace
) -> Callable[[Plan], Planned]:
    def evaluate(plan: Plan) -> Planned:
        rewritten = rewrite(step, plan, lint=False)
        resident = resident_nbytes(sizes, plan, budgets)
        resident["device"] += budgets.reserve
        resident["host"] += len(step.meta["homes"]) * SCALAR_STATE_NBYTES
        schedule = lower(rewritten, plan, machine, resident, workspace)
        time_us, exposed = times_us(schedule, machine, sizes, plan, budgets)
        peaks = dict(schedule.peak_nbytes)
        return Planned(replace(plan, step_time_us=time_us, update_us=exposed, peak_bytes=peaks), rewritten, schedule)

    return evaluate


def _finished(best: Planned, sizes: Mapping[str, int], budgets: Budgets, minimum: int) -> Planned:
    best.step.graph.lint()
    best.step.recompile()
    busy: dict[str, float] = {queue: us for queue, us in busy_us(simulate(best.schedule)).items()}
    busy["update"] = best.plan.update_us
    plan = replace(
        best.plan,
        budget_bytes=budgets.limits,
        minimum_device_bytes=minimum,
        state_bytes=sum(resident_nbytes(sizes, best.plan, budgets).values()),
        limiting_resource=max(busy, key=lambda what: busy[what]),
    )
    limits = {tier: n for tier, n in budgets.limits.items() if n is not None}
    return Planned(plan, best.step, replace(best.schedule, limit_nbytes=limits))


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
