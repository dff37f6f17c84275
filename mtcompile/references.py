"""References that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method, but does not keep its object; it returns None once that is gone. Dynamo keeps all
    backends, and an optimizer all hooks, that they were given."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    call.is_weak = True  # type: ignore[attr-defined]
    return call


def is_weak(hook: Any) -> bool:
    """Tells whether a hook, perhaps wrapped by torch, is one of ``weakly``, which copies of a module go without."""
    return bool(getattr(getattr(hook, "hook", hook), "is_weak", False))
