"""Memory that is pinned while a plan is being made."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtcompile.execution.memory.ahead import PinnedAhead, surely_at_home


class Pinning:
    """A device that pins memory when it is told to go on, and has room for ``most`` allocations."""

    def __init__(self, most: int = 100) -> None:
        self.most, self.pinned = most, list[int]()
        self.may_go_on, self.began = threading.Semaphore(0), threading.Semaphore(0)

    def arena(self, tier: str, nbytes: int) -> torch.Tensor:
        assert tier == "host"
        self.began.release()
        assert self.may_go_on.acquire(timeout=10)
        if len(self.pinned) == self.most:
            raise RuntimeError("no more")
        self.pinned.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


def pinning_ahead(sizes: list[int], **options: Any) -> tuple[Pinning, PinnedAhead]:
    device: Any = Pinning(**options)
    ahead = PinnedAhead(device)
    ahead.begin(sizes)
    return device, ahead


def test_what_is_ready_is_taken_once_and_the_rest_is_freed() -> None:
    device, ahead = pinning_ahead([64, 128, 64])
    for _ in range(3):
        device.may_go_on.release()
    taken = [ahead.take(64), ahead.take(128)]  # waits for what is under way, and pins by itself what has not begun
    ahead.end()
    assert all(memory is None or memory.numel() == nbytes for memory, nbytes in zip(taken, (64, 128), strict=True))
    assert ahead.nbytes == 0 and ahead.take(64) is None


def test_the_taker_waits_for_what_is_being_pinned_and_not_for_what_has_not_begun() -> None:
    device, ahead = pinning_ahead([64, 128])
    assert device.began.acquire(timeout=10)
    assert ahead.take(128) is None  # the caller pins it
    threading.Timer(0.05, device.may_go_on.release).start()
    memory = ahead.take(64)
    assert memory is not None and memory.numel() == 64
    ahead.end()
    assert device.pinned == [64]


def test_a_refusal_ends_it_and_nobody_waits() -> None:
    device, ahead = pinning_ahead([64, 128, 256], most=1)
    for _ in range(3):
        device.may_go_on.release()
    assert ahead.take(256) is None
    ahead.end()
    assert device.pinned == [64] and ahead.nbytes == 0
    ahead.begin([32])  # it may begin anew
    ahead.end()


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
