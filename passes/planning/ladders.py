"""Candidate plans: a few ladders from the floor to everything resident, each a list of plans that hold more and more.

They do not depend on the budget, so that a larger budget can only choose among more of them. Blocks that share a kernel
are decided one after the other, the last block first (what it saves lives shortest).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.saved import crossing_values, saved_values
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.variants import Variant, fused_variant, save_all, variants
from mtcompile.passes.step_graph import regions, results
from mtcompile.runtime.schedule import gib

Ladder = tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """Decisions that save about ``gain_us`` for ``nbytes`` more of device memory. ``order`` breaks ties."""

    gain_us: float
    nbytes: int
    order: tuple[int, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """What the ladders decide about one block."""

    index: int
    name: str
    region: fx.Node
    variants: tuple[Variant, ...]
    saved: tuple[fx.Node, ...]
    crossing: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]  # made by its backward regions and read later


def ladders(
    step: fx.GraphModule, base: Plan, machine: Machine, param_nbytes: Mapping[str, int], host: bool = True
) -> tuple[Ladder, ...]:
    """Candidate plans in ladders; the first ladder starts at the floor. ``base``: what is decided already.
    ``param_nbytes``: bytes of the home blocks whose tier is still open. ``host``: whether activations may go home."""
    blocks = blocks_of(step, machine)
    lighter = [b for b in blocks if b.variants[0].kept]  # than recomputing all of it
    why = "weighs less than what replaying needs"
    base = _with(base, [variant_decision(b.name, b.saved, b.variants[0], why) for b in lighter])
    params = _param_upgrades(param_nbytes, machine)
    keep = [u for b in blocks for u in _crossing_upgrades(b, machine)]
    vary = [u for b in blocks for u in _variant_upgrades(b)]
    ahead = replace(base, lookahead=1)
    device = ahead.with_decision(Decision("activation", "*", "device", 0, "what is kept stays on the device"))
    found: list[Ladder] = []
    if host:
        why = "kept at home: costs transfers, no recomputation"
        everything_saved = _with(ahead, [variant_decision(b.name, b.saved, b.variants[-1], why) for b in blocks])
        found.append((base, _with(base, everything_saved.decisions)))
        found.append(_ladder(ahead, [*_by_density(keep + vary), *params]))
        found.append(_ladder(ahead, _by_density(params + keep + vary)))
        stay = [u for b in blocks for u in _saved_upgrades(b, machine)]
        found.append(_ladder(everything_saved, [*_by_density(keep + stay), *params]))
    else:
        found.append((replace(device, lookahead=0),))
        found.append(_ladder(device, [*_by_density(vary), *params]))
    for length in _lengths(len(blocks)):
        found += [(_with(start, _chains(blocks, length)),) for start in ((device, base) if host else (device,))]
    if not host:  # what cannot go home can be halved and halved again
        found += [(replace(_with(device, _chains(blocks, len(blocks))), span=span),) for span in (1, 2, 4)]
    return tuple(found)


def everything(step: fx.GraphModule, base: Plan, param_nbytes: Mapping[str, int], fused: bool = False) -> Plan:
    """Nothing moved, and nothing recomputed but what costs nothing in ``fused`` kernels."""
    stay = Decision("activation", "*", "device", 0, "everything fits")
    kept = []
    for region in regions(step):
        if region.meta["phase"] == "forward":
            saved = tuple(saved_values(region))
            variant = fused_variant(step, region) if fused else save_all(region)
            kept.append(variant_decision(step.meta["blocks"][region.meta["block"]], saved, variant, "everything fits"))
    home = [Decision("params", block, "device", nbytes, "everything fits") for block, nbytes in param_nbytes.items()]
    return _with(replace(base, lookahead=1), [stay, *kept, *home])


def blocks_of(step: fx.GraphModule, machine: Machine) -> list[Block]:
    backward: dict[int, list[fx.Node]] = {}
    for region in regions(step):
        if region.meta["phase"] == "backward":
            backward.setdefault(region.meta["block"], []).extend(v for v in results(region) if v.meta["role"] == "activation")
    found, known = [], {}
    for region in regions(step):
        if region.meta["phase"] == "forward":
            key = (region.target, tuple(int(v.args[1]) for v in saved_values(region)))
            if key not in known:
                known[key] = variants(step, region, machine)
            index = region.meta["block"]
            found.append(
                Block(
                    index,
                    step.meta["blocks"][index],
                    region,
                    known[key],
                    tuple(saved_values(region)),
                    tuple(crossing_values(region)),
                    tuple(backward.get(index, ())),
                )
            )
    return found


def _with(plan: Plan, decisions: Iterable[Decision]) -> Plan:
    made = {(d.kind, d.subject): d for d in (*plan.decisions, *decisions)}
    return replace(plan, decisions=tuple(made.values()))


def _ladder(start: Plan, upgrades: Iterable[_Upgrade]) -> Ladder:
    plans = [start]
    for upgrade in upgrades:
        plans.append(_with(plans[-1], upgrade.decisions))
    return tuple(plans)


def _by_density(upgrades: list[_Upgrade]) -> list[_Upgrade]:
    """Most time per byte first. A block's own variants come in order, since they lie on a convex hull."""
    return sorted(upgrades, key=lambda u: (-u.gain_us / max(1, u.nbytes), u.order))


def variant_decision(block: str, saved: tuple[fx.Node, ...], variant: Variant, reason: str) -> Decision:
    kept = tuple(saved[i].name for i in variant.kept)
    choice = "save" if len(kept) == len(saved) else "keep" if kept else "recompute"
    return Decision("variant", block, choice, variant.nbytes, reason, () if choice == "save" else kept)


def _variant_upgrades(block: Block) -> list[_Upgrade]:
    """To each next variant, its values on the device."""
    found = []
    for step, (one, other) in enumerate(zip(block.variants, block.variants[1:], strict=False)):
        gain, nbytes = one.time_us - other.time_us, max(0, other.nbytes - one.nbytes)
        why = f"{gib(nbytes)} more kept saves {gain / 1e3:.3f} ms of recomputation"
        stay = [_on_device(block.saved[i], "kept on the device") for i in other.kept if i not in one.kept]
        order = (2, step, -block.index)
        found.append(_Upgrade(gain, nbytes, order, (variant_decision(block.name, block.saved, other, why), *stay)))
    return found


def _on_device(value: fx.Node, reason: str) -> Decision:
    return Decision("activation", value.name, "device", value.meta["nbytes"], reason)


def _stay_upgrade(values: tuple[fx.Node, ...], machine: Machine, order: tuple[int, ...]) -> list[_Upgrade]:
    if not values:
        return []
    nbytes = sum(value.meta["nbytes"] for value in values)
    gain = machine.copy_us(nbytes, "d2h") + machine.copy_us(nbytes, "h2d")
    return [_Upgrade(gain, nbytes, order, tuple(_on_device(v, "kept on the device saves two transfers") for v in values))]


def _crossing_upgrades(block: Block, machine: Machine) -> list[_Upgrade]:
    return _stay_upgrade((*block.crossing, *block.others), machine, (1, 0, -block.index))


def _saved_upgrades(block: Block, machine: Machine) -> list[_Upgrade]:
    return _stay_upgrade(block.saved, machine, (2, 0, -block.index))


def _param_upgrades(param_nbytes: Mapping[str, int], machine: Machine) -> list[_Upgrade]:
    found = []
    for position, (block, nbytes) in enumerate(param_nbytes.items()):
        gain = 2 * machine.copy_us(nbytes, "h2d") + machine.copy_us(nbytes, "d2h")
        why = f"resident saves {gain / 1e3:.3f} ms of transfers"
        found.append(_Upgrade(gain, 4 * nbytes, (3, position), (Decision("params", block, "device", nbytes, why),)))
    return found


def _lengths(blocks: int) -> list[int]:
    """Chain lengths worth trying: 2, 4, ... up to twice the square root of the number of blocks."""
    found, length = [], 2
    while length < blocks and length <= 2 * blocks**0.5:
        found.append(length)
        length *= 2
    return found


def _chains(blocks: list[Block], length: int) -> list[Decision]:
    """Of every ``length`` blocks, only what enters the first is kept; the rest is computed again from there."""
    return [
        Decision("activation", value.name, "recompute", value.meta["nbytes"], f"computed again in chains of {length} blocks")
        for position, block in enumerate(blocks)
        if (position + 1) % length
        for value in block.crossing
    ]
