"""Host memory that is pinned while a plan is being made: the driver pins a few GB a second, and the search leaves it idle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence

import torch

from mtcompile.execution.memory.host_room import host_arena
from mtcompile.runtime.devices.protocol import Device


def surely_at_home(sizes: Sequence[int], device_nbytes: int | None, most: int) -> list[int]:
    """Returns sizes of blocks that no plan can have on the device all together, ``most`` bytes of them. ``sizes``: bytes of
    every block, in the order of the step. It takes those in the middle: plans have the first and the last on the device."""
    left = 0 if device_nbytes is None else min(sum(sizes) - device_nbytes, most)
    middle = (len(sizes) - 1) / 2
    chosen = list[int]()
    for _, nbytes in sorted(enumerate(sizes), key=lambda each: abs(each[0] - middle)):
        if 0 < nbytes <= left:
            chosen.append(nbytes)
            left -= nbytes
    return chosen


class PinnedAhead:
    """A thread that pins memory of given sizes, until somebody takes each. What nobody takes is freed by ``end``. It gives up
    at the first refusal: who needs the memory asks again, and gets the error."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._pinning = 0  # the bytes that are being pinned now
        self._ready: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned and not taken."""
        with self._changed:
            return sum(memory.numel() for memory in self._ready)

    def begin(self, sizes: Iterable[int]) -> None:
        """Starts to pin, unless it has begun before."""
        if self._thread is None and (waiting := list(sizes)):
            self._waiting = waiting
            self._thread = threading.Thread(target=self._run, name="mtcompile-pinning", daemon=True)
            self._thread.start()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Returns pinned memory of that size, which is the caller's from now on; None if there is none, nor soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._index_of(nbytes) is not None or self._pinning != nbytes)
            if (index := self._index_of(nbytes)) is not None:
                return self._ready.pop(index)
            if nbytes in self._waiting:  # the caller pins it, beside the thread
                self._waiting.remove(nbytes)
            return None

    def end(self) -> None:
        """Ends the thread, and frees what nobody has taken."""
        with self._changed:
            self._waiting.clear()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._ready.clear()

    def _index_of(self, nbytes: int) -> int | None:
        return next((index for index, memory in enumerate(self._ready) if memory.numel() == nbytes), None)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            while True:
                with self._changed:
                    self._pinning = nbytes = self._waiting.pop(0) if self._waiting else 0
                if not nbytes:
                    return
                memory = host_arena(self._device, nbytes, "the weights of a block", "pass a larger memory=")
                with self._changed:
                    self._ready.append(memory)
                    self._pinning = 0
                    self._changed.notify_all()
                del memory  # else the thread would share it with who takes it
        with self._changed:
            self._waiting.clear()
            self._pinning = 0
            self._changed.notify_all()
