"""Works out the measures of plans with the C files in c/, built at install. The structures are those of c/figures.h."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import and_
from pathlib import Path
from typing import Any, NamedTuple

from mtcompile.passes.analysis.cost import CROSSINGS, PASSES, Machine
from mtcompile.passes.analysis.rows import ROW_COPY_US
from mtcompile.passes.memo import remembered
from mtcompile.passes.plan import Choice, Plan, Updates
from mtcompile.passes.planning.figures.layout import COLLECTIVES, PER_LEAVING, Layout
from mtcompile.passes.planning.figures.summary import Summary
from mtcompile.runtime.libraries import built_library
from mtcompile.runtime.schedule import ALIGNMENT

_VERSION = 13  # of the interface of c/
ON_DEVICE, ON_HOST, ON_DISK = 1, 2, 3  # kinds of slots
_QUEUES = "compute", "h2d", "d2h", "host", "disk_read", "disk_write", "network"
_BITS = {  # of what is decided about a home
    **{("params", "device"): 1, ("params", "disk"): 2, ("fetch", "keep"): 4},
    **{("return", "late"): 8, ("gradients", "early"): 16, ("update", "device"): 32},
}
_KINDS = "params", "fetch", "return", "gradients", "update"
_NO_UPDATES = Updates()


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Step(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "regions operands homes first_backward tangents"),
        *_fields(ctypes.c_void_p, "region us reads readers operand value leaving"),
    )


class _Costs(ctypes.Structure):
    _fields_ = (
        *(("gbps", ctypes.c_double * len(_QUEUES)), ("scale", ctypes.c_double * len(_QUEUES))),
        *_fields(ctypes.c_double, "direct_gbps direct_scale host_gbps row_us passes updating_gbps memory_gbps"),
        *_fields(ctypes.c_double, "on_disk_copies workspace_copies norm_copies network_gbps"),
        *_fields(ctypes.c_int64, "streamed"),
        *_fields(ctypes.c_int64 * len(COLLECTIVES), "through_host crossings"),
        *_fields(ctypes.c_int64, "hosts gathering_ranks alignment"),
    )


class _Choices(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "lookahead disk_lookahead disk_direct pooled updates patient sets run_ahead held"),
        *_fields(ctypes.c_void_p, "home waits rank alphabet"),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        *(("arenas", ctypes.c_int64 * 4), ("most", ctypes.c_int64), ("copied", ctypes.c_int64 * 2)),
        *(("read", ctypes.c_int64 * 2), ("written", ctypes.c_int64 * 2), *_fields(ctypes.c_int64, "updates casts")),
        *_fields(ctypes.c_double, "alone backward period collectives"),
        ("order", ctypes.c_void_p),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the library. Raises ImportError if it was not built here, or was built from other sources."""
    path = built_library(Path(__file__).with_name("_figures"))
    try:
        found = "none" if path is None else ctypes.CDLL(str(path))
    except OSError as error:  # built for another system
        found = str(error)
    if not isinstance(found, str) and (version := found.mt_figures_version()) != _VERSION:
        found = f"version {version}, which was built from other sources"
    if isinstance(found, str):
        raise ImportError(
            f"expected version {_VERSION} of mtcompile's C library, which plans need, found {found}. Build it with a C "
            "compiler: install mtcompile again, or, in a checkout, run pip install -e . or python setup.py build_ext --inplace"
        )
    kinds = _Step, _Costs, _Choices, _Result
    found.mt_figures.argtypes = [ctypes.POINTER(kind) for kind in kinds]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Measures:
    """The needs of a plan's calls, and the time that they take: bytes of the ``arenas`` by kind and of all else on the device,
    at ``most``; µs of forward and backward and of the ``backward``, both as if updates took no time, and from one step to the
    next (``period``), and those of ``collectives``; bytes that are ``copied``, and that are read from disk and written there
    (``drives``), both in a step and in its backward; ``casts``: whether the host casts anything in the backward;
    ``due_first``: the updates on the host in the order in which they are due (see ``pace``)."""

    arenas: Sequence[int]
    most: int
    alone: float
    backward: float
    period: float
    collectives: float
    copied: tuple[int, int]
    drives: tuple[tuple[int, int], tuple[int, int]]
    casts: bool
    due_first: Callable[[], tuple[str, ...]]


class CompiledSteps:
    """Summaries of one step as C reads them, and what plans decide about it. ``hosts``: how many train it together."""

    def __init__(self, machine: Machine, hosts: int) -> None:
        self.library, self.machine, self.hosts, self.layout = library(), machine, hosts, Layout()
        self._choices: dict[object, tuple[array[int], array[int]]] = {}  # by the token of decisions: plans differ in a few
        self._numbered: tuple[int, ...] = ()
        self._ranks: dict[tuple[str, ...], array[int]] = {}  # of names of updates, by their order
        self._costs: dict[object, _Costs] = {}
        self._names: Sequence[str] = ()
        self._alphabet: array[int] = array("q")

    def step(self, summary: Summary) -> CompiledStep:
        """Lays out a summary."""
        tables, layout = self.layout.tables(summary), self.layout
        if (numbered := layout.numbered()) != self._numbered:  # what is known says nothing of what had no number
            self._numbered, self._choices, self._ranks, self._names = numbered, {}, {}, list(layout.leaving)
            self._alphabet = array("q", self._names and _inverse(sorted(range(len(self._names)), key=self.name)))
        counts = len(summary.regions), len(summary.operands), numbered[0], summary.first_backward, summary.tangents
        return CompiledStep(self, _Step(*counts, *map(_address, tables)), tables)

    def name(self, number: int) -> str:
        """Returns the name of an update by its number."""
        return self._names[number] or "-"

    def ordered(self, updates: Updates | None) -> tuple[array[int], array[int]]:
        """Returns by name of an update its rank among those that have an order, and its place in the alphabet."""
        order, count = () if updates is None else updates.order, len(self._names)

        def ranks() -> array[int]:
            by_name = dict(zip(order, range(len(order)), strict=True))
            return array("q", [by_name.get(name, len(order)) for name in self._names] if order else bytes(8 * count))

        return remembered(self._ranks, order, ranks), self._alphabet

    def choices(self, plan: Plan) -> tuple[array[int], array[int]]:
        """Returns what ``_decided`` does, from the choices of a plan that this one was made of, if these are known."""
        known = self._choices

        def chosen() -> tuple[array[int], array[int]]:
            origin = next(((known[of], changed) for of, changed in plan.decisions.origins if of in known), None)
            return self._decided(plan) if origin is None else self._changed(plan, *origin)

        return remembered(known, plan.decisions.token, chosen)

    def _changed(
        self, plan: Plan, choices: tuple[array[int], array[int]], changed: Iterable[tuple[str, str]]
    ) -> tuple[array[int], array[int]]:
        """Returns what ``_decided`` does. ``choices``: of a plan that differs in what is ``changed``, by kind and subject."""
        homes, waits = array("B", choices[0]), array("B", choices[1])
        for kind, subject in changed:
            if kind in _KINDS and (number := self.layout.homes.get(subject)) is not None:
                bits = (_BITS.get((each, choice), 0) for each in _KINDS for choice in plan.choices(each, (subject,)))
                homes[number] = sum(bits) & self.layout.masks[number]
            elif subject == "*":
                return self._decided(plan)
            elif (number := self.layout.activations.get(subject)) is not None:
                waits[number] = _waits(plan.activation(subject), plan.loads_late(subject))
        return homes, waits

    def _decided(self, plan: Plan) -> tuple[array[int], array[int]]:
        """Returns what a plan decides about each home, and by name of an activation, where it waits."""
        homes = [0] * len(self.layout.homes)
        for kind in _KINDS:
            for number, choice in enumerate(plan.choices(kind, self.layout.homes)):
                homes[number] |= _BITS.get((kind, choice), 0)
        otherwise, names = plan.activation("*"), self.layout.activations
        loads = zip(plan.choices("activation", names), plan.choices("load", names), strict=True)
        waits = [_waits(otherwise if choice is None else choice, load == "late") for choice, load in loads]
        return array("B", map(and_, homes, self.layout.masks)), array("B", waits)

    def costs(self, updates: Updates) -> _Costs:
        key = updates.state_copies, updates.workspace_copies, updates.checked, updates.norm_copies, updates.streamed
        if key not in self._costs:
            machine, count = self.machine, len(_QUEUES)
            gbps, kinds = map(machine.gbps, _QUEUES), COLLECTIVES[1:]
            passes = 3 + updates.checked + 2 * updates.state_copies
            self._costs[key] = _Costs(
                *((ctypes.c_double * count)(*gbps), (ctypes.c_double * count)(*map(machine.scale, _QUEUES))),
                *(machine.gbps("direct"), machine.scale("direct"), machine.host_gbps, ROW_COPY_US),
                *(passes, machine.updating_gbps, machine.memory_gbps),
                *(1 + updates.state_copies, updates.workspace_copies, updates.norm_copies, machine.network_gbps),
                updates.streamed,
                *((ctypes.c_int64 * len(COLLECTIVES))(0, *map(table.__getitem__, kinds)) for table in (PASSES, CROSSINGS)),
                *(self.hosts, machine.gathering_ranks(self.hosts), ALIGNMENT),
            )
        return self._costs[key]


class CompiledStep(NamedTuple):
    """A summary as C reads it."""

    steps: CompiledSteps
    step: _Step
    tables: Sequence[array[int] | array[float]]  # that the step points into

    def measures(self, plan: Plan) -> Measures:
        """Works out the measures of a plan. Raises MemoryError."""
        updates, steps = plan.updates, self.steps
        decided = *steps.choices(plan), *steps.ordered(updates)
        order = array("q", bytes(8 * (len(self.tables[-1]) // PER_LEAVING)))
        when = (False, False, 2, False, False)
        if updates is not None:
            when = True, updates.patient, updates.sets, bool(updates.run_ahead), updates.held
        ahead = plan.lookahead, plan.disk_lookahead, plan.disk_direct
        choices = _Choices(*ahead, plan.pooled, *when, *map(_address, decided))
        result = _Result(order=_address(order))
        if steps.library.mt_figures(self.step, steps.costs(updates or _NO_UPDATES), choices, result):
            raise MemoryError("expected memory for the figures of a plan, found none; close other programs")
        drives = (result.read[0], result.written[0]), (result.read[1], result.written[1])
        spans, count = (result.alone, result.backward, result.period, result.collectives), result.updates

        def due_first() -> tuple[str, ...]:
            return tuple(map(steps.name, order[:count]))

        return Measures(result.arenas, result.most, *spans, tuple(result.copied), drives, bool(result.casts), due_first)


def _waits(choice: Choice, late: bool) -> int:
    """Returns where an activation waits, and how it comes back, as C reads it."""
    return 3 if choice == "disk" else (choice == "host") * (1 + late)


def _inverse(places: Sequence[int]) -> list[int]:
    """Returns by number its place among ``places``."""
    inverse = [0] * len(places)
    for place, number in enumerate(places):
        inverse[number] = place
    return inverse


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


library()  # if it cannot be loaded, the import fails, rather than a model's first step
