"""The planning problem as a linear program: what of each block to keep where, and which homes are resident.

Everything that overlaps perfectly is allowed to, memory is counted only where it must be live, and decisions may be taken in
part. So the optimum is a lower bound of every plan's time, and its prices say what more of each resource would give. Rounded to
whole decisions, it is a plan to start from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from mtcompile.passes.analysis.cost import Cost, Machine, kernel_us, node_cost
from mtcompile.passes.analysis.state import param_nbytes
from mtcompile.passes.generators import save_rng
from mtcompile.passes.planning.ladders import Block
from mtcompile.passes.planning.linear.homes import HomeCost
from mtcompile.passes.planning.linear.program import Infeasible, Program, added, gains_us
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, recomputed
from mtcompile.passes.step_graph import body_outputs, kernel_of, outputs_of, regions, results
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


def relaxation(
    problem: PlanningProblem, blocks: Sequence[Block], costs: Mapping[str, HomeCost], ahead: int = 0
) -> Callable[[Mapping[str, int | None]], Relaxed]:
    """Builds the linear program of a problem. Returns what solves it for bytes per tier, None for no limit; raises Infeasible.
    ``ahead``: how many blocks ahead prefetches are in memory, beside what must be there; the optimum bounds all plans only if
    it is 0."""
    step, machine, budgets = problem.step, problem.machine, problem.budgets
    sizes = param_nbytes(step)
    program = Program()
    time, span = 0, {phase: program.variable(None) for phase in PHASES}
    loads: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))  # (queue, phase) -> µs by variable
    copied: dict[str, dict[int, float]] = {phase: defaultdict(float) for phase in PHASES}  # bytes
    held = {tier: defaultdict[int, float](float) for tier in ("device", "host")}  # bytes at the start of the backward

    def moved(variable: int, nbytes: float, phase: str, queue: str) -> None:
        loads[queue, phase][variable] += machine.copy_us(1, queue) * nbytes
        copied[phase][variable] += nbytes

    # Homes: the share of each that is on the host.
    copies = (2 if budgets.updates is None else 1) + budgets.state_copies
    away = {home: program.variable() for home in sizes}
    for home, tier in problem.fixed_homes.items():
        if home in away:
            program.equal.append(({away[home]: 1.0}, 0.0 if tier == "device" else 1.0))
    resident = sum(nbytes * copies for nbytes in sizes.values())
    on_device_us = 0.0  # updates, if all are on the device
    for home, variable in away.items():
        cost = costs[home]
        for phase in PHASES:
            loads["h2d", phase][variable] += cost.fetch_us[phase]
            copied[phase][variable] += cost.fetched[phase]
        copied["backward"][variable] += cost.stored
        loads["d2h", "backward"][variable] += cost.store_us
        loads["host", "backward"][variable] += cost.update_us
        loads["compute", "backward"][variable] -= cost.device_update_us
        on_device_us += cost.device_update_us
        held["device"][variable] -= sizes[home] * copies
        held["host"][variable] += sizes[home] * copies

    # Blocks: the share of each option for what it saves, and of each place for what leaves it.
    options: dict[int, list[tuple[Option, int]]] = {}
    crossing: dict[int, tuple[int, int]] = {}
    alone_us: dict[str, float] = defaultdict(float)
    for region in regions(step):
        alone_us[region.meta["phase"]] += _least_us(kernel_of(step, region), machine)
    kept: dict[int, dict[int, float]] = {block.index: defaultdict(float) for block in blocks}
    leaving: dict[int, dict[int, float]] = {}
    back: dict[int, dict[int, float]] = {block.index: defaultdict(float) for block in blocks}  # from the host, for the backward
    for block in blocks:
        shares = []
        for variant in block.variants:
            for tier in ("device", "host") if budgets.host_activations and variant.positions else ("device",):
                variable = program.variable()
                shares.append((Option(variant, tier), variable))
                loads["compute", "backward"][variable] += variant.time_us
                if tier == "device":
                    kept[block.index][variable] += variant.nbytes
                else:
                    back[block.index][variable] += variant.nbytes
                    held["host"][variable] += variant.nbytes
                    moved(variable, variant.nbytes, "forward", "d2h")
                    moved(variable, variant.nbytes, "backward", "h2d")
        options[block.index] = shares
        program.equal.append(({variable: 1.0 for _, variable in shares}, 1.0))
        nbytes = sum(value.meta["nbytes"] for value in block.crossing)
        places = [program.variable() for _ in range(3)]  # on the device, on the host, made again
        crossing[block.index] = (places[0], places[1])
        leaving[block.index] = {places[0]: float(nbytes)}
        held["host"][places[1]] += nbytes
        moved(places[1], nbytes, "forward", "d2h")
        moved(places[1], nbytes, "backward", "h2d")
        loads["compute", "backward"][places[2]] += _made_again_us(step, block, machine)
        program.equal.append((dict.fromkeys(places, 1.0), 1.0))
        if not budgets.host_activations:
            program.equal.append(({places[1]: 1.0}, 0.0))

    # Time.
    reads = {region: _read(step, region) for region in regions(step)}
    names = {value: spec.name for spec, value in outputs_of(step) if spec.kind == "grad"}
    grads = {region: _graded(step, region, names) for region in regions(step)}

    def waited(
        region: fx.Node, nbytes: Mapping[fx.Node, Mapping[str, int]], us: Callable[[HomeCost], float]
    ) -> dict[int, float]:
        """The µs of a home that belong to a region, by its share of the bytes in the region's phase."""
        every = [n for other, n in nbytes.items() if other.meta["phase"] == region.meta["phase"]]
        return {
            away[home]: us(costs[home]) * n / sum(each.get(home, 0) for each in every)
            for home, n in nbytes[region].items()
            if home in away
        }

    forward, backward = ([region for region in reads if region.meta["phase"] == phase] for phase in PHASES)
    start = waited(forward[0], reads, lambda cost: cost.fetch_us["forward"])
    turn = waited(backward[0], reads, lambda cost: cost.fetch_us["backward"]) if backward else {}
    end = waited(backward[-1], grads, lambda cost: cost.store_us + cost.update_us) if backward else {}
    fixed_us = {"forward": alone_us["forward"], "backward": alone_us["backward"] + on_device_us}
    for phase, waits in (("forward", start), ("backward", turn)):
        program.takes("compute", {span[phase]: 1.0}, loads["compute", phase], fixed_us[phase], waits)
        program.takes("link", {span[phase]: 1.0}, loads["h2d", phase])
        program.takes("link", {span[phase]: 1.0}, loads["d2h", phase])
    contention = added(*({v: machine.contention_us(1) * n for v, n in copied[phase].items()} for phase in PHASES))
    both = added({span["forward"]: 1.0, span["backward"]: 1.0}, contention)
    updates_us = {v: machine.update_us(sizes[h], 0, budgets.state_copies) for h, v in away.items()}
    shared = {phase: {v: n / machine.host_gbps / 1e3 for v, n in copied[phase].items()} for phase in PHASES}
    if budgets.updates is None:
        on_device = {h: machine.update_us(0, n, budgets.state_copies) for h, n in sizes.items()}
        more = {v: -on_device[h] for h, v in away.items()}
        program.takes("host", {time: 1.0}, added(updates_us, more), sum(on_device.values()), both)
    elif budgets.updates.run_ahead:
        program.takes("", {time: 1.0}, both)
        program.takes("host", {time: 1.0}, loads["host", "backward"], 0.0, contention)
        program.takes("host", {time: 1.0}, added(updates_us, *shared.values()), 0.0, contention)
        busy = added(*(loads["compute", phase] for phase in PHASES))
        program.takes("compute", {time: 1.0}, busy, sum(fixed_us.values()), start, turn, end, contention)
    else:
        program.takes("", {time: 1.0}, both)
        program.takes("host", {span["backward"]: 1.0}, loads["host", "backward"])
        program.takes("host", {time: 1.0, span["forward"]: -1.0}, added(updates_us, shared["backward"]), 0.0, contention)
        program.takes("compute", {span["backward"]: 1.0}, loads["compute", "backward"], fixed_us["backward"], turn, end)

    # Memory: at each block's forward and backward, what it and all blocks before it keep, what it reads and makes, and what is
    # on its way: weights, saved values and gradients of the blocks near by.
    weights = {block.index: {away[h]: float(n) for h, n in reads[block.region].items() if h in away} for block in blocks}
    stored: dict[int, dict[int, float]] = defaultdict(dict)
    needed: dict[int, dict[int, float]] = defaultdict(dict)  # weights that a backward in one region reads
    for region in backward:
        index = region.meta["block"]
        stored[index] = added(stored[index], {away[h]: float(n) for h, n in grads[region].items() if h in away})
        needed[index] = {away[h]: float(n) for h, n in reads[region].items() if h in away}
    live: dict[int, float] = defaultdict(float)
    for place, block in enumerate(blocks):
        live = added(live, kept[block.index], held["device"] if not place else {})
        before, after = blocks[max(0, place - ahead) : place], blocks[place + 1 : place + 1 + ahead]
        beside, whole = _beside(problem, block)
        near = [needed[block.index], back[block.index]] if whole else []
        near += [terms[other.index] for other in before for terms in (weights, back)]
        near += [stored[other.index] for other in after]
        beyond = leaving[block.index] if ahead else {}  # a plan may let it go later than it must
        program.holds("device", added(live, beyond, *near), budgets.reserve + resident + beside)
        if ahead:
            near = [weights[block.index], back[block.index], *(back[other.index] for other in before)]
            near += [weights[other.index] for other in after]
            program.holds("device", added(live, leaving[block.index], *near), budgets.reserve + resident)
        live = added(live, leaving[block.index])
    program.holds("host", held["host"], 0.0)

    def solve(limits: Mapping[str, int | None]) -> Relaxed:
        solution, rows = program.solve(limits)
        if solution.status != 0:
            raise Infeasible(solution.message)
        values = solution.x
        return Relaxed(
            float(solution.fun),
            {home: 1.0 - float(values[variable]) for home, variable in away.items()},
            {index: tuple((option, float(values[v])) for option, v in shares) for index, shares in options.items()},
            {index: (float(values[one]), float(values[other])) for index, (one, other) in crossing.items()},
            gains_us(rows, values, -solution.ineqlin.marginals),
        )

    return solve


def _least_us(kernel: fx.GraphModule, machine: Machine) -> float:
    """The µs of a kernel of which nothing is recomputed: no generator's state is saved for that."""
    states = sum((node_cost(node) for node in kernel.graph.nodes if node.target is save_rng), Cost(0, 0, 0))
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
        total = sum(costs, Cost(0, 0, 0))
        return min(total.time_us(machine), replace(total, flops=0).time_us(machine), _flops_us(total, machine))

    return min(map(more_us, block.variants))


def _flops_us(cost: Cost, machine: Machine) -> float:
    return replace(cost, nbytes=0, fusible_nbytes=0).time_us(machine)


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


def _read(step: fx.GraphModule, region: fx.Node) -> dict[str, int]:
    """The bytes of the parameters that a region reads, by home."""
    homes, nbytes = step.meta["homes"], defaultdict[str, int](int)
    for operand in region.all_input_nodes:
        if operand.op == "placeholder" and operand.meta["role"] == "param" and operand.meta["name"] in homes:
            nbytes[homes[operand.meta["name"]]] += operand.meta["nbytes"]
    return nbytes


def _graded(step: fx.GraphModule, region: fx.Node, names: Mapping[fx.Node, str]) -> dict[str, int]:
    """The bytes of the parameters' gradients that a region makes, by home. ``names``: gradient -> parameter."""
    homes, nbytes = step.meta["homes"], defaultdict[str, int](int)
    for value in results(region):
        if names.get(value) in homes:
            nbytes[homes[names[value]]] += value.meta["nbytes"]
    return nbytes
