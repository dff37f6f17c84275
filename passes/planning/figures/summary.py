"""The summary of a step: its regions with their times and bytes, once they recompute what a plan says.

Values that are alike (the same bytes to move, the same readers) are one entry, so a summary has several times fewer entries
than the step graph has values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from mtcompile.passes.analysis.cost import Machine, kernel_us
from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.lower import Workspace
from mtcompile.passes.step_graph import inputs_of, is_region, kernel_of, outputs_of, regions, results
from mtcompile.runtime.schedule import PHASES, placed


class Unsupported(Exception):
    """Raised for a step or plan of which only the schedule itself tells the figures."""


@dataclass(slots=True, eq=False)
class Size:
    """Bytes of values that are alike: in the allocator, and one behind the other in a slot."""

    nbytes: int = 0
    slot: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.slot += placed(nbytes)


@dataclass(slots=True, eq=False)
class Operand(Size):
    """Inputs of the step that are alike: of one home, role and tier, read by the same regions, with gradients of the same
    region. ``number``: their position in the summary. ``rows``: of a parameter of which only rows cross, these."""

    number: int = 0
    home: str = ""
    role: str = ""
    tier: str = ""
    weights: bool = False  # parameters, whose tier the plan decides
    rows: Rows | None = None


@dataclass(slots=True, eq=False)
class Value(Size):
    """Values that a region makes. ``readers``: positions of the regions that read them. ``name``: of a single activation, which
    a plan may send home; ``returned``: the caller receives them."""

    readers: tuple[int, ...] = ()
    name: str = ""
    returned: bool = False


@dataclass(slots=True, eq=False)
class Leaving(Size):
    """Gradients or new buffers that a region makes and that go home if that is on the host. ``of``: the inputs that they are
    of; ``name``: the first of these; ``updates``: they are updated with them."""

    readers: tuple[int, ...] = ()
    home: str = ""
    of: Operand | None = None
    updates: bool = False
    name: str = ""


@dataclass(slots=True, eq=False)
class Region:
    """A region: ``us`` it takes, bytes of ``workspace``, ``reads`` of inputs, and what it makes: ``activations``, ``others``
    and what is ``leaving``, in the order of the outputs."""

    phase: int
    us: float
    workspace: int
    reads: list[Operand]
    activations: list[Value]
    others: list[Value]
    leaving: list[Leaving]


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """The regions of a step in order, its ``operands``, and the bytes of its ``tangents``. ``first_backward``: the position of
    the first region of the backward."""

    regions: list[Region]
    operands: list[Operand]
    tangents: int
    first_backward: int


def summary_of(draft: fx.GraphModule, machine: Machine, workspace: Workspace) -> Summary:
    """Summarises a draft that recomputes what a plan says, before anything moves. Raises Unsupported."""
    order = {region: position for position, region in enumerate(regions(draft))}
    homes: Mapping[str, str] = draft.meta["homes"]
    wanted = draft.meta.get("updated")
    inputs = inputs_of(draft)
    by_index = {spec.index: (spec, node) for spec, node in inputs if spec.index >= 0 and spec.role != "tangent"}
    makers: dict[fx.Node, list[fx.Node]] = {}  # parameters, and the values that are gradients of them
    leaving: dict[fx.Node, tuple[int, str, fx.Node, bool]] = {}  # values: place, home, input, whether they update it
    returned = set()
    for place, (spec, value) in enumerate(outputs_of(draft)):
        if spec.kind == "output":
            returned.add(value)
            continue
        if spec.kind == "update" or value in leaving or value.op == "placeholder" or not is_region(value.args[0]):
            raise Unsupported(spec.kind)
        about, node = by_index[spec.index]
        updates = spec.kind == "grad" and about.role == "param" and (wanted is None or about.name in wanted)
        leaving[value] = place, homes.get(spec.name, ""), node, updates
        if updates:
            makers.setdefault(node, []).append(value.args[0])
    if returned & leaving.keys():
        raise Unsupported("a result that is a gradient too")

    operands: dict[fx.Node, Operand] = {}
    alike: dict[tuple[object, ...], Operand] = {}
    tangents, rows = 0, draft.meta.get("rows") or {}
    for given, node in inputs:
        meta = node.meta
        if meta["role"] == "tangent" and meta["tier"] == "device":
            tangents += meta["nbytes"]
        home = homes.get(given.name)
        readers = frozenset(user for user in node.users if user in order)
        weights = given.role == "param" and home is not None
        by_rows = rows.get(given.name) if given.role == "param" else None
        about_home = homes.get(meta["name"], "")
        key = (about_home, meta["role"], meta["tier"], weights, home, readers, tuple(makers.get(node, ())), by_rows and node)
        if key not in alike:
            alike[key] = Operand(0, 0, len(alike), about_home, str(meta["role"]), str(meta["tier"]), weights, by_rows)
        operands[node] = alike[key]
        alike[key].add(meta["nbytes"])

    summarised = []
    for region in order:
        kernel = kernel_of(draft, region)
        reads = dict.fromkeys(operands[node] for node in region.all_input_nodes if node in operands)
        activations: list[Value] = []
        others: dict[tuple[object, ...], Value] = {}
        going: dict[tuple[object, ...], Leaving] = {}
        places: dict[Leaving, int] = {}
        for item in results(region):
            readers = tuple(sorted(order[user] for user in item.users if user in order))
            nbytes, role = item.meta["nbytes"], item.meta["role"]
            if item in leaving:
                place, home, node, updates = leaving[item]
                key = (home, operands[node].number, updates, readers)
                entry = going.setdefault(key, Leaving(0, 0, readers, home, operands[node], updates))
                entry.add(nbytes)
                if place < places.get(entry, place + 1):
                    places[entry], entry.name = place, node.name
            elif role == "activation":
                activations.append(activation := Value(0, 0, readers, item.name, item in returned))
                activation.add(nbytes)
            else:
                key = (role, readers, item in returned)
                others.setdefault(key, Value(0, 0, readers, "", item in returned)).add(nbytes)
        phase = PHASES.index(region.meta["phase"])
        about_region = phase, kernel_us(kernel, machine), workspace(kernel)
        summarised.append(
            Region(*about_region, list(reads), activations, list(others.values()), sorted(places, key=places.__getitem__))
        )
    first = next((position for position, region in enumerate(summarised) if region.phase), len(summarised))
    return Summary(summarised, list(alike.values()), tangents, first)
