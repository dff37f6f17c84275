"""The arenas of a session: one allocation per tier, lent to the program that runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtcompile import torch_private
from mtcompile.errors import ends_device
from mtcompile.execution.compiled import CompiledStep, LiveFrames
from mtcompile.execution.memory.host_room import host_arena
from mtcompile.runtime.devices.cpu import Arenas, CpuMemory
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.disk.store import DiskStore
from mtcompile.runtime.schedule import Schedule, Tier


class ArenaPool:
    """One arena per tier, shared by all programs of a session.

    Device slots never outlive a phase. Those on host and disk do, so while a training forward waits for its backward with
    values there, others get arenas of their own. ``drain``: waits for pending updates, which use the current arenas.
    ``homes``: returns the store of what has its home on disk; an arena on disk is a file beside it. ``planned_nbytes``: the
    most that a program that has run may take of host and disk.
    """

    def __init__(
        self, device: Device, frames: LiveFrames, drain: Callable[[], None], homes: Callable[[], DiskStore | None]
    ) -> None:
        self._device, self._frames, self._drain, self._homes = device, frames, drain, homes
        self._scratch: tuple[torch.Tensor, DiskStore] | None = None  # the disk's arena, mapped from a file of its own
        self._arenas: dict[Tier, torch.Tensor] = {}
        self.planned_nbytes = {"host": 0, "disk": 0}
        self._slot_views: list[dict[str, torch.Tensor]] = []  # those of all programs, which point into the arenas

    def nbytes(self, tier: Tier) -> int:
        return self._arenas[tier].numel() if tier in self._arenas else 0

    def all_host_nbytes(self) -> int:
        """Returns the bytes of the host arena and of those that waiting forwards have of their own."""
        shared = self._arenas.get("host")
        own = (frame.memory.arenas.host for frame in self._frames.waiting())
        return self.nbytes("host") + sum(arena.numel() for arena in own if arena is not shared)

    def note_planned(self, schedule: Schedule, beside: int) -> None:
        """Notes the bytes of a program that runs. The host's arena stays as large as the largest one needs. ``beside``: host
        bytes of parameters that the program does not read."""
        persistent = schedule.peak_nbytes.get("host", 0) - schedule.arena_nbytes.get("host", 0) + beside
        needed = {"host": persistent + self.all_host_nbytes(), "disk": schedule.peak_nbytes.get("disk", 0)}
        self.planned_nbytes = {tier: max(nbytes, needed[tier]) for tier, nbytes in self.planned_nbytes.items()}

    def lend(self, compiled: CompiledStep) -> tuple[Arenas, dict[str, torch.Tensor] | None]:
        """Returns arenas that are large enough for a program, and its slot views in them (None: it makes its own)."""
        needed = compiled.schedule.arena_nbytes
        shared = self._arenas.get("host")
        private_host = any(frame.memory.arenas.host is shared for frame in self._frames.waiting())
        if self._arenas.get("device") is None or self.nbytes("device") != needed.get("device", 0):
            self._replace("device", needed.get("device", 0))
        if not private_host and ("host" not in self._arenas or self.nbytes("host") < needed.get("host", 0)):
            self._replace("host", needed.get("host", 0))
        on_disk = needed.get("disk", 0)
        if private_host:
            own = self._disk_arena(on_disk) if on_disk else (None, None)
            return Arenas(self._arenas["device"], self._host_arena(needed.get("host", 0)), *own), None
        if on_disk and (self._scratch is None or self._scratch[0].numel() < on_disk):
            self._forget_views()
            self._scratch = None  # its space is free before more is asked for
            self._scratch = self._disk_arena(on_disk)
        if not any(views is compiled.slot_views for views in self._slot_views):
            self._slot_views.append(compiled.slot_views)
        scratch = self._scratch if on_disk and self._scratch is not None else (None, None)
        return Arenas(self._arenas["device"], self._arenas["host"], *scratch), compiled.slot_views

    def restore(self, compiled: CompiledStep, memory: CpuMemory) -> None:
        """Gives a backward the current device arena, if another program has replaced it since the forward."""
        if memory.arenas.device is not self._arenas.get("device"):
            arenas, _ = self.lend(compiled)
            memory.take_device(arenas.device)

    def release_device(self) -> None:
        """Frees the device's arena until a program needs it again."""
        self._replace("device", 0)

    def release(self) -> None:
        """Frees all arenas until a program needs them again."""
        self._forget_views()
        self._scratch = None
        if self._arenas:
            try:
                self._device.synchronize()
            except RuntimeError as error:
                if not ends_device(error):  # a device that has failed for good does nothing more
                    raise
            self._arenas.clear()

    def _forget_views(self) -> None:
        for views in self._slot_views:  # they would keep the old arena alive
            views.clear()
        self._slot_views.clear()

    def _replace(self, tier: Tier, nbytes: int) -> None:
        self._drain()  # pending updates would create new views of the old arena
        self._forget_views()
        if tier in self._arenas:
            self._device.synchronize()  # copies of a dropped step may still be under way
            del self._arenas[tier]
        if tier == "device":  # waiting steps have nothing there; their backward takes the arena of that time
            for frame in self._frames.waiting():
                frame.memory.leave_device()
        with torch_private.lasting():
            self._arenas[tier] = self._device.arena(tier, nbytes) if tier == "device" else self._host_arena(nbytes)

    def _host_arena(self, nbytes: int) -> torch.Tensor:
        return host_arena(self._device, nbytes, "values that wait there", "pass host= for a plan that takes less")

    def _disk_arena(self, nbytes: int) -> tuple[torch.Tensor, DiskStore]:
        """Reserves an arena on disk, with its store. Raises DiskFull and DiskError."""
        homes = self._homes()
        assert homes is not None, "whoever plans for a disk opens its store"
        store = DiskStore(homes.folder, beside=homes)
        return torch.frombuffer(store.map(nbytes), dtype=torch.uint8), store
