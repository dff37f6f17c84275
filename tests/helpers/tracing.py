"""Trace a model to its joint and step graph; run a step graph by interpretation, the reference, and its schedule on the
emulated device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from mtcompile.capture import tracing
from mtcompile.capture.tracing import Traced
from mtcompile.execution.memory.fragments import homes_off_device, tensor_of
from mtcompile.kernels.measure import strides_on
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.analysis.state import NO_LIMITS, Budgets, persistent_nbytes
from mtcompile.passes.lower import lower
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.proof.schedule import Given, check_schedule
from mtcompile.passes.step_graph import (
    calls,
    fragments_of,
    inputs_of,
    is_convert,
    outputs_of,
    placeholders,
    regions,
    results,
    step_outputs,
)
from mtcompile.runtime.devices.arena import arena, layout_of
from mtcompile.runtime.devices.cpu import Arenas, CpuMemory
from mtcompile.runtime.executor import Delays, PhaseOptions, execute, prepare
from mtcompile.runtime.schedule import Schedule
from mtcompile.torch_private import cpu_allocator_peak
from tests.helpers.models import make


def trace(model: nn.Module, data: dict[str, Any]) -> Traced:
    """With inputs of its own: what the schedules of a test write to."""
    torch.compiler.reset()
    traced = tracing.trace(model, data, observe=strides_on(torch.device("cpu")))
    return replace(traced, inputs=tuple(t.detach().clone() for t in traced.inputs))


@functools.cache
def _traced_once(name: str) -> Traced:
    return trace(*make(name))


def traced_case(name: str) -> Traced:
    """A case of ``tests.helpers.models``, traced once for all tests of a process; with inputs of its own."""
    traced = _traced_once(name)
    return replace(traced, inputs=tuple(t.detach().clone() for t in traced.inputs))


def interpret(step: fx.GraphModule, inputs: list[torch.Tensor], seed: int = 3) -> list[torch.Tensor]:
    """Results of ``fx.Interpreter``, and the generator's state afterwards."""
    torch.manual_seed(seed)
    values = []
    for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True):
        if spec.role == "tangent":
            values.append(torch.ones(tuple(node.meta["val"].shape)))
        else:
            values.append(step.meta["constants"][spec.name] if spec.role == "constant" else tensor_of(spec, inputs))
    with torch.no_grad():
        return [*fx.Interpreter(step).run(*values), torch.get_rng_state()]


def values(joint: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """What a joint graph returns, by name; gradients of fragments put together."""
    taken = []
    for spec, node in inputs_of(joint):
        val = node.meta["val"]
        taken.append(torch.ones(val.shape, dtype=val.dtype) if spec.role == "tangent" else tensor_of(spec, inputs))
    with torch.no_grad():
        results = fx.Interpreter(joint).run(*taken)
    parts, joined = fragments_of(joint), dict[str, list[torch.Tensor]]()
    for (spec, _), value in zip(outputs_of(joint), results, strict=True):
        joined.setdefault(parts[spec.name].parameter if spec.name in parts else spec.name, []).append(value)
    return {name: several[0] if len(several) == 1 else torch.cat(several) for name, several in joined.items()}


def lowered(step: fx.GraphModule, plan: Plan, workspace: Any = workspace_nbytes, budgets: Budgets = NO_LIMITS) -> Schedule:
    """The schedule of a rewritten step, its figures checked against the step."""
    schedule = lower(
        step, replace(plan, budget_bytes=budgets.nbytes), Machine(), persistent_nbytes(step, plan, budgets), workspace
    )
    check_schedule(step, schedule, Given(plan, budgets, workspace))
    return schedule


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def bind(memory: CpuMemory, step: Any, inputs: list[torch.Tensor]) -> dict[str, Any]:
    """Give a step its inputs and the homes of its results; the kernels it calls."""
    constants = step.meta["constants"]
    for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True):
        tangent = torch.ones(tuple(node.meta["val"].shape))
        memory.bind(
            node.name,
            tangent if spec.role == "tangent" else constants[spec.name] if spec.role == "constant" else tensor_of(spec, inputs),
        )
    for node in step_outputs(step):
        if memory.schedule.buffers[node.name].kind == "home":
            layout = memory.layouts[node.name]
            memory.bind(node.name, torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype))
    conversions = {call.name: _as_it_is for call in calls(step) if is_convert(call)}
    return {name: module.forward for name, module in step.named_children()} | conversions


def _as_it_is(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the place it is written to makes another dtype of."""
    return values


def layouts_and_arenas(step: Any, schedule: Any) -> tuple[dict[str, Any], Arenas]:
    nodes = {node.name: node for node in step.graph.nodes}
    layouts = {name: layout_of(nodes[name].meta["val"]) for name in schedule.buffers}
    return layouts, Arenas(arena(schedule.arena_nbytes["device"]), arena(schedule.arena_nbytes["host"]))


def run(
    step: Any, schedule: Any, inputs: list[torch.Tensor], seed: int, delays: Delays | None
) -> tuple[list[torch.Tensor], int]:
    """Both phases on the emulated device, poisoned; the results as by interpretation, and the measured peak."""
    memory = CpuMemory(schedule, *layouts_and_arenas(step, schedule), check=True)
    kernels = bind(memory, step, inputs)
    torch.manual_seed(seed)
    measured = []
    for phase in ("forward", "backward"):
        base = schedule.arena_nbytes["device"] + sum(
            t.untyped_storage().nbytes()
            for t, b in ((t, schedule.buffers[name]) for name, t in memory.tensors.items())
            if b.tier == "device" and (b.kind == "pooled" or (b.role == "tangent" and phase == "backward"))
        )
        with torch.no_grad(), cpu_allocator_peak() as peak:
            execute(prepare(schedule, phase), memory, kernels, PhaseOptions(delays=delays))
        assert peak.nbytes is not None
        measured.append(base + peak.nbytes)
    state = torch.get_rng_state()
    results = [memory.tensors[node.name] for node in step_outputs(step)]
    return [*results, state], max(measured)


def random_plan(step: fx.GraphModule, choose: Any) -> Plan:
    """A plan with every decision drawn by ``choose(options)``."""
    plan = Plan(lookahead=choose([0, 1, 2]), span=choose([0, 1, 2]), narrow=choose([True, False]), pooled=choose([True, False]))
    plan = replace(plan, wide=tuple(home for home in dict.fromkeys(step.meta["homes"].values()) if choose([True, False])))
    names = step.meta["blocks"]
    forward = [region for region in regions(step) if region.meta["phase"] == "forward"]
    for region in forward:
        choice = choose(["save", "keep", "recompute"])
        kept = tuple(v.name for v in saved_values(region) if choice == "keep" and choose([True, False]))
        plan = plan.with_decision(Decision("variant", names[region.meta["block"]], choice, 0, "drawn", kept))
    for block in dict.fromkeys(step.meta["homes"].values()):
        tiers = ["host"] if block in homes_off_device(step) else ["device", "host"]
        plan = plan.with_decision(Decision("params", block, choose(tiers), 0, "drawn"))
        plan = plan.with_decision(Decision("fetch", block, choose(["keep", "again"]), 0, "drawn"))
        plan = plan.with_decision(Decision("return", block, choose(["early", "late"]), 0, "drawn"))
        plan = plan.with_decision(Decision("gradients", block, choose(["early", "late"]), 0, "drawn"))
    for call in regions(step):
        for item in results(call):
            if item.meta["role"] == "activation":
                plan = plan.with_decision(
                    Decision("activation", item.name, choose(["device", "host", "recompute"]), 0, "drawn")
                )
                plan = plan.with_decision(Decision("load", item.name, choose(["early", "late"]), 0, "drawn"))
    return plan
