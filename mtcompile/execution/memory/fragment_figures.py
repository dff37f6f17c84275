"""Figures of fragments: how long the first layer waits for its weights, and how much of them is on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from mtcompile.passes.cuts.fragments.cut import Cut, cuts_of, homes_between
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.passes.step_graph import fragments_of, inputs_of, is_view, span_nbytes
from mtcompile.runtime.schedule import PHASES, Schedule, gib, listed
from mtcompile.runtime.sim import clock

aten = torch.ops.aten
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a schedule streams weights. ``wait_us``: from the start of a step to that of its first region with a weight that
    crosses the link; ``staging_nbytes``: the most bytes of such weights that are on the device at a time."""

    wait_us: float
    staging_nbytes: int

    def __str__(self) -> str:
        return f"{self.wait_us / 1e3:.3f} ms and {gib(self.staging_nbytes)}"


def streaming(schedule: Schedule, starts: Mapping[int, float] | None = None) -> Streaming:
    """Returns the figures of a schedule. ``starts``: µs from the step's start at which instructions started, by index; None: as
    predicted."""
    if starts is None:
        starts = dict(enumerate(clock(schedule)[0]))
    fetched = {b.name for b in schedule.buffers.values() if b.role == "param" and b.tier == "device" and b.kind != "home"}
    held = most = 0
    for each in schedule.instructions:
        if each.op in ("alloc", "free") and each.writes[0] in fetched:
            held += schedule.buffers[each.writes[0]].nbytes * (1 if each.op == "alloc" else -1)
            most = max(most, held)
    first = (
        starts[index]
        for index, each in schedule.phase(PHASES[0])
        if each.op == "run" and each.queue == "compute" and fetched.intersection(each.reads) and index in starts
    )
    return Streaming(min(first, default=0.0), most)


def streamed_whole(problem: PlanningProblem, on_disk: Collection[str] = ()) -> Schedule:
    """Returns the schedule of a step that streams its weights whole, one region ahead, on a device that has room for that.
    ``on_disk``: the parameters that are there."""
    homes, budgets = problem.step.meta["homes"], replace(problem.budgets, device=None, host=None)
    fixed = {**problem.fixed_homes, **{homes[name]: "disk" for name in on_disk if name in homes}}
    return make_plan(replace(problem, budgets=budgets, fixed_homes=fixed), "megatrain").schedule


def cut_on_disk(step: fx.GraphModule, plan: Plan) -> set[str]:
    """Returns the parameters that a step takes in fragments and a plan keeps on disk."""
    homes = step.meta["homes"]
    return {part.parameter for name, part in fragments_of(step).items() if plan.params(homes.get(name, "")) == "disk"}


def told_fragments(planned: Planned, whole: Schedule, fits: bool) -> str:
    """Says what a plan gains by its fragments. ``whole``: the schedule without; ``fits``: whether that keeps to the budget."""
    beside = "" if fits else ", more than there is"
    return (
        f"in fragments: {_names(planned.step)}; the first layer's wait and the weights on the device at a time are "
        f"{streaming(planned.schedule)}, whole they are {streaming(whole)}{beside}"
    )


def told_whole(joint: fx.GraphModule, cut: Cut, step: fx.GraphModule, begins: int) -> list[str]:
    """Says which large weights of a joint graph a cut leaves whole, and why; which the ``step`` that is cut so makes
    whole again; and which no plan of it can keep on disk, where fragments begin at multiples of ``begins`` bytes."""
    in_fragments = {part.parameter for part in fragments_of(step).values()}
    weights = [weight for weight, _ in cuts_of(joint, cut)]
    reasons = {weight.spec.name: "the loss is computed from it in chunks" for weight in weights}
    for spec, node in inputs_of(joint):
        if spec.role == "param" and spec.name not in reasons and span_nbytes(node.meta["val"]) > cut.nbytes:
            reasons[spec.name] = _why_whole(node, cut)
    reasons = {name: reason for name, reason in reasons.items() if reason and name not in in_fragments}
    told = [f"whole: {name}; {reason}" for name, reason in [*reasons.items()][:_MOST_NAMES]]
    if more := [*reasons][_MOST_NAMES:]:
        told.append(f"whole: {len(more)} more large weights, such as {more[0]}")
    in_parts = [weight for weight in weights if weight.spec.name in in_fragments and weight.has_input_gradient]
    if in_parts and not cut.splits:
        names, most = [weight.spec.name for weight in in_parts], max(weight.nbytes for weight in in_parts)
        told.append(
            f"whole for its input's gradient: {listed(names, _MOST_NAMES)}, up to {gib(most)}, which the device holds twice "
            'for that product; fragments="split" needs one fragment at a time'
        )
    if not (names := list(dict.fromkeys(homes_between(step, begins).values()))):
        return told
    return [
        *told,
        f"not on disk: {listed(names, _MOST_NAMES)}; a fragment there begins at a multiple of {begins} bytes, and rows of this "
        "size leave none as small as the device needs. Make the layer's width a multiple of 64",
    ]


def _why_whole(weight: fx.Node, cut: Cut) -> str:
    """Says why a weight is not cut; "" for one that nothing but embeddings read, of which rows may be fetched."""
    turned = {user for user in weight.users if user.target is aten.t.default}
    readers = [user for one in (weight, *turned) for user in one.users if user not in turned]
    forward = [user for user in readers if user.meta.get("phase") == "forward"]
    products = [user for user in forward if user.target in (aten.mm.default, aten.addmm.default)]
    if not products:
        others = sorted({str(user.target) for user in _reading(weight)} - {str(aten.embedding.default)})
        return f"{listed(others, 1)} reads it, and fragments are of weights that linear layers multiply by" if others else ""
    if any(user.target is aten.embedding.default for user in forward):
        return "an embedding reads it too, and fragments are of weights that one layer reads"
    if len(products) > 1:
        return f"{len(products)} products read it in the forward, and fragments are of weights that one layer reads"
    if besides := [user for user in forward if user not in products]:
        return f"{besides[0].target} reads it too, and fragments are of weights that one layer reads"
    backward = len(readers) > len(forward)
    if backward and not (cut.gathers or cut.splits):
        return "its input gets a gradient, for which it is read whole"
    return "its rows leave no two fragments that start where a copy may"


def _reading(weight: fx.Node) -> Iterator[fx.Node]:
    """The operations of the forward that read a weight, or a view, copy or cast of it."""
    todo = [weight]
    while todo:
        for user in todo.pop().users:
            if is_view(user) or user.target in (aten._to_copy.default, aten.clone.default):
                todo.append(user)
            elif user.meta.get("phase") == "forward":
                yield user


def _names(step: fx.GraphModule) -> str:
    counts = dict[str, int]()
    for part in fragments_of(step).values():
        counts[part.parameter] = counts.get(part.parameter, 0) + 1
    named: Sequence[str] = [f"{name} in {count}" for name, count in counts.items()]
    return listed(named, _MOST_NAMES)
