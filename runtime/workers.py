"""The threads that issue the queues of a phase, how far each queue has come, and the one queue that may outlive the phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mtcompile.runtime.schedule import Queue
from mtcompile.runtime.trace import Record

_LATEST_START_S = 1.0


class Stopped(Exception):
    """Raised in a queue when another one has failed, whose error is the one to report."""


class Gate:
    """Opens once. Unlike ``threading.Event``, it can be waited for through an interrupt: one that comes when Python code has
    just taken a lock leaves it taken, one at the ``with`` of a lock itself does not."""

    def __init__(self) -> None:
        self.is_open = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        self.is_open = True
        self._closed.release()

    def wait(self) -> None:
        while not self.is_open:
            with self._closed:
                pass

    def wait_for(self, seconds: float) -> bool:
        """Waits at most so long. Tells whether it is open. For one thread."""
        if not self.is_open and self._closed.acquire(timeout=seconds):
            self._closed.release()
        return self.is_open


class Progress:
    """The index of the last completed instruction per queue. One number is enough, since a queue is first in, first out.
    The lock is taken by ``with``, as ``Gate`` says why."""

    def __init__(self) -> None:
        self.completed: dict[str, int] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.failure: BaseException | None = None
        self.interrupted = False  # the thread that waits for the phase was

    def wait(self, queue: str, index: int) -> None:
        """Wait until that instruction is complete. Raises Stopped if any queue fails first."""
        with self._lock:
            while self.completed.get(queue, -1) < index:
                if self.failure is not None:
                    raise Stopped
                self._changed.wait()

    def complete(self, queue: str, index: int) -> None:
        with self._lock:
            self.completed[queue] = index
            self._changed.notify_all()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Make what is raised inside the failure, unless there is one already."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is None or isinstance(self.failure, Stopped):
                self.failure = error
            self._changed.notify_all()


class Worker(threading.Thread):
    """Issues one queue. Unlike a plain thread it can be waited for again after an interrupt: up to Python 3.12, ``join`` says
    then that the thread has ended."""

    def __init__(self, queue: Queue, drain: Callable[[Queue], None], progress: Progress) -> None:
        # An interpreter that ends waits for queue host, which a phase may leave running.
        super().__init__(name=f"mtcompile-{queue}", daemon=queue != "host")
        self._drain, self._queue, self._progress = drain, queue, progress
        self._begun, self._ended = Gate(), Gate()

    def run(self) -> None:
        self._begun.open()
        try:
            self._drain(self._queue)
        finally:
            self._ended.open()

    @property
    def ended(self) -> bool:
        return self._ended.is_open

    def settle(self) -> None:
        """Wait, as ``wait`` does, for one whose start may have failed. After a failure, one that begins later than this waits
        meets that failure and does nothing."""
        if self._begun.wait_for(_LATEST_START_S):
            self.wait()
        else:  # an interrupted start may leave it in Python's list of threads for good: it need not hold a step's memory
            self._drain = lambda queue: None

    def wait(self) -> None:
        """Wait until it has ended, even through an interrupt, which is raised then: a queue that nobody waits for would go on
        writing weights."""
        interrupt: BaseException | None = None
        while not self._ended.is_open:
            try:
                self._ended.wait()
            except BaseException as error:
                interrupt, self._progress.interrupted = error, True
        if interrupt is not None:
            raise interrupt

    def check(self) -> None:
        """Raises Stopped or KeyboardInterrupt, in its own thread, where the phase has failed or its caller was interrupted:
        other processes that it waits for may never come."""
        if self._progress.failure is not None:
            raise Stopped
        if self._progress.interrupted:
            raise KeyboardInterrupt


class DeferredQueue:
    """Queue host of a backward that has returned or soon will, with the instructions it has not run yet. ``records``: of what
    has run there."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._progress = Progress()
        self._worker: Worker | None = None

    def take(self, progress: Progress, worker: Worker, records: list[Record]) -> None:
        """Take over the queue from the phase that begins."""
        self._progress, self._worker, self.records = progress, worker, records

    @property
    def failed(self) -> bool:
        return self._progress.failure is not None

    @property
    def ended(self) -> bool:
        """True once no instruction will run any more."""
        return self._worker is None or self._worker.ended

    def wait(self, index: int) -> None:
        """Wait until that instruction is complete. Raises what stopped the queue before."""
        try:
            self._progress.wait("host", index)
        except Stopped:
            assert self._progress.failure is not None
            raise self._progress.failure from None

    def drain(self) -> None:
        """Wait until all instructions are complete. Raises what stopped the queue."""
        if self._worker is not None:
            self._worker.wait()
        if self._progress.failure is not None:
            raise self._progress.failure
