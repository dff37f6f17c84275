"""Who is measured: a peer is a function from a model to a callable that returns the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config

from benchmarks.models import Gpt

Call = Callable[..., Any]


def plain(model: Gpt, budget: int | None) -> Call:
    return model


def checkpointed(model: Gpt, budget: int | None) -> Call:
    model.recompute = True
    return model


def compiled(model: Gpt, budget: int | None) -> Call:
    return torch.compile(model, fullgraph=True)


def compiled_checkpointed(model: Gpt, budget: int | None) -> Call:
    model.recompute = True
    return torch.compile(model, fullgraph=True)


def compiled_within(share: float) -> Callable[[Gpt, int | None], Call]:
    """torch.compile with its own ``activation_memory_budget``, a share of what it saves without."""

    def make(model: Gpt, budget: int | None) -> Call:
        inner = torch.compile(model, fullgraph=True)

        def call(*args: Any) -> Any:  # the setting is read when the first call compiles
            with functorch_config.patch(activation_memory_budget=share):
                return inner(*args)

        return call

    return make


def mtcompiled(kernels: str, offload: bool = True) -> Callable[[Gpt, int | None], Call]:
    def make(model: Gpt, budget: int | None) -> Call:
        return torch.compile(
            model,
            fullgraph=True,
            backend="mtcompile",
            options={"activation_memory": budget, "kernels": kernels, "offload": offload},
        )

    return make


SHARES = (0.5, 0.25)
PEERS: dict[str, Callable[[Gpt, int | None], Call]] = {
    "plain": plain,
    "checkpoint": checkpointed,
    "torch.compile": compiled,
    "torch.compile+checkpoint": compiled_checkpointed,
    **{f"torch.compile budget {share}": compiled_within(share) for share in SHARES},
    "mtcompile eager": mtcompiled("eager"),
    "mtcompile inductor": mtcompiled("inductor"),
    # As the other peers, which have no host memory to go to.
    "mtcompile eager, no offload": mtcompiled("eager", offload=False),
    "mtcompile inductor, no offload": mtcompiled("inductor", offload=False),
}
RESIDENT = ("plain", "torch.compile", "mtcompile eager", "mtcompile inductor")
WITHIN = tuple(peer for peer in PEERS if peer not in ("plain", "torch.compile"))  # which hold what the budget is a share of
