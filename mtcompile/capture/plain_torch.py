"""Lets a trace take the ways through torch that a plain run takes. Beside ``torch_private``, uses torch's private APIs.

While torch traces, its dispatcher first asks operators for kernels in Python, and finds decompositions (of upsampling, of
recurrent cells, of margin losses, ...) that a plain run never meets: other operations, which round otherwise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload, OpOverloadPacket

aten = torch.ops.aten

# Python kernels that a trace needs, each with the reason.
_NEEDED = {
    aten.native_batch_norm.default,  # changes its running statistics, which its schema does not say: so would the trace not
    aten.cudnn_batch_norm.default,  # likewise
    aten.dropout.default,  # saves a mask of one byte per element, where the plain one saves numbers; the passes round it alike
}
_COMPOSED = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)

_lock = threading.Lock()
_taken: dict[OpOverload[..., Any], dict[Any, Any]] = {}  # the kernels that are out, by operator
_traces = 0  # how many are under way


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Traces inside, in any thread, decompose operators as plain runs do: by the kernels of C++."""
    global _traces
    with _lock:
        _traces += 1
        if _traces == 1:
            _take_python_kernels()
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if _traces == 0:
                _put_python_kernels_back()


def _take_python_kernels() -> None:
    for operator in _operators():
        if operator in _NEEDED:
            continue
        if kernels := {key: operator.py_kernels.pop(key) for key in _COMPOSED if key in operator.py_kernels}:
            _taken[operator] = kernels
            operator._dispatch_cache.clear()


def _put_python_kernels_back() -> None:
    for operator, kernels in _taken.items():
        operator.py_kernels.update(kernels)
        operator._dispatch_cache.clear()
    _taken.clear()


def _operators() -> Iterator[OpOverload[..., Any]]:
    """All operators of ATen that were used since torch was loaded: others have no Python kernels."""
    for packet in [p for p in vars(aten).values() if isinstance(p, OpOverloadPacket)]:
        yield from [o for o in vars(packet).values() if isinstance(o, OpOverload)]
