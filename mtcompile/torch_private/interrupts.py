"""Ctrl-C while torch traces. Its dispatcher calls Python from C++ that no exception may leave: a KeyboardInterrupt raised there
ends the process (``terminate called after throwing an instance of 'pybind11::error_already_set'``)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from mtcompile.reading import HeldInterrupts
from mtcompile.torch_private.autograd import in_own_capture

_held = HeldInterrupts()


@contextlib.contextmanager
def interrupts_after_tracing() -> Iterator[None]:
    """Holds Ctrl-C back while torch traces inside; a second one comes through at once."""
    if _held.holds:
        yield
        return
    try:
        _held.hold()
        yield
    finally:
        _held.release()


@contextlib.contextmanager
def interrupts_at_once() -> Iterator[None]:
    """Lets Ctrl-C through, for work of our own amid tracing."""
    held = _held.holds
    _held.release()
    try:
        yield
    finally:
        if held:
            _held.hold()


@functools.cache
def holding_interrupts() -> None:
    """Lets Dynamo's tracing of our own captures hold Ctrl-C back, up to its next value."""
    from torch._dynamo import convert_frame
    from torch._dynamo.variables import builder

    compile_frame, wrap = convert_frame._compile, builder._wrap_fx_proxy

    @functools.wraps(compile_frame)
    def held(*args: Any, **kwargs: Any) -> Any:
        if not in_own_capture():
            return compile_frame(*args, **kwargs)
        with interrupts_after_tracing():
            return compile_frame(*args, **kwargs)

    @functools.wraps(wrap)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _held.let_through()
        return wrap(*args, **kwargs)

    convert_frame._compile, builder._wrap_fx_proxy = held, wrapped
