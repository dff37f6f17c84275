"""Drop what no decision of the plan made somebody read."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mtcompile.passes.analysis.kernels import attach, drop_dead, install
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import body_outputs, is_random, kernel_of, placeholders, regions, results


def trim(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """What no decision of the plan made somebody read goes: results, what only they needed, and regions with nothing left.
    Random operations stay."""
    for region in reversed(regions(step)):
        made = results(region)
        used = [item for item in made if item.users]
        old = kernel_of(step, region)
        if len(used) == len(body_outputs(old)):
            continue
        if not used and not any(is_random(n) for n in old.graph.nodes):
            for item in made:
                step.graph.erase_node(item)
            step.graph.erase_node(region)
            continue
        keep = [int(item.args[1]) for item in used]
        memo = step.meta.setdefault("memo", {})
        key = (str(region.target), tuple(keep))
        if key not in memo:
            body, kept_inputs = _with_outputs(old, keep)
            memo[key] = step.get_submodule(install(step, step.meta["kernels"], body)), kept_inputs
        kernel, kept_inputs = memo[key]
        for item in made:
            if not item.users:
                step.graph.erase_node(item)
        for position, item in enumerate(used):
            item.args = (region, position)
        region.args = tuple(region.args[i] for i in kept_inputs)
        region.target = attach(step, kernel)
    return step


def _with_outputs(kernel: fx.GraphModule, keep: Iterable[int]) -> tuple[fx.Graph, list[int]]:
    """A copy of the body with only those outputs, and which of its inputs remain."""
    body = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    body.graph_copy(kernel.graph, env)
    outputs = body_outputs(kernel)
    made = body.output(tuple(env[outputs[i]] for i in keep))
    made.meta = {}
    drop_dead(body)
    remaining = []
    for position, node in enumerate(placeholders(body)):
        if node.users:
            remaining.append(position)
        else:
            body.erase_node(node)
    return body, remaining
