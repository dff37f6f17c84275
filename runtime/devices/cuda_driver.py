"""The calls that the CUDA device makes, in one place: tests stand a recording of them in for it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mtcompile.runtime.devices.host_pages import Placing, placing
from mtcompile.runtime.devices.pinned import NotPinned, pinned, registered


class Api:
    """The calls that the device makes to CUDA, by torch's module for it (``torch.cuda``). Streams and events are torch's own
    objects. ``copy`` and ``fill`` are issued to the current stream, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)

    def placing(self, root: Path = Path("/")) -> Placing:
        """Return the memory nodes that pinned memory comes from."""
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        return placing(cpus, pci_address(self.module.get_device_properties(self.device)), root)

    def current_stream(self) -> Any:
        return self.module.current_stream(self.device)

    def new_stream(self) -> Any:
        return self.module.Stream(self.device)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make ``stream`` this thread's current one."""
        return self.module.stream(stream)  # type: ignore[no-any-return]

    def new_event(self, timed: bool = False) -> Any:
        # A thread that waits for it leaves its core to others; events of other devices than CUDA's do not know the word.
        return self.module.Event(enable_timing=timed, **({"blocking": True} if self.device.type == "cuda" else {}))

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
        """Return a copy in host memory, after all that was issued to the current stream. The calling thread waits for it,
        without using its core."""
        layout = tensor.shape, tensor.stride()
        copied = torch.empty_strided(*layout, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        copied.copy_(tensor, non_blocking=True)
        catch_up(self)
        return copied

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
        return self._locked(functools.partial(pinned, nbytes, where=self.placing()))

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


# What makes the calls to devices of a kind (torch's name for it), where that is not ``Api``.
drivers: dict[str, Callable[[torch.device], Any]] = {}


def catch_up(api: Any) -> None:
    """Make the calling thread wait, without using its core, for all that was issued to its current stream."""
    issued = api.new_event()
    api.record(issued, api.current_stream())
    api.block(issued)


def pci_address(properties: Any) -> str:
    """Return a device's address as the system names it, such as ``0000:17:00.0``; "" where torch does not say."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(number is None for number in numbers[1:]):
        return ""
    domain, bus, slot = (number or 0 for number in numbers)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
