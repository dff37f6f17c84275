"""The planning problem as a linear program: what of each block to keep where, and which homes are resident.

Everything that overlaps perfectly is allowed to, memory is counted only where it must be live, and decisions may be taken in
part. So the optimum is a lower bound of every plan's time, and its prices say what more of each resource would give. Rounded to
whole decisions, it is a plan to start from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from mtcompile.passes.analysis.cost import Cost, Machine, node_cost
from mtcompile.passes.analysis.state import param_nbytes
from mtcompile.passes.planning.ladders import Block
from mtcompile.passes.planning.linear.homes import HomeCost
from mtcompile.passes.planning.linear.program import Infeasible, added, gains_us
from mtcompile.passes.planning.linear.queues import take_time
from mtcompile.passes.planning.linear.terms import Load, Terms, terms_of
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, recomputed
from mtcompile.passes.step_graph import body_outputs, kernel_of, placeholders, regions, results
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


class Solve(Protocol):
    """See ``relaxation``."""

    def __call__(self, limits: Mapping[str, int | None], on_device: Collection[str] | None = None) -> Relaxed: ...


@dataclass(frozen=True, slots=True)
class _Choices:
    """The variables of blocks. By block: ``options`` for what it saves, and the two places of what leaves it (``crossing``);
    bytes by variable that it saves on the device (``saved``), that leave it and wait there (``leaving``), and that its backward
    gets back from the host (``back``)."""

    options: Mapping[int, list[tuple[Option, int]]]
    crossing: Mapping[int, tuple[int, int]]
    saved: Mapping[int, dict[int, float]]
    leaving: Mapping[int, dict[int, float]]
    back: Mapping[int, dict[int, float]]


def relaxation(problem: PlanningProblem, blocks: Sequence[Block], costs: Mapping[str, HomeCost], ahead: int = 0) -> Solve:
    """Builds the linear program of a problem. Returns a function that solves it for a limit in bytes per tier (None: no
    limit) and raises Infeasible. If ``on_device`` is given, the homes in it are on the device and all others on the host.
    ``ahead``: how many blocks ahead prefetches are in memory, beside what must be there; the optimum bounds all plans only if
    it is 0."""
    terms = terms_of(problem.step)
    _place_homes(problem, costs, terms)
    choices = _place_blocks(problem, blocks, terms)
    take_time(problem, costs, terms)
    _hold_memory(problem, blocks, terms, choices, ahead)

    def solve(limits: Mapping[str, int | None], on_device: Collection[str] | None = None) -> Relaxed:
        decided = {} if on_device is None else {v: 0.0 if home in on_device else 1.0 for home, v in terms.away.items()}
        solution, rows = terms.program.solve(limits, decided)
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
    """Adds what the share of each home that is on the host costs, and what it leaves free on the device."""
    sizes, copies = param_nbytes(problem.step), problem.budgets.copies
    for home, tier in problem.fixed_homes.items():
        if home in terms.away:
            terms.program.equal.append(({terms.away[home]: 1.0}, 0.0 if tier == "device" else 1.0))
    for home, variable in terms.away.items():
        cost, low, high = costs[home], *terms.blocks[home]
        for phase in PHASES:
            terms.loads["h2d", phase].append(Load(low, high, {variable: cost.fetch_us[phase]}))
            terms.copied[phase][variable] += cost.fetched[phase]
        terms.copied["backward"][variable] += cost.stored
        terms.loads["d2h", "backward"].append(Load(low, high, {variable: cost.store_us}))
        terms.loads["host", "backward"].append(Load(low, high, {variable: cost.update_us}))
        # Updates on the device run beside a block's other work, held ones last of all: only all blocks together count them.
        terms.loads["compute", "backward"].append(Load(-1, high, {variable: -cost.device_update_us}, cost.device_update_us))
        terms.held["device"][variable] -= sizes[home] * copies
        terms.held["host"][variable] += sizes[home] * copies


def _place_blocks(problem: PlanningProblem, blocks: Sequence[Block], terms: Terms) -> _Choices:
    """The share of each option for what a block saves, and of each place for what leaves it."""
    machine, host, program = problem.machine, problem.budgets.host_activations, terms.program
    saved: dict[int, dict[int, float]] = defaultdict(dict)
    back: dict[int, dict[int, float]] = defaultdict(dict)
    leaving: dict[int, dict[int, float]] = {}
    options: dict[int, list[tuple[Option, int]]] = {}
    crossing: dict[int, tuple[int, int]] = {}
    elsewhere: dict[int, dict[int, float]] = {}

    def goes_home(variable: int, nbytes: float, made_in: int, read_in: tuple[int, int]) -> None:
        terms.held["host"][variable] += nbytes
        for phase, queue, within in (("forward", "d2h", (made_in, made_in)), ("backward", "h2d", read_in)):
            terms.loads[queue, phase].append(Load(*within, {variable: machine.copy_us(1, queue) * nbytes}))
            terms.copied[phase][variable] += nbytes

    last = max((block.index for block in blocks), default=0)
    for block in blocks:
        read_in = _read_in(block.saved, block.index)
        shares = options[block.index] = list[tuple[Option, int]]()
        for variant in block.variants:
            for tier in ("device", "host") if host and variant.positions else ("device",):
                variable = program.variable()
                shares.append((Option(variant, tier), variable))
                terms.loads["compute", "backward"].append(Load(*read_in, {variable: variant.time_us}))
                (saved if tier == "device" else back)[block.index][variable] = float(variant.nbytes)
                if tier == "host":
                    goes_home(variable, variant.nbytes, block.index, read_in)
        program.equal.append(({variable: 1.0 for _, variable in shares}, 1.0))
        nbytes = sum(value.meta["nbytes"] for value in block.crossing)
        stays, away, again = (program.variable() for _ in range(3))  # on the device, on the host, made again
        crossing[block.index], leaving[block.index] = (stays, away), {}
        goes_home(away, nbytes, block.index, _read_in(block.crossing, block.index))
        made_again = {again: _made_again_us(problem.step, block, machine)}
        terms.loads["compute", "backward"].append(Load(block.index, last, made_again))
        program.equal.append(({stays: 1.0, away: 1.0, again: 1.0}, 1.0))
        if not host:
            program.equal.append(({away: 1.0}, 0.0))
        elsewhere[block.index] = {away: 1.0, again: 1.0}
    for block in blocks:
        for value in block.crossing:
            if _readers(value):
                waits = crossing[block.index][0]
            else:  # no backward reads it as it is: it waits if a block makes something again from it
                waits = program.variable()
                needing = _needing(problem.step, value, blocks, options)
                program.takes({waits: 1.0, **elsewhere[block.index]}, {}, needing)
            leaving[block.index][waits] = leaving[block.index].get(waits, 0.0) + value.meta["nbytes"]
    return _Choices(options, crossing, saved, leaving, back)


def _needing(
    step: fx.GraphModule, value: fx.Node, blocks: Sequence[Block], options: Mapping[int, list[tuple[Option, int]]]
) -> dict[int, float]:
    """Takes the first block that reads a value. Returns the variables of its options that recompute something from it."""
    reader = next((block for block in blocks if block.region in value.users), None)
    if reader is None:
        return {}
    body = kernel_of(step, reader.region)
    operand = placeholders(body.graph)[list(reader.region.args).index(value)]
    outputs = body_outputs(body)
    saved = [outputs[int(item.args[1])] for item in reader.saved]

    def is_needed(variant: Variant) -> bool:
        given = {saved[position] for position in variant.positions}
        again = recomputed([node for node in saved if node not in given], given, free=True)
        return any(operand in node.all_input_nodes for node in again) or any(node is operand for node in saved)

    needed = {id(option.variant): is_needed(option.variant) for option, _ in options[reader.index]}
    return {variable: 1.0 for option, variable in options[reader.index] if needed[id(option.variant)]}


def _read_in(values: Sequence[fx.Node], block: int) -> tuple[int, int]:
    """The first and the last block whose backward reads any of the values; ``block`` if none does."""
    readers = [block for value in values for block in _readers(value)]
    return min(readers, default=block), max(readers, default=block)


def _readers(value: fx.Node) -> list[int]:
    """The blocks whose backward reads a value."""
    return [user.meta["block"] for user in value.users if user.meta.get("phase") == "backward"]


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
        live = added(live, choices.saved[index])
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
    outputs = [value for value in results(backward[0]) if problem.budgets.updates is not None or value.meta["role"] != "grad"]
    inputs = [v for v in backward[0].all_input_nodes if v.meta.get("role") == "activation" and _phase(v) == "backward"]
    return workspace + sum(value.meta["nbytes"] for value in (*outputs, *inputs)), True


def _phase(value: fx.Node) -> str:
    """The phase of the region that makes a value."""
    return str(value.args[0].meta["phase"]) if isinstance(value.args[0], fx.Node) else ""
