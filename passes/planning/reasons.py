"""The reasons of a finished plan's decisions: what each costs, and what its alternatives would.

What a decision costs is read off the plan's schedule: the time of its copies, and whether kernels hide them. What it spares is
priced as the planner prices it: copies by their bytes, recomputation by the operations that run again.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import fx

from mtcompile.passes.analysis.cost import kernel_us
from mtcompile.passes.analysis.names import value_names
from mtcompile.passes.analysis.saved import crossing_values, saved_values
from mtcompile.passes.analysis.state import held_nbytes, trained_nbytes
from mtcompile.passes.lower import update_cost
from mtcompile.passes.plan import Decision, Kind, Plan, Updates
from mtcompile.passes.planning.linear.needs import needs_of
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, likeness, recomputing
from mtcompile.passes.step_graph import calls, inputs_of, kernel_of, regions, results
from mtcompile.runtime.schedule import PHASES, Phase, Queue, Schedule, Tier, gib
from mtcompile.runtime.trace import Trace, takes_time


def with_reasons(problem: PlanningProblem, plan: Plan, step: fx.GraphModule, schedule: Schedule, trace: Trace) -> Plan:
    """Returns the plan with the reason of each decision, and with names for the values that these are about. ``step``: as the
    plan rewrites it; ``schedule``: that of this step; ``trace``: what is predicted of the schedule."""
    reasons, names = Reasons(problem, plan, step, schedule, trace), value_names(problem.step)
    decisions = tuple(map(reasons.given, plan.decisions))
    about = dict.fromkeys(name for each in decisions for name in (each.subject, *each.values))
    return replace(plan, decisions=decisions, names={name: names[name] for name in about if name in names})


class Reasons:
    """Works out what the decisions of a plan cost. The arguments are those of ``with_reasons``."""

    def __init__(self, problem: PlanningProblem, plan: Plan, step: fx.GraphModule, schedule: Schedule, trace: Trace) -> None:
        self.problem, self.plan, self.machine = problem, plan, problem.machine
        self.held, self.trained = held_nbytes(problem.step, problem.budgets, "device"), trained_nbytes(problem.step)
        self.values = {v.name: v for region in regions(problem.step) for v in results(region)}
        forward = [region for region in regions(problem.step) if region.meta["phase"] == PHASES[0]]
        self.regions = {problem.step.meta["blocks"][region.meta["block"]]: region for region in forward}
        self.saved = {block: saved_values(region) for block, region in self.regions.items()}
        self.kept = {
            block: tuple(i for i, value in enumerate(saved) if plan.keeps(block, value.name))
            for block, saved in self.saved.items()
        }
        self.block_of = {value.name: block for block, saved in self.saved.items() for value in saved}
        self.crossing = {value.name: region for region in forward for value in crossing_values(region)}
        self.by_rows = {problem.step.meta["homes"].get(name) for name in problem.step.meta["rows"]}
        self.fits = all(limit is None or schedule.peak_nbytes[t] <= limit for t, limit in problem.budgets.nbytes.items())
        # By home or value, queue and phase: the µs of its copies; and by home or value: how long compute waits beside them.
        self.copies, self.waits = _copies(step, schedule, trace)
        self.fetched, self.stored = self._crossing()
        self._recomputing: dict[Hashable, Callable[[tuple[int, ...]], Variant]] = {}

    def given(self, decision: Decision) -> Decision:
        """Returns a decision of the plan with its reason."""
        return replace(decision, reason=self.why(decision))

    def why(self, decision: Decision) -> str:
        """Returns the reason of a decision of the plan, in one sentence."""
        if self.plan.all_resident and self.fits:
            limit, peak = self.problem.budgets.device, gib(self.plan.peak_bytes["device"])
            return f"everything fits: {peak}" + ("" if limit is None else f" of {gib(limit)}")
        ways: dict[Kind, Callable[[Decision], str]] = {
            "params": self._home,
            "variant": self._variant,
            "activation": self._activation,
            "fetch": self._fetch,
            "return": self._ahead,
            "load": self._ahead,
            "gradients": self._gradients,
            "update": self._update,
        }
        return ways[decision.kind](decision)

    # ------------------------------------------------------------------------------------------------------------ homes

    def _home(self, d: Decision) -> str:
        home, plan, budgets = d.subject, self.plan, self.problem.budgets
        held, trained = self.held.get(home, 0), self.trained.get(home, 0)  # nothing of it may be in this step
        updates = budgets.updates or Updates(budgets.state_copies)
        _, update_us = update_cost(updates, self.machine, "host", trained, trained if d.choice == "disk" else 0)
        if d.choice == "device":
            costs = [f"fetching it from the host would cost {_ms(sum(self.fetched[home].values()))} a step"]
            store_us, where = self.stored[home], f"here it takes {gib(held)}{self._short('host', held)}"
        else:
            fetch_us, store_us = self._us(home, "h2d", "disk_read"), self._us(home, "d2h")
            costs = [f"fetching it costs {_ms(fetch_us)} a step{self._hidden(home)}"]
            where = f"on the device it would take {gib(held)}{self._short('device', held)}"
        if d.choice == "disk":
            when = "fetched straight" if plan.disk_direct else f"read {plan.disk_lookahead} region(s) before it is fetched"
            where = f"on the host it would take {gib(held)}{self._short('host', held)}; {when}"
        if trained and not plan.streams(home):
            costs += [f"copying its gradients home {_ms(store_us)}", f"updating it there {_ms(update_us)}"]
        fixed = ""
        if self.problem.fixed_homes.get(home) == d.choice != "disk":
            fixed = "the device needs few of its rows: " if home in self.by_rows else "decided before this plan: "
        return f"{fixed}{', '.join(costs)}; {where}"

    def _fetch(self, d: Decision) -> str:
        if self.plan.params(d.subject) == "device":
            return f"its home is the device, where it takes {gib(d.nbytes)} anyway"
        if d.choice == "keep":
            again_us = self.fetched[d.subject][PHASES[1]]
            return f"fetching it again would cost {_ms(again_us)}; {gib(d.nbytes)} stay from the forward to the backward"
        again_us = self.copies[d.subject, "h2d", PHASES[1]]
        cost = f"fetching it again costs {_ms(again_us)}{self._hidden(d.subject)}"
        return f"{cost}; {gib(d.nbytes)} would stay from the forward to the backward otherwise"

    def _ahead(self, d: Decision) -> str:
        """Returns the reason of a ``return`` or a ``load``."""
        us = self.copies[d.subject, "h2d", PHASES[1]]
        if not us:
            return f"it does not come back: {gib(d.nbytes)} stay on the device or are computed again"
        if d.choice == "late":
            return f"ahead, {gib(d.nbytes)} would be beside other regions; they wait for its copy of {_ms(us)}"
        return f"its copy of {_ms(us)} is issued ahead{self._hidden(d.subject)}, {gib(d.nbytes)} beside other regions"

    def _gradients(self, d: Decision) -> str:
        us = self._us(d.subject, "d2h")
        if not us:
            return f"none of {gib(d.nbytes)} goes home"
        if d.choice == "early":
            return f"late, {gib(d.nbytes)} would be beside the next regions, which wait {_ms(us)} for their copy home"
        return f"their copy home of {_ms(us)} goes on beside the next regions, and so do {gib(d.nbytes)}"

    def _update(self, d: Decision) -> str:
        updates, trained = self.problem.budgets.updates, self.trained.get(d.subject, 0)
        if updates is None or not updates.streamed or self.plan.params(d.subject) != "host":
            return "it is updated where its home is"
        host_us, nbytes = update_cost(updates, self.machine, "host", trained)[1], updates.streamed * trained
        comes, goes = (_ms(self.machine.copy_us(nbytes, queue)) for queue in ("h2d", "d2h"))
        if d.choice == "device":
            state = f"{gib(nbytes)} of weights and state come in {comes} and go home in {goes}"
            return f"the host would take {_ms(host_us)}, and updates others meanwhile; {state}"
        return f"the host takes {_ms(host_us)}; {gib(nbytes)} would come to the device in {comes} and go home in {goes}"

    def _crossing(self) -> tuple[dict[str, dict[Phase, float]], dict[str, float]]:
        """Returns the µs of the copies of each home, were it on the host: to the device, by phase, and of gradients."""
        fetched, stored = (
            defaultdict[str, dict[Phase, float]](lambda: dict.fromkeys(PHASES, 0.0)),
            defaultdict[str, float](float),
        )
        for region, needs in needs_of(self.problem.step).items():
            for home, nbytes in needs.read.items():
                wider = 0 if self.plan.narrow and home not in self.plan.wide else needs.wider.get(home, 0)
                fetched[home][region.meta["phase"]] += self.machine.copy_us(nbytes + wider, "h2d")
            for home, nbytes in needs.stored.items():
                wider = 0 if self.plan.narrow and home not in self.plan.wide else needs.grads_wider.get(home, 0)
                stored[home] += self.machine.copy_us(nbytes + wider, "d2h")
        return fetched, stored

    # ------------------------------------------------------------------------------------------- what the backward reads

    def _variant(self, d: Decision) -> str:
        saved, kept = self.saved[d.subject], self.kept[d.subject]
        every, nbytes = sum(v.meta["nbytes"] for v in saved), sum(saved[i].meta["nbytes"] for i in kept)
        if not saved:
            return "its backward needs nothing of it: 0 B"
        none, us = self._keeping(d.subject, ()), self._keeping(d.subject, kept).time_us
        if len(kept) == len(saved):
            states = f" and {gib(none.nbytes)} of generator states" if none.nbytes else ""
            return f"recomputing it would cost {_ms(none.time_us)}{states}; {gib(every)} wait for the backward"
        if not kept:
            return f"recomputing it costs {_ms(us)}; {gib(every)} would wait for the backward otherwise"
        cost = f"recomputing the rest costs {_ms(us)} and spares {gib(every - nbytes)}"
        return f"{cost}; recomputing all would cost {_ms(none.time_us)} and spare {gib(every)}"

    def _activation(self, d: Decision) -> str:
        if d.subject == "*":
            others = self.plan.decisions.of_kind("activation")
            waiting = [name for name in (*self.crossing, *self.block_of) if name not in others and self._waits(name)]
            nbytes = sum(self.values[name].meta["nbytes"] for name in waiting)
        else:
            waiting, nbytes = [d.subject], self.values[d.subject].meta["nbytes"]
            if not self._waits(d.subject):
                return f"it does not wait: its block makes it again, which spares {gib(nbytes)}"
        copies_us = self.machine.copy_us(nbytes, "d2h") + self.machine.copy_us(nbytes, "h2d")
        them = "them" if d.subject == "*" else "it"
        made_again = d.subject in self.crossing or d.subject in self.block_of
        again = f", recomputing it {_ms(self._again_us(d.subject))}" if made_again else ""
        if d.choice in ("device", "recompute"):
            cost = f"copying {them} to the host and back would cost {_ms(copies_us)}{again}"
            return f"{cost}; {gib(nbytes)} {'wait here' if d.choice == 'device' else 'would wait on the device otherwise'}"
        actual_us = sum(self._us(name, "d2h", "h2d", "disk_read", "disk_write") for name in waiting)
        waits = any(not self._hidden(name) for name in waiting)
        if not actual_us:
            return f"it is read at once, so it does not leave the device: {gib(nbytes)}"
        cost = f"copying {them} there and back costs {_ms(actual_us)}{'' if waits else ' (hidden)'}"
        tier: Tier = "host" if d.choice == "disk" else "device"
        ahead = f"; read {self.plan.disk_lookahead} region(s) before it is fetched" if d.choice == "disk" else ""
        return f"{cost}{again}; {gib(nbytes)} would wait on the {tier} otherwise{ahead}"

    def _waits(self, name: str) -> bool:
        """Tells whether a value is kept at all."""
        return name not in self.block_of or self.plan.keeps(self.block_of[name], name)

    def _again_us(self, name: str) -> float:
        """The µs of making a value again: one that leaves a block, by running that; one that it saves, from what it keeps."""
        if (region := self.crossing.get(name)) is not None:
            return kernel_us(kernel_of(self.problem.step, region), self.machine)
        kept = self.kept[block := self.block_of[name]]
        without = tuple(i for i in kept if self.saved[block][i].name != name)
        return self._keeping(block, without).time_us - self._keeping(block, kept).time_us

    def _keeping(self, block: str, kept: tuple[int, ...]) -> Variant:
        """The cost of recomputing what a block saves, except what is ``kept``. Worked out once for equal blocks."""
        region = self.regions[block]
        if (alike := likeness(region)) not in self._recomputing:
            self._recomputing[alike] = functools.cache(recomputing(self.problem.step, region, self.machine))
        return self._recomputing[alike](kept)

    # ----------------------------------------------------------------------------------------------------------- figures

    def _us(self, name: str, *queues: Queue) -> float:
        return sum(self.copies[name, queue, phase] for queue in queues for phase in PHASES)

    def _hidden(self, name: str) -> str:
        return "" if round(self.waits[name]) else " (hidden)"

    def _short(self, tier: Tier, nbytes: int) -> str:
        """Says that a tier has no room for so many bytes more, if that is so."""
        limit = self.problem.budgets.nbytes.get(tier)
        if limit is None or (left := limit - self.plan.peak_bytes[tier]) >= nbytes:
            return ""
        return f" (the {tier} has {gib(max(0, left))} left)"


def _copies(
    step: fx.GraphModule, schedule: Schedule, trace: Trace
) -> tuple[dict[tuple[str, Queue, Phase], float], dict[str, float]]:
    """Returns the µs of copies, and those in which they run while compute is idle, by what they move: a home or a value."""
    called, homes = {call.name: call for call in calls(step)}, step.meta["homes"]
    of_param = {node.name: homes.get(spec.name, "") for spec, node in inputs_of(step) if spec.role == "param"}
    compute = sorted((r.start_us, r.end_us) for r in trace.records if r.queue == "compute")
    busy_until = _busy(compute)
    spans = {record.index: (record.start_us, record.end_us) for record in trace.records}
    copies, waits = defaultdict[tuple[str, Queue, Phase], float](float), defaultdict[str, float](float)
    for index, instruction in enumerate(schedule.instructions):
        if instruction.op == "copy" and takes_time(instruction):
            call = called[instruction.label]
            origin = call.args[0].meta.get("origin", call.args[0].name)
            name = call.meta.get("home") or of_param.get(origin) or origin
            copies[name, instruction.queue, instruction.phase] += instruction.time_us
            if index in spans:
                start, end = spans[index]
                waits[name] += end - start - (busy_until(end) - busy_until(start))
    return copies, waits


def _busy(intervals: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Returns a function that tells for how many µs before a moment a queue was busy. ``intervals``: disjoint, in order."""
    starts = [start for start, _ in intervals]
    before = [0.0, *accumulate(end - start for start, end in intervals)]

    def busy(moment: float) -> float:
        place = bisect_right(starts, moment)
        return before[place] - (max(0.0, intervals[place - 1][1] - moment) if place else 0.0)

    return busy


def _ms(us: float) -> str:
    """Writes microseconds with two significant digits."""
    number, unit = (us / 1e3, "ms") if us >= 10 else (us, "µs")
    return f"{float(f'{number:.2g}'):,g} {unit}"
