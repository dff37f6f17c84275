"""References that keep nothing alive, the objects that hooks go to, and how often garbage is looked for."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_SELDOM = 50_000


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


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """Lets Python look for garbage once in 50,000 new objects inside. Captures and plans make many objects and few cycles:
    looking once in 700, as is usual, takes a fifth of their time."""
    usual = gc.get_threshold()
    if not 0 < usual[0] < _SELDOM:  # switched off, or another thread is in here
        yield
        return
    gc.set_threshold(_SELDOM, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
