"""A CUDA device that exists only as the order of what it was given: streams are queues of work, run later and in any order
that their events allow, drawn from a seed. A dependency without an event shows as wrong bits."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mtcompile.passes.step_graph import body_outputs, step_outputs
from mtcompile.runtime.devices.cuda import CudaMemory, Fence, Streams
from mtcompile.runtime.devices.pinned import Staging
from mtcompile.runtime.executor import PhaseOptions, execute, prepare
from mtcompile.runtime.schedule import Schedule
from tests.helpers.tracing import bind, layouts_and_arenas


class Event:
    """``recorded``: how often it has been put on a stream; ``done``: how many of those the device has reached; ``at``: by
    its clock, which counts what it has done."""

    def __init__(self) -> None:
        self.recorded = self.done = self.at = 0


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[tuple[str, Any]] = deque()


class FakeCuda:
    """``Api`` of runtime/devices/cuda.py. ``log``: (what, stream, event) of every record and wait, in the order of the calls.
    ``eager``: how much of what it has the device does while more is given to it. ``ranges``: the NVTX ranges, by the thread
    they are of, as they begin (their names) and end (None)."""

    def __init__(self, seed: int, eager: float = 0.3) -> None:
        self.random, self.eager = random.Random(seed), eager
        self.lock = threading.RLock()
        self.main = Stream("main")
        self.streams = [self.main]
        self.local = threading.local()
        self.log: list[tuple[str, str, Any]] = []
        self.copies: list[int] = []
        self.ranges: dict[str, list[str | None]] = {}
        self.blocked = self.clock = 0

    # ------------------------------------------------------------------------------------------------------- the calls

    def current_stream(self) -> Stream:
        return getattr(self.local, "stream", self.main)

    def new_stream(self) -> Stream:
        self.streams.append(Stream(f"stream{len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.local.stream = before

    def new_event(self, timed: bool = False) -> Event:
        return Event()

    def elapsed_us(self, start: Event, end: Event) -> float:
        self.block(end)
        return float(end.at - start.at)

    def pin(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def push(self, name: str) -> None:
        self.ranges.setdefault(threading.current_thread().name, []).append(name)

    def pop(self) -> None:
        self.ranges[threading.current_thread().name].append(None)

    def record(self, event: Event, stream: Stream) -> None:
        with self.lock:
            event.recorded += 1
            self.log.append(("record", stream.name, event))
            self._give(stream, "record", event)

    def wait(self, stream: Stream, event: Event) -> None:
        with self.lock:
            self.log.append(("wait", stream.name, event))
            self._give(stream, "wait", (event, event.recorded))  # never recorded: nothing to wait for, as on the device

    def block(self, event: Event) -> None:
        with self.lock:
            self.blocked += 1
            while event.done < event.recorded:
                self._step()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.append(target.numel())
        self.launch(lambda: target.copy_(source))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        copied, event, stream = torch.empty_like(tensor, device="cpu"), Event(), self.current_stream()
        self.launch(lambda: copied.copy_(tensor))
        self.record(event, stream)
        self.block(event)
        return copied

    def fill(self, target: torch.Tensor, value: int) -> None:
        self.launch(lambda: target.fill_(value))

    def launch(self, work: Callable[[], Any]) -> None:
        with self.lock:
            self._give(self.current_stream(), "run", work)

    # ------------------------------------------------------------------------------------------------------ the device

    def _give(self, stream: Stream, what: str, about: Any) -> None:
        stream.work.append((what, about))
        while self.random.random() < self.eager and self._step():
            pass

    def _step(self) -> bool:
        """Do the next thing of one stream that can go on; whether there was one."""
        ready = [s for s in self.streams if s.work and not self._held(s.work[0])]
        if not ready:
            return False
        self._do_next(self.random.choice(ready))
        return True

    def _do_next(self, stream: Stream) -> None:
        what, about = stream.work.popleft()
        self.clock += 1
        if what == "record":
            about.done += 1
            about.at = self.clock
        elif what == "run":
            with torch.no_grad():
                about()

    @staticmethod
    def _held(item: tuple[str, Any]) -> bool:
        return item[0] == "wait" and item[1][0].done < item[1][1]

    def synchronize(self) -> None:
        with self.lock:
            while self._step():
                pass
            assert not any(stream.work for stream in self.streams), "the streams wait for each other"

    def kernel(self, body: Any) -> Callable[..., Any]:
        """A kernel as the device sees it: its results exist at once, their contents later."""

        def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
            vals = [node.meta["val"] for node in body_outputs(body)]
            made = [torch.empty_strided(tuple(v.shape), tuple(v.stride()), dtype=v.dtype) for v in vals]

            def work() -> None:
                for one, other in zip(made, body.forward(*inputs), strict=True):
                    one.copy_(other)

            self.launch(work)
            return made

        return call


def on_fake(
    step: Any,
    schedule: Schedule,
    inputs: list[torch.Tensor],
    cuda: FakeCuda,
    fence: type[Fence] = Fence,
    staged: int = 0,
    kind: type[CudaMemory] = CudaMemory,
) -> list[Any]:
    """Run both phases of a schedule on the recording; the results as by interpretation. ``staged``: bytes of a chunk where home
    memory is not pinned."""
    layouts, arenas = layouts_and_arenas(step, schedule)
    rings: Any = {q: Staging(cuda, [torch.empty(staged, dtype=torch.uint8) for _ in range(3)]) for q in ("h2d", "d2h")}
    memory = kind(schedule, layouts, arenas, check=True, api=cuda, staging=rings if staged else None)
    bind(memory, step, inputs)
    kernels = {name: cuda.kernel(module) for name, module in step.named_children()}
    streams = Streams(cuda)
    torch.manual_seed(3)
    for phase in ("forward", "backward"):
        with torch.no_grad():
            execute(prepare(schedule, phase), memory, kernels, PhaseOptions(fence=fence(streams)))
    names = [node.name for node in step_outputs(step)]
    at_home = {name: memory.tensors[name].clone() for name in names if schedule.buffers[name].kind == "home"}
    cuda.synchronize()  # as the caller does who reads what is on the device; what is at home he has read already
    return [*(at_home.get(name, memory.tensors[name]) for name in names), torch.get_rng_state()]
