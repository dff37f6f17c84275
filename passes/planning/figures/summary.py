"""The summary of a step: its regions with their times and bytes, once they recompute what a plan says.

Values that are alike (the same bytes to move, the same readers) are one entry, so a summary has several times fewer entries
than the step graph has values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from mtcompile.passes.analysis.cost import Machine, kernel_us
from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.analysis.slices import read_by_slices
from mtcompile.passes.analysis.state import Budgets, crossing_alone, streamable
from mtcompile.passes.lower import Workspace
from mtcompile.passes.memo import remembered
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.figures.casts import Fetch, Narrowed, narrowed, nbytes_of
from mtcompile.passes.planning.figures.drawn import Drawn, Placed
from mtcompile.passes.planning.figures.sketch import Sketch
from mtcompile.passes.rewrites.collectives import collective_of, share_of
from mtcompile.passes.step_graph import InputSpec, inputs_of, is_region, outputs_of, placeholders, ranks_of
from mtcompile.runtime.schedule import PHASES, aligned, placed


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
    region. ``rows``: of a parameter of which only rows cross, these. ``fragment``: it is a fragment of a parameter.
    ``gathered``: by what collective hosts that have parts of it make it whole; empty: by none. ``alone``: its state crosses by
    itself for an update on the device."""

    home: str = ""
    role: str = ""
    tier: str = ""
    weights: bool = False  # parameters, whose tier the plan decides
    rows: Rows | None = None
    fragment: bool = False
    gathered: str = ""
    alone: bool = False
    read_slot: int = 0  # bytes of a slot on the host that a disk fills

    def add(self, nbytes: int) -> None:
        Size.add(self, nbytes)
        self.read_slot += placed(nbytes, by_disk=True)

    def there(self) -> tuple[int, int]:
        """The bytes on the device, in the allocator and in a slot."""
        if self.rows is None:
            return self.nbytes, self.slot
        nbytes = aligned(self.rows.held_nbytes)
        return nbytes, placed(nbytes)


@dataclass(slots=True, eq=False)
class Value(Size):
    """Values that a region makes. ``readers``: positions of the regions that read them. ``name``: of a single activation, which
    a plan may send home; ``returned``: the caller receives them; ``apart``: none is like it, as copies may read it too.
    ``cast``: the input whose cast waits at home in its place, and the region that it was fetched for; ``unmade``: its region
    makes it no longer then."""

    readers: tuple[int, ...] = ()
    name: str = ""
    returned: bool = False
    apart: bool = False
    cast: tuple[int, Operand] | None = None
    unmade: bool = False


@dataclass(slots=True, eq=False)
class Leaving(Size):
    """Gradients or new buffers that a region makes and that go home if that is on the host. ``of``: the inputs that they are
    of; ``name``: the first of these; ``updates``: they are updated with them; of a gradient in rows, ``crossing``: bytes of
    those that cross, and ``whole``: its bytes at home. ``count``: of these values, which are ``wide`` if they have 8 bytes an
    element; ``returned``: the caller receives them too; ``collective``: what combines them over ranks, and ``share``: what one
    rank has of them then, where it is not all. ``narrow``: at home before the host widens it to ``widened``, if it does."""

    readers: tuple[int, ...] = ()
    home: str = ""
    of: Operand | None = None
    updates: bool = False
    name: str = ""
    crossing: int = 0
    whole: int = 0
    count: int = 0
    wide: bool = False
    returned: bool = False
    collective: str = ""
    share: Size | None = None
    narrow: Size | None = None
    widened: Size | None = None

    def at_home(self) -> tuple[int, int]:
        """The bytes at home, in the allocator and in a slot."""
        size = self.widened or self
        return (self.whole, placed(self.whole)) if self.whole else (size.nbytes, size.slot)

    def combined(self) -> tuple[int, int]:
        """The bytes at home once ranks have combined them."""
        return self.at_home() if self.share is None else (self.share.nbytes, self.share.slot)


@dataclass(slots=True, eq=False)
class Region:
    """A region: ``us`` it takes, bytes of ``workspace``, ``reads`` of inputs, and what it makes: ``activations``, ``others``
    and what is ``leaving``, in the order of the outputs. ``ends``: of inputs that it reads by slices, the values that say where
    their rows end; ``places``: of each value that it makes, among activations and others. ``narrow``: of inputs that the host
    casts for it, what comes in; ``unread``: those that it then needs no more, and ``unfetched``, that nothing does; ``gone``:
    nothing is left of it. ``memo``: what is known of it."""

    phase: int
    us: float
    workspace: int
    reads: list[Operand]
    activations: list[Value]
    others: list[Value]
    leaving: list[Leaving]
    ends: dict[Operand, Any]
    places: dict[Any, int]
    narrow: dict[Operand, Size] = field(default_factory=dict)
    unread: frozenset[Operand] = frozenset()
    unfetched: frozenset[Operand] = frozenset()
    gone: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)


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
    """The inputs and outputs of a step. ``inputs``: with what operands of one summary share. ``leaving``: values -> their place
    among the outputs, home and input, whether they update it, and what combines them over ranks. ``sliced``: parameters that
    are fetched by slices; ``ranks``: how many run the step together. ``returned``: values that the caller receives.
    ``tangents``: bytes of these. ``operands``: of all summaries, by what is alike and the inputs; ``reading``: those of inputs,
    and each of them once, by what reads them."""

    inputs: Mapping[fx.Node, _About]
    leaving: Mapping[fx.Node, _Leaves]
    returned: frozenset[fx.Node]
    tangents: int
    sliced: frozenset[fx.Node]
    ranks: int
    operands: dict[tuple[object, ...], Operand] = field(default_factory=dict)
    reading: dict[object, tuple[dict[fx.Node, Operand], list[Operand]]] = field(default_factory=dict)


class _About(NamedTuple):
    """An input: where it belongs, what it is, whether it is a parameter whose tier the plan decides, and the rows of it that
    cross. ``apart``: the input itself if none other can be like it; ``fragment``: it is one of a parameter; ``gathered``: as of
    an operand."""

    home: str
    role: str
    tier: str
    weights: bool
    named: str | None
    apart: fx.Node | None
    rows: Rows | None
    fragment: bool
    gathered: str
    alone: bool


class _Leaves(NamedTuple):
    """A value that leaves the step: its place among the outputs, the home and the input that it is of, whether it updates that,
    and what combines it over ranks."""

    place: int
    home: str
    of: fx.Node
    updates: bool
    collective: str


class _Made(NamedTuple):
    """A value that a region makes. ``leaving``: as in an outline."""

    value: Any
    role: str
    nbytes: int
    slot: int
    returned: bool
    leaving: _Leaves | None


class _Shape(NamedTuple):
    """The inputs that a region reads, each once, its results that stay in the step, or leave it, and the parameters of which
    these are gradients that update them. ``nodes``: the inputs, and those that what leaves is of. ``ends``: of inputs that it
    reads by slices, the values that say where their rows end."""

    inputs: Sequence[fx.Node]
    stays: Sequence[_Made]
    leaves: Sequence[_Made]
    updated: tuple[fx.Node, ...]
    nodes: Sequence[fx.Node]
    ends: Mapping[fx.Node, Any]


def outline_of(step: fx.GraphModule, budgets: Budgets) -> Outline:
    """Returns the outline of a step before anything moves."""
    homes: Mapping[str, str] = step.meta["homes"]
    wanted = step.meta.get("updated")
    inputs = inputs_of(step)
    by_index = {spec.index: (spec, node) for spec, node in inputs if spec.index >= 0 and spec.role != "tangent"}
    leaving: dict[fx.Node, _Leaves] = {}
    ranks = ranks_of(step) if any(spec.kind == "grad" for spec, _ in outputs_of(step)) else 1
    returned = set()
    for place, (spec, value) in enumerate(outputs_of(step)):
        if spec.kind == "output":
            returned.add(value)
            continue
        assert value not in leaving and is_region(value.args[0]), f"expected a region's own result as {spec}, found {value}"
        about, node = by_index[spec.index]
        updates = spec.kind == "grad" and about.role == "param" and (wanted is None or about.name in wanted)
        target = None if ranks == 1 else collective_of(step, budgets.updates, spec, (about, node), value)
        leaving[value] = _Leaves(place, homes.get(spec.name, ""), node, updates, "" if target is None else target.__name__)
    tangents = [n.meta["nbytes"] for _, n in inputs if n.meta["role"] == "tangent" and n.meta["tier"] == "device"]
    sliced = frozenset(node for spec, node in inputs if spec.role == "param" and spec.name in (step.meta.get("sliced") or ()))
    return Outline(_inputs(step, inputs, budgets), leaving, frozenset(returned), sum(tangents), sliced, ranks)


def _inputs(step: fx.GraphModule, inputs: Sequence[tuple[InputSpec, fx.Node]], budgets: Budgets) -> dict[fx.Node, _About]:
    sharded = () if budgets.updates is None or step.meta.get("hosts", 1) == 1 else budgets.updates.sharded
    sliced = step.meta.get("sliced") or ()
    homes: Mapping[str, str] = step.meta["homes"]
    by_name: Mapping[str, Rows] = step.meta.get("rows") or {}
    about: dict[fx.Node, _About] = {}
    streaming = set(streamable(step, budgets))
    large = crossing_alone(step) if streaming else ()
    for given, node in inputs:
        meta, named = node.meta, homes.get(given.name)
        rows = by_name.get(given.name) if given.role == "param" else None
        weights = given.role == "param" and named is not None
        place = homes.get(meta["name"], ""), str(meta["role"]), str(meta["tier"])
        fragment = given.fragment is not None
        alone = weights and named in streaming and given.name in large
        apart = node if fragment or rows is not None or given.name in sliced or alone else None
        of_parts = weights and named in budgets.parts
        gathered = "all_gather of parts" if of_parts else "all_gather" if weights and named in sharded else ""
        about[node] = _About(*place, weights, named, apart, rows, fragment, gathered, alone)
    return about


def summary_of(
    sketch: Sketch, outline: Outline, machine: Machine, workspace: Workspace, casting: Plan | None = None
) -> Summary:
    """Summarises a step that recomputes what a plan says, before anything moves. ``outline``: of the sketch's graph.
    ``casting``: the plan, if its host casts. Summaries share regions that are alike."""
    shapes = [_shape_of(each.region, outline) for each in sketch.regions]
    readers, less = sketch.readers, list[Narrowed | None]([None] * len(shapes))
    used: tuple[object, ...] = tuple([readers.get(node, ()) for node in outline.inputs]), tuple([s.updated for s in shapes])
    used = *used, tuple([readers.get(made.value, ()) for shape in shapes for made in shape.leaves])
    if casting is not None:
        less = narrowed(sketch.graph, sketch.regions, casting, *_crossing(sketch, shapes, outline, casting), outline.returned)
        used = *used, tuple([each and each.key() for each in less])
    operands, each_once = remembered(outline.reading, used, lambda: _operands(outline, readers, shapes, less))
    summarised = list[Region]()
    for each, shape, narrow in zip(sketch.regions, shapes, less, strict=True):
        if each.last[0] is not operands:  # most summaries share these with the one before
            of = tuple([operands[node] for node in shape.nodes])
            make = partial(_summarised, each, shape, of, narrow, outline, machine, workspace)
            each.last = operands, remembered(each.memo, (of, narrow and narrow.key()), make)
        summarised.append(each.last[1])
    first = next((position for position, region in enumerate(summarised) if region.phase), len(summarised))
    return Summary(summarised, each_once, outline.tangents, first)


def _crossing(
    sketch: Sketch, shapes: Sequence[_Shape], outline: Outline, plan: Plan
) -> tuple[dict[fx.Node, list[Fetch]], list[dict[str, list[fx.Node]]]]:
    """Returns what may cross narrow: inputs, each with the regions that it is fetched for, and what leaves each region."""

    def tier(node: fx.Node) -> str:
        about = outline.inputs[node]
        return plan.params(about.named) if about.named is not None and about.weights else about.tier

    def may(node: fx.Node, about: _About) -> bool:  # what buffers become is the step's, and parts are gathered first
        whole = about.rows is None and about.role != "buffer" and about.gathered != "all_gather of parts"
        return whole and about.home not in plan.wide and tier(node) == "host"

    narrow = {node for node, about in outline.inputs.items() if may(node, about)}
    fetched, staying = dict[fx.Node, list[tuple[int, list[int]]]](), dict[fx.Node, list[int]]()
    leaving = list[dict[str, list[fx.Node]]]()
    for position, (each, shape) in enumerate(zip(sketch.regions, shapes, strict=True)):
        backward = each.region.phase == PHASES[1]
        for node in shape.inputs:
            if backward and node in staying:
                staying[node].append(position)
            elif node in narrow and node not in shape.ends:
                fetched.setdefault(node, []).append((position, [position]))
                if not backward and (home := outline.inputs[node].home) and plan.stays(home):
                    staying[node] = fetched[node][-1][1]
        used, by_home = dict(zip(each.region.makes, each.readers, strict=True)), dict[str, list[fx.Node]]()
        for made in sorted(shape.leaves, key=lambda made: made.leaving.place):
            goes = made.leaving
            leaves = tier(goes.of) != "device" and not (goes.updates and plan.streams(goes.home))
            if leaves and goes.home not in plan.wide and outline.inputs[goes.of].rows is None:
                alone = made.role == "grad" and not made.returned and not used[made.value]
                by_home.setdefault(goes.home, []).extend([made.value] if alone else [])
        leaving.append(by_home)
    return {node: [(place, tuple(users)) for place, users in each] for node, each in fetched.items()}, leaving


def _shape_of(region: Drawn, outline: Outline) -> _Shape:
    if "shape" not in region.memo:
        results = []
        for value in region.makes:
            nbytes = value.meta["nbytes"]
            about = value, value.meta["role"], nbytes, placed(nbytes), value in outline.returned
            results.append(_Made(*about, outline.leaving.get(value)))
        inputs, ends = [value for value in dict.fromkeys(region.reads) if value in outline.inputs], dict[fx.Node, Any]()
        if not outline.sliced.isdisjoint(inputs):
            body = region.kernel.graph
            given = dict(zip(placeholders(body), region.reads, strict=True))
            ends = {given[node]: given[end] for node, end in read_by_slices(body).items() if end in given}
            ends = {node: end for node, end in ends.items() if node in outline.sliced and end not in outline.inputs}
        leaves = [(each, each.leaving) for each in results if each.leaving is not None]
        region.memo["shape"] = _Shape(
            inputs,
            [each for each in results if each.leaving is None],
            [each for each, _ in leaves],
            tuple([leaves.of for _, leaves in leaves if leaves.updates]),
            [*inputs, *[leaves.of for _, leaves in leaves]],
            ends,
        )
    shape: _Shape = region.memo["shape"]
    return shape


def _summarised(
    there: Placed,
    shape: _Shape,
    of: Sequence[Operand],
    less: Narrowed | None,
    outline: Outline,
    machine: Machine,
    workspace: Workspace,
) -> Region:
    """Summarises a region. ``of``: by node of its shape, the operand that this is part of. ``less``: of the region if the host
    casts for it."""
    region, readers = there.region, dict(zip(there.region.makes, there.readers, strict=True))
    about: tuple[int, float, int] | None = region.memo.get("about")
    if about is None:  # sketches are of one problem: of one machine
        about = PHASES.index(region.phase), kernel_us(region.kernel, machine), workspace(region.kernel)
        region.memo["about"] = about
    count, operands = len(shape.inputs), dict(zip(shape.nodes, of, strict=True))
    casts = Narrowed(region.kernel) if less is None else less
    activations, others, places = _staying(region, shape, readers, outline, casts, operands)
    leaving = _leaving(shape, readers, of[count:], outline, casts)
    ends = {operands[node]: end for node, end in shape.ends.items()}
    summary = Region(*about, list(dict.fromkeys(of[:count])), activations, others, leaving, ends, places)
    if less is not None:
        kernel, summary.gone = less.kernel or region.kernel, less.kernel is None
        summary.us, summary.workspace = kernel_us(kernel, machine), workspace(kernel)
        for node, val in less.comes.items():
            summary.narrow.setdefault(operands[node], Size()).add(nbytes_of(val))
        summary.unread, summary.unfetched = (
            frozenset(operands[node] for node in some if node in operands) for some in (less.unread, less.unfetched)
        )
    return summary


def _staying(
    region: Drawn,
    shape: _Shape,
    readers: Mapping[Any, tuple[int, ...]],
    outline: Outline,
    casts: Narrowed,
    operands: Mapping[fx.Node, Operand],
) -> tuple[list[Value], list[Value], dict[Any, int]]:
    """Returns the activations that a region makes, the other values, and of each value its place among these."""
    activations: list[Value] = []
    others: dict[tuple[object, ...], Value] = {}
    made: dict[Any, Value] = {}
    for result in shape.stays:
        used = readers[result.value]
        apart = bool(outline.sliced) and not result.value.meta["val"].is_floating_point()  # it may be where rows end
        if result.role == "activation":
            name = "" if region.renamed else result.value.name
            cast = casts.waits.get(result.value)
            about = result.returned, apart, cast and (cast[0], operands[cast[1]]), result.value in casts.unmade
            activations.append(Value(result.nbytes, result.slot, used, name, *about))
            made[result.value] = activations[-1]
        else:
            alike = result.role, used, result.returned, result.value if apart else None
            made[result.value] = entry = others.setdefault(alike, Value(0, 0, used, "", result.returned, apart))
            entry.add(result.nbytes)
    order = {id(value): place for place, value in enumerate([*activations, *others.values()])}
    return activations, list(others.values()), {node: order[id(value)] for node, value in made.items()}


def _leaving(
    shape: _Shape, readers: Mapping[Any, tuple[int, ...]], of: Sequence[Operand], outline: Outline, casts: Narrowed
) -> list[Leaving]:
    """Returns the gradients and new buffers that a region makes, in the order of the outputs. ``of``: by what leaves."""
    going: dict[tuple[object, ...], Leaving] = {}
    places: dict[Leaving, int] = {}
    for result, operand in zip(shape.leaves, of, strict=True):
        assert result.leaving is not None
        (place, home, node, updates, collective), used = result.leaving, readers[result.value]
        val = result.value.meta["val"]
        made, narrow, widened = casts.leaves.get(result.value, (result.nbytes, 0, 0))
        alike = home, operand, updates, *_alike(result, used, narrow > 0)
        if (entry := going.get(alike)) is None:
            about = {"wide": val.element_size() == 8, "returned": result.returned, "collective": collective}
            entry = going[alike] = Leaving(0, 0, used, home, operand, updates, **about)
        entry.add(made)
        entry.count += 1
        if narrow:
            entry.narrow, entry.widened = entry.narrow or Size(), entry.widened or Size()
            entry.narrow.add(narrow)
            entry.widened.add(widened)
        if collective == "reduce_scatter":
            entry.share = entry.share or Size()
            entry.share.add(share_of(outline.ranks, val)["nbytes"])
        if (rows := operand.rows) is not None:
            row_nbytes = val.shape[1] * val.element_size()
            entry.crossing, entry.whole = rows.count * row_nbytes, aligned(rows.rows * row_nbytes)
        if place < places.get(entry, place + 1):
            places[entry], entry.name = place, node.name
    return sorted(places, key=places.__getitem__)


def _alike(made: _Made, readers: tuple[int, ...], narrow: bool) -> tuple[object, ...]:
    """Returns what is equal for values that leave a region in one copy, beside the inputs that they are of."""
    collective = "" if made.leaving is None else made.leaving.collective
    return readers, collective, made.value.meta["val"].element_size() == 8, made.returned, narrow


def _operands(
    outline: Outline, readers: Mapping[Any, tuple[int, ...]], shapes: Sequence[_Shape], less: Sequence[Narrowed | None]
) -> tuple[dict[fx.Node, Operand], list[Operand]]:
    """Returns the operand that each input of a step is part of, and each of them once. ``shapes``: of the regions in order;
    ``less``: of those for which the host casts."""
    casts: dict[fx.Node, list[object]] = {}  # inputs -> how they come in
    waiting = {node for each in less if each is not None for _, node in each.waits.values()}
    for position, each in enumerate(less):
        for node in each.comes.keys() | each.unread if each is not None else ():
            waits, of = node if node in waiting else None, (each.comes, each.unread, each.unfetched)
            casts.setdefault(node, []).append((position, waits, *[node in some for some in of]))
    making: dict[fx.Node, list[object]] = {}  # parameters -> the regions that make gradients of them, and how these leave
    for position, (shape, each) in enumerate(zip(shapes, less, strict=True)):
        for made in shape.leaves:
            if made.leaving is not None and made.leaving.updates:
                narrow = each is not None and made.value in each.leaves and each.leaves[made.value][1] > 0
                leaves_as = _alike(made, readers.get(made.value, ()), narrow)
                making.setdefault(made.leaving.of, []).append((position, *leaves_as))
    alike: dict[tuple[object, ...], list[fx.Node]] = {}
    for node, about in outline.inputs.items():
        key = (*about[:6], about.gathered, readers.get(node, ()), *making.get(node, ()), *casts.get(node, ()))
        alike.setdefault(key, []).append(node)
    operands: dict[fx.Node, Operand] = {}
    known = outline.operands
    for key, nodes in alike.items():
        if (shared := (key, *nodes)) not in known:
            about = outline.inputs[nodes[0]]
            operand = Operand(0, 0, *about[:4], about.rows, about.fragment, about.gathered, about.alone)
            for node in nodes:
                operand.add(node.meta["nbytes"])
            known[shared] = operand
        operands |= dict.fromkeys(nodes, known[shared])
    return operands, list(dict.fromkeys(operands.values()))
