"""Threads: what each has for itself, and what only one may do at a time."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
V = TypeVar("V")

# Held while a model is captured, compiled, measured or run. Dynamo's settings and torch's profiler belong to the process, and
# one model's arenas to one step: two threads at once gave wrong numbers, or ended the process.
process_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # a thread that holds it is not in the child, as a DataLoader's worker is
    os.register_at_fork(after_in_child=process_lock._at_fork_reinit)  # type: ignore[attr-defined]


def is_locked() -> bool:
    """Tells whether this thread captures, compiles, measures or runs a model."""
    return bool(process_lock._is_owned())  # type: ignore[attr-defined]


def one_at_a_time(function: Callable[P, V]) -> Callable[P, V]:
    """Lets a function run in one thread at a time, as ``process_lock`` says."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> V:
        with process_lock:
            return function(*args, **kwargs)

    return alone


class ThreadSetting(threading.local, Generic[V]):
    """``value`` is what every thread starts with, until ``during`` gives it another one."""

    def __init__(self, value: V) -> None:
        self.value = value

    @contextlib.contextmanager
    def during(self, value: V) -> Iterator[None]:
        """Gives this thread another value inside."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
