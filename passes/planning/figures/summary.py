"""The summary of a step: its regions with their times and bytes, once they recompute what a plan says.

Values that are alike (the same bytes to move, the same readers) are one entry, so a summary has several times fewer entries
than the step graph has values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mtcompile.passes.analysis.cost import Machine, kernel_us
from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.lower import Workspace
from mtcompile.passes.planning.figures.sketch import Sketch
from mtcompile.passes.step_graph import InputSpec, inputs_of, is_region, outputs_of
from mtcompile.runtime.schedule import PHASES, aligned, placed


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

    def there(self) -> tuple[int, int]:
        """The bytes on the device, in the allocator and in a slot."""
        if self.rows is None:
            return self.nbytes, self.slot
        nbytes = aligned(self.rows.held_nbytes)
        return nbytes, placed(nbytes)


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
    of; ``name``: the first of these; ``updates``: they are updated with them; of a gradient in rows, ``crossing``: bytes of
    those that cross, and ``whole``: its bytes at home."""

    readers: tuple[int, ...] = ()
    home: str = ""
    of: Operand | None = None
    updates: bool = False
    name: str = ""
    crossing: int = 0
    whole: int = 0

    def at_home(self) -> tuple[int, int]:
        """The bytes at home, in the allocator and in a slot."""
        return (self.whole, placed(self.whole)) if self.whole else (self.nbytes, self.slot)


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


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """The inputs and outputs of a step. ``leaving``: values -> their place among the outputs, home and input, and whether
    they update it. ``returned``: values that the caller receives. ``tangents``: bytes of these."""

    homes: Mapping[str, str]
    inputs: Sequence[tuple[InputSpec, fx.Node]]
    rows: Mapping[str, Rows]
    leaving: Mapping[fx.Node, tuple[int, str, fx.Node, bool]]
    returned: frozenset[fx.Node]
    tangents: int


def outline_of(draft: fx.GraphModule) -> Outline:
    """Returns the outline of a draft before anything moves. Raises Unsupported."""
    homes: Mapping[str, str] = draft.meta["homes"]
    wanted = draft.meta.get("updated")
    inputs = inputs_of(draft)
    by_index = {spec.index: (spec, node) for spec, node in inputs if spec.index >= 0 and spec.role != "tangent"}
    leaving: dict[fx.Node, tuple[int, str, fx.Node, bool]] = {}
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
    if returned & leaving.keys():
        raise Unsupported("a result that is a gradient too")
    tangents = [n.meta["nbytes"] for _, n in inputs if n.meta["role"] == "tangent" and n.meta["tier"] == "device"]
    return Outline(homes, inputs, draft.meta.get("rows") or {}, leaving, frozenset(returned), sum(tangents))


def summary_of(sketch: Sketch, outline: Outline, machine: Machine, workspace: Workspace) -> Summary:
    """Summarises a step that recomputes what a plan says, before anything moves. ``outline``: of the sketch's graph."""
    readers_of: dict[Any, list[int]] = {}
    makers: dict[fx.Node, list[int]] = {}  # parameters -> the regions that make gradients of them
    for position, region in enumerate(sketch.regions):
        for value in dict.fromkeys(region.reads):
            readers_of.setdefault(value, []).append(position)
        for value in region.makes:
            if value in outline.leaving and outline.leaving[value][3]:
                makers.setdefault(outline.leaving[value][2], []).append(position)
    operands = _operands(outline, readers_of, makers)

    summarised = []
    for region in sketch.regions:
        reads = dict.fromkeys([operands[node] for node in region.reads if node in operands])
        activations: list[Value] = []
        others: dict[tuple[object, ...], Value] = {}
        going: dict[tuple[object, ...], Leaving] = {}
        places: dict[Leaving, int] = {}
        for item in region.makes:
            readers = tuple(readers_of.get(item, ()))
            nbytes, role = item.meta["nbytes"], item.meta["role"]
            if item in outline.leaving:
                place, home, node, updates = outline.leaving[item]
                key = (home, operands[node].number, updates, readers)
                entry = going.setdefault(key, Leaving(0, 0, readers, home, operands[node], updates))
                entry.add(nbytes)
                if (rows := operands[node].rows) is not None:
                    row_nbytes = item.meta["val"].shape[1] * item.meta["val"].element_size()
                    entry.crossing, entry.whole = rows.count * row_nbytes, aligned(rows.rows * row_nbytes)
                if place < places.get(entry, place + 1):
                    places[entry], entry.name = place, node.name
            elif role == "activation":
                name = "" if region.renamed else item.name
                activations.append(activation := Value(0, 0, readers, name, item in outline.returned))
                activation.add(nbytes)
            else:
                key = (role, readers, item in outline.returned)
                others.setdefault(key, Value(0, 0, readers, "", item in outline.returned)).add(nbytes)
        about = PHASES.index(region.phase), kernel_us(region.kernel, machine), workspace(region.kernel)
        summarised.append(
            Region(*about, list(reads), activations, list(others.values()), sorted(places, key=places.__getitem__))
        )
    first = next((position for position, region in enumerate(summarised) if region.phase), len(summarised))
    return Summary(summarised, list(dict.fromkeys(operands.values())), outline.tangents, first)


def _operands(
    outline: Outline, readers_of: Mapping[Any, Sequence[int]], makers: Mapping[fx.Node, Sequence[int]]
) -> dict[fx.Node, Operand]:
    """Returns the operand that each input of a step is part of."""
    operands: dict[fx.Node, Operand] = {}
    alike: dict[tuple[object, ...], Operand] = {}
    for given, node in outline.inputs:
        meta = node.meta
        home = outline.homes.get(given.name)
        weights = given.role == "param" and home is not None
        by_rows = outline.rows.get(given.name) if given.role == "param" else None
        about_home = outline.homes.get(meta["name"], "")
        users = tuple(readers_of.get(node, ())), tuple(makers.get(node, ()))
        key = (about_home, meta["role"], meta["tier"], weights, home, users, by_rows and node)
        if key not in alike:
            alike[key] = Operand(0, 0, len(alike), about_home, str(meta["role"]), str(meta["tier"]), weights, by_rows)
        operands[node] = alike[key]
        alike[key].add(meta["nbytes"])
    return operands
