"""Checks I5: the rewritten step computes exactly the captured graph, and the schedule runs exactly the rewritten step.

Both graphs are expanded to their ATen operations and numbered by value: two operations get the same number when they
are the same operation on the same numbers, at the same place in the generator's stream. Copies, views made again and
recomputed operations then fall together; anything else does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mtcompile.passes.generators import replay, save_rng
from mtcompile.passes.step_graph import (
    body_outputs,
    calls,
    convert,
    gradient_norms,
    gradient_scale,
    is_convert,
    is_random,
    is_region,
    is_update,
    kernel_of,
    offload,
    placeholders,
    prefetch,
    recomputes,
    results,
    source,
    step_outputs,
)
from mtcompile.runtime.schedule import Schedule


class SameComputationError(ValueError):
    """Raised where I5 does not hold; the message names the output or region at fault."""


class _Numbering:
    """Value numbers shared by the two graphs; ``stream`` counts the random operations run so far in the current one."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.stream = 0

    def of(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def same_computation(joint: fx.GraphModule, step: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``step`` computes the outputs of ``joint`` by the same operations."""
    numbering = _Numbering()
    captured: list[Any] = _joint_outputs(joint, numbering)
    stream = numbering.stream
    numbering.stream = 0
    rewritten: list[Any] = _step_outputs(step, numbering)
    if numbering.stream != stream:
        raise SameComputationError(f"I5: expected {stream} operations to advance the generator, found {numbering.stream}")
    places = {spec.index: i for i, spec in enumerate(step.meta["inputs"]) if spec.role == "param"}
    grads = frozenset(one for spec, one in zip(step.meta["outputs"], captured, strict=True) if spec.kind == "update")
    for spec, one, other in zip(step.meta["outputs"], captured, rewritten, strict=True):
        if spec.kind == "update":
            param, updated = numbering.of(("input", places[spec.index])), other
            if updated not in (("update", param, one), ("update", param, one, ("scale", grads))):
                raise SameComputationError(f"I5: {spec.name} is not updated by its own gradient, or scaled by fewer than all")
        elif one != other:
            raise SameComputationError(f"I5: {spec.kind} {spec.name} is not computed as in the captured graph")


def _joint_outputs(joint: fx.GraphModule, numbering: _Numbering) -> list[int]:
    env: dict[fx.Node, Any] = {}
    for position, node in enumerate(placeholders(joint.graph)):
        env[node] = numbering.of(("input", position))
    # Phases run one after the other, and the generator's stream is counted in the order of execution.
    for node in joint.graph.nodes:
        if node.op == "call_function":
            env[node] = _number(node, env, numbering)
    return [env[node] for node in joint.graph.output_node().args[0]]


def _step_outputs(step: fx.GraphModule, numbering: _Numbering) -> list[int]:
    env: dict[fx.Node, Any] = {}
    for position, node in enumerate(placeholders(step.graph)):
        env[node] = numbering.of(("input", position))
    for node in step.graph.nodes:
        if is_region(node):
            env[node] = _body(kernel_of(step, node), [env[a] for a in node.args], numbering)
        elif is_convert(node):
            casts = zip(node.args, node.kwargs["casts"], strict=True)
            env[node] = tuple(_cast(env[value], cast, numbering) for value, cast in casts)
        elif is_update(node):
            env[node] = _updated(node, [env[a] for a in node.args])
        elif node.op == "call_function" and node.target in (prefetch, offload):
            env[node] = tuple(env[a] for a in node.args)
        elif node.op == "call_function":
            env[node] = env[node.args[0]][node.args[1]]
    return [env[node] for node in step_outputs(step)]


def _cast(value: Any, cast: Mapping[str, Any], numbering: _Numbering) -> Any:
    """Numbers a cast as ``_number`` numbers the operation."""
    return numbering.of((str(torch.ops.aten._to_copy.default), repr(((_Number(value),), dict(cast))), None))


def _updated(node: fx.Node, values: list[Any]) -> tuple[Any, ...]:
    """Numbers what an update makes, by its operands, and a scale, by the gradients whose norms it is made of."""
    if node.target is gradient_norms:
        return (frozenset(values),)
    if node.target is gradient_scale:
        return (("scale", frozenset().union(*values)),)
    count: Any = node.kwargs["count"]
    pairs = zip(values[:count], values[count : 2 * count], strict=True)
    return tuple(("update", *pair, *values[2 * count :]) for pair in pairs)


def _body(kernel: fx.GraphModule, args: list[Any], numbering: _Numbering) -> tuple[Any, ...]:
    env: dict[fx.Node, Any] = dict(zip(placeholders(kernel.graph), args, strict=True))
    for node in kernel.graph.nodes:
        if node.op == "call_function":
            env[node] = _number(node, env, numbering)
    return tuple(env[node] for node in body_outputs(kernel))


def _number(node: fx.Node, env: dict[fx.Node, Any], numbering: _Numbering) -> Any:
    if node.target is save_rng:
        return ("state", numbering.stream)
    if node.target is replay:
        state, _, target, *operands = map_arg(node.args, lambda n: _Number(env[n]))
        place = state.number[1]
        key: Any = (str(target), repr((tuple(operands), node.kwargs)), place)
        return numbering.of(key)
    operands = map_arg(node.args, lambda n: _Number(env[n]))
    keywords = map_arg(node.kwargs, lambda n: _Number(env[n]))
    if node.target is torch.ops.aten.clone.default and not node.kwargs:
        return operands[0].number  # the same bits in memory of their own
    if node.target is operator.getitem:
        return numbering.of(("item", operands[0].number, operands[1]))
    place = None
    if is_random(node):
        place, numbering.stream = numbering.stream, numbering.stream + 1
    return numbering.of((str(node.target), repr((tuple(operands), keywords)), place))


class _Number:
    """An operand by its value number, in the repr of an argument list."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


def check_schedule(step: fx.GraphModule, schedule: Schedule) -> None:
    """Raises SameComputationError unless the schedule runs the step's calls, in order, each with exactly the reads and
    writes of its kernel, with every operand holding the value that the step graph says, for the block and as the kind of
    work that it says."""
    instructions = [i for i in schedule.instructions if i.op in ("copy", "run")]
    expected = calls(step)
    _expect(len(instructions) == len(expected), lambda: f"{len(expected)} calls, found {len(instructions)}")
    for instruction, call in zip(instructions, expected, strict=True):
        reads = [source(a).name for a in call.args]
        writes = [source(item).name for item in results(call)]
        _expect(_values(schedule, instruction.reads) == reads, lambda c=call: f"{c.name} to read {c.args}")
        _expect(_values(schedule, instruction.writes) == writes, lambda c=call: f"{c.name} to write its results")
        block, work = step.meta["blocks"][call.meta["block"]], _work(call)
        _expect(instruction.block == block, lambda c=call, b=block: f"{c.name} to belong to block {b}")
        _expect(instruction.work == work, lambda c=call, w=work: f"{c.name} to be work of kind {w}")
        if is_region(call):
            kernel = kernel_of(step, call)
            _expect(instruction.kernel == call.target, lambda c=call: f"{c.name} to call {c.target}")
            _expect(
                len(instruction.reads) == len(placeholders(kernel.graph))
                and len(instruction.writes) == len(body_outputs(kernel)),
                lambda c=call: f"{c.name} to declare all that its kernel reads and writes",
            )
        elif is_update(call) or is_convert(call):
            _expect(instruction.kernel == call.name, lambda c=call: f"{c.name} to call itself")
            replaced = [schedule.buffers[name].version_of for name in instruction.writes]
            homes = [item.meta.get("version_of", "") for item in results(call)]
            _expect(replaced == homes, lambda c=call: f"{c.name} to write in place")


def _work(call: fx.Node) -> str:
    """Says what a call does, by what it calls: told here once more, so that a mistake of ``passes/lower`` shows."""
    if is_region(call):
        return "recompute" if recomputes(call) else "compute"
    kinds = {convert: "convert", prefetch: "prefetch", offload: "offload"}
    return kinds.get(call.target, "update")


def _values(schedule: Schedule, names: Iterable[str]) -> list[str]:
    return [schedule.buffers[name].value for name in names]


def _expect(condition: bool, what: Callable[[], str]) -> None:
    if not condition:
        raise SameComputationError(f"I5: expected {what()}")
