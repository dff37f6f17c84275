"""The executor: one loop over a schedule's instructions of one phase, on real memory.

The calling thread is the compute queue's worker (so kernels run with the caller's thread count and settings, and a
fully resident step hands nothing to another thread); every other queue that occurs has a worker thread for the length
of the phase. A dependency on another queue waits for that queue's progress. At the end of a phase all queues are
drained and all threads joined, whether it ended well or not.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtcompile.runtime.schedule import Instruction, Phase, Schedule
from mtcompile.runtime.trace import Record


class Memory(Protocol):
    """The bytes of one step on one device: what each buffer name is bound to."""

    def alloc(self, name: str) -> None: ...

    def free(self, name: str) -> None: ...

    def copy(self, reads: Sequence[str], writes: Sequence[str]) -> None: ...

    def run(self, kernel: Callable[..., Any], reads: Sequence[str], writes: Sequence[str], workspace: int) -> None: ...


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

    def fail(self, error: BaseException) -> None:
        with self.changed:
            if self.failure is None or isinstance(self.failure, _Stopped):
                self.failure = error
            self.changed.notify_all()


def execute(
    schedule: Schedule,
    phase: Phase,
    memory: Memory,
    kernels: Mapping[str, Callable[..., Any]],
    delays: Delays | None = None,
) -> list[Record]:
    """Run one phase; returns when every queue is drained. Raises what the failing instruction raised."""
    lanes: dict[str, list[tuple[int, Instruction]]] = {}
    for index, instruction in schedule.phase(phase):
        lanes.setdefault(instruction.queue, []).append((index, instruction))
    queue_of = [instruction.queue for instruction in schedule.instructions]
    in_phase = {index for lane in lanes.values() for index, _ in lane}
    progress = _Progress()
    records: list[Record] = []
    start = time.perf_counter_ns()

    def drain(queue: str) -> None:
        sleep = random.Random(f"{delays.seed}/{queue}/{phase}") if delays else None
        try:
            for index, instruction in lanes[queue]:
                for dep in instruction.deps:
                    if dep in in_phase:
                        progress.wait(queue_of[dep], dep)
                if progress.failure is not None:
                    return
                if sleep is not None and delays is not None:
                    time.sleep(sleep.random() * delays.longest_us / 1e6)
                began = time.perf_counter_ns()
                _perform(instruction, memory, kernels)
                if instruction.op in ("copy", "run"):
                    ended = time.perf_counter_ns()
                    records.append(Record(index, instruction.queue, (began - start) / 1e3, (ended - start) / 1e3))
                progress.complete(queue, index)
        except BaseException as error:  # an interrupt too must stop the other queues before it goes on
            progress.fail(error)

    threads = [
        threading.Thread(target=drain, args=(queue,), name=f"mtcompile-{queue}", daemon=True)
        for queue in lanes
        if queue != "compute"
    ]
    for thread in threads:
        thread.start()
    if "compute" in lanes:
        drain("compute")
    for thread in threads:
        thread.join()
    if progress.failure is not None:
        raise progress.failure
    records.sort(key=lambda record: (record.start_us, record.index))
    return records


def _perform(instruction: Instruction, memory: Memory, kernels: Mapping[str, Callable[..., Any]]) -> None:
    if instruction.op == "alloc":
        memory.alloc(instruction.writes[0])
    elif instruction.op == "free":
        memory.free(instruction.writes[0])
    elif instruction.op == "copy":
        memory.copy(instruction.reads, instruction.writes)
    else:
        memory.run(kernels[instruction.kernel], instruction.reads, instruction.writes, instruction.workspace)
