"""Counts what fetches of parameters cost the link: how many copies cross it; and tells whether any do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import fx

from mtcompile.passes.step_graph import inputs_of, span_nbytes
from mtcompile.runtime.schedule import Copied, Instruction, Schedule, is_direct, joined, placed
from mtcompile.runtime.usage import allocated_together

Place = tuple[Hashable, int]  # a memory, and a byte there


def fetches(step: fx.GraphModule, schedule: Schedule) -> tuple[int, int]:
    """Returns how many parameters a step fetches to the device, each as often as it does, and in how many copies: neighbours at
    home that are neighbours on the device cross together. ``step``: rewritten, of this schedule. Homes are taken to lie as a
    model's first program puts them. Slices count as one copy each, and what comes straight from
    disk as one for each parameter."""
    together, at_home = allocated_together(schedule), _at_home(step)
    spans = {node.name: span_nbytes(node.meta["val"]) for node in step.graph.nodes if node.name in schedule.buffers}

    def place(name: str) -> Place:
        buffer = schedule.buffers[name]
        if buffer.kind == "placed":
            return buffer.tier, buffer.offset or 0
        first, offset, _ = together.get(name, (name, 0, 0))
        return at_home.get(name, (first, offset))

    values = copies = 0
    for instruction in schedule.instructions:
        if pairs := _fetched(schedule, instruction):
            values += len(pairs)
            both = ((place(target), place(source), spans[source]) for target, source in pairs)
            apart = is_direct(instruction, schedule.buffers)
            joint = joined(Copied(*target, *source, nbytes) for target, source, nbytes in both)
            copies += len(pairs) if apart else sum(1 for _ in joint)
    return values, copies


def is_resident(schedule: Schedule) -> bool:
    """Tells whether a step computes nothing again and moves nothing but what it is given and what buffers become."""
    if any(i.work == "recompute" for i in schedule.instructions):
        return False
    moved = {schedule.buffers[name].role for i in schedule.instructions if i.op == "copy" for name in i.writes}
    return moved.isdisjoint(("param", "grad", "activation", "rng"))


def _fetched(schedule: Schedule, instruction: Instruction) -> list[tuple[str, str]]:
    if instruction.op != "copy" or instruction.queue != "h2d":
        return []
    pairs = zip(instruction.writes, instruction.reads, strict=False)  # a copy of slices reads where they end, too
    return [(target, source) for target, source in pairs if schedule.buffers[target].role == "param"]


def _at_home(step: fx.GraphModule) -> Mapping[str, Place]:
    """Returns where parameters lie at home, by the names of their values: a block's are one behind the other in its slab."""
    nodes = {spec.name: node for spec, node in inputs_of(step) if spec.role == "param"}
    ends: dict[str, int] = {}
    places: dict[str, Place] = {}
    for name, block in step.meta["homes"].items():
        if name in nodes:
            start = ends.get(block, 0)
            places[nodes[name].name] = ("home", block), start
            ends[block] = start + placed(span_nbytes(nodes[name].meta["val"]))
    return places
