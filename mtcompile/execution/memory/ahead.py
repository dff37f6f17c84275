"""Host memory that is pinned while a plan is being made: the driver pins a few GB a second, and the search leaves it idle."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch

from mtcompile.execution.memory.host_room import host_arena
from mtcompile.runtime.devices.protocol import Device


def surely_at_home(sizes: Sequence[int], device_nbytes: int | None, most: int) -> list[int]:
    """Returns sizes of blocks that are together no more than every plan has at home on the host, and ``most`` bytes at most.
    ``sizes``: bytes of every block, in the order of the step. Which blocks stay at home is a guess: those in the middle, since
    plans have the first and the last on the device."""
    left = 0 if device_nbytes is None else min(sum(sizes) - device_nbytes, most)
    middle = (len(sizes) - 1) / 2
    chosen = list[int]()
    for _, nbytes in sorted(enumerate(sizes), key=lambda each: abs(each[0] - middle)):
        if 0 < nbytes <= left:
            chosen.append(nbytes)
            left -= nbytes
    return chosen


class PinnedAhead:
    """Memory that a thread pins while a plan is searched. It is a wish: the thread gives up at the first error, which whoever
    needs the memory gets when he asks again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._wanted: Counter[int] = Counter()  # sizes
        self._waiting = deque[int]()
        self._ready: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None

    def begin(self, sizes: Iterable[int]) -> None:
        """Starts to pin memory of these sizes, unless it has begun before. Where other sizes are wanted now, as weights in
        fragments have other homes, frees memory of no use and begins anew."""
        wanted = Counter(sizes)
        if not wanted or (self._thread is not None and wanted == self._wanted):
            return
        self.settled_nbytes()
        self._wanted, missing, ready = Counter(wanted), wanted, list[torch.Tensor]()
        for memory in self._ready:
            if missing[memory.numel()]:
                missing[memory.numel()] -= 1
                ready.append(memory)
        waiting = deque(missing.elements())
        self._waiting, self._ready, self._thread = waiting, ready, None
        thread = threading.Thread(target=self._run, args=(waiting, self._ready), name="mtcompile-pinning", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            thread.start()
            self._thread = thread

    def settled_nbytes(self) -> int:
        """Begins nothing more, waits for what is being pinned, and returns the bytes that nobody has taken yet."""
        self._waiting.clear()
        if self._thread is not None:
            self._thread.join()
        return sum(memory.numel() for memory in self._ready)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Returns pinned memory of that size, which is the caller's from now on; None if there is none."""
        index = next((index for index, memory in enumerate(self._ready) if memory.numel() == nbytes), None)
        return None if index is None else self._ready.pop(index)

    def end(self) -> None:
        """Ends the thread, and frees what nobody has taken."""
        try:
            self.settled_nbytes()
        finally:
            self._thread, self._ready = None, []
            self._wanted.clear()

    def _run(self, waiting: deque[int], ready: list[torch.Tensor]) -> None:
        with contextlib.suppress(Exception):
            while waiting and self._device.staging is None:  # else the driver has refused to pin more
                ready.append(host_arena(self._device, waiting.popleft(), "the weights of a block", "pass a larger memory="))
