"""Trace a model to its joint and step graph, and run a step graph by interpretation, the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mtcompile import capture
from mtcompile.passes.build import build
from mtcompile.passes.normalize import normalize
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.recompute import saved_values
from mtcompile.passes.step_graph import placeholders, regions, results


@dataclass
class Traced:
    joint: fx.GraphModule
    step: fx.GraphModule
    inputs: list[torch.Tensor]


def trace(model: nn.Module, data: dict[str, Any]) -> Traced:
    """The graphs of one training step whose loss receives a gradient of one."""
    found: list[Traced] = []
    names: dict[int, tuple[str, str]] = {id(b): ("buffer", n) for n, b in model.named_buffers()}
    names |= {id(p): ("param", n) for n, p in model.named_parameters()}

    def backend(graph: Any, inputs: Any) -> Any:
        description = capture.describe(graph, inputs, lambda tensor: names.get(id(tensor)))
        scalars = tuple(d and s for _, d, s in description.computed)
        joint = normalize(capture.joint_graph(description, scalars))
        found.append(Traced(joint, build(joint), [t.detach().clone() for t in inputs]))
        return graph.forward

    torch.compiler.reset()

    def call(**inputs: Any) -> Any:  # a frame of our own: Dynamo skips those of torch.nn
        return model(**inputs)

    capture.front_end(call, backend)(**data)
    return found[0]


def interpret(step: fx.GraphModule, inputs: list[torch.Tensor], seed: int = 3) -> list[torch.Tensor]:
    """Results of ``fx.Interpreter``, and the generator's state afterwards."""
    torch.manual_seed(seed)
    values = []
    for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True):
        if spec.role == "tangent":
            values.append(torch.ones(tuple(node.meta["val"].shape)))
        else:
            values.append(step.meta["constants"][spec.name] if spec.role == "constant" else inputs[spec.index])
    with torch.no_grad():
        return [*fx.Interpreter(step).run(*values), torch.get_rng_state()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def random_plan(step: fx.GraphModule, choose: Any) -> Plan:
    """A plan with every decision drawn by ``choose(options)``."""
    plan = Plan(lookahead=choose([0, 1, 2]))
    names = step.meta["blocks"]
    forward = [region for region in regions(step) if region.meta["phase"] == "forward"]
    for region in forward:
        choice = choose(["save", "keep", "recompute"])
        kept = tuple(v.name for v in saved_values(region) if choice == "keep" and choose([True, False]))
        plan = plan.having(Decision("variant", names[region.meta["block"]], choice, 0, "drawn", kept))
    for block in dict.fromkeys(step.meta["homes"].values()):
        plan = plan.having(Decision("params", block, choose(["device", "host"]), 0, "drawn"))
    for call in regions(step):
        for item in results(call):
            if item.meta["role"] == "activation":
                plan = plan.having(Decision("activation", item.name, choose(["device", "host", "recompute"]), 0, "drawn"))
    return plan
