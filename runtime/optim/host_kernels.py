"""Optimizer updates on host memory, in place: by update.c (OpenMP) where it was built at install, else by torch's operations.

``formula.py`` has the arithmetic, ``operands.py`` the layouts of the tensors. Weight, states and remainder are written, and
their version counters rise by one; autograd does not see it otherwise. A call uses ``torch.get_num_threads()`` threads,
changes no setting, and does not hold the GIL while C runs.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal

import torch

from mtcompile.runtime.optim import torch_kernels
from mtcompile.runtime.optim.formula import KINDS, Update
from mtcompile.runtime.optim.operands import LAYOUTS, Layout, Operands

By = Literal["c", "torch"]
_VERSION = 1  # of update.c's interface and formulas
_CPU = torch.device("cpu")
_LEAST_PER_THREAD = 2**14  # elements: below, waking a thread takes longer than its share


def apply(update: Update, operands: Operands, by: By | None = None) -> None:
    """Update the operands in place. ``by``: None takes C where it was built.

    Raises ValueError for operands that are not those of the update, before anything is written, and RuntimeError for
    ``by="c"`` without the library.
    """
    operands.check(update.state_names, _CPU)
    c_library = None if by == "torch" else library()
    if by == "c" and c_library is None:
        raise RuntimeError("expected update.c to have been built, found no library; install again with a C compiler")
    if c_library is None:
        torch_kernels.apply(update, operands)
    else:
        _apply_by_c(c_library, update, operands)
    operands.count_writes()


def built() -> Path | None:
    """The path of the library that was built when mtcompile was installed; None without one."""
    paths = (Path(__file__).with_name("_update" + suffix) for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


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
    pointer, floats = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
    c_library.mt_update.argtypes = [ctypes.c_int] * 3 + [ctypes.c_int64] + [pointer] * 5 + [floats]
    c_library.mt_update.restype = None
    return c_library


def _apply_by_c(c_library: ctypes.CDLL, update: Update, operands: Operands) -> None:
    length = operands.weight.numel()
    threads = max(1, min(torch.get_num_threads(), length // _LEAST_PER_THREAD))
    c_library.mt_update(
        KINDS.index(update.kind),
        LAYOUTS.index(operands.layout),
        threads,
        length,
        operands.weight.data_ptr(),
        None if operands.remainder is None else operands.remainder.data_ptr(),
        operands.grad.data_ptr(),
        operands.states[0].data_ptr(),
        operands.states[1].data_ptr() if len(operands.states) > 1 else None,
        (ctypes.c_float * len(update.scalars))(*update.scalars),
    )


def which() -> str:
    """Say what an update runs in: "C with OpenMP, n threads" or "torch"."""
    return "torch" if library() is None else f"C with OpenMP, {torch.get_num_threads()} threads"


def moved_nbytes(states: int, layout: Layout) -> int:
    """The bytes that an update reads and writes for a parameter: weight and states both ways, the gradient one way."""
    return 2 * 4 * (1 + states) + (2 if layout == "split, bf16 gradient" else 4)
