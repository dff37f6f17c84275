"""The disk in climbs: moves about what is there, and what makes room on the host or the device by it.

Homes on disk are spread evenly over the step, so that a read hides behind the blocks in between. Frozen weights go there first:
they are read every step and never written. Of activations those that the first blocks keep go first: they are written early in
the forward and read late in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from torch import fx

from mtcompile.passes.analysis.state import held_nbytes, param_nbytes, update_staging_nbytes, uses_disk
from mtcompile.passes.plan import Choice, Plan
from mtcompile.passes.planning.blocks import Block, about_homes, kept_positions, placing
from mtcompile.passes.planning.climbs.move import FIRST, LAST, THEN, Move, Moved
from mtcompile.passes.planning.climbs.room import Room
from mtcompile.passes.planning.disk.homes import dear, may_move
from mtcompile.passes.planning.disk.spacing import evenly, spaced
from mtcompile.passes.planning.problem import PlanningProblem

_SHIFTS = 3  # by which homes in equal distances end before the last one
_MOST_AHEAD, _MOST_SETS = 8, 8  # regions that a read may be ahead of its fetch; sets of slots for gradients that go home


@dataclass(frozen=True, slots=True, eq=False)
class Disk:
    """Homes and activations that may go to disk. ``order``: the homes, those first that go there first; ``dear``: those among
    them that take more of the host on disk than at home; ``sizes``, ``held``: bytes by home, and with state; ``open``: homes
    that may be on the device; ``blocks``: of the step; ``activations``: whether these may go there; ``direct``: whether weights
    are read straight to the device, or None; ``staging``: bytes of the host that what a plan has on disk goes through."""

    order: Sequence[str]
    dear: Sequence[str]
    sizes: Mapping[str, int]
    held: Mapping[str, int]
    open: Mapping[str, int]
    blocks: Sequence[Block]
    activations: bool
    direct: bool | None
    staging: Callable[[Plan], int]

    # ------------------------------------------------------------------------------------------------------------- plans

    def with_homes(self, plan: Plan, tiers: Mapping[str, Choice]) -> Plan:
        """Returns the plan with homes on other tiers."""
        return self._begun(plan).with_decisions(about_homes("params", tiers, self.sizes))

    def with_values(self, plan: Plan, values: Sequence[fx.Node], tier: Choice) -> Plan:
        """Returns the plan with activations that wait on another tier."""
        return self._begun(plan).with_decisions(placing(values, tier))

    def most(self, plan: Plan, dear_too: bool, activations: bool) -> Plan:
        """Returns the plan with all homes on disk that are not on the device, and activations that wait on the host, or not."""
        tiers = zip(self.order, plan.tiers(self.order), strict=True)
        there = [home for home, tier in tiers if tier != "device" and (dear_too or home not in self.dear)]
        plan = self.with_homes(plan, dict.fromkeys(there, "disk"))
        return self.with_all_activations(plan) if activations else plan

    def mosts(self, plan: Plan) -> list[Plan]:
        """Returns what ``most`` does, in each way."""
        return [self.most(plan, dear_too, activations) for dear_too, activations in product((False, True), repeat=2)]

    def with_all_activations(self, plan: Plan) -> Plan:
        """Returns the plan with all activations on disk that wait on the host."""
        return self.with_values(plan, [value for _, values in self._waiting(plan, "host") for value in values], "disk")

    def _begun(self, plan: Plan) -> Plan:
        return plan if uses_disk(plan) else plan.changed(disk_lookahead=1, disk_direct=self.direct is True)

    def _waiting(self, plan: Plan, tier: Choice) -> Iterator[tuple[Block, list[fx.Node]]]:
        """Yields what each block keeps on a tier for the backward, where there is any."""
        for block in self.blocks if self.activations else ():
            values = [*(block.saved[i] for i in kept_positions(plan, block)), *block.crossing]
            if there := [value for value in values if plan.activation(value.name) == tier]:
                yield block, there

    # -------------------------------------------------------------------------------------------------------------- room

    def rooms(self) -> dict[str, list[Room]]:
        """Returns the ways to make room, by the tier that needs it."""
        return {"host": [self._homes_away, self._values_away, self._straight, self._later], "device": [self._homes_off_device]}

    def _homes_away(self, plan: Plan, before: Plan, missing: int) -> Plan | None:
        """Sends homes from the host to disk, as many as are needed, or all there are."""
        return self._sent(plan, before, "host", missing)

    def _homes_off_device(self, plan: Plan, before: Plan, missing: int) -> Plan | None:
        """Sends homes from the device to disk."""
        return self._sent(plan, before, "device", missing)

    def _sent(self, plan: Plan, before: Plan, tier: Choice, missing: int) -> Plan | None:
        tiers = zip(self.order, plan.tiers(self.order), before.tiers(self.order), strict=True)
        here = [home for home, now, then in tiers if now == then == tier]
        if not here:
            return None
        sent = self._with_fewest(plan, here, missing)
        if tier == "host" and (more := self.staging(sent) - self.staging(plan)) > 0:
            sent = self._with_fewest(plan, here, missing + more)
        return sent

    def _with_fewest(self, plan: Plan, here: Sequence[str], missing: int) -> Plan:
        count = 0
        while missing > 0 and count < len(here):
            missing -= self.held[here[count]]
            count += 1
        return self.with_homes(plan, dict.fromkeys(here[:count], "disk"))

    def _values_away(self, plan: Plan, before: Plan, missing: int) -> Plan | None:
        """Sends activations from the host to disk, as many as are needed, or all there are."""
        here = [v for _, values in self._waiting(plan, "host") for v in values if before.activation(v.name) == "host"]
        if not here:
            return None
        more, count = self.staging(self.with_values(plan, here[:1], "disk")) - self.staging(plan), 0
        missing += more
        while missing > 0 and count < len(here):
            missing -= here[count].meta["nbytes"]
            count += 1
        return self.with_values(plan, here[:count], "disk")

    def _straight(self, plan: Plan, before: Plan, missing: int) -> Plan | None:
        """Reads weights straight to the device: they need no slots on the host then."""
        if self.direct is not None or plan.disk_direct or "disk" not in plan.tiers(self.order):
            return None
        return plan.changed(disk_direct=True)

    def _later(self, plan: Plan, before: Plan, missing: int) -> Plan | None:
        """Reads nothing ahead, into the fewest slots."""
        return plan.changed(disk_lookahead=0) if uses_disk(plan) and plan.disk_lookahead else None

    # ------------------------------------------------------------------------------------------------------------- moves

    def moves(self) -> list[Move]:
        """Returns the moves."""
        by_size: dict[int, list[str]] = {}
        for home in self.sizes:
            if home in self.order:
                by_size.setdefault(self.held[home], []).append(home)
        kinds: list[Move] = [partial(self._of_homes, homes) for homes in by_size.values()]
        return [*kinds, self._of_activations, self._of_reads]

    def _of_homes(self, homes: Sequence[str], plan: Plan) -> Iterator[Moved]:
        """Moves equal homes between the host, the disk and the device: of those on disk, one less or one more in equal
        distances; as many elsewhere; one to the device."""
        tiers = dict(zip(homes, plan.tiers(homes), strict=True))
        outside = [home for home in homes if tiers[home] != "device"]
        count = sum(tiers[home] == "disk" for home in outside)

        def with_these(there: Sequence[str]) -> Plan:
            return self.with_homes(plan, {home: "disk" if home in there else "host" for home in outside})

        there = [home for home in outside if tiers[home] == "disk"]
        for home in dict.fromkeys((*there[-1:], *there[:1])):
            if home in self.open:
                name = "last here" if home == there[-1] else "first here"
                yield Moved(name, FIRST, partial(self.with_homes, plan, {home: "device"}))
        if count:
            yield Moved("fewer", FIRST, partial(with_these, spaced(outside, count - 1, 0)))
        if count < len(outside):
            yield Moved("more", THEN, partial(with_these, spaced(outside, count + 1, 0)))
        if 0 < count < len(outside):
            for shift in range(_SHIFTS):
                yield Moved(shift, THEN, partial(with_these, spaced(outside, count, shift)))
            yield Moved("last", THEN, partial(with_these, outside[-count:]))
            yield Moved("first", THEN, partial(with_these, outside[:count]))

    def _of_activations(self, plan: Plan) -> Iterator[Moved]:
        """Sends on what one block keeps on the host, or lets it wait there again; or all."""
        there, here = list(self._waiting(plan, "disk")), list(self._waiting(plan, "host"))
        for _, values in there[-1:]:
            yield Moved("fewer", FIRST, partial(self.with_values, plan, values, "host"))
        for _, values in here[:1]:
            yield Moved("more", THEN, partial(self.with_values, plan, values, "disk"))
        for name, blocks, tier in (("all", here, "disk"), ("none", there, "host")):
            if len(blocks) > 1:
                values = [value for _, values in blocks for value in values]
                yield Moved(name, LAST, partial(self.with_values, plan, values, tier))

    def _of_reads(self, plan: Plan) -> Iterator[Moved]:
        """Reads more or fewer regions ahead, or straight to the device; lets more gradients wait: an update of what is on disk
        may take as long as several blocks, which would wait for it."""
        if not uses_disk(plan):
            return
        for name, ahead in (("ahead", plan.disk_lookahead + 1), ("less ahead", plan.disk_lookahead - 1)):
            if 0 <= ahead <= _MOST_AHEAD:
                yield Moved(name, FIRST, partial(plan.changed, disk_lookahead=ahead))
        if "disk" in plan.tiers(self.order):
            if self.direct is None:
                yield Moved("straight", FIRST, partial(plan.changed, disk_direct=not plan.disk_direct))
            updates = plan.updates
            if updates is not None and not updates.held and not updates.patient and updates.sets < _MOST_SETS:
                yield Moved("sets", FIRST, partial(plan.changed, updates=replace(updates, sets=updates.sets + 1)))


def disk_of(problem: PlanningProblem, blocks: Sequence[Block]) -> Disk | None:
    """Returns what may go to disk; None where nothing may. ``blocks``: of the step."""
    budgets, step, (frozen, trained) = problem.budgets, problem.step, may_move(problem)
    if budgets.disk is None or not (frozen or trained or budgets.host_activations):
        return None
    too_dear, sizes = dear(problem), param_nbytes(step)
    order = [*evenly(frozen), *evenly([home for home in trained if home not in too_dear]), *too_dear]
    return Disk(
        order,
        too_dear,
        sizes,
        held_nbytes(step, budgets, "host"),
        {home: nbytes for home, nbytes in sizes.items() if home not in problem.fixed_homes},
        blocks,
        budgets.host_activations,
        budgets.disk_direct,
        lambda plan: (budgets.disk_staging if uses_disk(plan) else 0) + update_staging_nbytes(step, plan, budgets),
    )
