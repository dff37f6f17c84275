"""Drop results that nothing reads under this plan, and operands that no result needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        whole = kernel_of(step, region)
        less = trimmed(step, whole, tuple(int(item.args[1]) for item in used))
        if less is None:
            for item in items:
                step.graph.erase_node(item)
            step.graph.erase_node(region)
            continue
        kernel, used_inputs = less
        if kernel is whole:
            continue
        drop_unread(step, region)
        region.args = tuple(region.args[i] for i in used_inputs)
        region.target = attach(step, kernel)
    return step


def drop_unread(step: fx.GraphModule, call: fx.Node) -> None:
    """Drops the results of a call that nothing reads. The others keep their order."""
    for item in results(call):
        if not item.users:
            step.graph.erase_node(item)
    for position, item in enumerate(results(call)):
        item.args = (call, position)


def trimmed(
    step: fx.GraphModule, kernel: fx.GraphModule, positions: tuple[int, ...]
) -> tuple[fx.GraphModule, Sequence[int]] | None:
    """Returns what is left of a kernel with only the outputs at ``positions``, and the positions of the inputs that this takes;
    None if nothing is left."""
    memo, key = step.meta["memo"], ("trimmed", str(kernel.meta["name"]), positions)
    if key not in memo:
        memo[key] = _trimmed(step, kernel, positions)
    less: tuple[fx.GraphModule, Sequence[int]] | None = memo[key]
    return less


def _trimmed(
    step: fx.GraphModule, kernel: fx.GraphModule, positions: tuple[int, ...]
) -> tuple[fx.GraphModule, Sequence[int]] | None:
    nodes, inputs = kernel.graph.nodes, range(len(placeholders(kernel.graph)))
    all_used = len(positions) == len(body_outputs(kernel))
    if all_used and all(n.users or n.op == "output" or must_run(n) for n in nodes):
        return kernel, inputs
    if not positions and not any(must_run(node) for node in nodes):
        return None
    body, used_inputs = _with_outputs(kernel, positions)
    if all_used and len(used_inputs) == len(inputs):
        return kernel, inputs
    return step.get_submodule(install(step, step.meta["kernels"], body)), used_inputs


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
