"""Drop results that nothing reads under this plan, and operands that no result needs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mtcompile.passes.analysis.kernels import attach, drop_dead, install
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import body_outputs, kernel_of, must_run, placeholders, regions, results


def trim(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Drops results without a reader, the operations that only they needed, operands that no operation left needs (a view made
    where it is used leaves one behind where it was captured), and regions with nothing left. What must run stays."""
    for region in reversed(regions(step)):
        items = results(region)
        used = [item for item in items if item.users]
        old = kernel_of(step, region)
        if len(used) == len(body_outputs(old)) and all(n.users or n.op == "output" or must_run(n) for n in old.graph.nodes):
            continue
        if not used and not any(must_run(n) for n in old.graph.nodes):
            for item in items:
                step.graph.erase_node(item)
            step.graph.erase_node(region)
            continue
        positions = [int(item.args[1]) for item in used]
        memo = step.meta["memo"]
        key = (str(region.target), tuple(positions))
        if key not in memo:
            body, used_inputs = _with_outputs(old, positions)
            memo[key] = step.get_submodule(install(step, step.meta["kernels"], body)), used_inputs
        kernel, used_inputs = memo[key]
        if len(used) == len(body_outputs(old)) and len(used_inputs) == len(region.args):
            continue
        for item in items:
            if not item.users:
                step.graph.erase_node(item)
        for position, item in enumerate(used):
            item.args = (region, position)
        region.args = tuple(region.args[i] for i in used_inputs)
        region.target = attach(step, kernel)
    return step


def _with_outputs(kernel: fx.GraphModule, positions: Iterable[int]) -> tuple[fx.Graph, list[int]]:
    """A copy of the body with only the outputs at ``positions``, and the positions of the inputs that it still takes."""
    body = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    body.graph_copy(kernel.graph, env)
    outputs = body_outputs(kernel)
    body.output(tuple(env[outputs[i]] for i in positions)).meta = {}
    drop_dead(body)
    used_inputs = []
    for position, node in enumerate(placeholders(body)):
        if node.users:
            used_inputs.append(position)
        else:
            body.erase_node(node)
    return body, used_inputs
