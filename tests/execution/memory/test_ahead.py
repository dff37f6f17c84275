"""Memory that is pinned while a plan is being made."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtcompile.execution.memory.ahead import PinnedAhead, surely_at_home


class Pinning:
    """A device that pins memory when it is told to go on, and has room for ``most`` allocations."""

    def __init__(self, most: int = 100, error: Exception | None = None) -> None:
        self.most, self.pinned, self.error, self.staging = most, list[int](), error, None
        self.may_go_on, self.began = threading.Semaphore(0), threading.Semaphore(0)

    def arena(self, tier: str, nbytes: int) -> torch.Tensor:
        assert tier == "host"
        self.began.release()
        assert self.may_go_on.acquire(timeout=10)
        if len(self.pinned) == self.most:
            raise self.error or AssertionError("asked for too often")
        self.pinned.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


def pinning_ahead(sizes: list[int], **options: Any) -> tuple[Pinning, PinnedAhead]:
    device: Any = Pinning(**options)
    ahead = PinnedAhead(device)
    ahead.begin(sizes)
    return device, ahead


def wait_for(device: Pinning, count: int) -> None:
    """Waits until so many allocations are there."""
    while len(device.pinned) < count:
        time.sleep(0.001)


def test_what_is_ready_is_taken_once_and_the_rest_is_freed() -> None:
    device, ahead = pinning_ahead([64, 128, 64])
    for _ in range(3):
        device.may_go_on.release()
        assert device.began.acquire(timeout=10)
    wait_for(device, 3)
    assert ahead.settled_nbytes() == 256
    taken = [ahead.take(nbytes) for nbytes in (64, 0, 128, 128)]
    assert [None if memory is None else memory.numel() for memory in taken] == [64, None, 128, None]
    ahead.end()
    assert ahead.settled_nbytes() == 0 and ahead.take(64) is None


def test_once_settled_nothing_more_is_pinned() -> None:
    device, ahead = pinning_ahead([64, 128])
    assert device.began.acquire(timeout=10)
    threading.Timer(0.05, device.may_go_on.release).start()
    assert ahead.settled_nbytes() == 64 and device.pinned == [64]
    ahead.begin([128, 64])  # as a second search of the same step does
    assert ahead.settled_nbytes() == 64 and ahead.take(128) is None and ahead.take(64) is not None
    ahead.end()


def test_where_a_second_search_wants_other_sizes_these_are_pinned_and_what_fits_is_kept() -> None:
    device, ahead = pinning_ahead([64, 128, 32])
    for _ in range(2):
        device.may_go_on.release()
    wait_for(device, 2)
    for _ in range(4):
        device.may_go_on.release()
    ahead.begin([64, 256, 64])  # as of weights in fragments, which have homes of their own
    wait_for(device, 4)
    while len(device.pinned) < 4 + (32 in device.pinned):  # 32 may have been begun before
        time.sleep(0.001)
    ahead._thread.join()  # type: ignore[union-attr]
    assert sorted(memory.numel() for memory in ahead._ready) == [64, 64, 256]
    ahead.end()


@pytest.mark.parametrize("error", [RuntimeError("no more"), MemoryError(), ValueError("of a driver")])
def test_an_error_ends_it_in_silence(error: Exception) -> None:
    device, ahead = pinning_ahead([64, 128, 256], most=1, error=error)
    for _ in range(3):
        device.may_go_on.release()
    wait_for(device, 1)
    assert ahead.settled_nbytes() <= 64 and ahead.take(256) is None
    ahead.end()
    ahead.begin([32])  # it may begin anew
    ahead.end()


def test_where_pinning_is_refused_no_more_is_asked_for() -> None:
    device, ahead = pinning_ahead([64, 128, 256])
    assert device.began.acquire(timeout=10)
    device.staging = {}
    for _ in range(3):
        device.may_go_on.release()
    wait_for(device, 1)
    assert ahead.settled_nbytes() == 64 and device.pinned == [64]


def test_without_threads_nothing_is_pinned_and_it_may_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Pinning()
    ahead, refused = PinnedAhead(device), [True]
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if refused.pop():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    ahead.begin([64])
    assert ahead.settled_nbytes() == 0
    ahead.end()
    refused.append(False)
    device.may_go_on.release()
    ahead.begin([64])
    wait_for(device, 1)
    assert ahead.settled_nbytes() == 64


@given(st.lists(st.integers(0, 50), max_size=12), st.one_of(st.none(), st.integers(0, 200)), st.integers(0, 300))
def test_only_what_no_plan_can_keep_on_the_device_is_chosen(sizes: list[int], device_nbytes: int | None, most: int) -> None:
    chosen = surely_at_home(sizes, device_nbytes, most)
    assert sum(chosen) <= most and 0 not in chosen
    assert sum(chosen) == 0 if device_nbytes is None else sum(chosen) <= max(0, sum(sizes) - device_nbytes)
    left = list(sizes)
    for nbytes in chosen:
        left.remove(nbytes)


def test_the_middle_comes_first() -> None:
    assert surely_at_home([1, 2, 3, 4, 5], 9, 100) == [3, 2, 1]
    assert surely_at_home([8, 8, 8], 8, 10) == [8]


@pytest.mark.parametrize("device_nbytes", [24, 100])
def test_nothing_is_pinned_where_all_may_be_on_the_device(device_nbytes: int) -> None:
    assert surely_at_home([8, 8, 8], device_nbytes, 100) == []
