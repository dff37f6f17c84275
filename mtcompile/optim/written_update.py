"""The steps of torch's optimizers as updates by the written formula, for parameters with fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtcompile.optim.state_sizes import STATES
from mtcompile.runtime.devices.arena import zeros_like
from mtcompile.runtime.optim.formula import Update, adam, adamw, sgd
from mtcompile.runtime.optim.operands import Operands

Row = tuple[nn.Parameter, Tensor, Mapping[str, Any]]  # a parameter, its gradient and the options of its group
_SUPPORTED = ("AdamW", "Adam", "SGD")  # torch.optim classes whose arithmetic is written down
_NORM_PIECE = 1 << 16  # elements: in fp32 they stay in a core's cache


def written_update(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any], scale: float) -> Update:
    """The update that the optimizer's next step makes of a parameter. Changes nothing: see ``count_step``."""
    name, state = class_name(optimizer), optimizer.state.get(parameter, {})
    options: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "scale": scale}
    if name == "SGD":
        options |= {key: group[key] for key in ("momentum", "dampening", "nesterov")}
        return sgd(**options, first=state.get("momentum_buffer") is None)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    formula = adamw if name == "AdamW" or group.get("decoupled_weight_decay") else adam
    return formula(**options, beta1=beta1, beta2=beta2, eps=group["eps"], step=int(state.get("step", 0)) + 1)


def prepared_update(
    optimizer: torch.optim.Optimizer, row: Row, remainder: Tensor, scale: float
) -> tuple[Update, Operands, dict[str, Tensor]]:
    """The update of one parameter whose master has this ``remainder``, its operands, and the state that it has for the first
    time then. Changes nothing."""
    parameter, grad, group = row
    whole, new = states_of(optimizer, parameter, group)
    states = tuple(map(flat, whole))
    if not states:  # SGD without momentum: what the kernel writes there is not read
        states = (torch.empty(parameter.numel(), device=parameter.device),)
    grad = grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
    update = written_update(optimizer, parameter, group, scale)
    return update, Operands(flat(parameter.detach()), flat(grad.detach()), states, flat(remainder)), new


def states_of(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The state tensors of a parameter, and those among them that it has for the first time. Changes nothing."""
    state, new = optimizer.state.get(parameter, {}), dict[str, Tensor]()
    names = STATES[class_name(optimizer)] if group.get("momentum", 1) else ()
    for name in names:
        if state.get(name) is None:
            new[name] = zeros_like(parameter, torch.float32)
    return [new[name] if name in new else state[name] for name in names], new


def flat(tensor: Tensor) -> Tensor:
    """A 1-D view of all elements in their order in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def norm_in_fp32(gradient: Tensor) -> Tensor:
    """Returns the norm of a gradient of parameters with masters, in fp32. On the CPU, where torch would cast all of it at once,
    one of 16 bits is summed in pieces, in their order in memory."""
    if gradient.dtype == torch.float32 or gradient.device.type != "cpu":
        whole: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return whole
    in_order = gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True)).reshape(-1)
    # numpy's memory is no device's: an emulated one has no more than a GPU, which casts nothing
    room = torch.from_numpy(np.empty(min(in_order.numel(), _NORM_PIECE), np.float32))
    norms: list[Tensor] = [torch.linalg.vector_norm(room[: len(part)].copy_(part)) for part in in_order.split(_NORM_PIECE)]
    of_all: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return of_all


def count_step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: int = 1) -> None:
    """Counts the steps of a parameter up in its state, where its formula counts them."""
    if class_name(optimizer) != "SGD":
        optimizer.state[parameter].setdefault("step", torch.tensor(0.0)).add_(steps)


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
