"""The calls of a plan in order, as the rewrites would put them: regions, fetches, copies home and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mtcompile.passes.analysis.cost import Machine, rows_us
from mtcompile.passes.analysis.state import updated_on_disk_nbytes
from mtcompile.passes.lower import update_cost
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.figures.summary import Leaving, Operand, Summary, Value
from mtcompile.passes.rewrites.updates import later
from mtcompile.runtime.schedule import Queue

COMPUTE, H2D, D2H, HOST, DISK_READ = range(5)  # queues
POOLED, ON_DEVICE, ON_HOST = range(3)  # kinds of buffers: of the allocator, in slots of the device, in slots of the host


class Buffer(NamedTuple):
    """Bytes with one lifetime. ``returned``: never freed; ``by_disk``: a disk fills it."""

    kind: int
    nbytes: int
    returned: bool
    by_disk: bool


@dataclass(slots=True, eq=False)
class Call:
    """A region, copy or update. ``reads``, ``writes``: numbers of buffers; ``inputs``, ``updated``: numbers of operands at home
    that it reads and writes. ``update``: of an update, the first parameter; ``drive``: bytes that it reads from
    disk and writes there. ``early``: what it copies home is freed at once."""

    queue: int
    us: float
    phase: int
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    workspace: int = 0
    copied: int = 0
    update: str = ""
    drive: tuple[int, int] = 0, 0
    early: bool = False


@dataclass(slots=True, eq=False)
class _Gradients:
    """Gradients that one call makes or copies home, and what they update; ``name``: the first of that."""

    operands: list[Operand]
    buffers: list[int]
    name: str = ""


class Moves:
    """The calls of a plan, and the buffers that they touch. ``summary``: of the step as the plan recomputes it."""

    def __init__(self, summary: Summary, plan: Plan, machine: Machine) -> None:
        self.summary, self.plan, self.machine = summary, plan, machine
        self.buffers: list[Buffer] = []
        self.updates = plan.updates
        self.on_device = {home: plan.params(home) == "device" for home in {o.home for o in summary.operands if o.weights}}
        self.on_disk = {home for home in self.on_device if plan.params(home) == "disk"}
        self.calls: list[Call] = []
        count = len(summary.regions)
        self._before: list[list[Call]] = [[] for _ in range(count)]
        self._behind: list[list[Call]] = [[] for _ in range(count)]
        self._regions = [Call(COMPUTE, r.us, r.phase, workspace=r.workspace) for r in summary.regions]
        self._gradients: dict[int, _Gradients] = {}  # by identity of the call
        self._fetch()
        for position in range(count):
            self._make(position)
        self._in_order()

    def _buffer(self, kind: int, nbytes: int, slot: int, returned: bool = False, by_disk: bool = False) -> int:
        self.buffers.append(Buffer(kind, slot if kind else nbytes, returned, by_disk))
        return len(self.buffers) - 1

    def _first(self, position: int, ahead: int) -> int:
        """The position of the region before which a fetch is issued."""
        return max(position - ahead, self.summary.first_backward if self.summary.regions[position].phase else 0)

    def _away(self, operand: Operand) -> bool:
        return not self.on_device[operand.home] if operand.weights else operand.tier != "device"

    def _copied(self, together: Sequence[Operand | Leaving], queue: Queue) -> tuple[int, float]:
        """The bytes that cross of what is copied together, and the µs."""
        first = together[0] if isinstance(together[0], Operand) else together[0].of
        nbytes = sum([each.nbytes for each in together])
        if first is not None and (rows := first.rows) is not None:
            whole, crossing = (nbytes, rows.nbytes) if together[0] is first else (together[0].whole, together[0].crossing)
            return crossing, rows_us(self.machine, queue, rows.count, crossing, whole)
        return nbytes, self.machine.copy_us(nbytes, queue)

    # --------------------------------------------------------------------------------------------------------- fetches

    def _fetch(self) -> None:
        """Lists what comes in for each region, a copy per home."""
        plan, staying = self.plan, dict[int, int]()
        stays_home = {home: plan.stays(home) for home in self.on_device}
        for position, region in enumerate(self.summary.regions):
            call = self._regions[position]
            groups: dict[tuple[str, int, int], list[Operand]] = {}  # by home and fragments before; rows are apart
            counts: dict[str, int] = {}  # of the fragments of each home that this region fetches
            for operand in region.reads:
                if region.phase and operand.number in staying:
                    call.reads.append(staying[operand.number])
                elif self._away(operand):
                    before = 0
                    if operand.fragment:
                        before = counts[operand.home] = counts.get(operand.home, -1) + 1
                    apart = -1 if operand.rows is None else operand.number
                    groups.setdefault((operand.home, before, apart), []).append(operand)
                else:
                    call.inputs.append(operand.number)
            for (home, before, _), operands in groups.items():
                total, us = self._copied(operands, "h2d")
                stays = not region.phase and bool(home) and stays_home.get(home, False)
                kind = POOLED if plan.pooled or stays else ON_DEVICE
                fetch = Call(H2D, us, region.phase, copied=total)
                ahead = before + (0 if region.phase and plan.returns_late(home) else plan.lookahead)
                if home in self.on_disk and plan.disk_direct and operands[0].rows is None:
                    fetch.us = self.machine.copy_us(total, "direct")
                    fetch.inputs = [operand.number for operand in operands]
                    fetch.drive = total, 0
                elif home in self.on_disk:
                    fetch.reads = self._read(position, operands, ahead)
                else:
                    fetch.inputs = [operand.number for operand in operands]
                if stays:
                    for operand in operands:
                        staying[operand.number] = arrived = self._buffer(kind, *operand.there())
                        fetch.writes.append(arrived)
                else:
                    fetch.writes = self._by_role(kind, operands)
                call.reads += fetch.writes
                self._before[self._first(position, ahead)].append(fetch)

    def _read(self, position: int, operands: Sequence[Operand], ahead: int) -> list[int]:
        """A read from disk for a region, which fetches as many regions ``ahead``. Returns the buffers on the host that it
        fills."""
        nbytes, numbers = sum([operand.nbytes for operand in operands]), [operand.number for operand in operands]
        us = self.machine.copy_us(nbytes, "disk_read")
        read = Call(DISK_READ, us, self.summary.regions[position].phase, inputs=numbers, drive=(nbytes, 0))
        read.writes = self._by_role(ON_HOST, operands)
        self._before[self._first(position, ahead + self.plan.disk_lookahead)].append(read)
        return read.writes

    def _by_role(self, kind: int, operands: Sequence[Operand]) -> list[int]:
        """A buffer for the operands of each role: those are used together. On the host, a disk fills it."""
        by_role: dict[str, list[int]] = {}
        for operand in operands:
            sizes = by_role.setdefault(operand.role, [0, 0])
            nbytes, slot = (operand.nbytes, operand.read_slot) if kind == ON_HOST else operand.there()
            sizes[0] += nbytes
            sizes[1] += slot
        return [self._buffer(kind, *sizes, by_disk=kind == ON_HOST) for sizes in by_role.values()]

    # ---------------------------------------------------------------------------------------------- what regions make

    def _make(self, position: int) -> None:
        region, call = self.summary.regions[position], self._regions[position]
        by_readers: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for value in region.activations:
            if self.plan.activation(value.name) == "host":
                self._waits_at_home(position, value)
            else:
                sizes = by_readers.setdefault((value.readers, value.returned), [0, 0])
                sizes[0] += value.nbytes
                sizes[1] += value.slot
        for (readers, returned), sizes in by_readers.items():
            self._stays(call, readers, sizes[0], sizes[1], returned)
        for value in region.others:
            self._stays(call, value.readers, value.nbytes, value.slot, value.returned)
        if region.leaving:
            self._leave(position, region.leaving)

    def _stays(self, call: Call, readers: tuple[int, ...], nbytes: int, slot: int, returned: bool) -> int:
        buffer = self._buffer(POOLED, nbytes, slot, returned)
        call.writes.append(buffer)
        for reader in readers:
            self._regions[reader].reads.append(buffer)
        return buffer

    def _waits_at_home(self, position: int, value: Value) -> None:
        """A value that goes home behind its region, and comes back before later ones."""
        regions, machine = self.summary.regions, self.machine
        result = current = self._buffer(POOLED, value.nbytes, value.slot, value.returned)
        self._regions[position].writes.append(result)
        at_home, previous = -1, position
        for use in value.readers:
            same_phase = regions[previous].phase == regions[use].phase
            if not (use - previous <= 1 and (same_phase or current == result)):
                if at_home < 0:
                    at_home = self._buffer(ON_HOST, value.nbytes, value.slot)
                    us = machine.copy_us(value.nbytes, "d2h")
                    home = Call(D2H, us, regions[position].phase, [result], [at_home], copied=value.nbytes)
                    self._behind[position].insert(0, home)
                current = self._buffer(POOLED if self.plan.pooled else ON_DEVICE, value.nbytes, value.slot)
                us = machine.copy_us(value.nbytes, "h2d")
                back = Call(H2D, us, regions[use].phase, [at_home], [current], copied=value.nbytes)
                if regions[use].phase and self.plan.loads_late(value.name):
                    self._before[use].insert(0, back)
                else:
                    self._before[self._first(use, min(self.plan.lookahead, use - previous - 1))].append(back)
            self._regions[use].reads.append(current)
            previous = use

    def _leave(self, position: int, leaving: list[Leaving]) -> None:
        """Gradients and new buffers: a copy home per home, or an update on the device."""
        call, by_home, here = self._regions[position], dict[tuple[str, int], list[Leaving]](), _Gradients([], [])
        for entry in leaving:
            assert entry.of is not None
            if self._away(entry.of):
                apart = entry.of.number if entry.of.rows is not None else -1
                by_home.setdefault((entry.home, apart), []).append(entry)
            else:
                updated = entry.updates and self.updates is not None
                gradient = self._stays(call, entry.readers, entry.nbytes, entry.slot, not updated)
                if updated:
                    here.name = here.name or entry.name
                    here.operands.append(entry.of)
                    here.buffers.append(gradient)
        if here.operands:
            self._gradients[id(call)] = here
        copies = []
        for (home, _), entries in by_home.items():
            total, us = self._copied(entries, "d2h")
            copies.append(copy := Call(D2H, us, self.summary.regions[position].phase, copied=total))
            copy.early = self.plan.frees_early(home)
            gradients = _Gradients([], [])
            for entry in entries:
                assert entry.of is not None
                copy.reads.append(self._stays(call, entry.readers, entry.nbytes, entry.slot, False))
                if entry.updates and self.updates is not None:
                    gradients.name = gradients.name or entry.name
                    gradients.operands.append(entry.of)
            if gradients.operands:
                at_home = [entry.at_home() for entry in entries if entry.updates]
                sizes = sum([nbytes for nbytes, _ in at_home]), sum([slot for _, slot in at_home])
                gradients.buffers.append(self._buffer(ON_HOST, *sizes))
                copy.writes += gradients.buffers
                self._gradients[id(copy)] = gradients
        self._behind[position][:0] = copies

    # --------------------------------------------------------------------------------------------------------- updates

    def _in_order(self) -> None:
        """Lists the calls, and the updates where the plan wants them."""
        order: list[Call] = []
        for before, call, behind in zip(self._before, self._regions, self._behind, strict=True):
            order += before
            order.append(call)
            order += behind
        groups = [(place, self._gradients[id(call)]) for place, call in enumerate(order) if id(call) in self._gradients]
        if self.updates is None or not groups:
            self.calls = order
            return
        read_last: dict[int, int] = {}
        for place, call in enumerate(order):
            for operand in call.inputs:
                read_last[operand] = place
        end = len(order) - 1
        on_host = [place for place, _ in groups if order[place].queue == D2H]
        turns = dict(zip(on_host, later(on_host, self.updates.sets - 1), strict=True))
        ranks = {name: rank for rank, name in enumerate(self.updates.order)}
        late, after = list[tuple[int, _Gradients]](), dict[int, list[tuple[int, _Gradients]]]()
        for place, group in groups:
            if self.updates.patient and place in turns:
                late.append((place, group))
            else:
                reads = [read_last[operand.number] for operand in group.operands if operand.number in read_last]
                after.setdefault(max([turns.get(place, place), *reads]), []).append((place, group))
        if ranks:
            late.sort(key=lambda pair: ranks.get(pair[1].name, len(ranks)))
        after.setdefault(end, []).extend(late)
        for place, call in enumerate(order):
            self.calls.append(call)
            for source, group in after.get(place, ()) if place != end else ():
                self.calls.append(self._update(group, order[source].queue == D2H))
        self.calls += [self._update(group, order[source].queue == D2H) for source, group in after[end]]

    def _update(self, group: _Gradients, on_host: bool) -> Call:
        assert self.updates is not None
        nbytes = sum([operand.nbytes for operand in group.operands])
        on_disk = sum([operand.nbytes for operand in group.operands if operand.home in self.on_disk])
        workspace, us = update_cost(self.updates, self.machine, "host" if on_host else "compute", nbytes, on_disk)
        updated = [operand.number for operand in group.operands]
        call = Call(HOST if on_host else COMPUTE, us, 1, group.buffers, [], [], updated, workspace, update=group.name or "-")
        if on_disk:
            call.drive = (updated_on_disk_nbytes(self.updates, on_disk),) * 2
        return call
