"""The steps of torch's optimizers as updates by the written formula, for parameters with fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mtcompile.runtime.optim.formula import Update, adam, adamw, sgd

_SUPPORTED = ("AdamW", "Adam", "SGD")  # torch.optim classes whose arithmetic is written down


def written_update(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any], scale: float) -> Update:
    """The update that the optimizer's next step makes of a parameter; counts the step up in its state."""
    name, state = class_name(optimizer), optimizer.state[parameter]
    options: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "scale": scale}
    if name == "SGD":
        options |= {key: group[key] for key in ("momentum", "dampening", "nesterov")}
        return sgd(**options, first=state.get("momentum_buffer") is None)
    state.setdefault("step", torch.tensor(0.0))
    state["step"] += 1
    beta1, beta2 = (float(beta) for beta in group["betas"])
    formula = adamw if name == "AdamW" or group.get("decoupled_weight_decay") else adam
    return formula(**options, beta1=beta1, beta2=beta2, eps=group["eps"], step=int(state["step"]))


def grad_scaling(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """The factor of every gradient and whether to skip the step, which a GradScaler leaves to a fused optimizer."""
    scale, infinite = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else 1.0 / float(scale)), infinite is not None and bool(infinite)


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of the optimizer's class. Raises TypeError for one that cannot update masters."""
    for name in _SUPPORTED:
        if type(optimizer) is getattr(torch.optim, name):
            return name
    raise TypeError(
        f'expected torch.optim.AdamW, Adam or SGD with precision="bf16-master32", found {type(optimizer).__name__}: only their '
        'arithmetic is done on fp32 masters. Use one of them, or precision="fp32"'
    )
