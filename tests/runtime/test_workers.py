"""Locks of a phase's threads when the thread that waits for them is interrupted."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from mtcompile.runtime.workers import Gate, Progress

INSTANTS = 40


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def ends(thread: threading.Thread) -> bool:
    thread.join(20)
    return not thread.is_alive()


def test_an_interrupt_leaves_no_lock_of_a_phase_taken() -> None:
    """The more threads want a lock, the longer the moments in which a thread has just taken it."""
    progress, over, instants = Progress(), False, random.Random(0)

    def complete(queue: str) -> None:
        index = 0
        while not over:
            progress.complete(queue, index)
            index += 1

    others = [threading.Thread(target=complete, args=(f"queue {number}",), daemon=True) for number in range(2)]
    for other in others:
        other.start()
    try:
        for index in range(INSTANTS):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, instants.uniform(1e-5, 2e-3))
                while True:
                    progress.complete("compute", index)
            one_more = threading.Thread(target=progress.complete, args=("h2d", index), daemon=True)
            one_more.start()
            assert ends(one_more), f"after {index + 1} interrupts"
    finally:
        over = True
    assert all(map(ends, others))


def test_a_gate_opens_for_all_who_wait_however_often_one_is_interrupted() -> None:
    instants = random.Random(0)
    for _ in range(INSTANTS):
        gate, opened_at = Gate(), time.perf_counter() + 5e-3
        opening, waiting = threading.Timer(5e-3, gate.open), threading.Thread(target=gate.wait, daemon=True)
        opening.start()
        waiting.start()
        while not gate.is_open:
            try:
                signal.setitimer(signal.ITIMER_REAL, instants.uniform(1e-5, 2e-3))
                gate.wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert ends(opening) and ends(waiting) and time.perf_counter() >= opened_at
        assert gate.wait_for(1)
