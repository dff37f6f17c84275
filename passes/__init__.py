"""Analyses, planning and rewrites of a step graph, and lowering to a schedule; installed as ``mtcompile.passes``.

The whole composition, on one screen:

    joint graph --normalize--> --build--> step graph          once per program
    step graph  --PIPELINE (given a Plan)--> rewritten        once per candidate plan
    rewritten   --lower--> Schedule --verify--> proven        the candidate that is chosen

One block before any rewrite: its values are on the device, and what its forward saves stays there for its backward.

    W, x --> block_forward --> y          ...          W, saved, dy --> block_backward --> dx, dW
                    \\----------------- saved ---------------/

The same block under a plan with W at home on the host, x waiting there, recomputation and updates in the backward:

    host     W                 x'   ...   W  x'                               dW --> update --> W
             | prefetch        ^          |  |  prefetch                      ^
             v                 | offload  v  v                                | offload
    device   block_forward(W, x) --> y    block_backward_r(W, x', dy) --> dx, dW

(``block_backward_r`` has the forward's operations in front of the backward's, so nothing is saved.)

A pass is one function ``(step, plan) -> step``; it may change the graph it is given (``rewrite`` hands it a copy).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mtcompile.passes.plan import Plan
from mtcompile.passes.rewrites.casts import cast_on_host
from mtcompile.passes.rewrites.recompute import recompute, repeat_forward
from mtcompile.passes.rewrites.transfers import offload_activations, offload_gradients, stream_params
from mtcompile.passes.rewrites.trim import trim
from mtcompile.passes.rewrites.updates import place_updates
from mtcompile.passes.step_graph import copy_step

Pass = Callable[[fx.GraphModule, Plan], fx.GraphModule]

PIPELINE: tuple[Pass, ...] = (
    recompute,  # a block's saved values are made again in its backward
    repeat_forward,  # values between blocks are made again by running forward regions once more
    trim,  # what nothing reads any longer is dropped
    stream_params,  # parameters, buffers and inputs come in before they are used
    offload_activations,  # activations that wait on the host go there and come back
    offload_gradients,  # gradients and new buffers go home
    place_updates,  # parameters are updated in the backward
    cast_on_host,  # casts move to the side of the link where fewer bytes cross
)


def rewrite(
    step: fx.GraphModule, plan: Plan, after: Callable[[str, fx.GraphModule], None] | None = None, lint: bool = True
) -> fx.GraphModule:
    """A rewritten copy of ``step``; linted after every pass (not where it is one of many candidates), and shown to
    ``after(name, step)`` if given. Its graph is what counts: its Python code is not generated (``step.recompile()`` does)."""
    step = copy_step(step)
    for transform in PIPELINE:
        step = transform(step, plan)
        if lint:
            step.graph.lint()
        if after is not None:
            after(transform.__name__, step)
    return step
