"""An optimizer's state that waits for updates which still run, before anybody reads or changes it."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from mtcompile import torch_private
from mtcompile.runtime.workers import Worker

_USES = (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__"),
    *("clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
)


class WaitingState(defaultdict[Any, Any]):
    """The same entries as ``optimizer.state``. A copy does not wait, since no update writes to it."""

    wait: Callable[[], None] | None = None


def let_wait(optimizer: torch.optim.Optimizer, wait: Callable[[], None]) -> None:
    """Makes all code that uses the optimizer's state ``wait`` first, except for the updates and what runs them."""
    if not isinstance(optimizer.state, WaitingState):
        optimizer.state = WaitingState(dict, optimizer.state)
        optimizer.state.wait = wait


def _waiting(use: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(use)
    def waiting(self: WaitingState, *args: Any) -> Any:
        if self.wait is not None and not isinstance(threading.current_thread(), Worker) and not torch_private.is_locked():
            self.wait()
        return use(self, *args)

    return waiting


for _name in _USES:
    setattr(WaitingState, _name, _waiting(getattr(defaultdict, _name)))
