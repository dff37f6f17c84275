"""How a phase keeps to the speeds of a slower device, by a clock that only the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtcompile.runtime import executor
from mtcompile.runtime.executor import PhaseOptions, execute, prepare
from mtcompile.runtime.schedule import Instruction, Queue, Schedule

LEAST_US = 100.0


class Memory:
    """What a thread does takes time by the clock: so many microseconds as the name of an instruction's one buffer says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        clock = SimpleNamespace(
            perf_counter_ns=lambda: self.now_ns, sleep=lambda seconds: self.pass_us(max(1.0, seconds * 1e6))
        )
        monkeypatch.setattr(executor, "time", clock)

    def pass_us(self, us: float) -> None:
        self.now_ns += round(us * 1e3)

    def alloc(self, name: str, filled: bool) -> None:
        self.pass_us(float(name))

    def run(self, kernel: Any, reads: Any, writes: tuple[str], workspace: int) -> None:
        self.pass_us(float(writes[0]))


def spans(monkeypatch: pytest.MonkeyPatch, queue: Queue, *work: tuple[str, float]) -> list[tuple[float, float]]:
    """When runs begin and end, in microseconds. ``work``: operations of one queue, and what a thread takes for each."""
    instructions = tuple(Instruction(op, queue, "forward", writes=(str(us),), kernel="k") for op, us in work)  # type: ignore[arg-type]
    schedule = Schedule(instructions, {}, {}, {}, {})
    paced = {index: LEAST_US for index, (op, _) in enumerate(work) if op == "run"}
    records = execute(prepare(schedule, "forward"), Memory(monkeypatch), {"k": print}, PhaseOptions(paced=paced))  # type: ignore[arg-type]
    return [(round(record.start_us), round(record.end_us)) for record in records]


def test_what_a_thread_does_between_two_kernels_is_issued_while_the_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    work = ("run", 10), ("alloc", 30), ("run", 10), ("alloc", 40), ("alloc", 40), ("run", 10)
    assert spans(monkeypatch, "compute", *work) == [(0, 100), (100, 200), (200, 300)]


def test_what_takes_longer_than_that_kernel_delays_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans(monkeypatch, "compute", ("run", 10), ("alloc", 130), ("run", 10)) == [(0, 100), (130, 230)]


def test_a_kernel_that_takes_longer_here_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans(monkeypatch, "compute", ("run", 250), ("alloc", 30), ("run", 10)) == [(0, 250), (250, 350)]


@pytest.mark.parametrize("queue", ["host", "disk_read"])
def test_queues_of_the_host_begin_what_their_thread_has_come_to(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans(monkeypatch, queue, ("run", 10), ("alloc", 30), ("run", 10)) == [(0, 100), (130, 230)]


def test_a_kernel_begins_after_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three waits for the one before, on another queue."""
    instructions = (
        Instruction("run", "compute", "forward", writes=("10",), kernel="k"),
        Instruction("run", "host", "forward", writes=("10",), kernel="k", deps=(0,)),
        Instruction("run", "compute", "forward", writes=("10",), kernel="k", deps=(1,)),
    )
    schedule, paced = Schedule(instructions, {}, {}, {}, {}), dict.fromkeys(range(3), LEAST_US)
    records = execute(prepare(schedule, "forward"), Memory(monkeypatch), {"k": print}, PhaseOptions(paced=paced))  # type: ignore[arg-type]
    assert [(record.queue, round(record.start_us), round(record.end_us)) for record in records] == [
        ("compute", 0, 100),
        ("host", 100, 200),
        ("compute", 200, 300),
    ]
