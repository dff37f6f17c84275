"""One written formula for each optimizer, and its scalars: worked out in double, rounded once to fp32.

A kernel, whichever language it is in, takes ``Update.scalars`` in their order and does one fp32 operation after another as
the formula has them, each rounded to nearest: no fused multiply-add, division and square root as IEEE 754 has them. A bf16
gradient and a split weight are exact in fp32. Every NaN is stored as 0x7fc00000, so that split weights show it in their bf16
plane. Therefore all kernels give the same bits, whatever the number of threads or the width of vectors. Only
``torch.set_flush_denormal(True)`` changes them.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["adamw", "adam", "sgd", "sgd-first", "nesterov", "nesterov-first"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in update.c's order


@dataclass(frozen=True, slots=True)
class Update:
    """One step of one optimizer. ``kind``: which formula. ``scalars``: fp32 numbers, in the order that the function which
    makes the update lists them in."""

    kind: Kind
    scalars: tuple[float, ...]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state tensors, in the order in which kernels take them."""
        return ("m", "v") if self.kind in ("adamw", "adam") else ("buffer",)

    @property
    def nesterov(self) -> bool:
        return self.kind.startswith("nesterov")

    @property
    def first(self) -> bool:
        """True where the state is written and not read."""
        return self.kind.endswith("first")


def adamw(*, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, scale: float = 1.0) -> Update:
    """A step of torch.optim.AdamW without ``amsgrad`` and ``maximize``; ``step`` is the one being taken, the first is 1.

    Scalars: scale; keep = 1 - lr weight_decay; decay = weight_decay; take1 = 1 - beta1; beta2; take2 = 1 - beta2;
    size = lr / (1 - beta1^step); rise = 1 / sqrt(1 - beta2^step); eps. Then::

        g = grad * scale
        m = m + take1 * (g - m)
        v = beta2 * v + (take2 * g) * g
        d = sqrt(v) * rise + eps
        w = keep * w
        w = w - (size * m) / d

    Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"expected the first step to be number 1, found step {step}")
    size, rise = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    return _update("adamw", scale, 1 - lr * weight_decay, weight_decay, 1 - beta1, beta2, 1 - beta2, size, rise, eps)


def adam(*, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, scale: float = 1.0) -> Update:
    """A step of torch.optim.Adam without ``amsgrad`` and ``maximize``: weight decay is part of the gradient.

    Scalars: those of ``adamw``. Then::

        g = grad * scale
        g = g + decay * w
        m, v, d as in ``adamw``
        w = w - (size * m) / d

    Raises ValueError for a step below 1.
    """
    decoupled = adamw(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step, scale=scale)
    return Update("adam", decoupled.scalars)


def sgd(
    *,
    lr: float,
    momentum: float,
    first: bool,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    scale: float = 1.0,
) -> Update:
    """A step of torch.optim.SGD with momentum, without ``maximize``. ``first``: a parameter's first step, for which its buffer
    is not read.

    Scalars: scale; decay = weight_decay; momentum; take = 1 - dampening; lr. Then::

        g = grad * scale
        g = g + decay * w
        b = g if first else momentum * b + take * g
        u = g + momentum * b if nesterov else b
        w = w - lr * u
    """
    name, suffix = "nesterov" if nesterov else "sgd", "-first" if first else ""
    kind = next(kind for kind in KINDS if kind == name + suffix)
    return _update(kind, scale, weight_decay, momentum, 1 - dampening, lr)


def rounded(value: float) -> float:
    """The nearest fp32 number; infinity above the largest."""
    return ctypes.c_float(value).value


def _update(kind: Kind, *scalars: float) -> Update:
    return Update(kind, tuple(map(rounded, scalars)))
