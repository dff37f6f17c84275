"""The memory of this process for models, beside what ``MT_CACHE`` keeps on disk: text and numbers, no tensors and modules."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from mtcompile import knobs

_Value = TypeVar("_Value")


class Remembered(Generic[_Value]):
    """Values by key, those used last. What was put under one ``MT_CACHE`` is found under that one alone; under ``MT_CACHE=0``
    nothing is put. ``most``: the sum of ``size_of`` over all values at most."""

    def __init__(self, most: int, size_of: Callable[[_Value], int] = lambda value: 1) -> None:
        self._most, self._size_of, self._size = most, size_of, 0
        self._values: OrderedDict[Hashable, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> _Value | None:
        """Returns the value of a key; None if there is none, and for the key None."""
        folder = knobs.cache()
        with self._lock:
            if key is None or not folder or (folder, key) not in self._values:
                return None
            self._values.move_to_end((folder, key))
            return self._values[folder, key]

    def put(self, key: Hashable, value: _Value) -> None:
        """Remembers a value, unless the key is None, and forgets those used longest ago."""
        folder = knobs.cache()
        with self._lock:
            if key is None or not folder or (folder, key) in self._values:
                return
            self._values[folder, key] = value
            self._size += self._size_of(value)
            while self._size > self._most:
                self._size -= self._size_of(self._values.popitem(last=False)[1])
