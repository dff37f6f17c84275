"""The state of a training: its bytes, and moving it with its parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch


def numbered(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """Yields each parameter with its number in a state_dict. Raises ValueError for groups of other lengths."""
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(saved["params"], group["params"], strict=True)


def updates_all(optimizer: torch.optim.Optimizer | None, parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Tells whether the optimizer has all of these parameters."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(parameter) for parameter in parameters} <= {id(p) for group in groups for p in group["params"]}


def state_moved(optimizer: torch.optim.Optimizer | None, parameter: torch.Tensor) -> None:
    """Moves optimizer state to its parameter's device (a step counter only if the optimizer wants it there)."""
    state = optimizer.state.get(parameter) if optimizer is not None else None
    if optimizer is None or not state:
        return
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    counters_too = parameter.device.type == "cpu" or group.get("fused") or group.get("capturable")
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (value.dim() > 0 or counters_too):
            state[key] = value.to(parameter.device)


def training_nbytes(
    parameters: Collection[torch.Tensor], optimizer: torch.optim.Optimizer | None, gradients: Collection[torch.Tensor]
) -> dict[str, int]:
    """Returns the current bytes of weights and optimizer state, and those of the gradients of some of the parameters,
    ``gradients``."""
    # Accumulated ones are wider. What torch.func.functional_call puts in the place of a parameter has none.
    widths = ((p, p if not p.is_leaf or p.grad is None else p.grad) for p in gradients if p.requires_grad)
    entries = [] if optimizer is None else optimizer.state.values()
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.numel() * like.element_size() for p, like in widths),
        "optimizer": sum(v.nbytes for entry in entries for v in entry.values() if isinstance(v, torch.Tensor)),
    }
