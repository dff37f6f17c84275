"""The rows of the linear program: how long queues take, what waits for what, and what memory holds.

Some copies cannot hide. What a backward needs is on the device before it starts. What of it began to cross while the backward
before was running is in memory beside all that this one needs; the rest crosses between the two. In the same way, gradients
that are not home when the next backward starts are beside what that needs. Meanwhile the device may only recompute blocks or
update parameters:

    backward of p | copies that had no room beside p, or have none beside r | backward of r
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from mtcompile.passes.analysis.memory import body_lives, workspace_nbytes
from mtcompile.passes.analysis.state import held_nbytes, on_disk_nbytes, trained_nbytes
from mtcompile.passes.lower import update_cost
from mtcompile.passes.planning.blocks import Block
from mtcompile.passes.planning.linear.needs import HomeCost, needed_operands
from mtcompile.passes.planning.linear.program import GIB, Counted, Work, added
from mtcompile.passes.planning.linear.variables import Choices, Load, Terms
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import kernel_of, placeholders, results
from mtcompile.runtime.schedule import PHASES

_HOME_AND_UPDATED = (("d2h", "backward"), ("host", "backward"))  # queues and phases that a home's gradients go through
_MOST_PLACES = 16  # blocks before and behind which work is counted


def take_time(problem: PlanningProblem, terms: Terms) -> None:
    """Adds the rows."""
    step, machine, budgets = problem.step, problem.machine, problem.budgets
    program, time, span, away = terms.program, terms.time, terms.span, terms.away
    for region, needs in terms.needs.items():
        phase, block = region.meta["phase"], region.meta["block"]
        saved_us = terms.by_share({home: -us for home, us in needs.casts_us(machine).items()})
        terms.loads["compute", phase].append(Load(block, block, saved_us, needs.us(kernel_of(step, region), machine)))
    for phase in PHASES:
        program.takes({span[phase]: 1.0}, {"link": terms.work("d2h", phase)})
        program.takes({span[phase]: 1.0}, {"link": terms.work("h2d", phase)})
        program.takes({span[phase]: 1.0}, {"compute": terms.work("compute", phase), "link": terms.work("exposed", phase)})
        if ("casts", phase) in terms.loads:
            program.takes({span[phase]: 1.0}, {"host": terms.work("casts", phase)})
        if terms.on_disk:
            program.takes({span[phase]: 1.0}, {"disk": terms.work("disk_read", phase)})
    copied = {phase: program.summed(nbytes, GIB) for phase, nbytes in terms.copied.items()}
    contention = added(*({v: machine.contention_us(1) * n for v, n in copied[phase].items()} for phase in PHASES))
    both = added({span["forward"]: 1.0, span["backward"]: 1.0}, contention)
    sizes = trained_nbytes(step)
    checked = budgets.updates is not None and budgets.updates.checked
    memory = machine if budgets.updates is None else replace(machine, update_gbps=0.0)  # whose traffic copies share
    updates_us = {v: memory.update_us(sizes[h], 0, budgets.state_copies, checked) for h, v in away.items()}
    updates_us |= {v: -updates_us[away[h]] for h, v in terms.streamed.items()}
    shared = {phase: {v: n / machine.host_gbps / 1e3 for v, n in copied[phase].items()} for phase in PHASES}
    if budgets.updates is None:
        on_device = {h: machine.update_us(0, n, budgets.state_copies) for h, n in sizes.items()}
        more = {v: -on_device[h] for h, v in away.items()}
        program.takes({time: 1.0}, {"host": (added(updates_us, more), sum(on_device.values()))}, both)
    else:
        program.takes({time: 1.0}, {}, both)
        traffic, until = added(updates_us, shared["backward"]), {time: 1.0, span["forward"]: -1.0}
        if budgets.updates.run_ahead:
            traffic, until = added(traffic, shared["forward"]), {time: 1.0}
            program.takes({time: 1.0}, _with_casts(terms, PHASES), contention)
        else:
            program.takes({span["backward"]: 1.0}, _with_casts(terms, PHASES[1:]))
        program.takes(until, {"host": (traffic, 0.0)}, contention)
        if terms.on_disk:
            read = [terms.work("disk_read", phase) for phase in (PHASES if budgets.updates.run_ahead else PHASES[1:])]
            program.takes(until, {"disk": _sum(terms.work("drive", "backward"), *read)}, contention)
    first = max(terms.backwards, default=0)
    turn = terms.work("h2d", "backward", first)[0]  # what compute waits for at the start of the backward
    places = _places(terms)
    loads = [way for way in terms.loads if way[0] != "casts"]
    for (queue, phase), place in itertools.product(loads, reversed(places)):  # each sum has that of the next place
        terms.work(queue, phase, place + 1)
        terms.work(queue, phase, place)
    for place in places:
        _before_and_behind(problem, terms, place, turn, contention)


def _with_casts(terms: Terms, phases: Iterable[str]) -> dict[str, Work]:
    """Returns the updates on the host, with what it casts in these phases."""
    updates = terms.updates()
    casts = [terms.work("casts", phase) for phase in phases if ("casts", phase) in terms.loads]
    return updates | {"host": _sum(updates["host"], *casts)} if casts else updates


def _before_and_behind(
    problem: PlanningProblem, terms: Terms, place: int, turn: Mapping[int, float], contention: Mapping[int, float]
) -> None:
    """Adds the rows that say what one queue must do before another starts a block, or can do only after another has finished
    it."""
    program, time, span, updates = terms.program, terms.time, terms.span, problem.budgets.updates
    forward, backward = {span["forward"]: 1.0}, {span["backward"]: 1.0}
    forward_from, forward_until = terms.work("compute", "forward", place), terms.work("compute", "forward", 0, place)
    whole = len(terms.backwards.get(place, ())) <= 1
    backward_from = terms.work("compute", "backward", place if whole else place + 1)
    backward_until = terms.work("compute", "backward", 0, place if whole else place - 1)
    idle_from = terms.work("exposed", "backward", place if whole else place + 1)
    idle_until = terms.work("exposed", "backward", 0, place if whole else place - 1)
    program.takes(forward, {"link": terms.work("h2d", "forward", 0, place), "compute": forward_from})
    program.takes(forward, {"link": terms.work("d2h", "forward", place), "compute": forward_until})
    link = _sum(terms.work("h2d", "backward", place), idle_until)
    program.takes(backward, {"link": link, "compute": backward_until})
    link = _sum(terms.work("d2h", "backward", 0, place), idle_from)
    program.takes(backward, {"link": link, "compute": backward_from}, turn)
    homes = [variable for home, variable in terms.away.items() if terms.blocks[home] == (place, place)]  # this block's own
    if updates is not None and updates.run_ahead:
        outside = _sum(forward_from, backward_from)
        updated = terms.updates(0, place)
        program.takes({time: 1.0}, {**updated, "link": idle_from, "compute": outside}, turn, contention)
        # After the last of these updates, in the order of the blocks; of several homes in one block, any may be the last.
        fetched = terms.work("h2d", "forward", place if len(homes) <= 1 else place + 1)
        link = _sum(fetched, idle_from)
        program.takes({time: 1.0}, {**updated, "link": link, "compute": backward_from}, turn, contention)
        for home in homes:
            chain = _chain(terms, home, (*_HOME_AND_UPDATED, ("h2d", "forward")))
            program.takes({time: 1.0}, {"link": idle_from, "compute": outside}, chain, turn, contention)
    elif updates is not None:
        program.takes(backward, {**terms.updates(0, place), "link": idle_from, "compute": backward_from}, turn)
        for home in homes:
            program.takes(backward, {"link": idle_from, "compute": backward_from}, _chain(terms, home, _HOME_AND_UPDATED), turn)


def _chain(terms: Terms, home: int, ways: Sequence[tuple[str, str]]) -> dict[int, float]:
    """The µs that a home (its variable) takes on queues one after the other, such as its gradients' copy and their update."""
    return added(*(load.us for way in ways for load in terms.loads[way] if home in load.us))


def _sum(*works: Work) -> Work:
    return added(*(us for us, _ in works)), sum(fixed for _, fixed in works)


def _places(terms: Terms) -> Sequence[int]:
    """Blocks spread over all of them, with the first and the last."""
    blocks = sorted({region.meta["block"] for region in terms.needs})
    last = len(blocks) - 1
    count = min(len(blocks), _MOST_PLACES)
    return sorted({blocks[round(i * last / max(1, count - 1))] for i in range(count)})


def place_casts(problem: PlanningProblem, terms: Terms) -> None:
    """Adds what it costs where the host casts parameters for the forward, and gradients after the backward, and where it does
    not: then they cross as they are. Both are decided by home."""
    machine = problem.machine
    if terms.on_disk:
        return
    for region, needs in terms.needs.items():
        phase, block = region.meta["phase"], region.meta["block"]
        ways = [("d2h", "host", needs.grads_wider, needs.grads_host)]
        if phase == PHASES[0]:
            ways.append(("h2d", "casts", needs.wider, needs.host))
        for queue, work, wider, host in ways:
            for home, nbytes in wider.items():
                if nbytes and home in terms.away:
                    us = machine.copy_us(nbytes, queue), host[home] / machine.host_gbps / 1e3
                    terms.let_host_cast(terms.away[home], us, (queue, phase), (work, phase), (block, block))
                    if queue == "d2h" and home in terms.streamed:  # these gradients do not cross
                        terms.loads[queue, phase].append(Load(block, block, {terms.streamed[home]: -us[0]}))


def place_homes(problem: PlanningProblem, costs: Mapping[str, HomeCost], terms: Terms) -> None:
    """Adds what the share of each home that is on the host costs, and what it leaves free on the device."""
    held = {tier: held_nbytes(problem.step, problem.budgets, tier) for tier in ("device", "host")}
    for home, tier in problem.fixed_homes.items():
        if home in terms.away:
            terms.program.equal.append(({terms.away[home]: 1.0}, 0.0 if tier == "device" else 1.0))
    for home, variable in terms.away.items():
        cost, low, high, stays = costs[home], *terms.blocks[home], terms.staying[home]
        terms.program.at_most({stays: 1.0, variable: -1.0})
        for phase in PHASES:
            fetches = {variable: 1.0} if phase == "forward" else {variable: 1.0, stays: -1.0}
            terms.loads["h2d", phase].append(Load(low, high, {v: n * cost.fetch_us[phase] for v, n in fetches.items()}))
            for v, n in fetches.items():
                terms.copied[phase][v] += n * cost.fetched[phase]
        terms.copied["backward"][variable] += cost.stored
        terms.loads["d2h", "backward"].append(Load(low, high, {variable: cost.store_us}))
        terms.loads["host", "backward"].append(Load(low, high, {variable: cost.update_us}))
        # Updates on the device run beside a block's other work, held ones last of all: only all blocks together count them.
        terms.loads["compute", "backward"].append(Load(-1, high, {variable: -cost.device_update_us}, cost.device_update_us))
        terms.held["device"][variable] -= held["device"][home]
        terms.held["host"][variable] += held["host"][home]
        if home in terms.streamed:
            _stream(problem, home, cost, terms)
        if home in terms.on_disk:
            _place_on_disk(problem, home, cost, terms)


def _stream(problem: PlanningProblem, home: str, cost: HomeCost, terms: Terms) -> None:
    """Adds what the share of a home costs that the device updates though it is on the host, in place of its update there. No
    block waits until its state has come: only all of them together count that."""
    machine, variable, (low, high), updates = problem.machine, terms.streamed[home], terms.blocks[home], problem.budgets.updates
    assert updates is not None
    on_disk = {terms.on_disk[home]: 1.0} if home in terms.on_disk else {}
    terms.program.at_most({variable: 1.0, terms.away[home]: -1.0, **on_disk})
    terms.loads["h2d", "backward"].append(Load(-1, high, {variable: machine.copy_us(cost.streamed, "h2d")}))
    us = machine.copy_us(cost.streamed, "d2h") + update_cost(updates, machine, "compute", cost.streamed // updates.streamed)[1]
    us -= cost.store_us
    terms.loads["d2h", "backward"].append(Load(low, high, {variable: us}))
    terms.loads["host", "backward"].append(Load(low, high, {variable: -cost.update_us}))
    terms.copied["backward"][variable] += 2 * cost.streamed - cost.stored


def _place_on_disk(problem: PlanningProblem, home: str, cost: HomeCost, terms: Terms) -> None:
    """Adds what the share of a home that is on disk costs beside what it would on the host, and what it leaves free there."""
    step, machine, budgets, program = problem.step, problem.machine, problem.budgets, terms.program
    variable, away, stays, again = terms.on_disk[home], terms.away[home], terms.staying[home], program.variable()
    (low, high), trained, tier = terms.blocks[home], trained_nbytes(step)[home], problem.fixed_homes.get(home)
    program.at_most({variable: 1.0, away: -1.0})
    program.at_most({variable: 1.0, stays: -1.0, again: -1.0})
    may_move = home in budgets.disk_takes or tier is None
    if tier == "disk" or not may_move or (trained and not budgets.disk_updates):
        program.equal.append(({variable: 1.0}, 1.0 if tier == "disk" else 0.0))
    for phase, read in (("forward", variable), ("backward", again)):
        us = machine.copy_us(cost.fetched[phase], "disk_read")
        terms.loads["disk_read", phase].append(Load(low, high, {read: us}))
    more_us = max(0.0, cost.disk_update_us - cost.update_us)
    terms.loads["disk", "backward"].append(Load(low, high, {variable: more_us}))
    terms.loads["drive", "backward"].append(Load(low, high, {variable: cost.drive_us}))
    terms.held["host"][variable] -= held_nbytes(step, budgets, "host")[home]
    terms.held["disk"][variable] += on_disk_nbytes(step, budgets)[home]


def send_on(problem: PlanningProblem, terms: Terms, choices: Choices) -> None:
    """Adds the bytes of activations that wait on the host and go on to the disk, all together: each is written once, and read
    once by the backward."""
    machine, nbytes = problem.machine, terms.program.variable(None)  # in GiB
    waiting = added(*choices.back.values(), *({away: n for n, _, away in places} for places in choices.crossing.values()))
    terms.program.at_most({nbytes: 1.0, **{variable: -n / GIB for variable, n in waiting.items()}})
    terms.loads["disk_read", "backward"].append(Load(-1, 1 << 29, {nbytes: machine.copy_us(GIB, "disk_read")}))
    terms.program.takes(dict.fromkeys(terms.span.values(), 1.0), {"disk": ({nbytes: machine.copy_us(GIB, "disk_write")}, 0.0)})
    terms.held["host"][nbytes] -= GIB
    terms.held["disk"][nbytes] += GIB


Held = tuple[Mapping[int, float], float]  # bytes by variable, and constant bytes


class Waits(NamedTuple):
    """Bytes that wait on the device: ``live``, at each block, of homes and activations; ``gradients``, by block, when its
    backward begins, and, at -1, at the end."""

    live: Sequence[Mapping[int, float]]
    gradients: Mapping[int, Held]


def live_at(blocks: Sequence[Block], terms: Terms, choices: Choices) -> list[dict[int, float]]:
    """Returns the bytes that wait on the device at each block: of homes, and what it and all blocks before it keep, with the
    weights that stay once these have read them."""
    live, lives, staying = dict(terms.held["device"]), list[dict[int, float]](), _staying(blocks, terms)
    for place, block in enumerate(blocks):
        stays = staying[blocks[place - 1].index] if place else {}
        live = added(live, choices.waiting[block.index], stays, choices.saved[block.index])
        lives.append(live := terms.program.summed(live, GIB))
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
        elsewhere |= {terms.streamed[home]: float(nbytes) for home, nbytes in grads.items() if home in terms.streamed}
        made, fixed = terms.program.summed(added(made, elsewhere), GIB), fixed + sum(grads.values())
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
    always = problem.budgets.reserve + sum(held_nbytes(problem.step, problem.budgets, "device").values())
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


@dataclass(frozen=True, slots=True)
class Gap:
    """The gap between two backwards, of the blocks ``first`` and ``then``. ``us``: the variables for its µs, idle and not.
    ``fetched``: bytes, by variable, that the second needs and the first does not; ``stored``: of the gradients of the first."""

    first: int
    then: int
    us: tuple[int, int]
    fetched: Mapping[int, float]
    stored: Mapping[int, float]


def gaps_between(problem: PlanningProblem, costs: Mapping[str, HomeCost], terms: Terms, choices: Choices) -> list[Gap]:
    """Adds the µs that compute waits between two backwards, each one region, to its load. None where something else could run
    meanwhile."""
    if problem.budgets.updates is not None and problem.budgets.updates.held:
        return []
    gaps, backwards = list[Gap](), terms.of_phase(PHASES[1])
    for first, then in itertools.pairwise(backwards):
        low, high = then.meta["block"], first.meta["block"]
        if low >= high or len(terms.backwards[low]) > 1 or len(terms.backwards[high]) > 1:
            continue
        idle, busy = terms.program.variable(None), terms.program.variable(None)
        terms.loads["exposed", PHASES[1]].append(Load(low, high, {idle: 1.0}))
        needs, shared = terms.needs[then], terms.needs[first]
        apart = {home: nbytes for home, nbytes in needs.read.items() if home not in (*shared.read, *shared.stored)}
        fetched = added(terms.again(terms.by_share(apart)), choices.back[low], choices.given_first[low])
        gaps.append(Gap(high, low, (idle, busy), fetched, terms.by_share(shared.stored)))
    elsewhere = {gap.us[1]: 1.0 for gap in gaps}
    updates_us = {home: costs[home].device_update_us for home in terms.away}
    updated = {terms.away[home]: us for home, us in updates_us.items()}  # what is on the host is not updated on the device
    repeated = dict.fromkeys(choices.repeated, -1.0)
    terms.program.at_most(added(elsewhere, repeated, updated), sum(updates_us.values()))
    return gaps
