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

Who knows what: each room, a package or module here, imports only rooms below it, so that proofs and rewrites do not know how a
plan was found.

    cuts        other forms of a step, whose operations are cut; which of them is taken
    planning    how plans are found: choices, summaries, the bound, the search
    lower       a rewritten step as a schedule
    rewrites    the passes of the pipeline
    proof       that cuts, rewritten steps and schedules do what was captured
    joint       joint graphs, before they are regions
    analysis    costs, lives and bytes of a step
    plan        decisions

A pass is one function ``(step, plan) -> step``; it may change the graph it is given, a copy of the step. Searches take the
figures of plans from summaries of the step (``planning/figures``), which know what these passes do. ``register`` adds a pass of
your own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mtcompile.passes.plan import Plan
from mtcompile.passes.registered import Registered, applied, name_of
from mtcompile.passes.rewrites.casts import cast_on_host
from mtcompile.passes.rewrites.collectives import combine_over_ranks, gather_over_hosts
from mtcompile.passes.rewrites.recompute import recompute
from mtcompile.passes.rewrites.repeat import repeat_forward
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


_current: list[Pass] = list(PIPELINE)


def register(transform: Pass, after: Pass | str | None = None) -> Registered:
    """Puts a pass of your own into the pipeline of this process, and returns a handle whose ``remove()`` takes it out again;
    so does leaving a ``with`` block.

    transform  a function ``(step, plan) -> step``; it may change the step graph that it is given, an ``fx.GraphModule``
    after      the pass that it follows, or that pass's name: one of ``mtcompile.passes.PIPELINE``, or one that you
               registered; default: the last one

    What is planned from now on uses it: plans are compared by their schedules with the pass, which is in every listing, and
    each schedule is proven as always. What was planned before keeps its plan. Plans are cached by the pass's code, the code
    of the functions it calls in its own package, and the values it uses. If no text describes a value, such as a tensor,
    nothing is cached.

    Raises TypeError if it is not a function, and ValueError if it is in the pipeline already or if ``after`` is not in it. An
    error in the pass or in what it returns becomes a ``PassError`` later, when a step is planned.
    """
    if not callable(transform):
        raise TypeError(f"expected a function (step, plan) -> step, found {type(transform).__name__}")
    if transform in _current:
        raise ValueError(f"expected a pass that is not in the pipeline yet, found {name_of(transform)}, which is")
    names = [name_of(each) for each in _current]
    found = [place for place, each in enumerate(_current) if after is None or each is after or names[place] == after]
    if not found:
        what = repr(after) if isinstance(after, str) else name_of(after)
        raise ValueError(f"expected after= to be one of {', '.join(names)}, found {what}")
    _current.insert(found[-1] + 1, transform)
    return Registered(lambda: _current.remove(transform))


def pipeline() -> tuple[Pass, ...]:
    """Returns the passes of ``PIPELINE``, and registered ones, in their order."""
    return tuple(_current)


def own_passes(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Returns those passes that were registered."""
    return tuple(transform for transform in passes if transform not in PIPELINE)


def rewrite(
    step: fx.GraphModule,
    plan: Plan,
    after: Callable[[str, fx.GraphModule], None] | None = None,
    passes: tuple[Pass, ...] | None = None,
) -> fx.GraphModule:
    """Returns a rewritten copy of ``step``. ``after``: called with (name, step) after each pass. ``passes``: those to
    apply; default: those of ``pipeline``. Raises PassFailed for an error in a registered one."""
    step = copy_step(step)
    for transform in pipeline() if passes is None else passes:
        step = transform(step, plan) if transform in PIPELINE else applied(transform, step, plan)
        if after is not None:
            after(name_of(transform), step)
    step.graph.lint()
    step.recompile()
    return step
