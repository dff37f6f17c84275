"""A fault at every instruction of a step, by every way of training: the state is that before or after it, or the model refuses.
No thread and no descriptor is left, and the next step is the plain one."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.runtime.devices.cpu import CpuMemory
from tests.helpers.models import Mixture, Small
from tests.helpers.stacks import WIDTH, Residual
from tests.helpers.training import minimum_bytes

pytestmark = pytest.mark.slow  # it compiles many models

OPERATIONS = ("alloc", "free", "copy", "copy_slices", "transfer", "run")  # of a schedule, on the emulated device
WAYS: dict[str, dict[str, Any]] = {
    "step": {},
    "backward": {"update": "backward"},
    "clipped": {"update": "backward", "max_grad_norm": 0.1},
    "ahead": {"update": "backward", "run_ahead": True},
    "accumulated": {"accumulate": 2},
    "accumulated ahead": {"accumulate": 2, "update": "backward", "run_ahead": True, "max_grad_norm": 0.1},
    "masters": {"precision": "bf16-master32"},
    "masters ahead": {"precision": "bf16-master32", "update": "backward", "run_ahead": True},
    "compiled": {"kernels": "inductor"},
    "compiled ahead": {"kernels": "inductor", "update": "backward", "run_ahead": True},
    "disk": {"update": "backward"},
    "activations": {},
    "experts": {"experts": "used"},
}
DISKS = {
    "disk": {"memory": "1500KB", "policy": "megatrain", "host": "2.6MB"},
    "activations": {"memory": "6MiB", "policy": "offload-all", "host": "5.5MB"},
}


class Injected(RuntimeError):
    """A fault."""


class Model(Residual):
    """Whose second block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


@functools.cache
def least_bytes(way: str) -> int:
    return minimum_bytes(*subject(way), **WAYS[way])


def subject(way: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a way, and its batch."""
    if way == "experts":
        torch.manual_seed(0)
        return Mixture(1, experts=16, active=2), {"tokens": torch.arange(6).view(1, 6)}
    if way in DISKS:
        rows = 16 if way == "disk" else 512
        return Model(), {"x": torch.linspace(-1, 1, rows * WIDTH).view(rows, -1)}
    dtype = torch.bfloat16 if "masters" in way else torch.float32
    return Small(norm=nn.LayerNorm if "masters" in way else nn.BatchNorm1d), {
        "x": torch.linspace(-1, 1, 8 * 32).view(8, 32).to(dtype)
    }


class Training:
    """A compiled model that can be put back to its state after two steps, and what a third one makes of it."""

    def __init__(self, way: str, folder: Path) -> None:
        gc.collect()  # models of earlier tests, with the descriptors of their disks
        model, self.batch = subject(way)
        options = {"memory": 0, **WAYS[way]}
        if way in DISKS:
            options |= {**DISKS[way], "disk": f"{folder}:16MiB"}
        else:
            options["memory"] = int(least_bytes(way) * 1.2)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model: Any = mtcompile.compile(model, optimizer=self.optimizer, **options)
        torch.manual_seed(1)
        for _ in range(2):
            self.step()
        self.model_state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.optimizer_state, self.generator = copy.deepcopy(self.optimizer.state_dict()), torch.get_rng_state()
        self.before, self.threads = self.state(), threads()
        self.step()
        self.after = self.state()

    def step(self) -> None:
        self.model(**self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.synchronize()

    def restore(self) -> None:
        torch.set_grad_enabled(True)  # an interrupted optimizer of torch's may leave gradients off
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer_state))
        self.optimizer.zero_grad()
        torch.set_rng_state(self.generator)

    def state(self) -> dict[str, list[Tensor]]:
        """Weights with their state, and buffers; read past the methods that refuse."""
        masters = self.model._mt_model.door.masters
        entries = [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
        planes = [] if masters is None else [master.remainder for master in masters]
        weights = [*nn.Module.parameters(self.model), *entries, *planes]
        return {"weights": copied(weights), "buffers": copied(self.model.buffers())}

    def check(self) -> str:
        """Says what a fault has left; raises if it is neither before nor after nor refused, or if anything else is left."""
        torch.set_grad_enabled(True)
        with contextlib.suppress(Exception):
            self.model.synchronize()
        assert no_threads_but(self.threads)
        state = self.state()
        try:
            self.model(**self.batch)
        except mtcompile.StepError as error:
            assert "Load a checkpoint" in str(error)
            left = "said"
        else:
            for kind, values in state.items():
                assert equal(values, self.before[kind]) or equal(values, self.after[kind]), f"half of the {kind}"
            left = "after" if equal(state["weights"], self.after["weights"]) else "before"
        self.restore()
        self.step()
        now = self.state()
        assert equal(now["weights"], self.after["weights"]) and equal(now["buffers"], self.after["buffers"])
        return left


def copied(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def threads() -> set[threading.Thread]:
    """Those that run. Python lists one whose start was interrupted for good, without an identity."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("mtcompile") and thread.ident is not None}


def no_threads_but(held: set[threading.Thread]) -> bool:
    """A thread that has told that it is done may take a moment to end. ``held``: those of a disk."""
    for _ in range(200):
        if threads() <= held:
            return True
        time.sleep(0.01)
    return False


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@contextlib.contextmanager
def failing_at(count: int) -> Iterator[list[int]]:
    """Lets the ``count``-th instruction that begins, on whatever queue, fail. Yields how many have begun."""
    begun, lock = [0], threading.Lock()
    plain = {name: getattr(CpuMemory, name) for name in OPERATIONS}

    def failing(operation: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*args: Any) -> Any:
            with lock:
                begun[0] += 1
                fails = begun[0] == count
            if fails:
                raise Injected("at an instruction")
            return operation(*args)

        return perform

    for name, operation in plain.items():
        setattr(CpuMemory, name, failing(operation))
    try:
        yield begun
    finally:
        for name, operation in plain.items():
            setattr(CpuMemory, name, operation)


def faults(way: str, folder: Path, trials: int) -> Counter[str]:
    training = Training(way, folder)
    training.restore()
    with failing_at(-1) as begun:
        training.step()
    count, held, left = begun[0], descriptors(), Counter[str]()
    assert count > 40
    trials = min(trials, count)
    for instruction in (1 + (trial * count + count // 2) // trials for trial in range(trials)):
        training.restore()
        with failing_at(instruction):
            try:
                training.step()
            except Injected:
                pass
            else:
                continue  # queues meet otherwise: it was not reached, or ran with the next forward
        left[training.check()] += 1
        assert descriptors() == held
    assert sum(left.values()) > trials // 2
    assert left["before"] and bool(left["said"]) <= ("update" in WAYS[way])
    return left


def test_faults_at_some_instructions(tmp_path: Path) -> None:
    faults("masters ahead", tmp_path, 6)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_faults_at_every_instruction(way: str, tmp_path: Path) -> None:
    faults(way, tmp_path, 10**6)


# ---------------------------------------------------------------------------------------------------------- interrupts


def interrupts(way: str, folder: Path, trials: int) -> Counter[str]:
    """Real signals at random instants of whole steps, the optimizer's own included."""
    training = Training(way, folder)
    training.restore()
    began = time.perf_counter()
    training.step()
    took, left, held = time.perf_counter() - began, Counter[str](), descriptors()
    instants = random.Random(way)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(trials):
            training.restore()
            interrupted = False
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, instants.random() * took))
                training.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (KeyboardInterrupt, RuntimeError):  # Python's own locks may make an error of an interrupt
                interrupted = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            if interrupted:
                left[training.check()] += 1
                assert descriptors() == held
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sum(left.values()) > trials // 4
    return left


@pytest.mark.parametrize("way", ["step"])
def test_some_interrupts(way: str, tmp_path: Path) -> None:
    interrupts(way, tmp_path, 10)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_interrupts_at_random_instants(way: str, tmp_path: Path) -> None:
    interrupts(way, tmp_path, 50)
