"""The scalars of optimizer updates, worked out in double and rounded once to fp32.

``runtime/optim/host_kernels.py`` writes out what is done with them. A kernel, whichever language it is in, gets ``scalars`` in
this order and does nothing but fp32 operations with them, so all kernels give the same bits.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["adamw", "adam", "sgd", "sgd-first", "nesterov", "nesterov-first", "lion"]
KINDS: tuple[Kind, ...] = ("adamw", "adam", "sgd", "sgd-first", "nesterov", "nesterov-first", "lion")  # as update.c counts


@dataclass(frozen=True, slots=True)
class Update:
    """``kind``: which loop. ``scalars``: every one an fp32 number; their names are in the function that made it."""

    kind: Kind
    scalars: tuple[float, ...]


def rounded(value: float) -> float:
    """To the nearest fp32 number, infinity above the largest."""
    return ctypes.c_float(value).value


def _update(kind: Kind, *scalars: float) -> Update:
    return Update(kind, tuple(map(rounded, scalars)))


def adam_update(
    decoupled: bool, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, scale: float
) -> Update:
    """scale, keep, decay, take1, beta2, take2, size, rise, eps; AdamW where ``decoupled``. Raises ValueError."""
    if step < 1:
        raise ValueError(f"expected the first step to be number 1, found step {step}")
    size, rise = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    scalars = (scale, 1 - lr * weight_decay, weight_decay, 1 - beta1, beta2, 1 - beta2, size, rise, eps)
    return _update("adamw" if decoupled else "adam", *scalars)


def sgd_update(
    lr: float, momentum: float, dampening: float, nesterov: bool, weight_decay: float, first: bool, scale: float
) -> Update:
    """scale, decay, momentum, take, lr."""
    kinds: dict[tuple[bool, bool], Kind] = {
        (False, False): "sgd",
        (False, True): "sgd-first",
        (True, False): "nesterov",
        (True, True): "nesterov-first",
    }
    return _update(kinds[bool(nesterov), bool(first)], scale, weight_decay, momentum, 1 - dampening, lr)


def lion_update(lr: float, beta1: float, beta2: float, weight_decay: float, scale: float) -> Update:
    """scale, keep, beta1, take1, beta2, take2, lr."""
    return _update("lion", scale, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)
