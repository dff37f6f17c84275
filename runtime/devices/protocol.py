"""The protocol of a device: where its kernels run, memory in its tiers, and the order of a phase on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mtcompile.runtime.executor import Fence
from mtcompile.runtime.schedule import Queue, Schedule, Tier


class Device(Protocol):
    """A device. ``where``: the ``torch.device`` of everything in the device tier. ``staging``: not None once the driver has
    refused to pin host memory, so that copies are slower than planned."""

    @property
    def where(self) -> Any: ...

    @property
    def staging(self) -> Any: ...

    def arena(self, tier: Tier, nbytes: int) -> Any:
        """Return ``nbytes`` of a tier's memory, as a tensor of bytes."""

    def reach(self, memory: Any) -> Any:
        """Return host memory that the process has mapped itself, ready for the device's copies."""

    def memory(
        self,
        schedule: Schedule,
        layouts: Mapping[str, Any],
        arenas: Any,
        check: bool,
        trusted: bool,
        views: dict[str, Any] | None,
    ) -> Any:
        """Return the bytes of one step (a ``devices.cpu.CpuMemory``)."""

    def direct(self, store: Any) -> Any:
        """Return what reads a ``disk.store.DiskStore`` straight into the device (a ``disk.direct.DirectReader``). Raises
        DiskError."""

    def fence(self, visible: Iterable[Queue], timed: bool) -> Fence | None:
        """Return what keeps one phase in order. ``visible``: the queues that the host waits for at its end."""

    def synchronize(self) -> None:
        """Wait for everything that was issued."""
