"""Analyses, planning and rewrites of a step graph, and lowering to a schedule; installed as ``mtcompile.passes``.

The whole composition, on one screen:

    joint graph --normalize--> --build--> step graph          once per program
    step graph  --PIPELINE (given a Plan)--> rewritten        once per candidate plan
    rewritten   --lower--> Schedule --verify--> proven        the candidate that is kept

A pass is one function ``(step, plan) -> step``; it may change the graph it is given (``rewrite`` hands it a copy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from mtcompile.passes.plan import Plan

    Pass = Callable[[fx.GraphModule, Plan], fx.GraphModule]


def pipeline() -> tuple[Pass, ...]:
    """The rewrites, in order."""
    from mtcompile.passes.rewrites.casts import narrow_transfers
    from mtcompile.passes.rewrites.recompute import recompute, repeat_forward
    from mtcompile.passes.rewrites.transfers import offload_activations, offload_gradients, stream_params
    from mtcompile.passes.rewrites.trim import trim
    from mtcompile.passes.rewrites.updates import place_updates

    moves = (stream_params, offload_activations, offload_gradients)
    return (recompute, repeat_forward, trim, *moves, place_updates, narrow_transfers)


def rewrite(
    step: fx.GraphModule, plan: Plan, after: Callable[[str, fx.GraphModule], None] | None = None, lint: bool = True
) -> fx.GraphModule:
    """A rewritten copy of ``step``; linted after every pass (not where it is one of many candidates), and shown to
    ``after(name, step)`` if given. Its graph is what counts: its Python code is not generated (``step.recompile()`` does)."""
    from mtcompile.passes.step_graph import copy_step

    step = copy_step(step)
    for transform in pipeline():
        step = transform(step, plan)
        if lint:
            step.graph.lint()
        if after is not None:
            after(transform.__name__, step)
    return step
