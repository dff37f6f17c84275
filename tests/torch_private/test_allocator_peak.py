"""Measuring what is allocated, when an interrupt comes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from mtcompile.torch_private import cpu_allocator_peak, profiler_runs


def measured() -> int | None:
    with cpu_allocator_peak() as peak:
        torch.zeros(1024)
    return peak.nbytes


def interrupted(after: int) -> bool:
    """Measures, interrupted where Python looks for signals the ``after``-th time: at the start of a function in Python, or
    after one in C. Tells whether it came."""
    seen = 0
    # Where a generator goes on, Python 3.10 runs no ``finally`` for what a profile function raises, as it does for a signal.
    deaf = sys.version_info < (3, 11)

    def interrupt(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal seen
        if event == "c_return" or (event == "call" and not (deaf and frame.f_lasti >= 0)):
            seen += 1
            if seen == after:
                sys.setprofile(None)
                raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        measured()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_ends_the_profiler_and_the_next_measurement_is_whole() -> None:
    after = 1
    while interrupted(after):
        assert not profiler_runs(), after
        assert measured() == 4096, after
        after += 1
    assert after > 20  # it was looked at many places
