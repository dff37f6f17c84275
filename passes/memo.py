"""Remembers results up to a number: the oldest goes first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def remembered(known: dict[K, V], key: K, make: Callable[[], V], most: int = 256) -> V:
    """Returns what is ``known`` for a key, or makes it, and forgets the oldest where there are already ``most``."""
    if key not in known:
        value = make()
        if len(known) >= most:
            del known[next(iter(known))]
        known[key] = value
    return known[key]
