"""The variables of the linear program: where each home is, how much each block keeps where, and what these take and hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import fx

from mtcompile.passes.analysis.cost import Cost, Machine, node_cost
from mtcompile.passes.analysis.state import param_nbytes
from mtcompile.passes.planning.blocks import Block
from mtcompile.passes.planning.linear.needs import Needs, closure, narrowing_casts, param_homes
from mtcompile.passes.planning.linear.program import GIB, Program, Work, added
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, recomputed, trade_off
from mtcompile.passes.step_graph import body_outputs, kernel_of, placeholders, results
from mtcompile.runtime.schedule import PHASES


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a queue in a phase for the blocks from ``low`` to ``high``: µs per unit of each variable, and constant µs."""

    low: int
    high: int
    us: Mapping[int, float]
    fixed: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """``time``: the variable for the whole step, in µs; ``span``: phase -> the variable for its time. ``loads``: (queue, phase)
    -> what the queue does; ``copied``: phase -> bytes by variable; ``held``: tier -> bytes by variable, at the start of the
    backward. ``away``: home -> the variable for its share on the host; ``staying``: for the share that is there and, once
    fetched for the forward, stays for the backward; ``on_disk``: for the share that is on disk, which is a part of ``away``
    (without a disk, there is none); ``streamed``: for the share that is on the host and that the device updates. ``needs``: of
    each region. ``backwards``: the backward regions of a block, by its index.
    ``blocks``: home -> the first and the last block of the regions that read it or make its gradients. ``sums``: what ``work``
    returned, by range; ``ends``: the first and the last blocks of ``loads``, for it."""

    program: Program
    time: int
    span: Mapping[str, int]
    loads: dict[tuple[str, str], list[Load]]
    copied: dict[str, dict[int, float]]
    held: dict[str, dict[int, float]]
    away: Mapping[str, int]
    staying: Mapping[str, int]
    on_disk: Mapping[str, int]
    streamed: Mapping[str, int]
    needs: Mapping[fx.Node, Needs]
    backwards: Mapping[int, list[fx.Node]]
    blocks: Mapping[str, tuple[int, int]]
    sums: dict[tuple[str, str], dict[tuple[int, int], Work]]
    ends: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)

    def of_phase(self, phase: str) -> list[fx.Node]:
        return [region for region in self.needs if region.meta["phase"] == phase]

    def work(self, queue: str, phase: str, low: int = -1, high: int = 1 << 30) -> Work:
        """Returns what a queue certainly does in a phase for the blocks from ``low`` to ``high``. It is a variable, the sum of
        what it was asked for last within this range and of the rest: so rows are short, however many blocks there are. No load
        may be added any more."""
        asked = self.sums[queue, phase]
        if (low, high) not in asked:
            within = next(((a, b) for a, b in reversed(asked) if low <= a and b <= high), None)
            us, fixed = ({}, 0.0) if within is None else asked[within]
            loads = [self.loads[queue, phase][place] for place in self._between((queue, phase), (low, high), within)]
            total = added(us, *(load.us for load in loads))
            asked[low, high] = self.program.summed(total), fixed + sum(load.fixed for load in loads)
        return asked[low, high]

    def _between(self, of: tuple[str, str], ends: tuple[int, int], without: tuple[int, int] | None) -> list[int]:
        """Returns the places of the loads within a range of blocks, but for those within another."""
        if of not in self.ends:
            self.ends[of] = tuple(numpy.array([[load.low, load.high] for load in self.loads[of]], dtype=int).reshape(-1, 2).T)
        lows, highs = self.ends[of]

        def within(low: int, high: int) -> Any:
            return (low <= lows) & (highs <= high)

        places: list[int] = numpy.flatnonzero(within(*ends) if without is None else within(*ends) & ~within(*without)).tolist()
        return places

    def let_host_cast(
        self, share: int, us: tuple[float, float], link: tuple[str, str], work: tuple[str, str], within: tuple[int, int]
    ) -> None:
        """Adds that the host may cast a part of the variable ``share``, for the blocks ``within``. ``us``: the µs by which what
        it does not cast crosses longer, on ``link``, and those in which it casts, counted as ``work``; both for all of it."""
        longer_us, host_us = us
        by_host = self.program.variable()
        self.program.at_most({by_host: 1.0, share: -1.0})
        self.loads[link].append(Load(*within, {share: longer_us, by_host: -longer_us}))
        self.loads[work].append(Load(*within, {by_host: host_us}))

    def updates(self, low: int = -1, high: int = 1 << 30) -> dict[str, Work]:
        """Returns the updates on the host of these blocks, with what those of parameters on disk wait longer for the disk."""
        updates = {"host": self.work("host", "backward", low, high)}
        return updates | ({"disk": self.work("disk", "backward", low, high)} if self.on_disk else {})

    def by_share(self, amounts: Mapping[str, float]) -> dict[int, float]:
        """Returns amounts by home, such as bytes, as amounts by variable."""
        return {self.away[home]: float(n) for home, n in amounts.items() if home in self.away}

    def again(self, amounts: Mapping[int, float]) -> dict[int, float]:
        """Returns amounts by the share on the host as amounts by the part of it that does not stay from the forward on."""
        stays = {self.away[home]: variable for home, variable in self.staying.items()}
        return {**amounts, **{stays[variable]: -n for variable, n in amounts.items()}}


def terms_of(step: fx.GraphModule, needs: Mapping[fx.Node, Needs], disk: bool = False, streamable: Iterable[str] = ()) -> Terms:
    """Returns the terms of a step graph, with its variables for time and homes and nothing taken yet. ``needs``: of its
    regions; ``disk``: whether there is one; ``streamable``: homes that the device may update though they are on the host."""
    program = Program()
    users: dict[str, list[int]] = {home: [] for home in param_nbytes(step)}
    for region, need in needs.items():
        for home in (*param_homes(step, region).values(), *need.grads):
            users[home].append(region.meta["block"])
    backwards: dict[int, list[fx.Node]] = defaultdict(list)
    for region in needs:
        if region.meta["phase"] == "backward":
            backwards[region.meta["block"]].append(region)
    return Terms(
        program,
        0,
        {phase: program.variable(None) for phase in PHASES},
        defaultdict(list),
        {phase: defaultdict(float) for phase in PHASES},
        {tier: defaultdict(float) for tier in ("device", "host", "disk")},
        {home: program.variable() for home in param_nbytes(step)},
        {home: program.variable() for home in param_nbytes(step)},
        {home: program.variable() for home in param_nbytes(step)} if disk else {},
        {home: program.variable() for home in streamable},
        needs,
        dict(backwards),
        {home: (min(indices, default=0), max(indices, default=0)) for home, indices in users.items()},
        defaultdict(dict),
    )


_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A choice for a block: the saved values of a variant kept on the device or on the host. Equal blocks share theirs."""

    variant: Variant
    tier: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The variables of blocks. By block: ``options`` for what it saves, and, for each value that leaves it (``crossing``), its
    bytes and its two places; ``again``, for each that a call alone makes again, the variable for the share in which one does;
    bytes by variable that it saves on the device (``saved``), that leave it and wait there (``leaving``), and that its backward
    gets back from the host (``back``); ``waiting``: of what left blocks before it and waits on the device, what no backward
    behind its own reads; ``given``: that its backward reads of what left other blocks and did not wait on the device, and
    ``given_first``: what of this no block behind it reads. ``repeated``: the µs of making again what leaves a block, each.
    ``chain``: bytes that calls make again before one backward reads the last of them."""

    options: dict[int, list[tuple[Option, int]]] = field(default_factory=dict)
    crossing: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    again: dict[fx.Node, int] = field(default_factory=dict)
    saved: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    leaving: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    waiting: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    back: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    given: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    given_first: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    repeated: list[int] = field(default_factory=list)
    chain: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Operands:
    """The saved values that are made from each operand of a block. ``body``: operand -> placeholder. ``of``: placeholder -> the
    positions of the saved values that are made from it and not from one another: nothing that is made again needs the operand
    exactly if all of these are kept. ``sparing``: the variables for the options that keep all of these for a value of another
    block. ``casts``: as ``_cast_of`` gives them."""

    body: Mapping[fx.Node, fx.Node]
    of: Mapping[fx.Node, frozenset[int]]
    casts: Mapping[fx.Node, fx.Node]
    sparing: list[int] = field(default_factory=list)


# ``bounds`` and ``calls`` as ``place_blocks`` has them, and the µs of making values again, as far as they are known.
_Making = tuple[bool, bool, dict[tuple[object, ...], float]]


def place_blocks(problem: PlanningProblem, blocks: Sequence[Block], terms: Terms, bounds: bool) -> Choices:
    """Adds the share of each option for what a block saves, and of each place for each value that leaves it. ``bounds``:
    whether the optimum is to be a bound. Otherwise, where few blocks save anything, such as those of single operations, it is
    as plans have it: they call regions again, for which parameters are fetched again."""
    choices = Choices()
    calls = not bounds and problem.budgets.host_activations and 2 * sum(not block.saved for block in blocks) > len(blocks)
    operands = {block.index: _operands(problem.step, block) for block in blocks}
    hulls: dict[tuple[object, ...], tuple[Variant, ...]] = {}
    shared: dict[tuple[Variant, str], Option] = {}
    for block in blocks:
        _place_saved(problem, block, terms, choices, operands[block.index], hulls, shared)
        _cast_again(problem, block, terms, operands[block.index])
    making: _Making = bounds, calls, {}
    for block in blocks:
        _place_crossing(problem, block, blocks, terms, choices, operands, making)
    if choices.again:
        _hold_chain(terms, choices)
    return choices


def _place_saved(
    problem: PlanningProblem,
    block: Block,
    terms: Terms,
    choices: Choices,
    operands: _Operands,
    hulls: dict[tuple[object, ...], tuple[Variant, ...]],
    shared: dict[tuple[Variant, str], Option],
) -> None:
    """Adds the options: the best choices of what to keep, and the best of those that spare an operand that another block made.
    ``hulls``: those that were worked out before; ``shared``: the options of other blocks."""
    program, index = terms.program, block.index
    read_in = _read_in(block.saved, index)
    shares = choices.options[index] = list[tuple[Option, int]]()
    variants = [(variant, False) for variant in block.hull]
    for operand, inner in operands.body.items():
        if operand.meta.get("role") == "activation" and (positions := operands.of[inner]) and not _readers(operand):
            key = id(block.variants), positions
            if key not in hulls:
                hulls[key] = trade_off(problem.step, block.region, problem.machine, positions)
            variants += [(variant, True) for variant in hulls[key]]
    for variant, spares in variants:
        for tier in ("device", "host") if problem.budgets.host_activations and variant.positions else ("device",):
            variable = program.variable()
            shares.append((shared.setdefault((variant, tier), Option(variant, tier)), variable))
            operands.sparing.extend([variable] if spares else ())
            terms.loads["compute", "backward"].append(Load(*read_in, {variable: variant.time_us}))
            (choices.saved if tier == "device" else choices.back)[index][variable] = float(variant.nbytes)
            if tier == "host":
                by_host = [value for position in variant.positions if (value := block.saved[position]) in operands.casts]
                once = {operands.casts[value]: value for value in by_host}
                crossing = variant.nbytes - _nbytes(by_host)
                _goes_home(problem.machine, terms, variable, (crossing + _nbytes(once.values()), crossing), (index, index))
                _comes_back(problem.machine, terms, variable, variant.nbytes, read_in)
    program.equal.append(({variable: 1.0 for _, variable in shares}, 1.0))


def _goes_home(machine: Machine, terms: Terms, variable: int, nbytes: tuple[int, int], within: tuple[int, int]) -> None:
    """Adds what waits on the host. ``nbytes``: there, and of these, what crosses; the host has cast the rest itself."""
    held, crossing = nbytes
    terms.held["host"][variable] += held
    terms.loads["d2h", "forward"].append(Load(*within, {variable: machine.copy_us(1, "d2h") * crossing}))
    terms.copied["forward"][variable] += crossing


def _comes_back(machine: Machine, terms: Terms, variable: int, nbytes: int, within: tuple[int, int]) -> None:
    terms.loads["h2d", "backward"].append(Load(*within, {variable: machine.copy_us(1, "h2d") * nbytes}))
    terms.copied["backward"][variable] += nbytes


def _cast_of(step: fx.GraphModule, block: Block) -> dict[fx.Node, fx.Node]:
    """Returns the values of a block that are narrowing casts of parameters, or clones of these, which the host may make and let
    wait at home; each with the placeholder of its parameter."""
    outputs = body_outputs(kernel_of(step, block.region))
    casts = {cast: inner for inner in param_homes(step, block.region) for cast in narrowing_casts(inner)}
    casts |= {user: inner for cast, inner in casts.items() for user in cast.users if user.target is _CLONE}
    leaving = {value: outputs[int(value.args[1])] for value in (*block.saved, *block.crossing)}
    return {value: casts[output] for value, output in leaving.items() if output in casts}


def _nbytes(values: Iterable[fx.Node]) -> int:
    return sum(value.meta["nbytes"] for value in values)


def _cast_again(problem: PlanningProblem, block: Block, terms: Terms, operands: _Operands) -> None:
    """Adds what a backward saves if the host makes the casts of parameters that are made again."""
    for inner, home in param_homes(problem.step, block.region).items():
        if operands.of[inner] and home in terms.away:
            us = sum(map(node_cost, narrowing_casts(inner)), Cost()).time_us(problem.machine)
            terms.loads["compute", "backward"].append(Load(*_read_in(block.saved, block.index), {terms.away[home]: -us}))


def _place_crossing(
    problem: PlanningProblem,
    block: Block,
    blocks: Sequence[Block],
    terms: Terms,
    choices: Choices,
    operands: Mapping[int, _Operands],
    making: _Making,
) -> None:
    """Adds the places of each value that leaves a block. If a backward reads it, it is somewhere; otherwise only if the next
    block that reads it makes something again from it."""
    program, index, (bounds, calls, made_us) = terms.program, block.index, making
    by_call, by_itself = calls and not block.saved, (bounds or calls) and not block.saved
    places = choices.crossing[index] = list[tuple[int, int, int]]()
    repeated, last = program.variable(None), max(block.index for block in blocks)  # µs of making any of them again
    terms.loads["compute", "backward"].append(Load(index, last, {repeated: 1.0}))
    choices.repeated.append(repeated)
    for value in block.crossing:
        nbytes, read_in = value.meta["nbytes"], _read_in((value,), index)
        stays, again = program.variable(), program.variable()
        away = program.variable(1.0 if problem.budgets.host_activations else 0.0)
        places.append((nbytes, stays, away))
        choices.leaving[index][stays] = float(nbytes)
        by_host = {cast for operand in param_homes(problem.step, block.region) for cast in narrowing_casts(operand)}
        key = id(block.hull), int(value.args[1]), frozenset(by_host)
        if key not in made_us:
            made_us[key] = _made_again_us(problem.step, block, value, by_host, problem.machine, by_itself)
        program.at_most({again: made_us[key], repeated: -1.0})
        somewhere = {stays: 1.0, away: 1.0, again: 1.0}
        others = set(_readers(value)) - {index}  # its own backward makes it again inside, if it makes anything again
        choices.waiting[min(others, default=index + 1)][stays] = float(nbytes)
        for other in others:
            choices.given[other] |= {away: float(nbytes), again: float(nbytes)}
        if _readers(value):
            program.equal.append((somewhere, 1.0))
            if by_call:
                choices.again[value] = again
        elif (reader := next((other for other in blocks if other.region in value.users), None)) is not None:
            read_in, of = (reader.index, reader.index), operands[reader.index]
            if of.of[of.body[value]]:
                program.at_most(dict.fromkeys((*somewhere, *of.sparing), -1.0), -1.0)
                choices.given[reader.index][away] = float(nbytes)
        last_read = max((user.meta["block"] for user in value.users if "block" in user.meta), default=index)
        if last_read in choices.given and away in choices.given[last_read]:
            choices.given_first[last_read][away] = float(nbytes)
        casts = operands[index].casts
        once = value not in casts or list(casts.values()).count(casts[value]) == 1
        crossing = 0 if value in casts else nbytes
        _goes_home(problem.machine, terms, away, (nbytes if once else 0, crossing), (index, index))
        _comes_back(problem.machine, terms, away, nbytes, read_in)
        if by_itself:
            _fetch_for_call(problem, block, value, again, (index, last), terms)


def _fetch_for_call(
    problem: PlanningProblem, block: Block, value: fx.Node, again: int, within: tuple[int, int], terms: Terms
) -> None:
    """Adds the fetches of parameters for a call that makes a value ``again``: its backward fetches them by itself. ``within``:
    the first and the last block before whose backward it may be."""
    for home, nbytes in _read_for(problem.step, block, value, terms).items():
        fetched = terms.program.variable()
        terms.program.at_most({again: 1.0, terms.away[home]: 1.0, terms.staying[home]: -1.0, fetched: -1.0}, 1.0)
        terms.loads["h2d", "backward"].append(Load(*within, {fetched: problem.machine.copy_us(nbytes, "h2d")}))
        terms.copied["backward"][fetched] += nbytes


def _hold_chain(terms: Terms, choices: Choices) -> None:
    """Adds the bytes of what calls make again in one run, where as many values as are kept are spread evenly over all."""
    program, unit, count = terms.program, GIB, len(choices.again)
    chain = program.variable(None)
    choices.chain[chain] = float(unit)
    again = program.summed(dict.fromkeys(choices.again.values(), 1.0))
    mean = sum(value.meta["nbytes"] for value in choices.again) / count / unit
    # A run has (count + 1) / (kept + 1) - 1 values: at least what the tangents of that say, at some numbers of kept ones.
    runs = 2
    while runs <= 2 * count:
        slope = (count + 1) / runs**2  # fewer values, for each that is kept more
        at_none = mean * (2 * (count + 1) / runs - 1 - slope * (count + 1))  # of a run, by the tangent, if none is made again
        program.at_most({chain: -1.0} | {v: mean * slope * n for v, n in again.items()}, -at_none)
        runs *= 2


def _read_for(step: fx.GraphModule, block: Block, value: fx.Node, terms: Terms) -> dict[str, int]:
    """Returns the bytes that a call fetches to make a value, by home: of homes of which it reads all that the block does."""
    operations = closure([body_outputs(kernel_of(step, block.region))[int(value.args[1])]])
    spared = {home for operand, home in param_homes(step, block.region).items() if operand not in operations}
    needs = terms.needs[block.region].read
    return {home: nbytes for home, nbytes in needs.items() if home in terms.away and home not in spared}


def _operands(step: fx.GraphModule, block: Block) -> _Operands:
    body = kernel_of(step, block.region)
    inputs, outputs = placeholders(body.graph), body_outputs(body)
    saved = [outputs[int(value.args[1])] for value in block.saved]
    stays = {outputs[int(v.args[1])] for v in results(block.region) if v.meta["role"] not in ("activation", "rng")}
    of: dict[fx.Node, set[int]] = {operand: set() for operand in inputs}
    for position, value in enumerate(saved):
        seen, stack = {value}, list(value.all_input_nodes)
        while stack:
            node = stack.pop()
            if node in of:
                of[node].add(position)
            elif node not in seen and node not in stays and node not in saved:
                stack.extend(node.all_input_nodes)
            seen.add(node)
    operands = (operand for operand in block.region.args if isinstance(operand, fx.Node))
    by_operand = {node: frozenset(positions) for node, positions in of.items()}
    return _Operands(dict(zip(operands, inputs, strict=True)), by_operand, _cast_of(step, block))


def _made_again_us(
    step: fx.GraphModule, block: Block, value: fx.Node, by_host: set[fx.Node], machine: Machine, by_itself: bool
) -> float:
    """Returns the fewest µs that making again a value that leaves a block adds to any of its variants, if the host makes the
    casts ``by_host``. ``by_itself``: a call of its own does, as the block's backward makes nothing again."""
    kernel = kernel_of(step, block.region)
    outputs = body_outputs(kernel)
    saved = [outputs[int(value.args[1])] for value in block.saved]

    def more_us(variant: Variant) -> float:
        given = {saved[position] for position in variant.positions}
        without = by_host.union(recomputed([node for node in saved if node not in given], given))
        costs = [node_cost(node) for node in recomputed([outputs[int(value.args[1])]], given) if node not in without]
        total = sum(costs, Cost())
        if by_itself:
            return total.time_us(machine)
        # Beside products that are bound by FLOPs, the traffic of more products is free, and the other way round.
        return min(total.time_us(machine), total.traffic_us(machine), total.flops_us(machine))

    return min(map(more_us, block.hull))


def _read_in(values: Sequence[fx.Node], block: int) -> tuple[int, int]:
    """Returns the first and the last block whose backward reads any of the values; ``block`` if none does."""
    readers = [block for value in values for block in _readers(value)]
    return min(readers, default=block), max(readers, default=block)


def _readers(value: fx.Node) -> list[int]:
    """Returns the blocks whose backward reads a value."""
    return [user.meta["block"] for user in value.users if user.meta.get("phase") == "backward"]
