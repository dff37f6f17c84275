"""Optimizer updates by torch's own operations, where update.c was not built: the same bits, a chunk at a time.

Only operations are used that torch rounds once: ``mul``, ``add``, ``sub`` and ``div`` of two operands. Those of three
(``lerp``, ``addcmul``, ``add`` with ``alpha``) are contracted on some processors and not on others, and ``torch.sqrt`` asks
MKL, which on an AMD EPYC rounds a fifth of the roots to the wrong neighbour; numpy's is the processor's own.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mtcompile.runtime.optim.formula import Update
from mtcompile.runtime.optim.operands import Operands, join_bits, split_bits

_CHUNK = 2**16  # elements per thread: temporaries stay in its cache, and a call of torch is long beside its own overhead
_TEMPORARY = 24  # bytes of temporaries for each element of a chunk: four rows of fp32, and two of int32 where masters are split


@torch.no_grad()
def apply(update: Update, operands: Operands) -> None:
    """Update in place, on operands that have been checked. Version counters stay as they are: the caller counts. Temporaries
    take at most as many bytes as the weight, for which plans have room, or those of one element."""
    weight, grad, remainder = operands.weight.data, operands.grad.data, operands.remainder
    remainder = None if remainder is None else remainder.data  # .data: writes to it are not counted
    states = [state.data for state in operands.states]
    chunk = min(_CHUNK * torch.get_num_threads(), max(1, weight.nbytes // _TEMPORARY))
    rows = torch.empty((4, min(chunk, weight.numel())), dtype=torch.float32, device=weight.device)  # w, g and two temporaries
    for start in range(0, weight.numel(), chunk):
        part = slice(start, start + chunk)
        high, state_parts = weight[part], [state[part] for state in states]
        w, g, t, d = rows[:, : high.numel()]
        torch.mul(grad[part] if grad.dtype == torch.float32 else g.copy_(grad[part]), update.scalars[0], out=g)
        if remainder is None:
            w = high
        else:
            join_bits(high, remainder[part], w)
        if len(state_parts) == 2:
            _adam(update, w, g, state_parts, (t, d))
        else:
            _sgd(update, w, g, state_parts[0], t)
        for result in (w, *state_parts):
            torch.nan_to_num_(result, nan=math.nan, posinf=math.inf, neginf=-math.inf)  # every NaN becomes 0x7fc00000
        if remainder is not None:
            split_bits(w.view(torch.int32), high, remainder[part])


def _adam(update: Update, w: Tensor, g: Tensor, moments: list[Tensor], temporaries: tuple[Tensor, Tensor]) -> None:
    _, keep, decay, take1, beta2, take2, size, rise, eps = update.scalars
    (m, v), (t, d) = moments, temporaries
    if update.kind == "adam":
        g += torch.mul(w, decay, out=t)
    torch.sub(g, m, out=t).mul_(take1)
    m += t
    torch.mul(g, take2, out=t).mul_(g)
    v.mul_(beta2).add_(t)
    with np.errstate(invalid="ignore"):  # the root of a negative number is NaN, without a warning
        np.sqrt(v.numpy(), out=d.numpy())
    d.mul_(rise).add_(eps)
    if update.kind == "adamw":
        w *= keep
    w -= torch.mul(m, size, out=t).div_(d)


def _sgd(update: Update, w: Tensor, g: Tensor, b: Tensor, t: Tensor) -> None:
    _, decay, momentum, take, lr = update.scalars
    g += torch.mul(w, decay, out=t)
    if update.first:
        b.copy_(g)
    else:
        b.mul_(momentum).add_(torch.mul(g, take, out=t))
    u = g.add_(torch.mul(b, momentum, out=t)) if update.nesterov else b
    w -= torch.mul(u, lr, out=t)
