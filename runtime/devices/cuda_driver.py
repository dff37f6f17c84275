"""The calls that the CUDA device makes, in one place: tests stand a recording of them in for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from mtcompile.runtime.devices.pinned import NotPinned, pinned, registered


class Api:
    """The calls that the device makes to CUDA, by torch's module for it (``torch.cuda``). Streams and events are torch's own
    objects. ``copy`` and ``fill`` are issued to the current stream, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)

    def current_stream(self) -> Any:
        return self.module.current_stream(self.device)

    def new_stream(self) -> Any:
        return self.module.Stream(self.device)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make ``stream`` this thread's current one."""
        return self.module.stream(stream)  # type: ignore[no-any-return]

    def new_event(self, timed: bool = False) -> Any:
        return self.module.Event(enable_timing=timed)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Make all later work on ``stream`` start after ``event``."""
        stream.wait_event(event)

    def block(self, event: Any) -> None:
        """Make the calling thread wait for ``event``."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, after all that was issued to the current stream. The calling thread waits for it."""
        return tensor.cpu()

    def fill(self, target: torch.Tensor, value: int) -> None:
        target.fill_(value)

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Return the µs between two timed events; waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def push(self, name: str) -> None:
        """Begin an NVTX range on this thread."""
        self.module.nvtx.range_push(name)

    def pop(self) -> None:
        """End the range begun last."""
        self.module.nvtx.range_pop()

    def synchronize(self) -> None:
        self.module.synchronize(self.device)

    def pin(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory. Raises NotPinned."""
        return self._locked(functools.partial(pinned, nbytes))

    def register(self, memory: torch.Tensor) -> torch.Tensor:
        """Page-lock host memory that begins with a page, and return it. Raises NotPinned."""
        return self._locked(functools.partial(registered, memory))

    def _locked(self, lock: Callable[..., torch.Tensor]) -> torch.Tensor:
        try:
            return lock(self.module.cudart(), self.synchronize, lambda: self.module.device(self.device))
        except NotPinned:
            with contextlib.suppress(RuntimeError):  # the refusal stays the thread's last error until a launch reports it
                torch.empty(1, device=self.device).fill_(0)
            raise
