"""Stops a call at any line of Python, as Ctrl-C could."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor


class Stopped(BaseException):
    """An interrupt."""


def stop() -> None:
    raise Stopped


def stopped_at(
    call: Callable[[], Any],
    count: int,
    is_watched: Callable[[FrameType], bool] = lambda frame: True,
    stop: Callable[[], None] = stop,
) -> int:
    """Calls a function, and stops it at the ``count``-th line or call of Python in frames that are watched. Returns how many
    there were till then."""
    seen = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not is_watched(frame):
            return None
        seen[0] += 1
        if seen[0] == count:
            sys.settrace(None)
            stop()
        return trace

    sys.settrace(trace)
    try:
        call()
    except Stopped:
        pass
    finally:
        sys.settrace(None)
        # torch's own ``with`` may have been left without its end: with gradients off, or with functions that classes of tensors
        # do not see (Python 3.13).
        torch.set_grad_enabled(True)
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
    return seen[0]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
