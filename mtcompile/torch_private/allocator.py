"""The allocator's own events."""

from __future__ import annotations

from typing import Any

import torch


class AllocatorPeak:
    """Measures the largest sum of live bytes that this thread allocated since entry, from the allocator's own events.

    ``nbytes`` after exit: the peak over the bytes live at entry; None where another profiler was already active. ``kept``: the
    bytes that are still held then.
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.kept = 0
        self._profile: Any = None

    def __enter__(self) -> AllocatorPeak:
        if not torch._C._autograd._profiler_enabled():
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(*exc)
        memory = (e for e in self._profile.kineto_results.events() if e.name() == "[memory]")
        events = ((e.start_ns(), e.nbytes()) for e in memory)
        live = peak = 0
        for _, nbytes in sorted(events, key=lambda event: event[0]):  # stable: events of one nanosecond keep their order
            live += nbytes
            peak = max(peak, live)
        self.nbytes, self.kept = peak, live
