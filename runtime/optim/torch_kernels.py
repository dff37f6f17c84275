"""Optimizer updates by torch's own operations, where update.c was not built: the same bits, a chunk at a time.

Only operations are used that torch rounds once: ``mul``, ``add``, ``sub`` and ``div`` of two operands. Those of three
(``lerp``, ``addcmul``, ``add`` with ``alpha``) are contracted on some processors and not on others, and ``torch.sqrt`` asks
MKL, which on an AMD EPYC rounds a fifth of the roots to the wrong neighbour; numpy's is the processor's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtcompile.runtime.optim.formula import Update

_CHUNK = 2**16  # elements per thread: temporaries stay in its cache, and a call of torch is long beside its own overhead
_CONVERTED = 2**20  # elements of a chunk of ``split`` and ``joined``
_NAN = 0x7FC00000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 masters of any shape -> (``hi`` bf16, ``lo`` int16) of that shape and device, 4 bytes as before.

    ``hi = (bits + 0x8000) >> 16`` and ``lo`` is the low half of the bits, signed, so that ``(hi << 16) + lo`` is ``bits``:
    exactly, for every finite number and both infinities. ``hi`` is the master rounded to bf16, ties away from zero (torch:
    to even). From 0x7f7f8000 on (about 3.396e38) it is an infinity, as with torch; the pair still is the finite master.

    NaN: its bits are kept where ``hi`` is a NaN too. For others (0x7f800001..0x7f807fff, whose ``hi`` would be an infinity,
    and 0x7fff8000..0x7fffffff, among them the NaN that CUDA makes, whose ``hi`` would be a zero; both signs) both cannot be
    had, there being fewer pairs with a NaN in ``hi`` than NaNs: these become 0x7fc00000. Raises ValueError.
    """
    if master.dtype != torch.float32:
        raise ValueError(f"expected masters in torch.float32, found {master.dtype}")
    hi = torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)
    lo = torch.empty(master.shape, dtype=torch.int16, device=master.device)
    flat = master.detach().reshape(-1)
    for start in range(0, flat.numel(), _CONVERTED):
        part = slice(start, start + _CONVERTED)
        bits = flat[part].view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        hidden = (magnitude > 0x7F800000) & ((magnitude < 0x7F808000) | (magnitude >= 0x7FFF8000))
        _split_bits(bits.masked_fill(hidden, _NAN), hi.view(-1)[part], lo.view(-1)[part])
    return hi, lo


def joined(hi: Tensor, lo: Tensor) -> Tensor:
    """(bf16, int16) of one shape -> fp32: ``(hi << 16) + lo``. Raises ValueError."""
    if (hi.dtype, lo.dtype) != (torch.bfloat16, torch.int16) or hi.shape != lo.shape or hi.device != lo.device:
        expected = "expected torch.bfloat16 and torch.int16 of one shape on one device"
        raise ValueError(f"{expected}, found {hi.dtype} {list(hi.shape)} {hi.device}, {lo.dtype} {list(lo.shape)} {lo.device}")
    master = torch.empty(hi.shape, dtype=torch.float32, device=hi.device)
    high, low = hi.detach().reshape(-1), lo.reshape(-1)
    for start in range(0, high.numel(), _CONVERTED):
        part = slice(start, start + _CONVERTED)
        _join_bits(high[part], low[part], master.view(-1)[part])
    return master


def _split_bits(bits: Tensor, hi: Tensor, lo: Tensor) -> None:
    lo.copy_(bits)  # an integer that is too wide loses its upper bits
    hi.view(torch.int16).copy_((bits + 0x8000) >> 16)


def _join_bits(hi: Tensor, lo: Tensor, master: Tensor) -> None:
    bits = master.view(torch.int32)
    bits.copy_(hi.view(torch.int16))
    bits <<= 16
    bits += lo


def update(by: Update, weight: Tensor, grad: Tensor, states: Sequence[Tensor], remainder: Tensor | None) -> None:
    """In place, on operands that ``host_adam`` has checked."""
    chunk = _CHUNK * torch.get_num_threads()
    rows = torch.empty((4, min(chunk, weight.numel())), dtype=torch.float32, device=weight.device)  # w, g and two temporaries
    for start in range(0, weight.numel(), chunk):
        part = slice(start, start + chunk)
        hi, own = weight[part], [state[part] for state in states]
        w, g, t, d = rows[:, : hi.numel()]
        torch.mul(_fp32(grad[part], g), by.scalars[0], out=g)
        if remainder is None:
            w = hi
        else:
            _join_bits(hi, remainder[part], w)
        if by.kind in ("adamw", "adam"):
            _adam(by, w, g, own[0], own[1], t, d)
        elif by.kind == "lion":
            _lion(by, w, g, own[0], t, d)
        else:
            _sgd(by, w, g, own[0], t)
        for result in (w, *own):
            torch.nan_to_num_(result, nan=math.nan, posinf=math.inf, neginf=-math.inf)  # one NaN, 0x7fc00000
        if remainder is not None:
            _split_bits(w.view(torch.int32), hi, remainder[part])


def _fp32(grad: Tensor, room: Tensor) -> Tensor:
    return grad if grad.dtype == torch.float32 else room.copy_(grad)


def _adam(by: Update, w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, d: Tensor) -> None:
    _, keep, decay, take1, beta2, take2, size, rise, eps = by.scalars
    if by.kind == "adam":
        g += torch.mul(w, decay, out=t)
    torch.sub(g, m, out=t).mul_(take1)
    m += t
    torch.mul(g, take2, out=t).mul_(g)
    v.mul_(beta2).add_(t)
    with np.errstate(invalid="ignore"):  # the root of a negative number is NaN, without a warning
        np.sqrt(v.numpy(), out=d.numpy())
    d.mul_(rise).add_(eps)
    if by.kind == "adamw":
        w *= keep
    w -= torch.mul(m, size, out=t).div_(d)


def _sgd(by: Update, w: Tensor, g: Tensor, b: Tensor, t: Tensor) -> None:
    _, decay, momentum, take, lr = by.scalars
    g += torch.mul(w, decay, out=t)
    if by.kind.endswith("first"):
        b.copy_(g)
    else:
        b.mul_(momentum).add_(torch.mul(g, take, out=t))
    if by.kind.startswith("nesterov"):
        u = g.add_(torch.mul(b, momentum, out=t))
    else:
        u = b
    w -= torch.mul(u, lr, out=t)


def _lion(by: Update, w: Tensor, g: Tensor, m: Tensor, t: Tensor, u: Tensor) -> None:
    _, keep, beta1, take1, beta2, take2, lr = by.scalars
    torch.mul(m, beta1, out=u).add_(torch.mul(g, take1, out=t))
    t.fill_(lr).copysign_(u)
    w.mul_(keep).sub_(torch.where((u > 0) | (u < 0), t, u))
    m.mul_(beta2).add_(torch.mul(g, take2, out=t))
