"""The executor: one loop over a schedule's instructions of one phase, on real memory.

``prepare`` resolves once what a step would otherwise look up: per queue the instructions in order, and for each the
dependencies that are not met by the queue's own order, and whether another queue waits for it.

The calling thread is the compute queue's worker, so that kernels run with the caller's thread count and settings, and a
fully resident step hands nothing to another thread. Every other queue in use has a worker thread for the length of the
phase, unless they only fetch a call's inputs, in less time than a thread takes: then the calling thread runs all, in the
schedule's order. A dependency on another queue waits for that queue's progress. At the end of a phase, with or without an
error, all queues are drained and all threads joined; but in a schedule that runs ahead, queue host goes on after the backward
(a ``DeferredQueue``), and the next forward drains it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mtcompile.runtime.schedule import HOST_QUEUES, Instruction, Phase, Queue, Schedule
from mtcompile.runtime.trace import Record
from mtcompile.runtime.workers import DeferredQueue, Progress, Worker

_AWAKE_NS = 200_000  # at the end of a paced instruction
_THREAD_US = 50.0  # of the CPU, to start a thread and wait for it
_FAILED_AT = "mt_instruction"  # of an error


class Fence(Protocol):
    """Keeps a phase in order on a device that runs behind the threads that issue to it. There, a queue's progress is what
    has been issued, and these calls make the device keep to it. ``timed``: the device's clock is asked when each instruction
    ran; the host's clock knows only when it was issued."""

    timed: bool

    def begin(self, queues: Iterable[Queue]) -> None: ...

    def on(self, queue: Queue) -> AbstractContextManager[Any]:
        """Return what the thread that issues ``queue`` enters for the length of the phase. Those of the host's queues wait
        first until earlier phases have ended on all queues of ``schedule.HOST_AWAITS``."""

    def wait(self, queue: Queue, index: int) -> None:
        """Make all that is issued to ``queue`` from now on start after instruction ``index``, which has been signalled."""

    def signal(self, queue: Queue, index: int) -> None: ...

    def end(self, queues: Iterable[Queue], failed: bool) -> None: ...

    def stamp(self, queue: Queue, index: int) -> None:
        """Note the device's time; called before and after instruction ``index`` is issued, if ``timed``."""

    def records(self) -> list[Record]:
        """Return, after ``end``, when the stamped instructions ran. Waits for the device."""


class Memory(Protocol):
    """The bytes of one step on one device: what each buffer name is bound to."""

    def alloc(self, name: str, filled: bool) -> None:
        """Make room for a buffer. ``filled``: a copy will write it."""

    def reserve(self, nbytes: int, name: str) -> None:
        """Make room, for ``name`` and perhaps other buffers, whose memory kernels bring."""

    def free(self, name: str) -> None: ...

    def copy(self, reads: Sequence[str], writes: Sequence[str]) -> None: ...

    def copy_slices(self, reads: Sequence[str], writes: Sequence[str], ends: str) -> float:
        """Copy the slices that have rows, by ``Instruction.ends``. Return the share of the bytes that were copied."""

    def copy_rows(self, reads: Sequence[str], writes: Sequence[str], rows: Sequence[str]) -> float:
        """Copy the rows that ``Instruction.rows`` name. Return the share of the bytes that were copied."""

    def transfer(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Copy between host and disk, and return when it is done."""

    def exchange(self, collective: Callable[..., None], reads: Sequence[str], writes: Sequence[str]) -> None:
        """Call ``collective(sources, targets)`` with the tensors of the operands, which fills the targets."""

    def stream(self, kernel: Callable[..., None], reads: Sequence[str], writes: Sequence[str]) -> None:
        """Call ``kernel(copy, sources, targets)`` with the tensors of the operands; it fills the targets, by calls of
        ``copy(pairs, to_device)`` with pairs of a target and a source, and may change the last source on the device."""

    def run(self, kernel: Callable[..., Any], reads: Sequence[str], writes: Sequence[str], workspace: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Item:
    """An instruction as a queue's worker meets it, or several that alloc, or free, in a row. ``waits``: (queue, index) pairs;
    ``previous_step_deps``: indices of instructions on queue host in the previous step; ``signals``: whether anyone waits for
    it; ``filled``: of an alloc, whether a copy will write the buffer. ``reserved``: of allocs whose memory kernels bring, the
    bytes, else None. ``freed``: the buffers that are freed."""

    index: int
    instruction: Instruction
    waits: tuple[tuple[str, int], ...]
    previous_step_deps: tuple[int, ...]
    signals: bool
    filled: bool
    reserved: int | None = None
    freed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """One phase of a schedule, ready to run. ``lanes``: by queue; ``alone``: all in order, if threads would not pay."""

    phase: Phase
    lanes: Mapping[Queue, tuple[_Item, ...]]
    alone: tuple[_Item, ...] = ()


def prepare(schedule: Schedule, phase: Phase) -> Prepared:
    """Prepares one phase. Dependencies on earlier phases are left out: the drain between phases meets them, and what the fence
    makes queue host await before it starts one."""
    listed = dict(schedule.phase(phase))
    awaited = {dep for each in schedule.instructions for dep in (*each.deps, *each.previous_step_deps)}
    filled = {name for each in listed.values() if each.op == "copy" for name in each.writes}
    lanes: dict[Queue, list[_Item]] = {}
    for index, instruction in listed.items():
        waits = tuple((listed[dep].queue, dep) for dep in instruction.deps if dep in listed)
        room = instruction.op == "alloc" and instruction.writes[0] in filled
        buffer = schedule.buffers.get(instruction.writes[0]) if instruction.op == "alloc" else None
        reserved = buffer.nbytes if buffer is not None and buffer.kind == "pooled" and not room else None
        freed = instruction.writes if instruction.op == "free" else ()
        item = _Item(index, instruction, waits, instruction.previous_step_deps, index in awaited, room, reserved, freed)
        lanes.setdefault(instruction.queue, []).append(item)
    phase_lanes = {queue: _joined(items) for queue, items in lanes.items()}
    if not _are_alone(schedule, [each for each in listed.values() if each.queue != "compute"]):
        return Prepared(phase, phase_lanes)
    ordered = sorted((item for items in lanes.values() for item in items), key=lambda item: item.index)
    return Prepared(phase, phase_lanes, _joined(replace(item, waits=(), signals=False) for item in ordered))


def _joined(items: Iterable[_Item]) -> tuple[_Item, ...]:
    """Joins allocs whose memory kernels bring, and frees, that nothing is between, and nothing waits for but the last."""
    joined: list[_Item] = []
    for item in items:
        last = joined[-1] if joined else None
        if last is None or last.signals or last.previous_step_deps or item.waits or item.previous_step_deps:
            joined.append(item)
        elif last.reserved is not None and item.reserved is not None:
            joined[-1] = replace(item, waits=last.waits, reserved=last.reserved + item.reserved)
        elif last.freed and item.freed:
            joined[-1] = replace(item, waits=last.waits, freed=last.freed + item.freed)
        else:
            joined.append(item)
    return tuple(joined)


def _are_alone(schedule: Schedule, beside: Sequence[Instruction]) -> bool:
    """Tells whether what other queues do beside the computation is to fetch a call's inputs, which takes less than a thread."""
    copies = [each for each in beside if each.op == "copy"]
    if any(each.previous_step_deps or any(schedule.buffers[name].role != "input" for name in each.reads) for each in copies):
        return False
    filled = {name for each in copies for name in each.writes}
    return (
        bool(copies)
        and all(each.op == "copy" or (each.op == "alloc" and each.writes[0] in filled) for each in beside)
        and sum(each.time_us for each in copies) < _THREAD_US
    )


@dataclass(frozen=True, slots=True)
class Delays:
    """Random sleeps before instructions, from a seed: a missing dependency shows where timing would hide it."""

    seed: int
    longest_us: float = 300.0


@dataclass(frozen=True, slots=True)
class PhaseOptions:
    """The options of one phase's run.

    ``delays``: random sleeps. ``fence``: of a device that runs behind its threads; the phase is then issued, and drained
    into the compute queue, when ``execute`` returns. ``paced``: the microseconds that each takes at least, as on a slower
    device (``_Clock``). ``previous``: the queue that the previous step deferred, which this phase drains too. ``deferred``:
    takes what queue host has not finished, so that the phase does not wait for it. ``named``: makes a context for each copy
    and run, in which a profiler shows it by its name. ``issued``: called when queue compute has been issued to its end.
    """

    delays: Delays | None = None
    fence: Fence | None = None
    paced: Mapping[int, float] = field(default_factory=dict)
    previous: DeferredQueue | None = None
    deferred: DeferredQueue | None = None
    named: Callable[[Instruction], AbstractContextManager[object]] | None = None
    issued: Callable[[], None] = lambda: None


def execute(
    prepared: Prepared, memory: Memory, kernels: Mapping[str, Callable[..., Any]], options: PhaseOptions = PhaseOptions()
) -> list[Record]:
    """Runs one phase and returns its records when every queue is drained. Raises what the failing instruction raised."""
    return _PhaseRun(prepared, memory, kernels, options).run()


class _Clock:
    """Tells when instructions of one queue of a slower device begin and end. A thread issues the device's own queues one ahead:
    while an instruction runs, the next is issued, and begins when that one has ended and what it waits for has. So what the
    thread does between two of them takes no time unless it takes longer than the first. Other queues begin what their thread
    has come to.

    ``ends``: of all queues, by instruction. ``ahead``: whether the queue is the device's.
    """

    def __init__(self, ends: dict[int, int], ahead: bool) -> None:
        self.ends, self.ahead = ends, ahead
        self._free_ns = self._last_ns = 0

    def pass_by(self, item: _Item) -> None:
        """Notes what an instruction waits for, and when one without a length of its own is done."""
        since = time.perf_counter_ns() if item.previous_step_deps else 0  # these have no clock here
        self._free_ns = max(self._free_ns, since, *(self.ends.get(dep, 0) for _, dep in item.waits))
        self.ends[item.index] = self._free_ns

    def run(self, index: int, began_ns: int, least_ns: int) -> tuple[int, int]:
        """Waits until an instruction has ended that a thread has come to, and has done. Returns when it began and ended."""
        length = max(least_ns, time.perf_counter_ns() - began_ns)
        start = max(self._free_ns, began_ns - self._last_ns) if self.ahead else began_ns
        self._free_ns = self.ends[index] = start + length
        self._last_ns = length
        wait_until(self._free_ns)
        return start, self._free_ns if self.ahead else time.perf_counter_ns()


class _PhaseRun:
    """One phase while it runs. ``records`` and ``host_records``: of copies and kernels, of queue host apart, since that may
    be deferred."""

    def __init__(
        self, prepared: Prepared, memory: Memory, kernels: Mapping[str, Callable[..., Any]], options: PhaseOptions
    ) -> None:
        self.prepared, self.memory, self.kernels, self.options = prepared, memory, kernels, options
        self.fence, self.previous = options.fence, options.previous
        alone = prepared.alone and options.fence is None and options.delays is None and not options.paced
        self.lanes: Mapping[Queue, tuple[_Item, ...]] = {"compute": prepared.alone} if alone else prepared.lanes
        self.progress = Progress()
        self.started: list[Worker] = []
        self.drained = False
        self.records: list[Record] = []
        self.host_records: list[Record] = []
        self.ends: dict[int, int] = {}  # of what is paced, by its clock
        self.start_ns = time.perf_counter_ns()

    def run(self) -> list[Record]:
        lanes, fence, progress, deferred = self.lanes, self.fence, self.progress, self.options.deferred
        workers = {queue: Worker(queue, self._drain, progress) for queue in lanes if queue != "compute"}
        host = workers.get("host") if deferred is not None else None  # not waited for, unless something fails
        stopped: BaseException | None = None
        try:
            if deferred is not None and host is not None:
                deferred.take(progress, host, self.host_records)
            if fence is not None:
                fence.begin(lanes)
            for worker in workers.values():
                self.started.append(worker)
                worker.start()
            if "compute" in lanes:
                self._drain("compute")
            if progress.failure is None:
                self.options.issued()
        except BaseException as error:  # what is called here could be interrupted in turn
            stopped = error
        while not self.drained:
            try:
                self._end(stopped, host)
            except BaseException as interrupt:
                stopped = stopped or interrupt
        if progress.failure is not None:
            raise progress.failure
        finished = self.records if host is not None else self.records + self.host_records
        if fence is not None and fence.timed:
            shares = {record.index: record.share for record in finished}
            timed = [replace(record, share=shares.get(record.index, 1.0)) for record in fence.records()]
            return timed + [record for record in finished if record.queue in HOST_QUEUES]
        if workers:
            finished.sort(key=lambda record: (record.start_us, record.index))
        return finished

    def _end(self, stopped: BaseException | None, host: Worker | None) -> None:
        """Wait until all queues are drained and the threads have ended; queue host's only if something failed. ``stopped``:
        what kept the calling thread from going on. Only an interrupt is raised; the next call goes on from there."""
        progress = self.progress
        if stopped is not None:
            progress.fail(stopped)
        for worker in self.started:
            if worker is not host:
                worker.settle() if progress.failure is not None else worker.wait()
        if self.previous is not None:
            with progress.caught():
                self.previous.drain()
        if progress.failure is not None and host in self.started and host is not None:
            host.settle()
        if self.fence is not None:
            with progress.caught():
                self.fence.end(self.lanes, failed=progress.failure is not None)
        self.drained = True

    def _drain(self, queue: Queue) -> None:
        """Issue a queue to its end. Any exception, an interrupt included, stops the other queues before it goes on."""
        with self.progress.caught(), self.fence.on(queue) if self.fence is not None else nullcontext():
            if queue == "host" and self.previous is not None:
                self.previous.drain()
            self._issue(queue)

    def _issue(self, queue: Queue) -> None:
        memory, progress, delays = self.memory, self.progress, self.options.delays
        sleep = random.Random(f"{delays.seed}/{queue}/{self.prepared.phase}") if delays else None
        clock = _Clock(self.ends, queue not in HOST_QUEUES) if self.options.paced else None
        for item in self.lanes[queue]:
            if item.waits or item.previous_step_deps:
                self._wait(queue, item)
            if progress.failure is not None:
                return
            if sleep is not None and delays is not None:
                time.sleep(sleep.random() * delays.longest_us / 1e6)
            instruction = item.instruction
            if clock is not None:
                clock.pass_by(item)
            try:
                if item.reserved is not None:
                    memory.reserve(item.reserved, instruction.writes[0])
                elif item.freed:
                    for name in item.freed:
                        memory.free(name)
                elif instruction.op == "alloc":
                    memory.alloc(instruction.writes[0], item.filled)
                else:
                    self._work(item.index, instruction, clock)
            except Exception as error:
                setattr(error, _FAILED_AT, (item.index, instruction))
                raise
            if item.signals:
                if self.fence is not None:
                    self.fence.signal(queue, item.index)
                progress.complete(queue, item.index)

    def _wait(self, queue: Queue, item: _Item) -> None:
        for other, dep in item.waits:
            self.progress.wait(other, dep)
            if self.fence is not None:
                self.fence.wait(queue, dep)
        if self.previous is not None:
            for dep in item.previous_step_deps:
                self.previous.wait(dep)

    def _work(self, index: int, instruction: Instruction, clock: _Clock | None) -> None:
        """Issue a copy or run, and record it."""
        queue = instruction.queue
        stamp = self.fence.stamp if self.fence is not None and self.fence.timed and queue not in HOST_QUEUES else None
        if stamp is not None:
            stamp(queue, index)
        began = time.perf_counter_ns()
        if self.options.named is None:
            share = self._perform(instruction)
        else:
            with self.options.named(instruction):
                share = self._perform(instruction)
        start, ended = self.start_ns, time.perf_counter_ns()
        if clock is not None and (least_us := self.options.paced.get(index)) is not None:
            began, ended = clock.run(index, began, round(share * least_us * 1e3))
        records = self.host_records if queue == "host" else self.records
        records.append(Record(index, queue, (began - start) / 1e3, (ended - start) / 1e3, share))
        if stamp is not None:
            stamp(queue, index)

    def _perform(self, instruction: Instruction) -> float:
        """Does what an instruction says. Returns the share of its bytes that had to be copied."""
        queue = instruction.queue
        if instruction.op == "copy" and instruction.ends:
            return self.memory.copy_slices(instruction.reads[:-1], instruction.writes, instruction.ends)
        if instruction.op == "copy" and instruction.rows:
            return self.memory.copy_rows(instruction.reads[:1], instruction.writes, instruction.rows)
        if instruction.op == "copy" and queue in ("disk_read", "disk_write"):
            self.memory.transfer(instruction.reads, instruction.writes)
        elif instruction.op == "copy":
            self.memory.copy(instruction.reads, instruction.writes)
        elif queue == "network":
            self.memory.exchange(self.kernels[instruction.kernel], instruction.reads, instruction.writes)
        elif queue in ("h2d", "d2h"):
            self.memory.stream(self.kernels[instruction.kernel], instruction.reads, instruction.writes)
        else:
            kernel = self.kernels[instruction.kernel]
            self.memory.run(kernel, instruction.reads, instruction.writes, instruction.workspace)
        return 1.0


def instruction_of(error: BaseException) -> tuple[int, Instruction] | None:
    """Returns the instruction that raised an error, with its index; None if none did."""
    failed: tuple[int, Instruction] | None = getattr(error, _FAILED_AT, None)
    return failed


def wait_until(clock_ns: int) -> None:
    """Sleeps until shortly before, since a sleep ends late; then stays awake, letting the other queues' threads run."""
    asleep_ns = clock_ns - time.perf_counter_ns() - _AWAKE_NS
    if asleep_ns > 0:
        time.sleep(asleep_ns / 1e9)
    while time.perf_counter_ns() < clock_ns:
        time.sleep(0)
