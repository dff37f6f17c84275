"""A pipeline through few sets of memory: while one value is changed, the next is read and the one before is written.

    reads     p0 | p1 | p2 | ...
    changes        p0 | p1 | ...
    writes              p0 | ...

One thread reads and one writes, both in order. What is expected is read as soon as a set is free, before it is taken.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

V = TypeVar("V")


class Pipeline(Generic[V]):
    """Its methods are for one thread. ``sets``: of memory, which reads are told by their number."""

    def __init__(self, sets: int) -> None:
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(sets):
            self._free.put(number)
        self._reader = ThreadPoolExecutor(1, "mtcompile-disk-in")
        self._writer = ThreadPoolExecutor(1, "mtcompile-disk-out")
        self._reads: deque[tuple[Hashable, Future[tuple[int, V]]]] = deque()
        self._writes: deque[Future[None]] = deque()

    def expect(self, reads: Sequence[tuple[Hashable, Callable[[int], V]]]) -> None:
        """Reads these values next, each by a function of its set. What has been expected before goes on as far as the keys are
        the same, and is forgotten from there on."""
        same = 0
        for (key, _), (expected, _) in zip(reads, self._reads, strict=False):
            if key != expected:
                break
            same += 1
        self._forget(same)
        for key, read in reads[same:]:
            self._reads.append((key, self._reader.submit(self._read, read)))

    @contextlib.contextmanager
    def taken(self) -> Iterator[tuple[V, Callable[[Callable[[], None]], Future[None]]]]:
        """Yields the value that is expected first, and what submits its write, which ends the use of its set. Raises what
        failed, in a write before too."""
        _, read = self._reads.popleft()
        number, value = read.result()
        submitted = False

        def submit(write: Callable[[], None]) -> Future[None]:
            nonlocal submitted
            submitted = True
            self._writes.append(self._writer.submit(self._write, write, number))
            return self._writes[-1]

        try:
            self._raise_failed()
            yield value, submit
        finally:
            if not submitted:
                self._free.put(number)

    def end(self) -> None:
        """Waits until nothing is read or written any more. Raises what failed in a write."""
        self._forget(0)
        self._reader.shutdown()
        self._writer.shutdown()
        self._raise_failed()

    def _read(self, read: Callable[[int], V]) -> tuple[int, V]:
        number = self._free.get()
        try:
            return number, read(number)
        except BaseException:
            self._free.put(number)
            raise

    def _write(self, write: Callable[[], None], number: int) -> None:
        try:
            write()
        finally:
            self._free.put(number)

    def _forget(self, first: int) -> None:
        """Forgets the reads from ``first`` on, those that failed too."""
        forgotten = [self._reads.pop()[1] for _ in range(len(self._reads) - first)]
        for read in forgotten:
            read.cancel()
        for read in reversed(forgotten):
            if not read.cancelled() and read.exception() is None:
                self._free.put(read.result()[0])

    def _raise_failed(self) -> None:
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()
