"""The variables of blocks in the linear program: how much each keeps where, and what that spares its backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from mtcompile.passes.analysis.cost import Cost, Machine, node_cost
from mtcompile.passes.planning.blocks import Block
from mtcompile.passes.planning.linear.needs import closure, narrowing_casts, param_homes
from mtcompile.passes.planning.linear.terms import Load, Terms
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, recomputed, trade_off
from mtcompile.passes.step_graph import body_outputs, kernel_of, placeholders, results

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


@dataclass(frozen=True, slots=True)
class _Making:
    """How values between blocks are made again. ``us``: of making one, as far as it is known; for the others see
    ``place_blocks``."""

    bounds: bool
    calls: bool
    us: dict[tuple[object, ...], float] = field(default_factory=dict)


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
    making = _Making(bounds, calls)
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
    program, index = terms.program, block.index
    places = choices.crossing[index] = list[tuple[int, int, int]]()
    repeated, last = program.variable(None), max(block.index for block in blocks)  # µs of making any of them again
    terms.loads["compute", "backward"].append(Load(index, last, {repeated: 1.0}))
    choices.repeated.append(repeated)
    for value in block.crossing:
        nbytes, read_in = value.meta["nbytes"], _read_in((value,), index)
        by_call = making.calls and not block.saved
        stays, again = program.variable(), program.variable()
        away = program.variable(1.0 if problem.budgets.host_activations else 0.0)
        places.append((nbytes, stays, away))
        choices.leaving[index][stays] = float(nbytes)
        by_host = {cast for operand in param_homes(problem.step, block.region) for cast in narrowing_casts(operand)}
        key = id(block.hull), int(value.args[1]), frozenset(by_host)
        if key not in making.us:
            by_itself = not block.saved and (making.bounds or making.calls)
            making.us[key] = _made_again_us(problem.step, block, value, by_host, problem.machine, by_itself)
        program.at_most({again: making.us[key], repeated: -1.0})
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
        if not block.saved and (making.bounds or making.calls):
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
    program, unit, count = terms.program, 1 << 30, len(choices.again)
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
    """Returns the bytes that a call fetches to make a value, by home: of homes of which that reads all that the block
    does."""
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
