"""The rows of the linear program that say what memory holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from mtcompile.passes.analysis.memory import body_lives, workspace_nbytes
from mtcompile.passes.analysis.state import held_nbytes
from mtcompile.passes.planning.blocks import Block
from mtcompile.passes.planning.linear.blocks import Choices
from mtcompile.passes.planning.linear.exposed import Gap
from mtcompile.passes.planning.linear.needs import needed_operands
from mtcompile.passes.planning.linear.program import Counted, added
from mtcompile.passes.planning.linear.terms import Terms
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import kernel_of, placeholders, results

Held = tuple[Mapping[int, float], float]  # bytes by variable, and constant bytes


class Waits(NamedTuple):
    """Bytes that wait on the device: ``live``, at each block, of homes and activations; ``gradients``, by block, when its
    backward begins, and, at -1, at the end."""

    live: Sequence[Mapping[int, float]]
    gradients: Mapping[int, Held]


def waiting(problem: PlanningProblem, blocks: Sequence[Block], terms: Terms, choices: Choices) -> Waits:
    """Returns what waits on the device at each block."""
    return Waits(_live_at(blocks, terms, choices), gradients_at(problem, terms))


def _live_at(blocks: Sequence[Block], terms: Terms, choices: Choices) -> list[dict[int, float]]:
    """Returns the bytes that wait on the device at each block: of homes, and what it and all blocks before it keep, with the
    weights that stay once these have read them."""
    live, lives, staying = dict(terms.held["device"]), list[dict[int, float]](), _staying(blocks, terms)
    for place, block in enumerate(blocks):
        stays = staying[blocks[place - 1].index] if place else {}
        live = added(live, choices.waiting[block.index], stays, choices.saved[block.index])
        lives.append(live := terms.program.summed(live, 1 << 30))
    return lives


def _staying(blocks: Sequence[Block], terms: Terms) -> dict[int, dict[int, float]]:
    """Returns the bytes of weights, by variable, that stay behind each block: of the last block that reads a home in the
    forward, as its copy is the one that stays."""
    last = {home: (block.index, nbytes) for block in blocks for home, nbytes in terms.needs[block.region].read.items()}
    staying: dict[int, dict[int, float]] = defaultdict(dict)
    for home, (index, nbytes) in last.items():
        if home in terms.staying:
            staying[index][terms.staying[home]] = float(nbytes)
    return staying


def gradients_at(problem: PlanningProblem, terms: Terms) -> dict[int, Held]:
    """Returns the gradients of homes on the device, which wait there for ``optimizer.step()`` or for the norm of all. Empty
    where they are used as they are made."""
    updates = problem.budgets.updates
    if updates is not None and not updates.held:
        return {}
    made, fixed, at = dict[int, float](), 0.0, dict[int, Held]()
    for region in terms.of_phase("backward"):
        at.setdefault(region.meta["block"], (made, fixed))
        grads = terms.needs[region].grads
        elsewhere = {variable: -nbytes for variable, nbytes in terms.by_share(grads).items()}
        made, fixed = terms.program.summed(added(made, elsewhere), 1 << 30), fixed + sum(grads.values())
    return at | {-1: (made, fixed)}


def hold_memory(
    problem: PlanningProblem,
    blocks: Sequence[Block],
    terms: Terms,
    choices: Choices,
    waits: Waits,
    counted: Counted,
    gaps: Sequence[Gap] = (),
) -> None:
    """The rows that say what memory holds at each block's forward and backward: what waits then, what it reads and makes, and
    what is on its way: weights, saved values and gradients of the blocks near by."""
    ahead = counted.ahead
    weights = {block.index: terms.by_share(terms.needs[block.region].read) for block in blocks}
    again = {index: terms.again(nbytes) for index, nbytes in weights.items()}  # fetched in the backward
    stored: dict[int, dict[int, float]] = defaultdict(dict)
    needed: dict[int, dict[int, float]] = defaultdict(dict)  # weights that a backward in one region reads, less casts' room
    for region in terms.of_phase("backward"):
        index, needs = region.meta["block"], terms.needs[region]
        stored[index] = added(stored[index], terms.by_share(needs.stored))
        fewer = ({home: -nbytes for home, nbytes in each.items()} for each in (needs.grads, needs.cast_nbytes))
        needed[index] = added(*map(terms.by_share, (needs.read, needs.stored, *fewer)))
    insides: dict[tuple[str, tuple[int, ...]], int] = {}
    at_backward: dict[int, list[tuple[dict[int, float], float]]] = {}  # rows of each block's backward
    always = problem.budgets.reserve + sum(held_nbytes(problem.step, problem.budgets).values())
    for place, (block, live) in enumerate(zip(blocks, waits.live, strict=True)):
        index, back, backward = block.index, choices.back, terms.backwards.get(block.index, [])
        before, after = blocks[max(0, place - ahead) : place], blocks[place + 1 : place + 1 + ahead]
        beside, whole = _beside(problem, backward)
        near = [nbytes[other.index] for other in before for nbytes in (again, back)]
        near += [stored[other.index] for other in after]
        beyond = added(choices.leaving[index], choices.chain) if ahead else {}  # a plan may let it go later than it must
        grads, grads_nbytes = waits.gradients.get(index, ({}, 0.0))
        read = [needed[index], *([] if ahead else [choices.given[index]])] if whole else []
        own = [*read, back[index]] if whole else []
        at_once = [(added(live, beyond, *own, *near, grads), always + beside + grads_nbytes)]
        if not counted.inside:  # the last block's may make what others save: the gradient of a loss head in chunks
            others = {variable: -nbytes for variable, nbytes in choices.saved[index].items()} if block is blocks[-1] else {}
            at_once = [(added(live, others, grads), always + grads_nbytes)]
        elif whole and (inside := _inside(problem, block, backward[0], insides)):
            others = {variable: -nbytes for variable, nbytes in choices.saved[index].items()}
            at_once.append((added(live, others, beyond, *read, *near, grads), always + inside + grads_nbytes))
        at_backward[index] = at_once
        for nbytes, fixed in at_once:
            terms.program.holds(counted, "device", nbytes, fixed)
        if ahead:
            near = [weights[index], back[index], *(back[other.index] for other in before)]
            near += [weights[other.index] for other in after]
            terms.program.holds(counted, "device", added(live, choices.leaving[index], *near), always)
    for gap in gaps if counted.inside else ():
        for at, moved, queue in ((gap.first, gap.fetched, "h2d"), (gap.then, gap.stored, "d2h")):
            crossing = dict.fromkeys(gap.us, -1.0 / problem.machine.copy_us(1, queue))
            for nbytes, fixed in at_backward.get(at, ()):
                terms.program.holds(counted, "device", added(nbytes, moved, crossing), fixed)
    if -1 in waits.gradients:
        grads, grads_nbytes = waits.gradients[-1]
        terms.program.holds(counted, "device", added(terms.held["device"], grads), always + grads_nbytes)
    for tier in ("host", "disk"):
        terms.program.holds(counted, tier, terms.held[tier], 0.0)


def _beside(problem: PlanningProblem, backward: Sequence[fx.Node]) -> tuple[int, bool]:
    """The bytes that a block's ``backward`` needs beside weights and saved values, whatever the plan: workspace, what other
    backwards made for it, what it makes. And whether it is one region, so that all it needs is in memory at once."""
    workspace = max((problem.workspace(kernel_of(problem.step, region)) for region in backward), default=0)
    if len(backward) != 1:
        return workspace, False
    outputs = [value for value in results(backward[0]) if value.users]
    return workspace + _arriving(problem.step, backward[0]) + sum(value.meta["nbytes"] for value in outputs), True


def _inside(problem: PlanningProblem, block: Block, region: fx.Node, insides: dict[tuple[str, tuple[int, ...]], int]) -> int:
    """The fewest bytes that a block's backward, one region, needs at once for what other backwards made for it, what it makes
    inside, and the values that its forward saved, whatever a plan keeps of these: it makes all others again before anything
    else, and lets each go once it has read it. 0 where kernels were measured. ``insides``: what is known of kernels."""
    if problem.workspace is not workspace_nbytes:
        return 0
    kernel, operands = kernel_of(problem.step, region), list(region.args)
    positions = tuple(operands.index(value) for value in block.saved if value in operands)
    if (key := (str(region.target), positions)) not in insides:
        inputs = placeholders(kernel.graph)
        given = {inputs[place]: value.meta["nbytes"] for place, value in enumerate(operands) if place in positions}
        insides[key] = max(body_lives(kernel.graph, given), default=0)
    return insides[key] + _arriving(problem.step, region)


def _arriving(step: fx.GraphModule, region: fx.Node) -> int:
    """The bytes of what other backwards made for a region."""
    inputs = [value for value in needed_operands(step, region) if value.meta.get("role") == "activation"]
    return sum(value.meta["nbytes"] for value in inputs if _phase(value) == "backward")


def _phase(value: fx.Node) -> str:
    """The phase of the region that makes a value."""
    return str(value.args[0].meta["phase"]) if isinstance(value.args[0], fx.Node) else ""
