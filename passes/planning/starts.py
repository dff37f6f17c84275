"""Plans to begin a search at: those in which all blocks and homes decide alike, and fixed policies.

They do not depend on the budgets. The linear program gives others, which do (see ``linear/seeds.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.blocks import Block, all_others, loading, variant_decision, waiting
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import PlanningProblem

_ENDS = 3  # blocks at the beginning, and at the end, that may keep less: they are beside an embedding and a head
_SPANS = (1, 2, 4)  # blocks in a row that are recomputed at once, where nothing may go home


def least_plan(base: Plan, blocks: Sequence[Block]) -> Plan:
    """Returns the plan that keeps fewest bytes: it fetches nothing ahead."""
    return _with_variants(base, blocks, 0)


def plans_to_start_from(
    problem: PlanningProblem, base: Plan, blocks: Sequence[Block], sizes: Mapping[str, int]
) -> Iterator[Plan]:
    """Yields the plans. ``base``: decides what is decided already; ``blocks``: of the step; ``sizes``: bytes of the homes whose
    tier is open."""
    host = problem.budgets.host_activations
    for name, policy in POLICIES.items():
        if host and name != "resident":  # so that no policy beats the search
            yield policy(problem.step, base, sizes)
    least = least_plan(base, blocks)
    for plan in (least, least.changed(pooled=True)) if host else (least.with_decision(all_others("device")),):
        yield plan
        for length in _chain_lengths(len(blocks)):
            yield plan.with_decisions(_chains(blocks, length))
    if not host:  # values that cannot go home: recompute recursively, in halves of halves
        chain = base.with_decisions([*_chains(blocks, len(blocks)), all_others("device")])
        yield from (chain.changed(span=span) for span in _SPANS)
    tiers: tuple[Choice, ...] = ("host", "device") if host else ("device",)
    for index in range(max((len(block.variants) for block in blocks), default=0)):
        for tier in tiers:
            plan = _with_variants(base.changed(lookahead=1, pooled=True), blocks, index)
            plan = plan.with_decision(all_others("device")) if tier == "device" else plan
            yield plan
            for homes in (_large(sizes), list(sizes)):  # with no room to fetch ahead in the backward, or none for large ones
                yield (plan := plan.with_decisions(waiting(homes, sizes, True)))
            if tier == "host":
                yield (plan := plan.with_decisions(loading([v for b in blocks for v in (*b.saved, *b.crossing)], True)))
                if index:
                    yield _with_variants(plan, (*blocks[:_ENDS], *blocks[-_ENDS:]), index - 1)


def _large(sizes: Mapping[str, int]) -> list[str]:
    """The homes that are larger than most, such as embeddings."""
    usual = Counter(sizes.values()).most_common(1)[0][0] if sizes else 0
    return [home for home, nbytes in sizes.items() if nbytes > usual]


def _with_variants(plan: Plan, blocks: Sequence[Block], index: int) -> Plan:
    """Gives every block its variant at ``index``, or its last one before. Blocks that recompute everything need no decision."""
    chosen = [(b, b.variants[min(index, len(b.variants) - 1)]) for b in blocks]
    return plan.with_decisions([variant_decision(b.name, b.saved, v) for b, v in chosen if v.positions or index])


def _chain_lengths(blocks: int) -> list[int]:
    """Returns chain lengths worth trying: 2, 4, ... up to twice the square root of the number of blocks."""
    lengths, length = [], 2
    while length < blocks and length <= 2 * blocks**0.5:
        lengths.append(length)
        length *= 2
    return lengths


def _chains(blocks: Sequence[Block], length: int) -> list[Decision]:
    """Returns decisions that keep only what enters the first of every ``length`` blocks; the rest is recomputed from there."""
    return [
        Decision("activation", value.name, "recompute", value.meta["nbytes"])
        for position, block in enumerate(blocks)
        if (position + 1) % length
        for value in block.crossing
    ]
