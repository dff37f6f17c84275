"""The executor: one loop over a schedule's instructions of one phase, on real memory.

``prepare`` resolves once what a step would otherwise look up: per queue the instructions in order, for each the
dependencies that are not met by the queue's own order, and whether another queue waits for it.

The calling thread is the compute queue's worker (so kernels run with the caller's thread count and settings, and a
fully resident step hands nothing to another thread); every other queue that occurs has a worker thread for the length
of the phase. A dependency on another queue waits for that queue's progress. At the end of a phase all queues are
drained and all threads joined, whether it ended well or not; but in a schedule that runs ahead, queue host goes on after the
backward (``Behind``), and the next forward drains it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from mtcompile.runtime.schedule import Instruction, Phase, Queue, Schedule
from mtcompile.runtime.trace import Record

_AWAKE_NS = 200_000  # at the end of a paced instruction


class Fence(Protocol):
    """The order of a phase on a device that runs behind the threads that give it work: there a queue's progress is what
    has been issued, and these make the device keep to it. ``timed``: the device's clock is asked when each instruction
    ran; the host's knows only when it was issued."""

    timed: bool

    def begin(self, queues: Iterable[Queue]) -> None: ...

    def on(self, queue: Queue) -> AbstractContextManager[Any]:
        """Entered by the thread that issues ``queue``, for the length of the phase."""

    def wait(self, queue: Queue, index: int) -> None:
        """What is issued to ``queue`` from now on starts after instruction ``index``, which has been signalled."""

    def signal(self, queue: Queue, index: int) -> None: ...

    def end(self, queues: Iterable[Queue], failed: bool) -> None: ...

    def stamp(self, queue: Queue, index: int) -> None:
        """Called before and after instruction ``index`` is issued, if ``timed``."""

    def records(self) -> list[Record]:
        """When the stamped instructions ran, after ``end``; waits for the device."""


class Memory(Protocol):
    """The bytes of one step on one device: what each buffer name is bound to."""

    def alloc(self, name: str) -> None: ...

    def free(self, name: str) -> None: ...

    def copy(self, reads: Sequence[str], writes: Sequence[str]) -> None: ...

    def run(self, kernel: Callable[..., Any], reads: Sequence[str], writes: Sequence[str], workspace: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Item:
    """An instruction as a queue's worker meets it. ``waits``: (queue, index) pairs; ``previous_step_deps``: indices of
    instructions on queue host in the previous step; ``signals``: whether anyone waits for it."""

    index: int
    instruction: Instruction
    waits: tuple[tuple[str, int], ...]
    previous_step_deps: tuple[int, ...]
    signals: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """One phase of a schedule, ready to run."""

    phase: Phase
    lanes: Mapping[Queue, tuple[_Item, ...]]


def prepare(schedule: Schedule, phase: Phase) -> Prepared:
    """Dependencies on earlier phases are met by the drain between phases."""
    listed = dict(schedule.phase(phase))
    awaited = {dep for instruction in schedule.instructions for dep in (*instruction.deps, *instruction.previous_step_deps)}
    lanes: dict[Queue, list[_Item]] = {}
    for index, instruction in listed.items():
        waits = tuple((listed[dep].queue, dep) for dep in instruction.deps if dep in listed)
        item = _Item(index, instruction, waits, instruction.previous_step_deps, index in awaited)
        lanes.setdefault(instruction.queue, []).append(item)
    return Prepared(phase, {queue: tuple(items) for queue, items in lanes.items()})


@dataclass(frozen=True, slots=True)
class Delays:
    """Random sleeps before instructions, from a seed: a missing dependency shows where timing would hide it."""

    seed: int
    longest_us: float = 300.0


class _Stopped(Exception):
    """Another queue failed; its error is the one raised."""


class _Progress:
    """Index of the last completed instruction per queue; first in, first out makes one number enough."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.changed = threading.Condition()
        self.failure: BaseException | None = None

    def wait(self, queue: str, index: int) -> None:
        with self.changed:
            while self.done.get(queue, -1) < index:
                if self.failure is not None:
                    raise _Stopped
                self.changed.wait()

    def complete(self, queue: str, index: int) -> None:
        with self.changed:
            self.done[queue] = index
            self.changed.notify_all()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """What is raised inside is the failure, unless there is one."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            if self.failure is None or isinstance(self.failure, _Stopped):
                self.failure = error
            self.changed.notify_all()


class Behind:
    """What a backward has left to do on queue host when it returns. ``records``: of what ran there since."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._progress = _Progress()
        self._thread: _Worker | None = None

    def left(self, progress: _Progress, thread: _Worker, records: list[Record]) -> None:
        self._progress, self._thread, self.records = progress, thread, records

    def wait(self, index: int) -> None:
        """Until that instruction is complete. Raises what stopped the queue before."""
        try:
            self._progress.wait("host", index)
        except _Stopped:
            assert self._progress.failure is not None
            raise self._progress.failure from None

    def drain(self) -> None:
        """Until all are. Raises what stopped the queue."""
        if self._thread is not None:
            self._thread.wait()
        if self._progress.failure is not None:
            raise self._progress.failure


class _Worker(threading.Thread):
    """Can be waited for again after an interrupt; of a plain thread, join says then that it has ended (Python to 3.12)."""

    def __init__(self, queue: Queue, drain: Callable[[Queue], None]) -> None:
        # An interpreter that ends waits for queue host, which may be left behind.
        super().__init__(name=f"mtcompile-{queue}", daemon=queue != "host")
        self._drain, self._queue, self._ended = drain, queue, threading.Event()

    def run(self) -> None:
        try:
            self._drain(self._queue)
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Until it has ended, also through an interrupt, which is raised then: a queue that nobody waits for would go on
        writing weights."""
        interrupt: BaseException | None = None
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _wait_until(clock_ns: int) -> None:
    """Asleep until shortly before, since a sleep ends late; then awake, while the other queues' threads may run."""
    asleep_ns = clock_ns - time.perf_counter_ns() - _AWAKE_NS
    if asleep_ns > 0:
        time.sleep(asleep_ns / 1e9)
    while time.perf_counter_ns() < clock_ns:
        time.sleep(0)


def execute(
    prepared: Prepared,
    memory: Memory,
    kernels: Mapping[str, Callable[..., Any]],
    delays: Delays | None = None,
    fence: Fence | None = None,
    paced: bool = False,
    before: Behind | None = None,
    behind: Behind | None = None,
) -> list[Record]:
    """Run one phase; returns when every queue is drained (with a ``fence``: issued, and drained into the compute queue).
    ``before``: what the step before has left, drained too. ``behind``: takes what is left of queue host, which is not waited
    for.
    ``paced``: a copy or run that took less than its ``time_us`` waits out the rest, as a slower device would take it.
    Raises what the failing instruction raised."""
    progress = _Progress()
    records: list[Record] = []
    late: list[Record] = []  # of queue host
    start = time.perf_counter_ns()

    def drain(queue: Queue) -> None:
        # An interrupt too must stop the other queues before it goes on.
        with progress.caught(), fence.on(queue) if fence is not None else nullcontext():
            issue(queue)

    def issue(queue: Queue) -> None:
        sleep = random.Random(f"{delays.seed}/{queue}/{prepared.phase}") if delays else None
        stamp = fence.stamp if fence is not None and fence.timed and queue != "host" else None
        if queue == "host" and before is not None:
            before.drain()
        clock = time.perf_counter_ns
        alloc, free, copy, run = memory.alloc, memory.free, memory.copy, memory.run
        for item in prepared.lanes[queue]:
            for other, dep in item.waits:
                progress.wait(other, dep)
                if fence is not None:
                    fence.wait(queue, dep)
            if before is not None:
                for dep in item.previous_step_deps:
                    before.wait(dep)
            if progress.failure is not None:
                return
            if sleep is not None and delays is not None:
                time.sleep(sleep.random() * delays.longest_us / 1e6)
            instruction = item.instruction
            op = instruction.op
            if op == "alloc":
                alloc(instruction.writes[0])
            elif op == "free":
                free(instruction.writes[0])
            else:
                if stamp is not None:
                    stamp(queue, item.index)
                began = clock()
                if op == "copy":
                    copy(instruction.reads, instruction.writes)
                else:
                    run(kernels[instruction.kernel], instruction.reads, instruction.writes, instruction.workspace)
                if paced:
                    _wait_until(began + round(instruction.time_us * 1e3))
                made = late if queue == "host" else records
                made.append(Record(item.index, queue, (began - start) / 1e3, (clock() - start) / 1e3))
                if stamp is not None:
                    stamp(queue, item.index)
            if item.signals:
                if fence is not None:
                    fence.signal(queue, item.index)
                progress.complete(queue, item.index)

    threads = {queue: _Worker(queue, drain) for queue in prepared.lanes if queue != "compute"}
    if fence is not None:
        fence.begin(prepared.lanes)
    for thread in threads.values():
        thread.start()
    if "compute" in prepared.lanes:
        drain("compute")
    leaving = behind is not None and "host" in threads
    for queue, thread in threads.items():
        if not (leaving and queue == "host"):
            with progress.caught():
                thread.wait()
    if before is not None:
        with progress.caught():
            before.drain()
    if progress.failure is not None and leaving:
        with progress.caught():
            threads["host"].wait()
    if fence is not None:
        fence.end(prepared.lanes, failed=progress.failure is not None)
    if progress.failure is not None:
        raise progress.failure
    if behind is not None and leaving:
        behind.left(progress, threads["host"], late)
    elif late:
        records += late
    if fence is not None and fence.timed:
        return fence.records() + [record for record in records if record.queue == "host"]
    if threads:
        records.sort(key=lambda record: (record.start_us, record.index))
    return records
