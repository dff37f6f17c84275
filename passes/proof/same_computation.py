"""Checks I5, first half: the rewritten step computes exactly the captured graph (``schedule`` has the second).

Both graphs are numbered by value (``numbering``), and every result of the step must have the number of the captured one.
A result of a kernel is in memory of its own. Everything else that a step graph says of its inputs, results, updates and values
is made out again from the captured graph and compared: what a schedule is lowered from and an executor binds by must not be
taken on trust.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.generators import generator_nbytes, save_rng
from mtcompile.passes.proof.numbering import Number, Numbering, over_ranks
from mtcompile.passes.proof.values import phase_of
from mtcompile.passes.step_graph import (
    MOVES_OF_ROWS,
    TIER_OF_MOVE,
    InputSpec,
    OutputSpec,
    all_gather,
    all_reduce,
    body_outputs,
    broadcast,
    calls,
    fetch_state,
    gathers_parts,
    gradient_norms,
    inputs_of,
    is_collective,
    is_convert,
    is_move,
    is_region,
    is_seed,
    is_update,
    kernel_of,
    outputs_of,
    placeholders,
    prefetch_rows,
    ranks_of,
    reduce_scatter,
    results,
    scales_of,
    source,
    span_nbytes,
    step_outputs,
    storage_nbytes,
    streamed_state,
    update,
)
from mtcompile.runtime.schedule import aligned


class SameComputationError(ValueError):
    """Raised where I5 does not hold; the message names the output, value or call at fault."""


def expect(condition: bool, what: Callable[[], str]) -> None:
    """Raises SameComputationError with what was expected unless it holds."""
    if not condition:
        raise SameComputationError(f"I5: expected {what()}")


@contextmanager
def well_formed(what: str) -> Iterator[None]:
    """Raises SameComputationError for a graph so malformed that it cannot be checked. ``what``: what was expected."""
    try:
        yield
    except SameComputationError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SameComputationError(f"I5: expected {what}, found {error!r}") from error


def same_computation(joint: fx.GraphModule, step: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``step`` computes the outputs of ``joint`` by the same operations, under the same
    names, from the same inputs, and describes each of its values as it is."""
    _same_names(joint, step)
    rows: Mapping[str, Rows] = joint.meta.get("rows", {})
    numbering = Numbering(joint.meta["device"])
    captured = numbering.joint(joint.graph)
    drawn = numbering.restart()
    with well_formed("a step graph whose calls match their kernels"):
        rewritten = numbering.step(step, rows)
    drawn_again = numbering.restart()
    expect(
        len(drawn) == len(drawn_again),
        lambda: f"{len(drawn)} operations to advance the generator, found {len(drawn_again)}",
    )
    expect(drawn == drawn_again, lambda: "random numbers to be drawn in the phase in which the captured graph draws them")
    results = captured | _whole_gradients(joint, rows, numbering, captured)
    _same_results(joint, step, results, rewritten)
    _same_updates(joint, step, results, rewritten)
    _same_collectives(joint, step, results, rewritten)
    _same_values(joint, step, captured, rewritten)
    _results_of_their_own(step)


def _whole_gradients(
    joint: fx.GraphModule, rows: Mapping[str, Rows], numbering: Numbering, captured: Mapping[fx.Node, Number]
) -> dict[fx.Node, Number]:
    """Returns the numbers at home of the gradients that the captured graph makes in rows."""
    by_name = {spec.name: captured[node] for spec, node in inputs_of(joint) if spec.role == "input"}
    grads = {spec.name: value for spec, value in outputs_of(joint) if spec.kind == "grad" and spec.name in rows}
    named = {name: [by_name[index] for index in each.indices] for name, each in rows.items()}
    return {value: numbering.all_rows(captured[value], rows[name].rows, named[name]) for name, value in grads.items()}


def _same_names(joint: fx.GraphModule, step: fx.GraphModule) -> None:
    """Checks what the executor binds by: the inputs, outputs and constants, each under its name and index."""
    inputs, taken = joint.meta["inputs"], step.meta["inputs"]
    expect(len(placeholders(step.graph)) == len(taken) == len(inputs), lambda: f"{len(inputs)} inputs, found {len(taken)}")
    for spec, other in zip(inputs, taken, strict=True):
        expect(spec == other, lambda s=spec, o=other: f"input {s}, found {o}")
    outputs, returned = joint.meta["outputs"], step.meta["outputs"]
    expect(len(step_outputs(step)) == len(returned) == len(outputs), lambda: f"{len(outputs)} outputs, found {len(returned)}")
    for spec, other in zip(outputs, returned, strict=True):
        alike = replace(spec, kind=other.kind) == other
        same = other.kind in (spec.kind, "update" if spec.kind == "grad" else spec.kind)
        expect(alike and same, lambda s=spec, o=other: f"output {s}, found {o}")
    constants, given = joint.meta["constants"], step.meta["constants"]
    for spec in inputs:
        same = spec.role != "constant" or given.get(spec.name) is constants.get(spec.name)
        expect(same, lambda s=spec: f"constant {s.name} to be the captured tensor")
    device = joint.meta["device"]
    expect(step.meta["device"] == device, lambda: f"kernels on {device}, found {step.meta['device']}")


def _same_results(
    joint: fx.GraphModule, step: fx.GraphModule, captured: Mapping[fx.Node, Number], rewritten: Mapping[fx.Node, Number]
) -> None:
    """Checks that each result is computed as in the captured graph, and is there at the end of the same phase."""
    for spec, one, other in zip(step.meta["outputs"], step_outputs(joint), step_outputs(step), strict=True):
        if spec.kind == "update":
            continue
        same = _combined(step, spec, captured[one]) == rewritten[other]
        expect(same, lambda s=spec: f"{s.kind} {s.name} to be computed as in the captured graph")
        for call in _made_by(other):
            phase = call.meta["phase"]
            expect(phase == phase_of(one), lambda s=spec, o=one, p=phase: f"{s.kind} {s.name} in {phase_of(o)}, found {p}")


def _combined(step: fx.GraphModule, spec: OutputSpec, number: Number) -> Number:
    """Numbers a result as all ranks have it together: gradients of parameters, and buffers of a step with gradients."""
    of = next((s.role for s in step.meta["inputs"] if s.index == spec.index and s.role != "tangent"), "")
    trains = any(each.kind in ("grad", "update") for each in step.meta["outputs"])
    if ranks_of(step) == 1 or not trains or spec.kind == "output":
        return number
    if spec.kind == "mutation":
        return over_ranks(broadcast, number) if of == "buffer" else number
    return over_ranks(all_reduce, number) if of == "param" else number


def _same_collectives(
    joint: fx.GraphModule, step: fx.GraphModule, captured: Mapping[fx.Node, Number], rewritten: Mapping[fx.Node, Number]
) -> None:
    """Checks that collectives combine results of the captured graph, and updates of parameters, each under its own name, by
    which ranks compare them."""
    named = {spec.name: captured[one] for spec, one in outputs_of(joint) if spec.kind == "grad"}
    buffers = {spec.name: captured[one] for spec, one in outputs_of(joint) if spec.kind == "mutation"}
    updated = {
        name: rewritten[item]
        for call in calls(step)
        if call.target is update
        for name, item in zip(call.meta["names"], results(call), strict=False)
    }
    parts = {spec.name: rewritten[node] for spec, node in inputs_of(step) if spec.role == "param"}
    for call in filter(is_collective, calls(step)):
        if gathers_parts(call):
            numbers = parts
        else:
            numbers = {broadcast: buffers, all_gather: updated}.get(call.target, named)
        expected = [over_ranks(call.target, numbers[name]) if name in numbers else () for name in call.meta["names"]]
        combined = [rewritten[item] for item in results(call)]
        expect(combined == expected, lambda c=call: f"{c.name} to name what it combines, found {c.meta['names']}")


def _made_by(value: fx.Node) -> Iterator[fx.Node]:
    """Yields the calls from the one that a value was moved or cast by last, back to the region that made it."""
    while value.target is operator.getitem:
        call, position = value.args
        yield call
        if not (is_move(call) or is_convert(call) or is_collective(call)):
            return
        value = call.args[position]


def _same_updates(
    joint: fx.GraphModule, step: fx.GraphModule, captured: Mapping[fx.Node, Number], rewritten: Mapping[fx.Node, Number]
) -> None:
    """Checks that every parameter with an update is updated once, under its own name, by its own gradient, scaled like all
    others: by the norms of all gradients that are used, each under the name of its parameter."""
    inputs = inputs_of(step)
    params = {spec.index: (spec, node) for spec, node in inputs if spec.role == "param"}
    names = {node: spec.name for spec, node in inputs}
    grads: dict[str, Number] = {}  # of each parameter that is updated, by name
    for spec, one, other in zip(step.meta["outputs"], step_outputs(joint), step_outputs(step), strict=True):
        if spec.kind == "update":
            expect(spec.index in params, lambda s=spec: f"an update of a parameter, found {s}")
            param_spec, param = params[spec.index]
            grads[param_spec.name] = grad = _combined(step, spec, captured[one])
            number, own = rewritten[other], [grad, over_ranks(reduce_scatter, captured[one])]  # ``schedule`` checks which
            number = number[1:] if number[0] == "all_gather" else number
            of_its_own = number[:2] == ("update", rewritten[param]) and number[2] in own
            expect(of_its_own, lambda s=spec: f"{s.name} to be updated by its own gradient")
            follows = other.meta.get("version_of") == param.name
            expect(follows, lambda o=other, p=param: f"{o.name} to be the next version of {p.name}")
    updated: list[str] = []
    scales: set[Number] = set()
    for call in calls(step):
        given = tuple(call.meta.get("names", ())) if is_update(call) else ()
        if call.target is update:
            count: Any = call.kwargs["count"]
            expect(
                given == tuple(names.get(param) for param in call.args[:count]) and len(results(call)) == count,
                lambda c=call, g=given: f"{c.name} to update {c.args[: c.kwargs['count']]} under their names, found {g}",
            )
            updated += given
            scales.add(tuple(rewritten[scale] for scale in scales_of(call)))
        elif is_update(call) and call.target is not fetch_state:
            (item,) = results(call)
            expected = rewritten[item][1:]
            right = tuple(grads.get(name) for name in given) == expected and rewritten[item][0] in ("norms", "scale")
            expect(right, lambda c=call, g=given: f"{c.name} to name the parameters whose gradients it takes, found {g}")
    expect(sorted(updated) == sorted(grads), lambda: f"one update of each of {sorted(grads)}, found {sorted(updated)}")
    alike = len(scales) <= 1 and all(len(scale) <= 1 for scale in scales)
    expect(alike, lambda: "all updates to be scaled alike, by one factor or none")
    for scale in (one for several in scales for one in several):
        right = scale[0] == "scale" and sorted(scale[1:]) == sorted(grads.values())
        expect(right, lambda: "updates to be scaled by the norms of all gradients that are used, each once")


# ---------------------------------------------------------------------------------------------- what is said of the values


class _Layout(NamedTuple):
    """A value's dtype, shape and strides, and the bytes of its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int


def _layout(val: torch.Tensor) -> _Layout:
    return _Layout(val.dtype, tuple(val.shape), tuple(val.stride()), storage_nbytes(val))


def _same_values(
    joint: fx.GraphModule, step: fx.GraphModule, captured: Mapping[fx.Node, Number], rewritten: Mapping[fx.Node, Number]
) -> None:
    """Checks layout, bytes, role and tier of every value."""
    layouts: dict[Number, set[_Layout]] = {}  # by number, as captured
    for node, number in captured.items():
        if isinstance(node.meta.get("val"), torch.Tensor):
            layouts.setdefault(number, set()).add(_layout(node.meta["val"]))
    rows: Mapping[str, Rows] = joint.meta.get("rows", {})
    for spec, one, other in zip(step.meta["inputs"], placeholders(joint.graph), placeholders(step.graph), strict=True):
        _same_input(spec, one, other, rows.get(spec.name) if spec.role == "param" else None)
        for call in other.users if spec.in_backward else ():
            right = call.op == "output" or call.meta["phase"] == "backward"
            expect(right, lambda s=spec, c=call: f"{s.name} to be read in the backward alone, found that {c.name} reads it")
    roles = _roles(joint, step, captured, rewritten)
    for call in calls(step):
        operands: tuple[Any, ...] = call.args
        if is_region(call):
            for operand, taken in zip(operands, placeholders(kernel_of(step, call).graph), strict=True):
                same = _alike(operand.meta["val"], taken.meta["val"])
                expect(same, lambda c=call, o=operand, t=taken: f"{c.name} to take {o.name} as {_layout(t.meta['val'])}")
        for item in results(call):
            layout, nbytes, tier = _expected(step, call, item, layouts.get(rewritten[item], set()))
            described = _layout(item.meta["val"])[:3]
            expect(
                described == layout[:3], lambda i=item, e=layout: f"{i.name} to be {e[:3]}, found {_layout(i.meta['val'])[:3]}"
            )
            place = (item.meta["nbytes"], item.meta["tier"])
            expect(
                place == (nbytes, tier), lambda i=item, p=place, e=(nbytes, tier): f"{i.name} in (bytes, tier) {e}, found {p}"
            )
            role = item.meta["role"]
            expect(role in roles(item), lambda i=item, r=role: f"{i.name} as one of {roles(i)}, found {r}")


def _same_input(spec: InputSpec, one: fx.Node, other: fx.Node, rows: Rows | None) -> None:
    val, meta = one.meta["val"], other.meta
    if rows is not None:  # at home it is whole
        val = _of_rows(val, rows.rows)
        expect(meta["tier"] != "device", lambda: f"input {spec.name}, of which rows are taken, at home elsewhere than there")
    expect(_alike(val, meta["val"]), lambda: f"input {spec.name} to be {_layout(val)[:3]}, found {_layout(meta['val'])[:3]}")
    expected = (aligned(span_nbytes(val)), spec.role, spec.name)
    described = (meta["nbytes"], meta["role"], meta["name"])
    expect(described == expected, lambda: f"input {spec.name} with (bytes, role, name) {expected}, found {described}")
    tiers = ("device",) if spec.role == "tangent" else (spec.tier, "device")
    tiers += ("disk",) if spec.role == "param" else ()
    expect(meta["tier"] in tiers, lambda: f"input {spec.name} in one of {tiers}, found {meta['tier']}")


def _of_rows(val: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns a tensor without content as ``val`` is, with so many rows."""
    return torch.empty((rows, *val.shape[1:]), dtype=val.dtype, device="meta")


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _layout(one)[:3] == _layout(other)[:3]


def _results_of_their_own(step: fx.GraphModule) -> None:
    """Checks that no result of a kernel is a view of an operand or of another result: it would be freed, or written over, with
    what it views. A number does not tell a view from a copy, which has the same bits."""
    kernels = {str(call.target): kernel_of(step, call) for call in calls(step) if is_region(call)}
    for kernel in kernels.values():
        held = set(placeholders(kernel.graph))
        for output in body_outputs(kernel):
            base: Any = owner(output)
            base = base.args if base.target is operator.getitem else base  # an item of a call, however often it is taken
            expect(base not in held, lambda o=output: f"{o.name} in memory of its own, found a view of an operand or a result")
            held.add(base)


def _expected(step: fx.GraphModule, call: fx.Node, item: fx.Node, captured: set[_Layout]) -> tuple[_Layout, int, str]:
    """Returns the layout, bytes and tier of a call's result. ``captured``: the layouts that its value has in the captured
    graph. Raises SameComputationError for a kernel whose own description is not one of these."""
    position: Any = item.args[1]
    operands: tuple[Any, ...] = call.args
    if is_region(call):
        output = body_outputs(kernel_of(step, call))[position]
        layout = _layout(output.meta["val"])
        known = layout in captured or layout == _of_body(step, output)
        expect(known, lambda: f"{call.target} to return {item.name} as one of {captured}, found {layout}")
        return layout, aligned(layout.nbytes), "device"
    if call.target in MOVES_OF_ROWS:
        rows: Any = call.kwargs["held" if call.target is prefetch_rows else "rows"]
        val = _of_rows(operands[0].meta["val"], rows)
        return _layout(val), aligned(span_nbytes(val)), MOVES_OF_ROWS[call.target]
    if is_move(call):
        operand = operands[position]
        return _layout(operand.meta["val"]), operand.meta["nbytes"], TIER_OF_MOVE[call.target]
    if is_collective(call):
        operand = operands[position]
        expect(operand.meta["tier"] == "host", lambda: f"{call.name} to take {operand.name} on the host")
        if call.target is reduce_scatter:  # 64 elements or a multiple for each rank, or all of fewer
            numel, share = operand.meta["val"].numel(), 64 * ranks_of(step)
            numel = min(numel, 64 * -(-numel // share))
            layout = _layout(torch.empty(numel, dtype=operand.meta["val"].dtype, device="meta"))
            return layout, aligned(layout.nbytes), "host"
        return _layout(operand.meta["val"]), operand.meta["nbytes"], "host"
    if is_convert(call):
        layout = _layout(operands[position].meta["val"])._replace(dtype=call.kwargs["casts"][position]["dtype"])
        expect(layout[:3] in {one[:3] for one in captured}, lambda: f"{item.name} as one of {captured}, found {layout[:3]}")
        return layout, aligned(span_nbytes(item.meta["val"])), "host"
    tier = call.meta["tier"]
    count: Any = call.kwargs.get("count", len(operands))
    moved = operands[: 2 * count]
    there: tuple[str, ...] = (tier, "disk") if call.target is update and tier == "host" else (tier,)  # the host does both
    if call.target is fetch_state or (call.target is update and streamed_state(call) is not None):
        there = ("host",)
    right = all(operand.meta["tier"] in (there if i < count else (tier,)) for i, operand in enumerate(moved))
    expect(right, lambda: f"{call.name} to take operands on the {tier}")
    if call.target is update:
        param = operands[position]
        return _layout(param.meta["val"]), param.meta["nbytes"], param.meta["tier"]
    if call.target is fetch_state:
        nbytes: Any = call.kwargs["nbytes"]
        return _layout(torch.empty(nbytes, dtype=torch.uint8, device="meta")), nbytes, tier
    wide = any(operand.meta["val"].dtype == torch.float64 for operand in operands)
    dtype = torch.float64 if wide else torch.float32
    shape = (len(operands),) if call.target is gradient_norms else ()
    val = torch.empty(shape, dtype=dtype, device="meta")
    return _layout(val), aligned(val.numel() * dtype.itemsize), tier


def _of_body(step: fx.GraphModule, output: fx.Node) -> _Layout | None:
    """Returns the layout of what a body makes without the captured graph having it: a copy in memory of its own, and the state
    of a generator; else None."""
    if output.target is torch.ops.aten.clone.default:
        return _layout(torch.empty_like(output.args[0].meta["val"], device="meta"))
    if output.target is save_rng:
        return _layout(torch.empty(generator_nbytes(step.meta["device"]), dtype=torch.uint8, device="meta"))
    return None


def _roles(
    joint: fx.GraphModule, step: fx.GraphModule, captured: Mapping[fx.Node, Number], rewritten: Mapping[fx.Node, Number]
) -> Callable[[fx.Node], tuple[str, ...]]:
    """Returns a function that gives the roles that a value may have. Results and used gradients have one, as all of their
    copies do; what is computed again of an output may still be called that."""
    of_kind = {"output": "output", "grad": "grad", "mutation": "buffer"}
    marked: dict[fx.Node, str] = {}

    def mark(value: fx.Node, role: str) -> None:
        marked[source(value)] = role
        call, position = source(value).args if source(value).target is operator.getitem else (None, 0)
        if isinstance(call, fx.Node) and (is_convert(call) or is_collective(call)):
            mark(call.args[position], role)

    for spec, value in outputs_of(step):
        if spec.kind != "update":
            mark(value, of_kind[spec.kind])
    for call in calls(step):
        if call.target is update:
            count: Any = call.kwargs["count"]
            for grad in call.args[count : 2 * count]:
                mark(grad, "grad")
    returned = {captured[value] for value in step_outputs(joint)}

    def roles(item: fx.Node) -> tuple[str, ...]:
        origin = source(item)
        if origin in marked:
            return (marked[origin],)
        if origin.op == "placeholder":
            return (origin.meta["role"],)
        call, position = origin.args
        if is_convert(call) or is_collective(call):
            return roles(call.args[position])
        if is_update(call):
            return ("param",) if call.target is update else ("state",)
        output = body_outputs(kernel_of(step, call))[position]
        if rewritten[origin][0] == "state" or is_seed(output):
            return ("rng",)
        return ("activation", "output") if rewritten[origin] in returned else ("activation",)

    return roles
