"""Interrupts at the worst instants leave no descriptor open."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mtcompile import reading
from mtcompile.cached import files
from mtcompile.runtime.disk.store import DiskStore
from mtcompile.runtime.interrupts import interrupts_later

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list descriptors")


@contextmanager
def interrupted_at(function: Any, number: int) -> Iterator[list[int]]:
    """Sends a signal when a function of Python begins or one of C has ended, once. Yields what was sent."""
    sent: list[int] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        if not sent and ((event, called) == ("c_return", function) or (event == "call" and frame.f_code is code)):
            sent.append(number)
            signal.raise_signal(number)

    code = getattr(function, "__code__", None)
    sys.setprofile(look)
    try:
        yield sent
    finally:
        sys.setprofile(None)


def raises(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    before = signal.signal(request.param, raises)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (os.unlink, lambda path: DiskStore(path.parent)),
        (os.open, files.own_text),
        (os.open, lambda path: files.write_whole(path, "text")),
        (os.open, reading.read_bytes),
        (os.open, lambda path: reading.write_replacing(path, "text")),
    ],
    ids=["store", "own text", "whole", "bytes", "replacing"],
)
def test_one_that_comes_when_a_file_was_opened(function: Any, call: Callable[[Path], Any], number: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    before = descriptors()
    with pytest.raises(KeyboardInterrupt), interrupted_at(function, number) as sent:
        call(path)
    assert sent and descriptors() == before


def test_one_that_comes_when_a_store_is_dropped(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: lost.append(about.exc_type))
    before = descriptors()
    store = DiskStore(tmp_path)
    assert descriptors() > before
    with interrupted_at(ThreadPoolExecutor.shutdown, number) as sent:
        del store
    assert sent and descriptors() == before
    assert lost == [KeyboardInterrupt]  # by Python, which raises nothing out of a finalizer


def test_all_that_have_come_are_raised_at_the_end() -> None:
    called: list[int] = []
    before = {each: signal.signal(each, lambda number, _: called.append(number)) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with interrupts_later() as let_interrupts_through:
            signal.raise_signal(signal.SIGINT)
            assert called == []
            let_interrupts_through()
            assert called == [signal.SIGINT]
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert called == [signal.SIGINT]
        assert sorted(called) == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
