"""Optimizer updates on host memory: AdamW, Adam, SGD with momentum and Lion, in place, by one written formula each.

Two layouts, both with fp32 optimizer state:

*fp32*: fp32 weight and gradient.

*split*: the weight is two planes, ``hi`` in bf16, which is computed with, and ``remainder`` in int16; together they are an
fp32 master (``split``, ``joined``) in 4 bytes. The gradient is bf16 or fp32.

In the formulas, what is called a *scalar* is worked out in double and rounded once to fp32; everything else is one
fp32 operation after another in the order written, each rounded to nearest: no fused multiply-add, division and square root
as IEEE 754 has them. A bf16 gradient and a split weight are exact in fp32. A NaN is stored as 0x7fc00000, whichever it
was, so split weights show it in ``hi``. Given that, bits depend on neither threads, nor vector width, nor which of these ran:
update.c (OpenMP, built at install where there is a compiler), update_torch.py where it was not built, and the kernels
of ``runtime/optim/device_kernels.py``. The one thing that changes them is ``torch.set_flush_denormal(True)``.

Every tensor is 1-D, contiguous, on the CPU, as long as the others, and shares no memory with them. Weight, states and
remainder are written and their version counters rise by one; autograd does not see it otherwise. A call uses
``torch.get_num_threads()`` threads, changes no setting, and holds no GIL while C runs. ``by``: "c" or "torch"; None: C where
there is. Everything that is wrong with the operands is a ValueError before anything is written; ``by="c"`` without the
library is a RuntimeError.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mtcompile.runtime.optim.formula import KINDS, Update, adam_update, lion_update, sgd_update
from mtcompile.runtime.optim.torch_kernels import joined, split
from mtcompile.runtime.optim.torch_kernels import update as update_by_torch

__all__ = ["adam", "adamw", "gbps", "joined", "library", "lion", "moved_nbytes", "operands", "sgd", "split", "which"]

By = Literal["c", "torch"]
Layout = Literal["fp32", "split, bf16 gradient", "split, fp32 gradient"]
LAYOUTS: tuple[Layout, ...] = ("fp32", "split, bf16 gradient", "split, fp32 gradient")  # as update.c counts them
_VERSION = 1  # of update.c's interface and formulas
_CPU = torch.device("cpu")
_LEAST = 2**14  # elements per thread: below, waking one takes longer than its share


@dataclass(frozen=True, slots=True)
class Operands:
    """Tensors of an update that were checked. ``states``: as many as the optimizer keeps. ``remainder``: of split weights."""

    layout: Layout
    weight: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    remainder: Tensor | None

    def written(self) -> tuple[Tensor, ...]:
        return (self.weight, *self.states, *(() if self.remainder is None else (self.remainder,)))


def operands(
    weight: Tensor, grad: Tensor, states: Mapping[str, Tensor], remainder: Tensor | None, where: torch.device
) -> Operands:
    """Check them; ``where``: the device that they have to be on. Raises ValueError."""
    halves = torch.bfloat16 if remainder is not None else torch.float32
    dtypes = {"weight": (halves,), "grad": (torch.float32,) if remainder is None else (torch.bfloat16, torch.float32)}
    tensors = {"weight": weight, "grad": grad, **states}
    if remainder is not None:
        tensors["remainder"], dtypes["remainder"] = remainder, (torch.int16,)
    length = weight.numel()
    for name, tensor in tensors.items():
        allowed = dtypes.get(name, (torch.float32,))
        right = tensor.dtype in allowed and tensor.shape == (length,) and tensor.device == where
        if not right or not tensor.is_contiguous() or tensor.layout != torch.strided:
            expected = f"{' or '.join(map(str, allowed))} [{length}] on {where}, contiguous"
            how = f"strides {list(tensor.stride())}" if tensor.layout == torch.strided else str(tensor.layout)
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}, {how}"
            hint = "; a bf16 weight needs its remainder" if name == "weight" and tensor.dtype == torch.bfloat16 else ""
            raise ValueError(f"expected {name} to be {expected}, found {found}{hint}")
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"expected tensors that share no memory, found {first} and {second} overlapping")
    layout: Layout = "fp32"
    if remainder is not None:
        layout = "split, bf16 gradient" if grad.dtype == torch.bfloat16 else "split, fp32 gradient"
    return Operands(layout, weight, grad, tuple(states.values()), remainder)


# ------------------------------------------------------------------------------------------------------------ optimizers


def adamw(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    remainder: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float = 1.0,
    by: By | None = None,
) -> None:
    """torch.optim.AdamW without ``amsgrad`` and ``maximize``; ``step`` counts from 1 and is the one being taken.

    Scalars: scale; keep = 1 - lr weight_decay; take1 = 1 - beta1; beta2; take2 = 1 - beta2; size = lr / (1 - beta1^step);
    rise = 1 / sqrt(1 - beta2^step); eps. Then::

        g = grad * scale
        m = m + take1 * (g - m)
        v = beta2 * v + (take2 * g) * g
        d = sqrt(v) * rise + eps
        w = keep * w
        w = w - (size * m) / d
    """
    update = adam_update(True, lr, beta1, beta2, eps, weight_decay, step, scale)
    _run(update, operands(weight, grad, {"m": m, "v": v}, remainder, _CPU), by)


def adam(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    remainder: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float = 1.0,
    by: By | None = None,
) -> None:
    """torch.optim.Adam without ``amsgrad`` and ``maximize``: weight decay is part of the gradient.

    Scalars: as ``adamw``'s, and decay = weight_decay instead of keep. Then::

        g = grad * scale
        g = g + decay * w
        m, v, d as in ``adamw``
        w = w - (size * m) / d
    """
    update = adam_update(False, lr, beta1, beta2, eps, weight_decay, step, scale)
    _run(update, operands(weight, grad, {"m": m, "v": v}, remainder, _CPU), by)


def sgd(
    weight: Tensor,
    grad: Tensor,
    buffer: Tensor,
    remainder: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    first: bool,
    scale: float = 1.0,
    by: By | None = None,
) -> None:
    """torch.optim.SGD with momentum, without ``maximize``. ``first``: the buffer is not read, as in a parameter's first step.

    Scalars: scale; decay = weight_decay; momentum; take = 1 - dampening; lr. Then::

        g = grad * scale
        g = g + decay * w
        b = g if first else momentum * b + take * g
        u = g + momentum * b if nesterov else b
        w = w - lr * u
    """
    update = sgd_update(lr, momentum, dampening, nesterov, weight_decay, first, scale)
    _run(update, operands(weight, grad, {"buffer": buffer}, remainder, _CPU), by)


def lion(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    remainder: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float = 1.0,
    by: By | None = None,
) -> None:
    """Lion (arXiv 2302.06675, algorithm 2) with decoupled weight decay.

    Scalars: scale; keep = 1 - lr weight_decay; beta1; take1 = 1 - beta1; beta2; take2 = 1 - beta2; lr. Then::

        g = grad * scale
        u = beta1 * m + take1 * g
        u = lr if u > 0, -lr if u < 0, else u    (a zero or NaN)
        w = keep * w - u
        m = beta2 * m + take2 * g
    """
    update = lion_update(lr, beta1, beta2, weight_decay, scale)
    _run(update, operands(weight, grad, {"m": m}, remainder, _CPU), by)


def _run(update: Update, tensors: Operands, by: By | None) -> None:
    found = None if by == "torch" else library()
    if by == "c" and found is None:
        raise RuntimeError("expected update.c to have been built, found no library; install again with a C compiler")
    if found is not None:
        _call(found, update, tensors)
    else:
        states = [state.data for state in tensors.states]  # .data: counted once, below
        weight, grad, remainder = tensors.weight.data, tensors.grad.data, tensors.remainder
        with torch.no_grad():
            update_by_torch(update, weight, grad, states, None if remainder is None else remainder.data)
    increment_version([tensor for tensor in tensors.written() if not tensor.is_inference()])


# ------------------------------------------------------------------------------------------------------------ the library


def built() -> Path | None:
    """Where the library is that was built when mtcompile was installed."""
    names = (Path(__file__).with_name("_update" + suffix) for suffix in EXTENSION_SUFFIXES)
    return next((path for path in names if path.is_file()), None)


@functools.cache
def library() -> ctypes.CDLL | None:
    """update.c, loaded; None where it was not built here, or from another version of it. torch has been imported: where both
    were linked with one OpenMP library, its threads are the ones that are used."""
    path = built()
    if path is None:
        return None
    try:
        found = ctypes.CDLL(str(path))
    except OSError:  # built for another system, or without its OpenMP library
        return None
    if found.mt_update_version() != _VERSION:
        return None
    pointer, floats = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
    found.mt_update.argtypes = [ctypes.c_int] * 3 + [ctypes.c_int64] + [pointer] * 5 + [floats]
    found.mt_update.restype = None
    return found


def _call(found: ctypes.CDLL, update: Update, tensors: Operands) -> None:
    length = tensors.weight.numel()
    threads = max(1, min(torch.get_num_threads(), length // _LEAST))
    second = tensors.states[1].data_ptr() if len(tensors.states) > 1 else None
    found.mt_update(
        KINDS.index(update.kind),
        LAYOUTS.index(tensors.layout),
        threads,
        length,
        tensors.weight.data_ptr(),
        None if tensors.remainder is None else tensors.remainder.data_ptr(),
        tensors.grad.data_ptr(),
        tensors.states[0].data_ptr(),
        second,
        (ctypes.c_float * len(update.scalars))(*update.scalars),
    )


def which() -> str:
    """What an update runs in: "C with OpenMP, n threads" or "torch"."""
    return "torch" if library() is None else f"C with OpenMP, {torch.get_num_threads()} threads"


def moved_nbytes(states: int, layout: Layout) -> int:
    """Bytes an update reads and writes for a parameter: weight and states both ways, the gradient one way."""
    return 2 * 4 * (1 + states) + (2 if layout == "split, bf16 gradient" else 4)


def gbps(layout: Layout = "split, bf16 gradient", parameters: int = 2**24, repeats: int = 5, by: By | None = None) -> float:
    """GB/s that AdamW moves on that many parameters: median of ``repeats`` after one that is not counted."""
    whole, halves = torch.float32, torch.bfloat16
    weight = torch.ones(parameters, dtype=whole if layout == "fp32" else halves, device=_CPU)
    grad = torch.full_like(weight, 0.01, dtype=halves if layout == "split, bf16 gradient" else whole)
    remainder = None if layout == "fp32" else torch.zeros_like(weight, dtype=torch.int16)
    m, v = torch.zeros_like(weight, dtype=whole), torch.zeros_like(weight, dtype=whole)
    times = []
    for step in range(1, repeats + 2):
        start = time.perf_counter()
        adamw(weight, grad, m, v, remainder, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step, by=by)
        times.append(time.perf_counter() - start)
    return moved_nbytes(2, layout) * parameters / statistics.median(times[1:]) / 1e9
