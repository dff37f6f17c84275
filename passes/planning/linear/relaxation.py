"""The planning problem as a linear program: what of each block to keep where, and which homes are resident.

Everything that overlaps perfectly is allowed to, memory is counted only where it must be live, and decisions may be taken in
part. So the optimum is a lower bound of every plan's time, and its prices say what more of each resource would give. Rounded to
whole decisions, it is a plan to start from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mtcompile.passes.analysis.cost import Cost, Machine, kernel_us, node_cost
from mtcompile.passes.analysis.state import param_nbytes
from mtcompile.passes.generators import save_rng
from mtcompile.passes.planning.ladders import Block
from mtcompile.passes.planning.linear.homes import HomeCost
from mtcompile.passes.planning.linear.program import Infeasible, added, gains_us
from mtcompile.passes.planning.linear.terms import Terms, terms_of
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, recomputed
from mtcompile.passes.step_graph import body_outputs, kernel_of, regions, results
from mtcompile.runtime.schedule import PHASES


@dataclass(frozen=True, slots=True)
class Option:
    """A choice for a block: the saved values of a variant kept on the device or on the host."""

    variant: Variant
    tier: str


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The optimum. ``bound_us``: no plan is faster. ``resident``: home -> share on the device. ``options``: block -> share of
    each option. ``crossing``: block -> shares on the device and on the host of what leaves it. ``gains_us``: as in a
    Certificate."""

    bound_us: float
    resident: Mapping[str, float]
    options: Mapping[int, tuple[tuple[Option, float], ...]]
    crossing: Mapping[int, tuple[float, float]]
    gains_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Choices:
    """The variables of blocks. By block: ``options`` for what it saves, and the two places of what leaves it (``crossing``);
    bytes by variable that it keeps on the device (``kept``), that leave it and wait there (``leaving``), and that its backward
    gets back from the host (``back``)."""

    options: Mapping[int, list[tuple[Option, int]]]
    crossing: Mapping[int, tuple[int, int]]
    kept: Mapping[int, dict[int, float]]
    leaving: Mapping[int, dict[int, float]]
    back: Mapping[int, dict[int, float]]


def relaxation(
    problem: PlanningProblem, blocks: Sequence[Block], costs: Mapping[str, HomeCost], ahead: int = 0
) -> Callable[[Mapping[str, int | None]], Relaxed]:
    """Builds the linear program of a problem. Returns what solves it for bytes per tier, None for no limit; raises Infeasible.
    ``ahead``: how many blocks ahead prefetches are in memory, beside what must be there; the optimum bounds all plans only if
    it is 0."""
    terms = terms_of(problem.step)
    _place_homes(problem, costs, terms)
    choices = _place_blocks(problem, blocks, terms)
    _take_time(problem, costs, terms)
    _hold_memory(problem, blocks, terms, choices, ahead)

    def solve(limits: Mapping[str, int | None]) -> Relaxed:
        solution, rows = terms.program.solve(limits)
        if solution.status != 0:
            raise Infeasible(solution.message)
        values = solution.x
        return Relaxed(
            float(solution.fun),
            {home: 1.0 - float(values[variable]) for home, variable in terms.away.items()},
            {index: tuple((option, float(values[v])) for option, v in shares) for index, shares in choices.options.items()},
            {index: (float(values[one]), float(values[other])) for index, (one, other) in choices.crossing.items()},
            gains_us(rows, values, -solution.ineqlin.marginals),
        )

    return solve


def _place_homes(problem: PlanningProblem, costs: Mapping[str, HomeCost], terms: Terms) -> None:
    """What the share of each home that is on the host costs, and what it leaves free on the device."""
    sizes, copies = param_nbytes(problem.step), problem.budgets.copies
    for home, tier in problem.fixed_homes.items():
        if home in terms.away:
            terms.program.equal.append(({terms.away[home]: 1.0}, 0.0 if tier == "device" else 1.0))
    for home, variable in terms.away.items():
        cost = costs[home]
        for phase in PHASES:
            terms.loads["h2d", phase][variable] += cost.fetch_us[phase]
            terms.copied[phase][variable] += cost.fetched[phase]
        terms.copied["backward"][variable] += cost.stored
        terms.loads["d2h", "backward"][variable] += cost.store_us
        terms.loads["host", "backward"][variable] += cost.update_us
        terms.loads["compute", "backward"][variable] -= cost.device_update_us
        terms.held["device"][variable] -= sizes[home] * copies
        terms.held["host"][variable] += sizes[home] * copies


def _place_blocks(problem: PlanningProblem, blocks: Sequence[Block], terms: Terms) -> _Choices:
    """The share of each option for what a block saves, and of each place for what leaves it."""
    machine, host, program = problem.machine, problem.budgets.host_activations, terms.program
    kept: dict[int, dict[int, float]] = defaultdict(dict)
    back: dict[int, dict[int, float]] = defaultdict(dict)
    leaving: dict[int, dict[int, float]] = {}
    options: dict[int, list[tuple[Option, int]]] = {}
    crossing: dict[int, tuple[int, int]] = {}

    def goes_home(variable: int, nbytes: float) -> None:
        terms.held["host"][variable] += nbytes
        for phase, queue in (("forward", "d2h"), ("backward", "h2d")):
            terms.loads[queue, phase][variable] += machine.copy_us(1, queue) * nbytes
            terms.copied[phase][variable] += nbytes

    for block in blocks:
        shares = options[block.index] = list[tuple[Option, int]]()
        for variant in block.variants:
            for tier in ("device", "host") if host and variant.positions else ("device",):
                variable = program.variable()
                shares.append((Option(variant, tier), variable))
                terms.loads["compute", "backward"][variable] += variant.time_us
                (kept if tier == "device" else back)[block.index][variable] = float(variant.nbytes)
                if tier == "host":
                    goes_home(variable, variant.nbytes)
        program.equal.append(({variable: 1.0 for _, variable in shares}, 1.0))
        nbytes = sum(value.meta["nbytes"] for value in block.crossing)
        stays, away, again = (program.variable() for _ in range(3))  # on the device, on the host, made again
        crossing[block.index], leaving[block.index] = (stays, away), {stays: float(nbytes)}
        goes_home(away, nbytes)
        terms.loads["compute", "backward"][again] += _made_again_us(problem.step, block, machine)
        program.equal.append(({stays: 1.0, away: 1.0, again: 1.0}, 1.0))
        if not host:
            program.equal.append(({away: 1.0}, 0.0))
    return _Choices(options, crossing, kept, leaving, back)


def _take_time(problem: PlanningProblem, costs: Mapping[str, HomeCost], terms: Terms) -> None:
    """The rows that say how long queues take, and what waits for what."""
    step, machine, budgets = problem.step, problem.machine, problem.budgets
    program, time, span, loads, away = terms.program, terms.time, terms.span, terms.loads, terms.away
    sizes = param_nbytes(step)
    start, turn, ends = _waits(costs, terms, budgets.updates is not None and budgets.updates.run_ahead)
    fixed_us = {phase: sum(_least_us(kernel_of(step, region), machine) for region in terms.of_phase(phase)) for phase in PHASES}
    fixed_us["backward"] += sum(costs[home].device_update_us for home in away)  # updates, if all are on the device
    for phase, waits in (("forward", start), ("backward", turn)):
        program.takes("compute", {span[phase]: 1.0}, loads["compute", phase], fixed_us[phase], waits)
        program.takes("link", {span[phase]: 1.0}, loads["h2d", phase])
        program.takes("link", {span[phase]: 1.0}, loads["d2h", phase])
    contention = added(*({v: machine.contention_us(1) * n for v, n in terms.copied[phase].items()} for phase in PHASES))
    both = added({span["forward"]: 1.0, span["backward"]: 1.0}, contention)
    updates_us = {v: machine.update_us(sizes[h], 0, budgets.state_copies) for h, v in away.items()}
    shared = {phase: {v: n / machine.host_gbps / 1e3 for v, n in terms.copied[phase].items()} for phase in PHASES}
    if budgets.updates is None:
        on_device = {h: machine.update_us(0, n, budgets.state_copies) for h, n in sizes.items()}
        more = {v: -on_device[h] for h, v in away.items()}
        program.takes("host", {time: 1.0}, added(updates_us, more), sum(on_device.values()), both)
    elif budgets.updates.run_ahead:
        program.takes("", {time: 1.0}, both)
        program.takes("host", {time: 1.0}, loads["host", "backward"], 0.0, contention)
        program.takes("host", {time: 1.0}, added(updates_us, *shared.values()), 0.0, contention)
        busy = added(*(loads["compute", phase] for phase in PHASES))
        for end in (start, *ends):
            program.takes("compute", {time: 1.0}, busy, sum(fixed_us.values()), turn, end, contention)
    else:
        program.takes("", {time: 1.0}, both)
        program.takes("host", {span["backward"]: 1.0}, loads["host", "backward"])
        program.takes("host", {time: 1.0, span["forward"]: -1.0}, added(updates_us, shared["backward"]), 0.0, contention)
        for end in ends:
            program.takes("compute", {span["backward"]: 1.0}, loads["compute", "backward"], fixed_us["backward"], turn, end)


def _waits(
    costs: Mapping[str, HomeCost], terms: Terms, run_ahead: bool
) -> tuple[dict[int, float], dict[int, float], list[dict[int, float]]]:
    """What compute waits for: the first fetches of the forward and of the backward, and, before the next step can begin, the
    last gradients' copies home, their updates, and for each home both and the fetch after them."""

    def waited(
        region: fx.Node, nbytes: Mapping[fx.Node, Mapping[str, int]], us: Callable[[HomeCost], float]
    ) -> dict[int, float]:
        """The µs of a home that belong to a region, by its share of the bytes in the region's phase."""
        every = [nbytes[other] for other in terms.of_phase(region.meta["phase"])]
        return {
            terms.away[home]: us(costs[home]) * n / sum(each.get(home, 0) for each in every)
            for home, n in nbytes[region].items()
            if n and home in terms.away
        }

    forward, backward = map(terms.of_phase, PHASES)
    start = waited(forward[0], terms.reads, lambda cost: cost.fetch_us["forward"]) if forward else {}
    turn = waited(backward[0], terms.reads, lambda cost: cost.fetch_us["backward"]) if backward else {}
    if not backward:
        return start, turn, []
    stores = waited(backward[-1], terms.grads, lambda cost: cost.store_us)
    updates = waited(backward[-1], terms.grads, lambda cost: cost.update_us)
    fetches = start if run_ahead else {}
    each = [{v: stores[v] + updates[v] + fetches.get(v, 0.0)} for v in stores]
    return start, turn, [stores, updates, *each]


def _hold_memory(problem: PlanningProblem, blocks: Sequence[Block], terms: Terms, choices: _Choices, ahead: int) -> None:
    """The rows that say what memory holds at each block's forward and backward: what it and all blocks before it keep, what it
    reads and makes, and what is on its way: weights, saved values and gradients of the blocks near by."""
    weights = {block.index: terms.by_share(terms.reads[block.region]) for block in blocks}
    stored: dict[int, dict[int, float]] = defaultdict(dict)
    needed: dict[int, dict[int, float]] = defaultdict(dict)  # weights that a backward in one region reads
    for region in terms.of_phase("backward"):
        index = region.meta["block"]
        stored[index] = added(stored[index], terms.by_share(terms.grads[region]))
        needed[index] = terms.by_share(terms.reads[region])
    always = problem.budgets.reserve + sum(nbytes * problem.budgets.copies for nbytes in param_nbytes(problem.step).values())
    live = dict(terms.held["device"])
    for place, block in enumerate(blocks):
        index, back = block.index, choices.back
        live = added(live, choices.kept[index])
        before, after = blocks[max(0, place - ahead) : place], blocks[place + 1 : place + 1 + ahead]
        beside, whole = _beside(problem, block)
        near = [needed[index], back[index]] if whole else []
        near += [nbytes[other.index] for other in before for nbytes in (weights, back)]
        near += [stored[other.index] for other in after]
        beyond = choices.leaving[index] if ahead else {}  # a plan may let it go later than it must
        terms.program.holds("device", added(live, beyond, *near), always + beside)
        if ahead:
            near = [weights[index], back[index], *(back[other.index] for other in before)]
            near += [weights[other.index] for other in after]
            terms.program.holds("device", added(live, choices.leaving[index], *near), always)
        live = added(live, choices.leaving[index])
    terms.program.holds("host", terms.held["host"], 0.0)


def _least_us(kernel: fx.GraphModule, machine: Machine) -> float:
    """The µs of a kernel of which nothing is recomputed: no generator's state is saved for that."""
    states = sum((node_cost(node) for node in kernel.graph.nodes if node.target is save_rng), Cost())
    return max(0.0, kernel_us(kernel, machine) - states.time_us(machine))


def _made_again_us(step: fx.GraphModule, block: Block, machine: Machine) -> float:
    """The fewest µs that making again what leaves a block adds to any of its variants."""
    outputs = body_outputs(kernel_of(step, block.region))
    wanted = [outputs[int(value.args[1])] for value in block.crossing]
    saved = [outputs[int(value.args[1])] for value in block.saved]

    def more_us(variant: Variant) -> float:
        given = {saved[position] for position in variant.positions}
        without = set(recomputed([node for node in saved if node not in given], given))
        costs = [node_cost(node) for node in recomputed(wanted, given) if node not in without]
        # Beside a kernel that is bound by FLOPs its traffic is free, and the other way round.
        total = sum(costs, Cost())
        return min(total.time_us(machine), total.traffic_us(machine), total.flops_us(machine))

    return min(map(more_us, block.variants))


def _beside(problem: PlanningProblem, block: Block) -> tuple[int, bool]:
    """The bytes that a block's backward needs beside weights and saved values, whatever the plan: workspace, what other
    backwards made for it, what it makes. And whether it is one region, so that all it needs is in memory at once."""
    step = problem.step
    backward = [r for r in regions(step) if r.meta["phase"] == "backward" and r.meta["block"] == block.index]
    workspace = max((problem.workspace(kernel_of(step, region)) for region in backward), default=0)
    if len(backward) != 1:
        return workspace, False
    made = [value for value in results(backward[0]) if problem.budgets.updates is not None or value.meta["role"] != "grad"]
    given = [v for v in backward[0].all_input_nodes if v.meta.get("role") == "activation" and _phase(v) == "backward"]
    return workspace + sum(value.meta["nbytes"] for value in (*made, *given)), True


def _phase(value: fx.Node) -> str:
    """The phase of the region that makes a value."""
    return str(value.args[0].meta["phase"]) if isinstance(value.args[0], fx.Node) else ""
