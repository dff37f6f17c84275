"""The blocks of a step, and the decisions that a plan may make about them and about homes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.saved import crossing_values, saved_values
from mtcompile.passes.plan import Choice, Decision, Kind, Plan
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.variants import Variant, fused_variant, likeness, save_all, thinned, trade_off
from mtcompile.passes.step_graph import regions, results

WaitKind = Literal["return", "gradients"]
WAITS: tuple[WaitKind, ...] = get_args(WaitKind)
_RANKS = 6  # of values that a block keeps: these come back ahead one after the other, the smaller ones together


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


def waiting(
    homes: Iterable[str], param_nbytes: Mapping[str, int], waits: bool, kinds: Sequence[WaitKind] = WAITS
) -> list[Decision]:
    """Returns decisions about homes that have waits, or none: for their fetches in the backward, or for their gradients, or for
    both."""
    lates = {kind: waits == (kind == "return") for kind in kinds}
    return [Decision(kind, h, "late" if late else "early", param_nbytes[h]) for kind, late in lates.items() for h in homes]


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


def everything(step: fx.GraphModule, base: Plan, param_nbytes: Mapping[str, int], fused: bool = False) -> Plan:
    """Returns the plan that moves nothing and recomputes nothing, except what is free in ``fused`` kernels."""
    variant_decisions = []
    for region in regions(step):
        if region.meta["phase"] == "forward":
            saved = tuple(saved_values(region))
            variant = fused_variant(step, region) if fused else save_all(region)
            variant_decisions.append(variant_decision(step.meta["blocks"][region.meta["block"]], saved, variant))
    params = [Decision("params", block, "device", nbytes) for block, nbytes in param_nbytes.items()]
    return _with(replace(base, lookahead=1), [all_others("device"), *variant_decisions, *params])


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


def differ(blocks: Sequence[Block]) -> bool:
    """Tells whether most blocks differ from all others."""
    return 2 * len(blocks_alike(blocks)) > len(blocks)


def blocks_of(step: fx.GraphModule, machine: Machine) -> list[Block]:
    """Returns the step's blocks in forward order; equal blocks share their variants."""
    backward: dict[int, list[fx.Node]] = {}
    for region in regions(step):
        if region.meta["phase"] == "backward":
            backward.setdefault(region.meta["block"], []).extend(v for v in results(region) if v.meta["role"] == "activation")
    blocks, shared = [], {}
    for region in regions(step):
        if region.meta["phase"] == "forward":
            if (key := likeness(region)) not in shared:
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


def _with(plan: Plan, decisions: Iterable[Decision]) -> Plan:
    return plan.changed(decisions=plan.decisions.replaced(decisions, behind=False))


def variant_decision(block: str, saved: tuple[fx.Node, ...], variant: Variant) -> Decision:
    """Returns the decision to keep, of a block's ``saved`` values, those of ``variant``."""
    values = tuple(saved[i].name for i in variant.positions)
    choice = "save" if len(values) == len(saved) else "keep" if values else "recompute"
    return Decision("variant", block, choice, variant.nbytes, values=() if choice == "save" else values)


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


def all_others(choice: Choice) -> Decision:
    """Returns the decision where all values without one of their own wait for their readers."""
    return Decision("activation", "*", choice, 0)


def keeping(blocks: Iterable[Block], variant: Variant, tier: Choice) -> list[Decision]:
    """Returns the decisions to keep, of what blocks save, what a variant does, all of it on one tier."""
    decisions = list[Decision]()
    for block in blocks:
        decisions.append(variant_decision(block.name, block.saved, variant))
        decisions += [activation_decision(block.saved[i], tier) for i in variant.positions]
    return decisions


def placing(values: Iterable[fx.Node], tier: Choice) -> list[Decision]:
    """Returns the decisions that values wait for their readers on a tier, or are made again."""
    return [activation_decision(value, tier) for value in values]


def about_homes(kind: Kind, choices: Mapping[str, Choice], sizes: Mapping[str, int]) -> list[Decision]:
    """Returns the decisions of one kind about some homes. ``sizes``: their bytes."""
    return [Decision(kind, home, choice, sizes[home]) for home, choice in choices.items()]
