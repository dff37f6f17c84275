"""The meeting place of the ranks of one host: counters in shared memory, with who has failed and who has ended.

A rank that waits sleeps. It ends its wait with an error as soon as another one has said that it failed, or as its process has
ended, and at the latest after ``timeout_s``. An interrupt ends it too. Ranks that have come for different things part.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from mtcompile.errors import StepError
from mtcompile.runtime.workers import Worker

MESSAGE_NBYTES = 512
_ARRIVED, _FAILED, _DOING = 0, 1, 2  # places of a rank's counters; from the last on, what for, of even and odd meetings
_ROW_NBYTES = 64 + MESSAGE_NBYTES  # counters, on a cache line of their own, and why it failed
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # of a sleep
_LOOK_S = 0.05  # between two looks at the other processes


class RanksParted(StepError):
    """Raised when another rank has failed, ended or not answered. The ranks cannot go on together."""


def meeting_nbytes(count: int) -> int:
    """Returns the bytes of shared memory that a meeting of ``count`` ranks takes."""
    return count * _ROW_NBYTES


class Meeting:
    """The meeting of one host's ranks. ``ranks`` and ``processes``: of all of them, in order; ``me``: this one's place. A
    process of 0 cannot be looked at from here."""

    def __init__(self, memory: torch.Tensor, ranks: Sequence[int], processes: Sequence[int], me: int, timeout_s: float) -> None:
        self.ranks, self.processes, self.me, self.timeout_s = tuple(ranks), tuple(processes), me, timeout_s
        self._rows = [memory[i * _ROW_NBYTES : (i + 1) * _ROW_NBYTES] for i in range(len(ranks))]
        self._counters = [row[:64].numpy().view("int64") for row in self._rows]
        self._met = 0
        self._fence = threading.Lock()

    def meet(self, doing: str) -> None:
        """Wait until all ranks of this host have come here as often as this one. Raises RanksParted. ``doing``: what for, which
        all of them say alike."""
        self._met += 1
        place, purpose = _DOING + self._met % 2, zlib.crc32(doing.encode())
        self._counters[self.me][place] = purpose
        for _ in range(2):  # what this rank has written is there before its counter is
            with self._fence:
                pass
        self._counters[self.me][_ARRIVED] = self._met
        began, sleep_s = time.monotonic(), _SHORTEST_S
        looked = began
        missing = [place for place in range(len(self.ranks)) if place != self.me]
        thread = threading.current_thread()
        while missing := [place for place in missing if self._counters[place][_ARRIVED] < self._met]:
            time.sleep(sleep_s)
            sleep_s = min(_LONGEST_S, 1.5 * sleep_s)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if isinstance(thread, Worker):
                    thread.check()
                self._look(missing, doing, now - began > self.timeout_s)
        for rank, counters in zip(self.ranks, self._counters, strict=True):
            if counters[place] != purpose:
                raise RanksParted(
                    f"rank {rank} came for something else when this one came {doing}: all ranks call the same things in the "
                    "same order; start the job again from the last checkpoint"
                )

    def fail(self, why: str) -> None:
        """Tell the ranks that wait, or will wait, for this one why it has failed."""
        text = why.encode()[:MESSAGE_NBYTES].ljust(MESSAGE_NBYTES, b"\0")
        self._rows[self.me][64:].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for _ in range(2):
            with self._fence:
                pass
        self._counters[self.me][_FAILED] = 1

    def _look(self, missing: Sequence[int], doing: str, late: bool) -> None:
        """Raise RanksParted if one of the ranks that are waited for will not come, whoever was the first not to."""
        for place in missing:
            ended = process_state(self.processes[place]) == "ended"
            if ended and not self._counters[place][_FAILED] and self._counters[place][_ARRIVED] < self._met:
                raise RanksParted(
                    f"rank {self.ranks[place]} (process {self.processes[place]}) has ended while this one waited {doing}; look "
                    "for its error, and start the job again from the last checkpoint"
                )
        for place, counters in enumerate(self._counters):
            if place != self.me and counters[_FAILED]:
                why = bytes(self._rows[place][64:].tolist()).rstrip(b"\0").decode(errors="replace")
                raise RanksParted(f"rank {self.ranks[place]} stopped while this one waited {doing}: {why}")
        for place in missing:
            if late:
                stopped = process_state(self.processes[place]) == "stopped"
                about = "is stopped" if stopped else "is busy with something else, or has no batch left"
                raise RanksParted(
                    f"rank {self.ranks[place]} (process {self.processes[place]}) did not come within {self.timeout_s:g} s "
                    f"(MT_RANKS_TIMEOUT) while this one waited {doing}: its process {about}; start the job again"
                )


def process_state(process: int) -> str:
    """Tells whether a process of this host is "running", "stopped" or has "ended"."""
    if not process:
        return "running"
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "ended"
    letter = status.rpartition(")")[2].split()[0]
    return {"Z": "ended", "X": "ended", "T": "stopped", "t": "stopped"}.get(letter, "running")
