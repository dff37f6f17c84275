"""References that keep nothing alive, and the objects that hooks go to."""

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


def with_hooks(optimizer: Any) -> Any:
    """Returns the optimizer within a shell that has no hooks, such as Accelerate's; any other as it is."""
    return optimizer if hasattr(optimizer, "_optimizer_state_dict_pre_hooks") else optimizer.optimizer
