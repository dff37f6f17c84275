"""A value that each thread has for itself, and another one for as long as a block runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


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
