"""Ladders of candidate plans, from the floor to everything resident: each plan keeps more on the device than the one before.

Ladders do not depend on the budget, so a larger budget only adds choices. Blocks that share a kernel are decided one after the
other, starting with the last block, whose saved values live shortest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.saved import crossing_values, made_again_inside, saved_values
from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, fused_variant, save_all, thinned, trade_off
from mtcompile.passes.step_graph import regions, results

Ladder = Sequence[Plan]
_BESIDE = 2  # homes before and behind one that may be on the device with it
WaitKind = Literal["return", "gradients"]
_RANKS = 6  # of values that a block keeps: these come back ahead one after the other, the smaller ones together
_ENDS = 3  # blocks at the beginning, and at the end, that may keep less than all others
_NEAR_FLOOR = (1, 2)  # a little more kept than the fewest bytes: a kernel that recomputes less may need less


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """Decisions that save about ``gain_us`` microseconds for ``nbytes`` more of device memory. ``order`` breaks ties."""

    gain_us: float
    nbytes: int
    order: tuple[int, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block and what a plan may decide about it. ``saved``: values that its forward saves for the backward; ``variants`` keep
    more or fewer of them, and are a few of all on the ``hull`` of bytes and time. ``crossing``: values that later blocks read.
    ``others``: values that its backward makes and later regions read."""

    index: int
    name: str
    region: fx.Node
    variants: tuple[Variant, ...]
    hull: tuple[Variant, ...]
    saved: tuple[fx.Node, ...]
    crossing: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]


def ladders(
    blocks: list[Block], base: Plan, machine: Machine, param_nbytes: Mapping[str, int], host: bool = True
) -> tuple[Ladder, ...]:
    """Returns the ladders to search; the first starts at the floor. ``blocks``: of the step. ``base``: decisions already made.
    ``param_nbytes``: bytes of the home blocks whose tier is still open. ``host``: whether activations may go home."""
    floors = [base := _with_variants(base, blocks, 0), *(_with_variants(base, blocks, i) for i in _NEAR_FLOOR)]
    param_upgrades = _param_upgrades(param_nbytes, machine)
    crossing_upgrades = [u for b in blocks for u in _crossing_upgrades(b, machine)]
    variant_upgrades = [u for b in blocks for u in _variant_upgrades(b)]
    ahead = replace(base, lookahead=1, pooled=True)
    stays = Decision("activation", "*", "device", 0)
    device = ahead.with_decision(stays)
    searched: list[Ladder] = []
    if host:
        everything_saved = _with(ahead, [variant_decision(b.name, b.saved, b.variants[-1]) for b in blocks])
        searched.append((base, _with(base, everything_saved.decisions)))
        searched.append(_Upgraded(ahead, [*_by_density(crossing_upgrades + variant_upgrades), *param_upgrades]))
        at_home = _by_density([u for b in blocks for u in _variant_upgrades(b, stays=False)])
        # One block that keeps more needs as much room as all of them, each beside its neighbours, and gains little.
        starts = ahead, replace(ahead, lookahead=2), waiting_less(ahead, param_nbytes)[0]
        searched += [_Upgraded(start, at_home) for start in starts]
        searched += _loading_less(starts[-1], blocks)
        searched.append(_crossing_late(starts[-1], blocks))
        searched.append(_Upgraded(ahead, _by_density(param_upgrades + crossing_upgrades + variant_upgrades)))
        saved_upgrades = [u for b in blocks for u in _saved_upgrades(b, machine)]
        searched.append(_Upgraded(everything_saved, [*_by_density(crossing_upgrades + saved_upgrades), *param_upgrades]))
    else:
        searched.append((replace(device, lookahead=0),))
        searched.append(_Upgraded(device, [*_by_density(variant_upgrades), *param_upgrades]))
    if param_nbytes:
        searched.append(waiting_less(ahead if host else device, param_nbytes))
    leanest = [*floors[1:], replace(base, pooled=True)]
    searched += [(plan if host else plan.with_decision(stays),) for plan in leanest]
    for length in _chain_lengths(len(blocks)):
        searched += [(_with(start, _chains(blocks, length)),) for start in ((device, base) if host else (device,))]
    if not host:  # values that cannot go home: recompute recursively, in halves of halves
        searched += [(replace(_with(device, _chains(blocks, len(blocks))), span=span),) for span in (1, 2, 4)]
    return tuple(searched)


def waiting(kind: WaitKind, homes: Iterable[str], param_nbytes: Mapping[str, int], waits: bool) -> list[Decision]:
    """Returns decisions about homes that have waits, or none: for their fetches in the backward, or for their gradients."""
    choice: Choice = "late" if waits == (kind == "return") else "early"
    return [Decision(kind, home, choice, param_nbytes[home]) for home in homes]


def waiting_less(ahead: Plan, param_nbytes: Mapping[str, int]) -> Ladder:
    """Returns plans that fetch ahead in the forward, at first not in the backward, where memory is scarce: fewer and fewer
    homes wait there, the small ones first, and of these the ones that are not beside larger ones. A large one, such as a head,
    may be all that has no room beside its neighbours."""
    kinds: tuple[WaitKind, ...] = ("return", "gradients")
    plans = [_with(ahead, [d for kind in kinds for d in waiting(kind, param_nbytes, param_nbytes, True)])]
    for size in sorted(set(param_nbytes.values())):
        homes = [home for home, nbytes in param_nbytes.items() if nbytes == size]
        for alike, kind in itertools.product(_by_room(homes, param_nbytes), kinds):
            plans.append(_with(plans[-1], waiting(kind, alike, param_nbytes, False)))
    return tuple(plans)


def _loading_less(ahead: Plan, blocks: list[Block]) -> list[Ladder]:
    """Returns plans whose blocks all keep as much at home, for each of their inner variants; and those whose first and last
    blocks keep less, as they are beside an embedding and a head. At first nothing of it comes back ahead, then more and more,
    the largest values first: small ones that do not fit beside the next backward cost least. None where most blocks differ:
    what one keeps says little of the others then."""
    searched: list[Ladder] = []
    if 2 * len({id(block.variants) for block in blocks}) > len(blocks):
        return searched
    inner = blocks[_ENDS : len(blocks) - _ENDS]
    ends = [block for block in blocks if block not in inner]
    for index in range(1, max((len(block.variants) for block in blocks), default=0) - 1):
        for of_ends in (index - 1, index) if inner else (index,):
            start = _with_variants(_with_variants(ahead, inner, index), ends, of_ends)
            ranks = at_home_by_rank(start, blocks)
            plans = [_with(start, loading([value for values in ranks for value in values], True))]
            for values in ranks:
                plans.append(_with(plans[-1], loading(values, False)))
            searched.append(tuple(plans))
    return searched


def _crossing_late(ahead: Plan, blocks: Sequence[Block]) -> Ladder:
    """Returns plans that fetch ahead in the forward, and in the backward nothing at all, not even what left blocks; then more
    and more of it, the smallest values first. Even the fewest bytes may leave room for fetches in the forward."""
    values = crossing_by_size(ahead, blocks)
    plans = [_with(ahead, [d for alike in values for d in loading(alike, True)])]
    for alike in reversed(values):
        plans.append(_with(plans[-1], loading(alike, False)))
    return tuple(plans)


def crossing_by_size(plan: Plan, blocks: Sequence[Block]) -> list[list[fx.Node]]:
    """Returns the values that leave blocks and wait at home, equally large ones together, the largest first."""
    by_size: dict[int, list[fx.Node]] = {}
    for value in (value for block in blocks for value in block.crossing):
        if plan.activation(value.name) == "host":
            by_size.setdefault(value.meta["nbytes"], []).append(value)
    return [by_size[nbytes] for nbytes in sorted(by_size, reverse=True)]


def at_home_by_rank(plan: Plan, blocks: Sequence[Block]) -> list[list[fx.Node]]:
    """Returns what blocks keep at home: the largest values of each, then its next ones, and the small ones together."""
    by_rank: dict[int, list[fx.Node]] = {}
    for block in blocks:
        values = [block.saved[i] for i in kept_positions(plan, block) if plan.activation(block.saved[i].name) == "host"]
        for rank, value in enumerate(sorted(values, key=lambda value: -value.meta["nbytes"])):
            by_rank.setdefault(min(rank, _RANKS), []).append(value)
    return [by_rank[rank] for rank in sorted(by_rank)]


def loading(values: Iterable[fx.Node], late: bool) -> list[Decision]:
    """Returns decisions about values that wait at home: whether they come back for the backward late, or ahead."""
    return [Decision("load", value.name, "late" if late else "early", value.meta["nbytes"]) for value in values]


def _by_room(homes: Sequence[str], param_nbytes: Mapping[str, int]) -> list[list[str]]:
    """Returns homes in two parts: those that are beside no larger one in the order of the step, and the others."""
    order = list(param_nbytes)
    nbytes = [param_nbytes[home] for home in order]
    largest = {home: max(nbytes[max(0, place - _BESIDE) : place + _BESIDE + 1]) for place, home in enumerate(order)}
    beside = [[home for home in homes if (largest[home] > param_nbytes[home]) == is_beside] for is_beside in (False, True)]
    return [each for each in beside if each]


def everything(step: fx.GraphModule, base: Plan, param_nbytes: Mapping[str, int], fused: bool = False) -> Plan:
    """Returns the plan that moves nothing and recomputes nothing, except what is free in ``fused`` kernels."""
    activations = Decision("activation", "*", "device", 0)
    variant_decisions = []
    for region in regions(step):
        if region.meta["phase"] == "forward":
            saved = tuple(saved_values(region))
            variant = fused_variant(step, region) if fused else save_all(region)
            variant_decisions.append(variant_decision(step.meta["blocks"][region.meta["block"]], saved, variant))
    params = [Decision("params", block, "device", nbytes) for block, nbytes in param_nbytes.items()]
    return _with(replace(base, lookahead=1), [activations, *variant_decisions, *params])


def decided(problem: PlanningProblem, sizes: Mapping[str, int]) -> Plan:
    """Returns the plan with only the decisions made before any search: the fixed homes."""
    fixed = tuple(
        Decision("params", block, problem.fixed_homes[block], sizes.get(block, 0))
        for block in dict.fromkeys(problem.step.meta["homes"].values())
        if block in problem.fixed_homes
    )
    budgets = problem.budgets
    plan = Plan(decisions=fixed, budget_bytes=budgets.nbytes, machine=problem.machine.name, numerics=str(problem.numerics))
    plan = replace(plan, parts=tuple(sorted(budgets.parts)))
    if any(decision.choice == "disk" for decision in fixed):
        plan = replace(plan, disk_lookahead=1, disk_direct=budgets.disk_direct is True)
    # Gradients wait on the host rather than make the device wait for their updates; see ``impatient`` for less of it.
    updates = budgets.updates
    return replace(plan, updates=None if updates is None else replace(updates, patient=not (updates.held or updates.in_turn)))


def blocks_alike(blocks: Iterable[Block]) -> list[list[Block]]:
    """Returns the blocks by what a plan may decide about them: those that share their variants together, in their order."""
    alike: dict[int, list[Block]] = {}
    for block in blocks:
        alike.setdefault(id(block.variants), []).append(block)
    return list(alike.values())


def blocks_of(step: fx.GraphModule, machine: Machine) -> list[Block]:
    """Returns the step's blocks in forward order; equal blocks share their variants."""
    backward: dict[int, list[fx.Node]] = {}
    for region in regions(step):
        if region.meta["phase"] == "backward":
            backward.setdefault(region.meta["block"], []).extend(v for v in results(region) if v.meta["role"] == "activation")
    blocks, shared = [], {}
    for region in regions(step):
        if region.meta["phase"] == "forward":
            key = (region.target, *(tuple(int(v.args[1]) for v in of(region)) for of in (saved_values, made_again_inside)))
            if key not in shared:
                hull = trade_off(step, region, machine)
                shared[key] = thinned(hull), hull
            index = region.meta["block"]
            blocks.append(
                Block(
                    index,
                    step.meta["blocks"][index],
                    region,
                    *shared[key],
                    tuple(saved_values(region)),
                    tuple(crossing_values(region)),
                    tuple(backward.get(index, ())),
                )
            )
    return blocks


def _with_variants(plan: Plan, blocks: list[Block], index: int) -> Plan:
    """Gives every block its variant at ``index``, or its last one before. Blocks that recompute everything need no decision."""
    chosen = [(b, b.variants[min(index, len(b.variants) - 1)]) for b in blocks]
    return _with(plan, [variant_decision(b.name, b.saved, variant) for b, variant in chosen if variant.positions])


def _with(plan: Plan, decisions: Iterable[Decision]) -> Plan:
    return plan.changed(decisions=plan.decisions.replaced(decisions, behind=False))


class _Upgraded(Sequence[Plan]):
    """Plans that take more and more of ``upgrades``, each made when it is asked for."""

    def __init__(self, start: Plan, upgrades: Sequence[_Upgrade]) -> None:
        self.start, self.upgrades = start, upgrades

    def __len__(self) -> int:
        return 1 + len(self.upgrades)

    def __getitem__(self, position: Any) -> Any:
        taken = self.upgrades[: range(len(self))[position]]
        return _with(self.start, [decision for upgrade in taken for decision in upgrade.decisions])


def _by_density(upgrades: list[_Upgrade]) -> list[_Upgrade]:
    """Sorts upgrades by time saved per byte, largest first. A block's variants stay in order: they lie on a convex hull."""
    return sorted(upgrades, key=lambda u: (-u.gain_us / max(1, u.nbytes), u.order))


def variant_decision(block: str, saved: tuple[fx.Node, ...], variant: Variant) -> Decision:
    """Returns the decision to keep, of a block's ``saved`` values, those of ``variant``."""
    values = tuple(saved[i].name for i in variant.positions)
    choice = "save" if len(values) == len(saved) else "keep" if values else "recompute"
    return Decision("variant", block, choice, variant.nbytes, values=() if choice == "save" else values)


def _variant_upgrades(block: Block, stays: bool = True) -> list[_Upgrade]:
    """Returns an upgrade to each next variant. ``stays``: the values that it additionally keeps stay on the device."""
    upgrades = []
    for step, (lighter, heavier) in enumerate(itertools.pairwise(block.variants)):
        gain, nbytes = lighter.time_us - heavier.time_us, max(0, heavier.nbytes - lighter.nbytes)
        stay = [
            activation_decision(block.saved[i], "device") for i in heavier.positions if stays and i not in lighter.positions
        ]
        order = (2, step, -block.index)
        upgrades.append(_Upgrade(gain, nbytes, order, (variant_decision(block.name, block.saved, heavier), *stay)))
    return upgrades


def kept_positions(plan: Plan, block: Block) -> tuple[int, ...]:
    """Returns the positions among a block's ``saved`` values of those that a plan keeps."""
    decision = plan.find("variant", block.name)
    if decision is None or decision.choice == "save":
        return () if decision is None else tuple(range(len(block.saved)))
    values = frozenset(decision.values)
    return tuple([i for i, value in enumerate(block.saved) if value.name in values])


def activation_decision(value: fx.Node, choice: Choice) -> Decision:
    """Returns the decision where a value waits for its readers."""
    return Decision("activation", value.name, choice, value.meta["nbytes"])


def keeping(block: Block, variant: Variant, tier: Choice) -> list[Decision]:
    """Returns the decisions to keep, of what a block saves, what a variant does, all of it on one tier."""
    placed = [activation_decision(block.saved[i], tier) for i in variant.positions]
    return [variant_decision(block.name, block.saved, variant), *placed]


def _stay_upgrade(values: tuple[fx.Node, ...], machine: Machine, order: tuple[int, ...]) -> list[_Upgrade]:
    if not values:
        return []
    nbytes = sum(value.meta["nbytes"] for value in values)
    gain = machine.copy_us(nbytes, "d2h") + machine.copy_us(nbytes, "h2d")
    return [_Upgrade(gain, nbytes, order, tuple(activation_decision(value, "device") for value in values))]


def _crossing_upgrades(block: Block, machine: Machine) -> list[_Upgrade]:
    return _stay_upgrade((*block.crossing, *block.others), machine, (1, 0, -block.index))


def _saved_upgrades(block: Block, machine: Machine) -> list[_Upgrade]:
    return _stay_upgrade(block.saved, machine, (2, 0, -block.index))


def _param_upgrades(param_nbytes: Mapping[str, int], machine: Machine) -> list[_Upgrade]:
    upgrades = []
    for position, (block, nbytes) in enumerate(param_nbytes.items()):
        gain = 2 * machine.copy_us(nbytes, "h2d") + machine.copy_us(nbytes, "d2h")
        upgrades.append(_Upgrade(gain, 4 * nbytes, (3, position), (Decision("params", block, "device", nbytes),)))
    return upgrades


def _chain_lengths(blocks: int) -> list[int]:
    """Returns chain lengths worth trying: 2, 4, ... up to twice the square root of the number of blocks."""
    lengths, length = [], 2
    while length < blocks and length <= 2 * blocks**0.5:
        lengths.append(length)
        length *= 2
    return lengths


def _chains(blocks: list[Block], length: int) -> list[Decision]:
    """Returns decisions that keep only what enters the first of every ``length`` blocks; the rest is recomputed from there."""
    return [
        Decision("activation", value.name, "recompute", value.meta["nbytes"])
        for position, block in enumerate(blocks)
        if (position + 1) % length
        for value in block.crossing
    ]
