"""Streams and events of the second device: threads that do later what they are given, each in its order."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_of_stream = threading.local()  # ``works``: set on the threads of streams


class Call(NamedTuple):
    """A call that was made of the device. ``kind``: "launch", "copy", "record", "wait" or "block", for which the calling thread
    waits."""

    kind: str
    name: str
    stream: int
    thread: str


@dataclass(slots=True)
class Faults:
    """What is to go wrong: by kind of call, in how many of them from now on. ``late``: the call returns, and the device fails
    when it comes to it; from then on every call raises that error, as after an illegal access of a GPU's."""

    at: Counter[str] = field(default_factory=Counter)
    late: bool = False


class Device:
    """The state that streams share. ``lag_s``: the longest pause before each piece of work, by stream; main is 0."""

    def __init__(self) -> None:
        self.local, self.main = threading.local(), Stream()
        self.faults = Faults()
        self.error: BaseException | None = None
        self.lag_s: dict[int, float] = {}
        self.calls: list[Call] | None = None

    def current(self) -> Stream:
        return getattr(self.local, "stream", None) or self.main

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.local.stream = self.current(), stream
        try:
            yield
        finally:
            self.local.stream = before

    def note(self, kind: str, name: str, stream: Stream) -> Callable[[], None] | None:
        """Notes a call. Raises what it is to raise; returns what is to fail in its place, or None."""
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        if self.calls is not None:
            self.calls.append(Call(kind, name, stream.number, threading.current_thread().name))
        if self.faults.at[kind] > 0:
            self.faults.at[kind] -= 1
            if self.faults.at[kind] == 0:
                return self._fail(f"injected into {kind} {name}")
        return None

    def blocks(self, name: str, stream: Stream) -> None:
        """Notes that the calling thread waits for what it has put on a stream."""
        if self.calls is not None:
            self.calls.append(Call("block", name, stream.number, threading.current_thread().name))

    def _fail(self, text: str) -> Callable[[], None]:
        if not self.faults.late:
            raise RuntimeError(text)

        def failing() -> None:
            self.error = RuntimeError(f"CUDA error: an illegal memory access was encountered, {text}")
            raise self.error

        return failing

    def synchronize(self) -> None:
        if getattr(_of_stream, "works", False):  # a finalizer, on the thread of a stream: what is under way holds its memory
            return
        self.blocks("device", self.current())
        for stream in tuple(_streams):
            stream.drain()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error

    def reset(self) -> None:
        """Ends errors, faults, pauses and notes."""
        self.faults, self.lag_s, self.calls = Faults(), {}, None
        with contextlib.suppress(RuntimeError):
            self.synchronize()
        self.error = None


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.number = next(_numbers)
        self.work: deque[Callable[[], None]] = deque()
        self.changed = threading.Condition()
        self.idle = True
        _streams.append(self)
        threading.Thread(target=self._run, name=f"second-device-{self.number}", daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        with self.changed:
            self.work.append(work)
            self.changed.notify_all()

    def done(self, work: Callable[[], Any]) -> Any:
        """Returns or raises what ``work`` does, after all that came before it."""
        future = Future[Any]()

        def working() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.put(working)
        self.drain()
        if DEVICE.error is not None:
            raise RuntimeError(str(DEVICE.error)) from DEVICE.error
        return future.result(timeout=0)

    def drain(self) -> None:
        with self.changed:
            self._wait_until(lambda: self.idle and not self.work)

    def _wait_until(self, so: Callable[[], bool]) -> None:
        """Waits for what another thread changes. Between a look and a wait, a finalizer may run that waits for this stream too.
        What changes then has nobody to wake, so that who waits looks again now and then."""
        while not so():
            self.changed.wait(timeout=0.2)

    def wait_event(self, event: Event) -> None:
        DEVICE.note("wait", "event", self)
        if (reached := event.reached) is not None:
            self.put(lambda: _wait(reached))

    def synchronize(self) -> None:
        DEVICE.blocks("stream", self)
        self.drain()

    @torch.inference_mode()
    def _run(self) -> None:
        _of_stream.works = True
        pauses = random.Random(self.number)
        while True:
            with self.changed:
                self.idle = True
                self.changed.notify_all()
                self._wait_until(lambda: bool(self.work))
                work, self.idle = self.work.popleft(), False
            if lag_s := DEVICE.lag_s.get(self.number):
                time.sleep(pauses.random() * lag_s)
            try:
                if DEVICE.error is None or isinstance(work, Mark):
                    work()
            except BaseException as error:  # what a kernel raises is the device's, not the caller's
                DEVICE.error = DEVICE.error or error
            del work


class Mark:
    """A place on a stream, where ``reached`` is set."""

    def __init__(self, event: Event) -> None:
        self.event, self.reached = event, event.reached

    def __call__(self) -> None:
        self.event.at_s = time.perf_counter()
        assert self.reached is not None
        self.reached.set()


class Event:
    """``reached``: set when the stream comes to the last record of it; None before there is one."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.reached: threading.Event | None = None
        self.stream: Stream | None = None
        self.at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or DEVICE.current()
        DEVICE.note("record", "event", stream)
        self.stream, self.reached = stream, threading.Event()
        stream.put(Mark(self))

    def synchronize(self) -> None:
        if self.reached is not None and self.stream is not None:
            DEVICE.blocks("event", self.stream)
            _wait(self.reached)
        if DEVICE.error is not None:
            raise RuntimeError(str(DEVICE.error)) from DEVICE.error

    def query(self) -> bool:
        return self.reached is None or self.reached.is_set()

    def elapsed_time(self, other: Event) -> float:
        return max(1e-6, 1e3 * (other.at_s - self.at_s))


def _wait(reached: threading.Event) -> None:
    if not reached.wait(timeout=120):
        raise RuntimeError("an event was not reached in two minutes: the streams wait for each other")


_numbers, _streams = itertools.count(), list[Stream]()
DEVICE = Device()
atexit.register(lambda: [stream.drain() for stream in _streams])  # while there still is a torch
