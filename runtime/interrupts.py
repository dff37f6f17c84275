"""Interrupts that wait while something is held that must be given back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_later() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C, and a SIGTERM or SIGHUP that Python handles, back while a library runs that would lose it, or tell of it as
    of an error in a file, and while something is held that must be given back: a descriptor is a number, which nobody closes
    before it has an owner. Yields what lets one through that has come, for places where it may be raised. Also a decorator."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not before:
        yield lambda: None
        return
    come: dict[int, FrameType | None] = {}

    def let_through() -> None:
        if come:
            number, frame = come.popitem()
            try:
                before[signal.Signals(number)](number, frame)
            finally:
                let_through()

    try:
        for number in before:
            signal.signal(number, come.__setitem__)
        yield let_through
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        let_through()
