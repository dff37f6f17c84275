"""Fixed strategies such as other systems use: one plan each, for comparison with a searched plan in the same runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.blocks import all_others, everything
from mtcompile.passes.step_graph import regions

# (step graph, plan with the decisions already made, bytes of the home blocks still open) -> plan
Policy = Callable[[fx.GraphModule, Plan, Mapping[str, int]], Plan]


def _checkpoint_all(step: fx.GraphModule, base: Plan, open_params: Mapping[str, int]) -> Plan:
    """Keeps state and what enters a block on the device; all else is recomputed."""
    params = [Decision("params", block, "device", nbytes) for block, nbytes in open_params.items()]
    return _with(replace(base, lookahead=1), [*params, all_others("device")])


def _megatrain(step: fx.GraphModule, base: Plan, open_params: Mapping[str, int]) -> Plan:
    """Keeps state on the host. Streams weights in for the forward and again for the backward, the next block's while this one
    computes. What enters a block waits on the device; all else is recomputed."""
    return _with(replace(base, lookahead=1), [all_others("device")])


def _zero3_offload(step: fx.GraphModule, base: Plan, open_params: Mapping[str, int]) -> Plan:
    """Works like ``megatrain``, but fetches each block's weights only when the block is about to run."""
    return _with(base, [all_others("device")])


def _offload_all(step: fx.GraphModule, base: Plan, open_params: Mapping[str, int]) -> Plan:
    """Recomputes nothing: what a block saves goes home and comes back, as its weights do."""
    saved = [
        Decision("variant", step.meta["blocks"][region.meta["block"]], "save", 0)
        for region in regions(step)
        if region.meta["phase"] == "forward" and saved_values(region)
    ]
    return _with(replace(base, lookahead=1), [all_others("host"), *saved])


POLICIES: Mapping[str, Policy] = {
    "resident": everything,
    "checkpoint-all": _checkpoint_all,
    "megatrain": _megatrain,
    "zero3-offload": _zero3_offload,
    "offload-all": _offload_all,
}
KEEP_STATE = ("resident", "checkpoint-all")  # on the device


def _with(plan: Plan, decisions: list[Decision]) -> Plan:
    return replace(plan, decisions=(*plan.decisions, *decisions))
