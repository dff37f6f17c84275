"""Several threads: capture, measuring and running take turns, and give the numbers of one thread."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mtcompile
from mtcompile.passes.analysis.cost import Machine
from mtcompile.torch_private import process_lock
from tests.helpers.training import minimum_bytes

pytestmark = pytest.mark.slow  # it compiles many models

AHEAD: dict[str, Any] = {"update": "backward", "run_ahead": True}


class Mlp(nn.Module):
    def __init__(self, seed: int, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def batch(rows: int = 16) -> Tensor:
    return torch.linspace(-1, 1, rows * 48).view(rows, 48)


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 6) -> list[Tensor]:
    losses = []
    for step in range(steps):
        loss = model(batch(16 + 8 * (step % 2)))  # two programs, both captured here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """The results of the calls, each made in a thread of its own, at once."""
    results: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        torch.set_num_threads(1)
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def trained_plainly(seed: int) -> list[Tensor]:
    model = Mlp(seed)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def trained_compiled(model: nn.Module, memory: int, options: dict[str, Any]) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(mtcompile.compile(model, memory=memory, optimizer=optimizer, **options), optimizer)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), AHEAD], ids=["step", "ahead"])
def test_two_models_in_two_threads(options: dict[str, Any]) -> None:
    memory = int(minimum_bytes(Mlp(0), {"x": batch(24)}) * 1.3)
    expected = [trained_plainly(seed) for seed in range(2)]
    models = [Mlp(seed) for seed in range(2)]  # random numbers are the process's
    results = in_threads(*[functools.partial(trained_compiled, model, memory, options) for model in models])
    for one, other in zip(expected, results, strict=True):
        assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True] * len(one)


def test_one_model_in_two_threads() -> None:
    model = Mlp(0)
    memory = int(minimum_bytes(model, {"x": batch()}) * 1.3)
    with torch.no_grad():
        expected = [model(batch()), model(batch(24))]
    other = mtcompile.compile(model, memory=memory)

    def evaluated() -> int:
        with torch.no_grad():
            return sum(torch.equal(other(batch(16 + 8 * (i % 2))), expected[i % 2]) for i in range(60))

    assert in_threads(evaluated, evaluated, evaluated) == [60, 60, 60]


def test_forward_here_and_backward_there() -> None:
    memory = int(minimum_bytes(Mlp(0), {"x": batch()}) * 1.3)
    model, plain = Mlp(0), Mlp(0)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    one: Any = mtcompile.compile(model, memory=memory, optimizer=optimizer, **AHEAD)
    for _ in range(4):
        loss, wanted = one(batch()), plain(batch())
        in_threads(loss.backward)
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
        assert torch.equal(loss, wanted)
    assert all(map(torch.equal, one.parameters(), plain.parameters()))


def test_a_capture_beside_updates_of_the_step_before() -> None:
    """Optimizers look at whether torch is compiling: the updates that run behind a forward must not notice its capture."""
    memory = int(minimum_bytes(Mlp(0), {"x": batch(24)}) * 1.3)
    slow_host = Machine(flops=2e10, memory_gbps=20, h2d_gbps=4, d2h_gbps=4, host_gbps=0.001, issue_us=2)
    model, plain = Mlp(0), Mlp(0)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    one: Any = mtcompile.compile(model, memory=memory, optimizer=optimizer, throttle=slow_host, **AHEAD)
    assert all(map(torch.equal, trained(one, optimizer), trained(plain, other)))


def small(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = Mlp(0)
    memory = int(minimum_bytes(Mlp(0), {"x": batch(24)}) * 1.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mtcompile.compile(model, memory=memory, optimizer=optimizer, **options), optimizer


@pytest.mark.long
def test_signal_handlers_stay() -> None:
    def handler(*_: Any) -> None: ...

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        trained(*small(**AHEAD), steps=2)
        assert all(signal.getsignal(number) is handler for number in numbers)
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


_ENDS = """
import sys
from tests.execution.test_threads import AHEAD, batch, small
model, optimizer = small(**AHEAD)
for _ in range(3):
    model(batch()).backward()
    optimizer.step()
{end}
"""


@pytest.mark.long
@pytest.mark.parametrize("end, code", [("", 0), ("sys.exit(7)", 7), ("raise ValueError('of the user')", 1)])
def test_a_process_ends_with_updates_under_way(end: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS.format(end=end)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, ended.stderr
    assert ("ValueError: of the user" in ended.stderr) == (code == 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, AHEAD], ids=["step", "ahead"])
def test_a_data_loader_forks_while_a_step_is_under_way(options: dict[str, Any]) -> None:
    (model, optimizer), plain = small(**options), Mlp(0)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(2):
        model(batch()).backward()
        optimizer.step()  # updates may go on behind it
        optimizer.zero_grad()
        plain(batch()).backward()
        other.step()
        other.zero_grad()
        for (rows,) in DataLoader(TensorDataset(batch()), batch_size=8, num_workers=2):
            assert torch.equal(model(rows.clone()), plain(rows.clone()))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def _loss_of_child(results: Any) -> None:
    results.put(float(trained(*small(), steps=1)[0]))


@pytest.mark.long
def test_a_spawned_process_trains() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_loss_of_child, args=(results,))
    child.start()
    assert results.get(timeout=300) == float(trained_plainly(0)[0])
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_wait_for_threads_of_its_parent() -> None:
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with process_lock:
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if process_lock.acquire(timeout=10) else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
