"""Casts on the host, as ``rewrites/casts`` moves them there: what of each region comes in and leaves narrow under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.figures.drawn import Placed
from mtcompile.passes.rewrites.casts import cloned_operand, leaving_narrow, made_nbytes, narrowing_cast, sized, taking_narrow
from mtcompile.passes.rewrites.trim import trimmed
from mtcompile.runtime.devices.arena import layout_of


@dataclass(slots=True, eq=False)
class Narrowed:
    """A region whose casts the host has taken over. ``kernel``: what it runs; None: nothing is left of it. ``comes``: inputs,
    with what the host makes of each; ``unread``: those that it reads no longer, and ``unfetched``, those that do not come
    in either. ``leaves``: gradients, with their bytes as it makes them, at home before they are widened, and after.
    ``waits``: activations that wait at home as the cast of an input, with the position of the region that this was fetched for;
    ``unmade``: those of them that it does not make."""

    kernel: fx.GraphModule | None
    comes: dict[Any, torch.Tensor] = field(default_factory=dict)
    unread: set[Any] = field(default_factory=set)
    unfetched: set[Any] = field(default_factory=set)
    leaves: dict[Any, tuple[int, int, int]] = field(default_factory=dict)
    waits: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    unmade: set[Any] = field(default_factory=set)

    def key(self) -> object:
        """Returns what is equal for regions that are narrowed alike."""
        comes = tuple([(node, nbytes_of(val)) for node, val in self.comes.items()])
        sets = frozenset(self.unread), frozenset(self.unfetched), frozenset(self.unmade)
        return self.kernel, comes, tuple(self.leaves.items()), tuple(self.waits.items()), sets


def nbytes_of(val: torch.Tensor) -> int:
    """Returns the bytes of a value that the host has cast."""
    return int(sized(val)["nbytes"])


Fetch = tuple[int, tuple[int, ...]]  # the position of the region that an input is fetched for, and those that read it then


def narrowed(
    step: fx.GraphModule,
    regions: Sequence[Placed],
    plan: Plan,
    fetched: Mapping[Any, Sequence[Fetch]],
    leaving: Sequence[Mapping[str, Sequence[Any]]],
    returned: frozenset[Any],
) -> list[Narrowed | None]:
    """Returns what becomes of each region; None where it stays as it is. ``fetched``: by input that may cross narrow;
    ``leaving``: by region and home, the gradients that go there in one copy and may cross narrow."""
    new = [Narrowed(each.region.kernel) for each in regions]
    for node, fetches in fetched.items():
        for _, users in fetches:
            reads = [(regions[p].region.kernel, [i for i, o in enumerate(regions[p].region.reads) if o is node]) for p in users]
            if (cast := narrowing_cast(step, reads, node.meta.get("held", node.meta["val"]))) is not None:
                for position in users:
                    new[position].comes[node] = cast.meta["val"]
    brought = {(user, node): place for node, fetches in fetched.items() for place, users in fetches for user in users}
    for position, (each, by_home, less) in enumerate(zip(regions, leaving, new, strict=True)):
        _narrow(step, each, by_home, less)
        _let_wait(step, position, regions, plan, returned, less, brought)
    for node, fetches in fetched.items():
        for _, users in fetches:
            if all(node in new[position].unread for position in users):
                for position in users:
                    new[position].unfetched.add(node)
    return [less if less.kernel is not each.region.kernel else None for each, less in zip(regions, new, strict=True)]


def _narrow(step: fx.GraphModule, each: Placed, by_home: Mapping[str, Sequence[Any]], less: Narrowed) -> None:
    """Gives a region the kernel that takes and returns values in the form in which they cross."""
    region, kernel = each.region, each.region.kernel
    if less.comes:
        kernel = taking_narrow(step, kernel, tuple([i for i, operand in enumerate(region.reads) if operand in less.comes]))
    place = {value: position for position, value in enumerate(region.makes)}
    for values in by_home.values():
        kernel, casts = leaving_narrow(step, kernel, tuple([place[value] for value in values]))
        for position, cast in casts.items():
            val, wide = cast.args[0].meta["val"], region.makes[position].meta["val"]
            less.leaves[region.makes[position]] = made_nbytes(val), nbytes_of(val), nbytes_of(wide)
    less.kernel = kernel


def _let_wait(
    step: fx.GraphModule,
    position: int,
    regions: Sequence[Placed],
    plan: Plan,
    returned: frozenset[Any],
    less: Narrowed,
    brought: Mapping[tuple[int, Any], int],
) -> None:
    """Lets activations wait at home as the casts that the host has made, and trims the region. ``brought``: by region and
    input, for which region this was fetched."""
    region, readers = regions[position].region, regions[position].readers
    for place, (value, used) in enumerate(zip(region.makes, readers, strict=True)):
        name = "" if region.renamed else value.name
        if not less.comes or value.meta["role"] != "activation" or plan.activation(name) != "host":
            continue
        near = _near(position, used, regions)
        operand = cloned_operand(less.kernel, place) if near < len(used) else None
        node = None if operand is None else region.reads[operand]
        if node in less.comes and layout_of(less.comes[node]) == layout_of(value.meta["val"]):
            less.waits[value] = brought[position, node], node
            if not near and value not in returned:
                less.unmade.add(value)
    if less.unmade:
        kept = tuple([place for place, value in enumerate(region.makes) if value not in less.unmade])
        left = trimmed(step, less.kernel, kept)
        less.kernel, used_inputs = (None, ()) if left is None else left
        less.unread = {*region.reads} - {region.reads[i] for i in used_inputs}


def _near(position: int, used: Sequence[int], regions: Sequence[Placed]) -> int:
    """Returns how many of the first regions that use a value read what its region has made."""
    previous = position
    for count, use in enumerate(used):
        if use - previous > 1:
            return count
        previous = use
    return len(used)
