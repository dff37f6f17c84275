"""Optimizer updates on host memory, in place: by update.c (OpenMP) where it was built at install, else by torch's operations.

Several updates are one call, whose threads take chunks of all of them as they come free. It may scan the gradients first: an
exponent of which all bits are set is that of an infinity or a NaN. Nothing is written then.

``formula.py`` has the arithmetic, ``operands.py`` the layouts of the tensors. Weight, states and remainder are written, and
their version counters rise by one; autograd does not see it otherwise. A call uses ``torch.get_num_threads()`` threads,
changes no setting, and does not hold the GIL while C runs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from mtcompile.runtime.devices.arena import overlaps, span_nbytes
from mtcompile.runtime.libraries import built_library
from mtcompile.runtime.optim import torch_kernels
from mtcompile.runtime.optim.formula import KINDS, Update
from mtcompile.runtime.optim.operands import LAYOUTS, Layout, Operands

By = Literal["c", "torch"]
_VERSION = 2  # of update.c's interface and formulas
_CPU = torch.device("cpu")
_LEAST_PER_THREAD = 2**14  # elements: below, waking a thread takes longer than its share
_SCANNED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # in update.c's order
_MOST_SCALARS = 10


class _Task(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "layout", "n")),
        *((name, ctypes.c_void_p) for name in ("weight", "remainder", "grad", "first", "second")),
        ("k", ctypes.c_float * _MOST_SCALARS),
    )


class _Values(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int64), ("n", ctypes.c_int64), ("values", ctypes.c_void_p))


def apply(update: Update, operands: Operands, by: By | None = None) -> None:
    """Update the operands in place. ``by`` and errors: as of ``apply_all``."""
    apply_all([(update, operands)], by=by)


def apply_all(
    tasks: Sequence[tuple[Update, Operands]], checked: bool = False, by: By | None = None, spared: int = 0
) -> int | None:
    """Update the operands of all tasks in place. ``by``: None takes C where it was built. ``checked``: returns the position of
    the first task with a gradient that is not finite, if there is one, and then has written nothing; None otherwise.
    ``spared``: threads that C leaves to others, as far as there are many.

    Raises ValueError for operands that are not those of their update, before anything is written, and RuntimeError for
    ``by="c"`` without the library.
    """
    for update, operands in tasks:
        operands.check(update.state_names, _CPU)
    c_library = None if by == "torch" else library()
    if by == "c" and c_library is None:
        raise RuntimeError("expected update.c to have been built, found no library; install again with a C compiler")
    if c_library is not None:
        rows = (_Task * len(tasks))(*(_task(update, operands) for update, operands in tasks))
        threads = _threads(sum(operands.weight.numel() for _, operands in tasks), spared)
        if (first := c_library.mt_update(threads, checked, len(tasks), rows)) < len(tasks):
            return int(first)
    else:
        if checked and (position := nonfinite([operands.grad for _, operands in tasks], by)) is not None:
            return position
        for update, operands in tasks:
            torch_kernels.apply(update, operands)
    for _, operands in tasks:
        operands.count_writes()
    return None


def nonfinite(tensors: Sequence[Tensor], by: By | None = None) -> int | None:
    """The position of the first tensor with a value that is not finite; None without one. Allocates a few numbers: no plan has
    room for a mask beside an update. On a device, one flag for all tensors is read."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (tensor.detach() for tensor in tensors)]
    c_library = None if by == "torch" else library()
    if c_library is not None and all(t.device == _CPU and t.dtype in _SCANNED and _is_dense(t) for t in real):
        rows = (_Values * len(real))(*(_Values(_SCANNED.index(t.dtype), t.numel(), t.data_ptr()) for t in real))
        first = int(c_library.mt_nonfinite(_threads(sum(t.numel() for t in real)), len(real), rows))
        return first if first < len(real) else None
    values = [t for t in real if t.numel()]
    if values and all(t.device != _CPU for t in values) and bool(get_total_norm(values, math.inf).isfinite()):
        return None  # a few launches and one flag for all of them
    return next((i for i, t in enumerate(real) if t.numel() and not bool(torch.stack(torch.aminmax(t)).isfinite().all())), None)


def _is_dense(tensor: Tensor) -> bool:
    return span_nbytes(tensor) == tensor.nbytes and not overlaps(tensor)


def _threads(elements: int, spared: int = 0) -> int:
    count = torch.get_num_threads()
    return max(1, min(count - min(spared, count // 4), elements // _LEAST_PER_THREAD))


def built() -> Path | None:
    """The path of the library that was built when mtcompile was installed; None without one."""
    return built_library(Path(__file__).with_name("_update"))


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load update.c; None where it was not built here, or from another version of it. torch has been imported: where both were
    linked with one OpenMP library, its threads are the ones that are used."""
    path = built()
    if path is None:
        return None
    try:
        c_library = ctypes.CDLL(str(path))
    except OSError:  # built for another system, or without its OpenMP library
        return None
    if c_library.mt_update_version() != _VERSION:
        return None
    c_library.mt_update.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(_Task)]
    c_library.mt_nonfinite.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.POINTER(_Values)]
    c_library.mt_place.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64]
    c_library.mt_touch.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    c_library.mt_touch.restype = None
    c_library.mt_update.restype = c_library.mt_nonfinite.restype = ctypes.c_int64
    return c_library


def _task(update: Update, operands: Operands) -> _Task:
    return _Task(
        KINDS.index(update.kind),
        LAYOUTS.index(operands.layout),
        operands.weight.numel(),
        operands.weight.data_ptr(),
        None if operands.remainder is None else operands.remainder.data_ptr(),
        operands.grad.data_ptr(),
        operands.states[0].data_ptr(),
        operands.states[1].data_ptr() if len(operands.states) > 1 else None,
        (ctypes.c_float * _MOST_SCALARS)(*update.scalars),
    )


def which() -> str:
    """Say what an update runs in: "C with OpenMP, n threads" or "torch"."""
    return "torch" if library() is None else f"C with OpenMP, {torch.get_num_threads()} threads"


def moved_nbytes(states: int, layout: Layout, checked: bool = False) -> int:
    """The bytes that an update reads and writes for a parameter: weight and states both ways, the gradient one way, and once
    more where it is checked."""
    return 2 * 4 * (1 + states) + (1 + checked) * (2 if layout == "split, bf16 gradient" else 4)
