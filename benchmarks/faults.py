"""Trains with drawn faults, and compares the bits with those of the same training without any.

Each round draws a way of training and a model's seed, trains without a fault, and then again with an autosave and with faults:

  interrupt        Ctrl-C at a moment of a step, or SIGTERM, once or twice: real signals
  read, write      requests to the disk tier fail (EIO, or EROFS from then on), or the drive is full (ENOSPC)
  slow disk        each request to it takes milliseconds more
  device memory    a kernel runs out of memory, as on a GPU, in the forward or the backward
  host memory      a kernel is refused memory as by the host's allocator, or as by Python's
  save             a checkpoint cannot be written: EIO or ENOSPC

Lengths change, and the model is evaluated in between. After a fault the training goes on, or loads the newest checkpoint in
place or into a new model. What a fault leaves must be a whole step or a refusal, and each loss, the weights, the buffers and
the state of the optimizer must have the bits of the run without faults. All is drawn from ``--seed``. The moment of an
interrupt is a share of a step's time, so what it meets differs. Memory is refused by an operation of the model's own.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from torch import Tensor, nn

import mtcompile
from benchmarks.models import Language
from mtcompile import checkpoint

STEPS = 16
LENGTHS = (8, 16)
_SMALL = {"memory": "700KiB", "policy": "megatrain"}  # a fixed policy plans faster
_DISK = {"memory": "800KiB", "host": "1MB", "disk": "16MiB", "policy": "megatrain"}
_AHEAD = {"update": "backward", "run_ahead": True}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"memory": "64MiB"},
    "streamed": _SMALL,
    "disk": {**_DISK, "update": "backward"},
    "clipped": {**_SMALL, "update": "backward", "max_grad_norm": 0.5},
    "disk ahead": {**_DISK, **_AHEAD},
    "ahead": {**_SMALL, **_AHEAD},
}
EVERYWHERE = ("interrupt", "device memory", "host memory", "save")
ON_DISK = ("read", "write", "full", "read-only", "slow disk")
_CODES = {"read": errno.EIO, "write": errno.EIO, "full": errno.ENOSPC, "read-only": errno.EROFS}
_REFUSALS: dict[str, list[Exception]] = {
    "device memory": [torch.OutOfMemoryError("out of memory: drawn")],
    "host memory": [MemoryError("drawn"), RuntimeError("DefaultCPUAllocator: can't allocate memory: drawn")],
}
_TRIES = 6  # of one step; only the first two meet a fault
_VISITS = 200  # of one training


class Differs(AssertionError):
    """A fault has left what it must not leave."""


# ---------------------------------------------------------------------------------------------------------- the model


class Refusing:
    """Lets the ``at``-th kernel of the model's own operation raise an error. 0: none."""

    at, error = 0, Exception()

    def __call__(self) -> None:
        self.at -= 1
        if self.at == 0:
            raise type(self.error)(*self.error.args)


refusing = Refusing()


@torch.library.custom_op("mtcompile_soak::passed", mutates_args=())
def passed(x: Tensor) -> Tensor:
    refusing()
    return x.clone()


@passed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


passed.register_autograd(lambda context, gradient: passed(gradient))


class Refused(Language):
    """A model whose layers' results go through an operation that can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.embed.weight, std=0.1)

    def after(self, h: Tensor) -> Tensor:
        return passed(h)  # type: ignore[no-any-return]


class Run:
    """A compiled model and its optimizer."""

    def __init__(self, way: str, seed: int, folder: Path, differs: int = 0) -> None:
        torch.manual_seed(seed + differs)  # weights, until others are loaded
        self.seed, options = seed, dict(WAYS[way])
        if "disk" in options:
            options["disk"] = f"{folder}:{options['disk']}"
        plain = Refused()
        self.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        self.model: Any = mtcompile.compile(plain, optimizer=self.optimizer, device="cpu", **options)
        self.clips = way == "resident"

    def step(self, number: int) -> float:
        """Returns the loss of the step of that number. Every third one begins with an evaluation."""
        drawn = torch.Generator().manual_seed(self.seed * 1000 + number)
        tokens = torch.randint(0, 256, (2, LENGTHS[number // 2 % len(LENGTHS)]), generator=drawn)
        if number % 3 == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(tokens[:1])
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + number)
        loss = self.model(tokens)
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> str:
        """Returns a digest of weights and optimizer state, once nothing is under way. Raises StepError."""
        self.model.synchronize()
        entries = self.optimizer.state_dict()["state"]
        moments = [entries[index][key] for index in sorted(entries) for key in sorted(entries[index])]
        buffers = {name for name, _ in self.model.named_buffers()}
        weights = [value for name, value in self.model.state_dict().items() if name not in buffers]
        return digest([*weights, *moments])

    def buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.model.buffers()]

    def put_back(self, moment: Moment) -> None:
        """Makes what a forward changes as it was, to do a step again: as in plain PyTorch, that is the caller's to do."""
        self.optimizer.zero_grad()
        torch.set_rng_state(moment.generator)
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), moment.buffers, strict=True):
                buffer.copy_(value)


def digest(tensors: list[Tensor]) -> str:
    sums = xxhash.xxh3_128()
    for tensor in tensors:
        sums.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return str(sums.hexdigest())


@dataclass(frozen=True, slots=True)
class Moment:
    """The state before a step of the run without faults, and its loss (of the last: none)."""

    state: str
    buffers: list[Tensor]
    generator: Tensor
    loss: float = float("nan")


def reference(way: str, seed: int, folder: Path) -> list[Moment]:
    run, moments = Run(way, seed, folder), list[Moment]()
    for number in range(STEPS + 1):
        state = run.state(), run.buffers(), torch.get_rng_state()
        moments.append(Moment(*state, *([run.step(number)] if number < STEPS else [])))
    return moments


# --------------------------------------------------------------------------------------------------------- the faults


@contextlib.contextmanager
def requests(folder: Path, names: tuple[str, ...], before: Callable[[str, int], None]) -> Iterator[None]:
    """Calls ``before`` with the name and the number of each call of these functions of ``os`` for a file below a folder."""
    count, lock, real = [0], threading.Lock(), {name: getattr(os, name) for name in names}

    def asked(name: str) -> Callable[..., Any]:
        def call(descriptor: int, *rest: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
                with lock:
                    count[0] += 1
                    number = count[0]
                before(name, number)
            return real[name](descriptor, *rest)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(os, name, asked(name)))
        yield


def fails(nth: int, code: int, for_good: bool) -> Callable[[str, int], None]:
    def before(name: str, number: int) -> None:
        if number == nth or (for_good and number > nth):
            raise OSError(code, os.strerror(code))

    return before


@contextlib.contextmanager
def signalled(number: int, after_s: float, times: int) -> Iterator[None]:
    """Sends a signal to this thread after a time, also if the step has ended by then."""
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        for _ in range(times):
            signal.pthread_kill(main, number)
            time.sleep(0.001)

    timer = threading.Timer(after_s, send)
    try:
        timer.start()
        yield
        timer.join()
        time.sleep(0.002)
    finally:
        while timer.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                timer.join()
        with contextlib.suppress(KeyboardInterrupt):  # what it sent last may not have come yet
            time.sleep(0.002)


# ---------------------------------------------------------------------------------------------------------- the round


@dataclass
class Round:
    """A training with faults. ``counts``: what was drawn, and what came of it."""

    way: str
    seed: int
    folder: Path
    moments: list[Moment]
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.05  # that a step takes
    done: int = 0
    tries: int = 0  # of the next step
    visits: int = 0  # how often the training was begun or gone on with: else a step done again would draw the same again
    is_interrupted: bool = False  # on purpose
    told: list[str] = field(default_factory=list)  # of this step: faults and errors

    def train(self) -> None:
        self.saves, self.run = self.folder / "saves", Run(self.way, self.seed, self.folder / "disk")
        checkpoint.save(self.saves, self.run.model, self.run.optimizer, step=0)
        while self.done < STEPS:
            self.visits += 1
            if self.visits > _VISITS:
                raise Differs(f"step {self.done} after going on {_VISITS} times: {self.told}")
            drawn = self.draws("visit")
            try:
                with checkpoint.autosave(
                    self.saves,
                    self.run.model,
                    self.run.optimizer,
                    every=drawn.randint(1, 5),
                    background=drawn.random() < 0.5,
                    on_sigterm=drawn.random() < 0.5,
                ) as saver:
                    while self.done < STEPS and self.next_step(saver):
                        pass
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, Differs) or (isinstance(error, KeyboardInterrupt) and not self.is_interrupted):
                    raise  # by whoever runs this
                self.told.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
                error.__traceback__ = None  # which holds the model
            if self.done < STEPS:
                self.recover()
            self.is_interrupted = False
        self.compare(self.run, "at the end")

    def draws(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {self.visits} {self.done} {self.tries} {what}")

    def next_step(self, saver: checkpoint.Autosave) -> bool:
        number, drawn = self.done, self.draws("fault")
        self.tries += 1
        if self.tries > _TRIES:
            raise Differs(f"step {number} cannot be done: {self.told}")
        if not torch.equal(torch.get_rng_state(), self.moments[number].generator):
            raise Differs(f"the generator before step {number}, after {self.told}")
        kinds = EVERYWHERE + (ON_DISK if "disk" in WAYS[self.way] else ())
        kind = drawn.choice(kinds) if self.tries <= 2 and drawn.random() < 0.4 else ""
        self.counts[kind] += 1
        self.told += [kind] * bool(kind)
        began = time.perf_counter()
        with self.fault(kind, drawn) if kind != "save" else contextlib.nullcontext():
            loss = self.run.step(number)
        self.seconds = time.perf_counter() - began
        if loss != self.moments[number].loss:
            raise Differs(f"the loss of step {number}: {loss!r}, not {self.moments[number].loss!r}, after {self.told}")
        self.done, self.tries, self.told = number + 1, 0, []
        with self.fault(kind, drawn) if kind == "save" else contextlib.nullcontext():
            return saver.after(self.done)

    @contextlib.contextmanager
    def fault(self, kind: str, drawn: random.Random) -> Iterator[None]:
        disk, nth = self.folder / "disk", drawn.randint(1, 40)
        with contextlib.ExitStack() as stack:
            if kind == "interrupt":
                self.is_interrupted = True
                number = drawn.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM))
                after_s = drawn.random() * self.seconds
                times = drawn.randint(1, 2) if number == signal.SIGINT else 1
                stack.enter_context(signalled(number, after_s, times))
            elif kind in _REFUSALS:
                refusing.at, refusing.error = nth % 6 + 1, drawn.choice(_REFUSALS[kind])
                stack.callback(setattr, refusing, "at", 0)
            elif kind == "save":
                before = fails(nth % 12 + 1, drawn.choice((errno.EIO, errno.ENOSPC)), drawn.random() < 0.5)
                stack.enter_context(requests(self.saves, ("write", "pwrite", "fsync"), before))
            elif kind == "slow disk":
                pause = drawn.random() * 0.01
                stack.enter_context(requests(disk, ("preadv", "pwritev"), lambda name, number: time.sleep(pause)))
            elif kind:
                names = ("preadv",) if kind == "read" else ("pwritev",)
                for_good = kind in ("full", "read-only") or drawn.random() < 0.3
                stack.enter_context(requests(disk, names, fails(nth, _CODES[kind], for_good)))
            yield

    def recover(self) -> None:
        """Goes on from what is there, if that is a whole step; or loads, in place or into a new model."""
        drawn, way = self.draws("recover").choice(("goes on", "goes on", "loads", "new model")), ""
        try:
            state = self.run.state()
        except mtcompile.StepError as error:
            self.counts["refused"] += 1
            self.told.append(f"refused: {str(error)[:200]}")
        else:
            at = [index for index in (self.done, self.done + 1) if self.moments[index].state == state]
            if not at:
                raise Differs(f"what is left amid step {self.done} is no whole step, after {self.told}")
            if drawn == "goes on" and self.tries < 3:
                way = drawn
                self.advance(at[0])
                self.run.put_back(self.moments[self.done])
        if not way:
            way = "new model" if drawn == "new model" or self.tries >= 4 else "loads"
            if way == "new model":
                self.run = Run(self.way, self.seed, self.folder / "disk", differs=1)
            try:
                loaded = checkpoint.load(self.saves, self.run.model, self.run.optimizer)
            except mtcompile.StepError:
                self.run = Run(self.way, self.seed, self.folder / "disk", differs=1)
                loaded = checkpoint.load(self.saves, self.run.model, self.run.optimizer)
            self.run.optimizer.zero_grad()
            if not self.done - 6 <= loaded.step <= self.done + 1:
                raise Differs(f"the newest checkpoint is of step {loaded.step}, after {self.done} steps and {self.told}")
            self.advance(loaded.step)
        self.counts[way] += 1
        self.compare(self.run, f"after {self.told}")

    def advance(self, done: int) -> None:
        if done != self.done:
            self.done, self.tries = done, min(self.tries, 1)

    def compare(self, run: Run, when: str) -> None:
        moment = self.moments[self.done]
        if run.state() != moment.state:
            raise Differs(f"weights or state of the optimizer of step {self.done}, {when}")
        if not all(map(torch.equal, run.buffers(), moment.buffers)):
            raise Differs(f"buffers of step {self.done}, {when}")


def one_round(number: int, seed: int, folder: Path) -> tuple[str, Counter[str], str]:
    """Returns the way that was drawn, what happened, and what differs, or ""."""
    drawn = random.Random(f"{seed} {number}")
    way = list(WAYS)[number % len(WAYS)]
    seed = drawn.randrange(1 << 20)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for each in handlers:
        signal.signal(each, interrupted)
    differs, round_ = "", None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each fault is warned of
            round_ = Round(way, seed, folder, reference(way, seed, folder / "disk"))
            try:
                round_.train()
            except Exception as error:
                differs = f"{type(error).__name__}: {error}"
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    counts, round_ = round_.counts, None
    gc.collect()
    return way, counts, differs
