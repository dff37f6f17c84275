"""Interrupts and failures at any moment: the state is that before or after the step, or the model refuses to go on and says
so. No thread is left, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import mtcompile
from mtcompile.execution.runner import write_buffers
from mtcompile.runtime import workers as worker_threads
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.workers import Progress, Worker
from tests.helpers.models import Small
from tests.helpers.training import minimum_bytes

pytestmark = pytest.mark.slow  # it compiles many models

PACKAGE = str(Path(mtcompile.__file__).resolve().parents[1])
WAYS: dict[str, dict[str, Any]] = {
    "step": {},
    "backward": {"update": "backward"},
    "clipped": {"update": "backward", "max_grad_norm": 0.1},
    "ahead": {"update": "backward", "run_ahead": True},
    "clipped ahead": {"update": "backward", "run_ahead": True, "max_grad_norm": 0.1},
}


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Python's own handler: a process that was started in the background may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


BATCH = torch.linspace(-1, 1, 8 * 32).view(8, 32)


class Training:
    """A compiled model that can be put back to its state after two steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        model, memory = Small(blocks=4), int(least_bytes() * 1.2)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model: Any = mtcompile.compile(model, memory=memory, optimizer=self.optimizer, **options)
        torch.manual_seed(1)
        for _ in range(2):
            self.step()
        self.saved = self.state()
        self.model.synchronize()
        self.model_state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.optimizer_state = _copied(self.optimizer.state_dict())
        self.step()
        self.after = self.state()

    def forward_and_backward(self) -> None:
        self.model(BATCH).backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def restore(self) -> None:
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(_copied(self.optimizer_state))
        self.optimizer.zero_grad()
        torch.set_rng_state(self.saved["rng"])

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers, moments and the generator, once nothing is under way."""
        self.model.synchronize()
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        moments = {
            f"{i} {key}": value
            for i, entry in enumerate(self.optimizer.state.values())
            for key, value in entry.items()
            if isinstance(value, Tensor)
        }
        state = {name: value.detach().clone() for name, value in {**named, **moments}.items()}
        return {**state, "rng": torch.get_rng_state()}


@functools.cache
def least_bytes() -> int:
    return minimum_bytes(Small(blocks=4), {"x": BATCH})


@functools.cache
def training_of(way: str) -> Training:
    """Made once for all tests of a process; each test puts it back."""
    return Training(WAYS[way])


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def weights_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "rng" and "running" not in name and "num_b" not in name}


def buffers_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "running" in name or "num_b" in name}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mtcompile-")]


def no_workers() -> bool:
    """A thread that has told that it is done may take a moment to end."""
    for _ in range(200):
        if not workers():
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def interrupted_at(count: int) -> Iterator[list[int]]:
    """Interrupts this thread when a function of the package is called for the ``count``-th time, which is where Python looks
    for signals. Yields the number of calls so far."""
    calls = [0]

    def trace(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and "tests" not in path[len(PACKAGE) :]:
            calls[0] += 1
            if calls[0] == count:
                sys.settrace(None)
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        yield calls
    finally:
        sys.settrace(None)


def raises(training: Training, error: type[BaseException]) -> bool:
    """Says whether forward and backward raise an error. Its traceback, and the loss in it, are gone then."""
    try:
        training.forward_and_backward()
    except error:
        return True
    return False


def check(training: Training) -> str:
    """Says what an interrupt in forward or backward has left; raises if it is neither before nor after nor refused."""
    refused = ""
    try:
        state = training.state()
    except mtcompile.StepError as error:
        refused = str(error)
    assert no_workers(), workers()
    if not refused:
        before, after = training.saved, training.after
        updated = after if training.model._mt_model.door.updates is not None else before
        try:
            training.model(BATCH)
        except mtcompile.StepError as error:
            refused = str(error)
        else:
            assert equal(weights_of(state), weights_of(before)) or equal(weights_of(state), weights_of(updated))
        assert equal(buffers_of(state), buffers_of(before)) or equal(buffers_of(state), buffers_of(after))
    assert not refused or "Load a checkpoint" in refused
    training.restore()
    training.step()
    assert equal(training.state(), training.after)
    return "refused" if refused else "whole"


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.long] * (way not in ("step", "clipped ahead"))) for way in WAYS]
)
def test_an_interrupt_at_any_call(way: str, request: pytest.FixtureRequest) -> None:
    training = training_of(way)
    training.restore()
    with interrupted_at(-1) as calls:
        training.forward_and_backward()
    training.optimizer.step()
    count = calls[0]
    assert count > 100
    trials = 60 if request.config.getoption("-m") == "long" else 10
    left = []
    for trial in range(trials):
        training.restore()
        with interrupted_at(1 + (trial * count + count // 2) // trials):
            interrupted = raises(training, KeyboardInterrupt)
        if interrupted:
            left.append(check(training))
        else:  # a step has more and fewer calls, as its threads meet
            training.optimizer.step()
    assert len(left) > trials // 2 and "whole" in left and (way == "step") <= ("refused" not in left)


@pytest.mark.parametrize("way", ["step", "backward", "ahead"])
def test_a_worker_that_cannot_start(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_threads, "_LATEST_START_S", 0.05)  # one that failed is not waited for as long
    training, start = training_of(way), Worker.start
    raised = 0
    for fails_at in range(1, 7):
        training.restore()
        starts = []

        def start_or_fail(worker: Worker, fails_at: int = fails_at, starts: list[int] = starts) -> None:
            starts.append(1)
            if len(starts) == fails_at:
                raise RuntimeError("can't start new thread")
            start(worker)

        with monkeypatch.context() as patched:
            patched.setattr(Worker, "start", start_or_fail)
            failed = raises(training, RuntimeError)
        if failed:
            raised += 1
            check(training)
        else:
            training.optimizer.step()
    assert raised >= 3


@pytest.mark.parametrize("way", ["step", "backward", "ahead"])
@pytest.mark.parametrize("queue", ["h2d", "d2h", "host"])
def test_an_interrupt_while_workers_start(way: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training, start, seen = training_of(way), Worker.start, []
    training.restore()

    def start_and_interrupt(worker: Worker) -> None:
        start(worker)
        if worker.name == f"mtcompile-{queue}" and not seen:
            seen.append(1)
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", start_and_interrupt)
        interrupted = raises(training, KeyboardInterrupt)
    assert interrupted == bool(seen)
    if interrupted:
        check(training)


@pytest.mark.parametrize("way", ["ahead", "clipped ahead"])
def test_a_fault_behind_the_forward_marks_the_model(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in an update: where queue host frees memory."""
    training, free, returned = training_of(way), CpuMemory.free, threading.Event()

    def fail_on_host(memory: CpuMemory, name: str) -> None:
        if threading.current_thread().name == "mtcompile-host":
            if returned.is_set():
                raise MemoryError("no memory")
            time.sleep(0.02)
        free(memory, name)

    training.restore()
    with monkeypatch.context() as patched:
        patched.setattr(CpuMemory, "free", fail_on_host)
        training.forward_and_backward()
        returned.set()
        training.optimizer.step()
        with pytest.raises(MemoryError):
            training.model.synchronize()
    with pytest.raises(mtcompile.StepError, match=r"failed behind the forward after it.*Load a checkpoint"):
        training.model(BATCH)
    with pytest.raises(mtcompile.StepError, match="Load a checkpoint"):
        training.model.state_dict()
    with pytest.raises(mtcompile.StepError, match="Load a checkpoint"):
        training.optimizer.state_dict()
    training.restore()
    training.step()
    assert equal(training.state(), training.after)


def test_after_an_interrupt_before_the_step_a_checkpoint_helps() -> None:
    training = training_of("backward")
    training.restore()
    training.forward_and_backward()  # and then an interrupt
    with pytest.raises(mtcompile.StepError, match=r"between backward\(\) and optimizer\.step"):
        training.forward_and_backward()
    training.restore()
    training.step()
    assert equal(training.state(), training.after)


def test_all_buffers_or_none_have_their_new_versions() -> None:
    class Interrupting(dict[Tensor, Tensor]):
        passes = 0

        def items(self) -> Any:
            self.passes += 1
            for number, pair in enumerate(super().items()):
                if number == 1 and self.passes == 1:
                    raise KeyboardInterrupt
                yield pair

    buffers = [torch.zeros(2) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        write_buffers(Interrupting({buffer: torch.ones(2) for buffer in buffers}))
    assert all(bool(buffer.all()) for buffer in buffers)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_interrupts_by_the_clock(way: str) -> None:
    """Real signals, at any instruction of Python."""
    training = training_of(way)
    training.restore()
    began = time.perf_counter()
    training.forward_and_backward()
    took = time.perf_counter() - began
    training.optimizer.step()
    interrupts = 0
    for trial in range(100):
        training.restore()
        interrupted = False
        timer = threading.Timer(took * trial / 100, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        try:
            timer.start()
            training.forward_and_backward()
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted = True
        timer.join()
        if interrupted:
            interrupts += 1
            check(training)
        else:
            training.optimizer.step()
    assert interrupts > 20


@pytest.mark.parametrize("way", ["backward", pytest.param("ahead", marks=pytest.mark.long), "clipped ahead"])
def test_ctrl_c_at_any_time_leaves_a_whole_step(way: str, request: pytest.FixtureRequest) -> None:
    """Updates in the backward end first. The next step has the bits of a run without an interrupt."""
    training, drawn, left = training_of(way), random.Random(0), set[str]()
    main = threading.main_thread().ident
    assert main is not None
    training.restore()
    began = time.perf_counter()
    training.step()
    took = time.perf_counter() - began
    training.step()
    beyond = training.state()
    for _ in range(100 if request.config.getoption("-m") == "long" else 25):
        training.restore()
        timer = threading.Timer(drawn.random() * took, signal.pthread_kill, (main, signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            timer.start()
            training.step()
            timer.join()
            time.sleep(0.002)
        timer.join()
        state = weights_of(training.state())
        ended = equal(state, weights_of(training.after))
        assert ended or equal(state, weights_of(training.saved))
        left.add("after" if ended else "before")
        if ended:
            training.optimizer.zero_grad()
            torch.set_rng_state(training.after["rng"])
            training.step()
            assert equal(weights_of(training.state()), weights_of(beyond))
    assert "after" in left


def test_a_second_ctrl_c_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    training, run, seen = training_of("backward"), CpuMemory.run, []

    def interrupted(memory: CpuMemory, *arguments: Any) -> None:
        run(memory, *arguments)
        if (
            threading.current_thread() is threading.main_thread()
            and not seen
            and training.model._mt_model.door.updates.has_updated
        ):
            seen.append(1)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    training.restore()
    monkeypatch.setattr(CpuMemory, "run", interrupted)
    before = signal.getsignal(signal.SIGINT)
    if raises(training, KeyboardInterrupt):
        check(training)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_thread_that_never_began_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python keeps one whose start was interrupted in its list of threads."""
    monkeypatch.setattr("mtcompile.runtime.workers._LATEST_START_S", 0.0)

    class Memory:
        def drain(self, queue: str) -> None: ...

    memory = Memory()
    worker, seen = Worker("h2d", memory.drain, Progress()), weakref.ref(memory)
    worker.settle()
    del memory
    assert seen() is None
    worker.start()  # and if it begins after all, it does nothing
    worker.wait()


_HANGS = """
import signal, torch
from mtcompile.runtime.workers import Progress, Worker
from tests.execution.test_interrupts import WAYS, Training
signal.signal(signal.SIGINT, signal.default_int_handler)
training, start = Training(WAYS["backward"]), Worker.start
def start_and_interrupt(worker):
    start(worker)
    if worker.name == "mtcompile-host":
        signal.raise_signal(signal.SIGINT)
Worker.start = start_and_interrupt
training.forward_and_backward()
"""


def test_a_process_that_is_interrupted_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert ended.returncode != 0 and "KeyboardInterrupt" in ended.stderr
