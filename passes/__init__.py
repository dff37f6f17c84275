"""Analyses, planning and rewrites of a step graph, and lowering to a schedule; installed as ``mtcompile.passes``.

The whole pipeline, on one screen:

    joint graph --normalize--> --build--> step graph          once per program
    step graph  --PIPELINE (given a Plan)--> rewritten        for the chosen plan
    rewritten   --lower--> Schedule --verify--> proven        the chosen candidate

One block before any rewrite: its values are on the device, and the values that its forward saves stay there for its backward.

    W, x --> block_forward --> y          ...          W, saved, dy --> block_backward --> dx, dW
                    \\----------------- saved ---------------/

The same block under a plan that keeps W on the host, lets x wait there, recomputes, and updates in the backward:

    host     W                 x'   ...   W  x'                               dW --> update --> W
             | prefetch        ^          |  |  prefetch                      ^
             v                 | offload  v  v                                | offload
    device   block_forward(W, x) --> y    block_backward_r(W, x', dy) --> dx, dW

(``block_backward_r`` has the forward's operations in front of the backward's, so nothing is saved.)

A pass is one function ``(step, plan) -> step``; it may change the graph it is given, a copy of the step. Searches
have the figures of plans from summaries of the step (``planning/figures``), which know what these passes do.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mtcompile.passes.plan import Plan
from mtcompile.passes.rewrites.casts import cast_on_host
from mtcompile.passes.rewrites.collectives import combine_over_ranks, gather_over_hosts
from mtcompile.passes.rewrites.recompute import recompute, repeat_forward
from mtcompile.passes.rewrites.transfers import offload_activations, offload_gradients, stream_params
from mtcompile.passes.rewrites.trim import trim
from mtcompile.passes.rewrites.updates import place_updates
from mtcompile.passes.step_graph import copy_step

Pass = Callable[[fx.GraphModule, Plan], fx.GraphModule]

PIPELINE: tuple[Pass, ...] = (
    recompute,  # recomputes a block's saved values in its backward
    repeat_forward,  # runs forward regions again for values between blocks
    trim,  # drops what nothing reads any longer
    stream_params,  # brings parameters, buffers and inputs in before they are used
    offload_activations,  # sends activations to the host and brings them back
    offload_gradients,  # sends gradients and new buffers home
    combine_over_ranks,  # makes gradients and buffers those of all ranks
    place_updates,  # puts updates of parameters into the backward
    gather_over_hosts,  # brings the parts of parameters that other hosts have updated
    cast_on_host,  # moves casts to the side of the link where fewer bytes cross
)


def rewrite(step: fx.GraphModule, plan: Plan, after: Callable[[str, fx.GraphModule], None] | None = None) -> fx.GraphModule:
    """Returns a rewritten copy of ``step``. ``after``: called with (name, step) after each pass."""
    step = copy_step(step)
    for transform in PIPELINE:
        step = transform(step, plan)
        if after is not None:
            after(transform.__name__, step)
    step.graph.lint()
    step.recompile()
    return step
