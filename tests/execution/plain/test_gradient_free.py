"""Calls without gradients: any shape, no plan, the bits of a plain run, within the budget."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.execution.plain import calls
from mtcompile.execution.plain.lending import Lending, call_lending
from mtcompile.execution.plain.sizes import CallSize, KnownCalls
from mtcompile.runtime.devices.fetching import CpuFetcher
from tests.execution.plain.models import MODELS, WIDTH, Odd, floats, losses_after_sharing, plain, results, tokens
from tests.helpers import stacks
from tests.helpers.training import adamw, same, train


def least_bytes(name: str) -> int:
    """The smallest budget that the errors lead to."""
    least = 1
    while True:
        try:
            results(mtcompile.compile(plain(name), memory=least), MODELS[name][1])
            return least
        except mtcompile.BudgetError as error:
            assert error.minimum_bytes > least
            least = error.minimum_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n == "attending")) for n in MODELS])
def test_bits_are_equal_at_three_budgets(name: str) -> None:
    expected, least = results(plain(name), MODELS[name][1]), least_bytes(name)
    least = int(least * 1.1)  # what a call takes depends a little on what it finds
    for memory in (1 << 30, int(least * 1.5), least):
        model = mtcompile.compile(plain(name), memory=memory)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # torch warns of Python 3.13.0 itself
            assert all(map(torch.equal, expected, results(model, MODELS[name][1])))
        report = model.memory_report()
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= memory
        assert memory < 1 << 30 or model.plan is None  # there is nothing to plan, but for what may take more
        weights = sum(p.nbytes for p in model.parameters())
        assert (report["peak_device_bytes"] > weights) == (memory == 1 << 30) or least > weights


def test_training_before_and_after_is_that_of_a_plain_run_and_is_planned_as_without_calls() -> None:
    def run(model: nn.Module, evaluates: bool, **options: Any) -> tuple[list[Any], nn.Module]:
        optimizer = adamw(model.parameters())
        compiled = mtcompile.compile(model, optimizer=optimizer, **options) if options else model
        rows: list[Any] = []
        for round_ in range(2):
            for size in ((9, 3), (5, 2)) if evaluates else ():
                with torch.no_grad():
                    rows.append([compiled(x=floats(*size))])
            rows += train(compiled, optimizer, {"x": floats(4, 3 + round_)}, steps=1)
        return rows, compiled

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out = self.last(nn.functional.dropout(self.norm(self.first(x.flatten(0, 1)))))
            return out.square().mean() if torch.is_grad_enabled() else out

    def new() -> nn.Module:
        torch.manual_seed(0)
        return Small()

    expected, _ = run(new(), True)
    actual, model = run(new(), True, memory="1GiB")
    assert same(expected, actual)
    _, unevaluated = run(new(), False, memory="1GiB")
    assert str(model.plan) == str(unevaluated.plan)


def test_parameters_are_lent_after_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    every: list[Lending] = []
    monkeypatch.setattr(calls, "Lending", lambda *args: every.append(Lending(*args)) or every[-1])
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    optimizer = adamw(model.parameters())
    compiled = mtcompile.compile(model, memory="88KiB", optimizer=optimizer)
    compiled(floats(4)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(compiled(floats(2)), copy.deepcopy(compiled)(floats(2)))
    assert every[0].fetched_nbytes >= sum(p.nbytes for p in model.parameters()) and not every[1:]


@pytest.mark.parametrize("tied", [False, True])
def test_memory_that_is_shared_after_calls_stays_shared(tied: bool) -> None:
    expected, losses = losses_after_sharing(tied, torch.device("cpu"))
    assert losses == expected and len(set(losses)) == 3


def test_a_call_fits_beside_a_forward_that_waits() -> None:
    model = plain("recurrent")
    expected = copy.deepcopy(model)
    compiled = mtcompile.compile(model, memory="1GiB")
    waiting = [each(floats(4, 8)).square().sum() for each in (expected, compiled)]
    with torch.no_grad():
        assert torch.equal(expected(floats(9, 2)), compiled(floats(9, 2)))
    for loss in waiting:
        loss.backward()
    pairs = zip(expected.parameters(), compiled.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs if one.grad is not None and other.grad is not None)


class Large(nn.Module):
    """A model of which one weight takes most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(4000, 16), nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, indices: Tensor) -> Tensor:
        return self.down(self.up(self.table(indices)).relu()).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("percent", [106, *(pytest.param(each, marks=pytest.mark.long) for each in (100, 112))])
def test_a_large_weight_and_the_one_after_it_are_not_there_at_once_where_they_do_not_fit(percent: int) -> None:
    indices = torch.arange(64)
    with pytest.raises(mtcompile.BudgetError) as refusal:
        mtcompile.compile(Large(), memory="1KiB", embeddings="all")(indices)
    memory = refusal.value.minimum_bytes * percent // 100
    model = mtcompile.compile(Large(), memory=memory, embeddings="all")
    model(indices).backward()
    with torch.no_grad():
        model(indices)
    assert model.memory_report()["peak_device_bytes"] <= memory


def test_too_little_memory_is_said_and_nothing_is_lost() -> None:
    model = plain("deep")
    state = copy.deepcopy(model.state_dict())
    compiled = mtcompile.compile(model.eval(), memory="60KiB")
    with torch.no_grad():
        compiled(tokens(1, 1))
        for _ in range(2):  # no plan can be made of what looks at values: it runs, and is measured
            with pytest.raises(mtcompile.BudgetError, match=r"without gradients took .* for what it reads") as refusal:
                compiled(tokens(64, 8))
            assert refusal.value.minimum_bytes > 60 * 1024
        compiled(tokens(1, 1))
    assert all(map(torch.equal, state.values(), model.state_dict().values()))


@pytest.mark.slow
def test_a_larger_call_is_refused_before_it_runs_by_what_a_smaller_one_took() -> None:
    x = torch.randn(4, stacks.WIDTH)
    model = mtcompile.compile(stacks.Residual(layers=2), memory="1MiB", device="cpu")
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            with pytest.raises(mtcompile.BudgetError, match="no plan fits memory=") as refusal:
                model(x.repeat(4096, 1))
            assert refusal.value.minimum_bytes > 1 << 20
        assert torch.equal(model(x), expected)
    assert model.memory_report()["peak_device_bytes"] <= 1 << 20


def test_a_first_call_that_may_not_fit_is_planned_before_it_runs() -> None:
    x, plain = torch.randn(2048, stacks.WIDTH), stacks.Residual(layers=2)
    for memory, fits in ((1 << 20, False), (9 << 20, True)):
        model = mtcompile.compile(copy.deepcopy(plain), memory=memory, device="cpu")
        with torch.no_grad():
            if fits:
                assert torch.equal(model(x), plain(x))
            else:
                with pytest.raises(mtcompile.BudgetError, match="no plan fits memory="):
                    model(x)
            assert torch.equal(model(x[:8]), plain(x[:8]))
        assert 0 < model.memory_report()["peak_device_bytes"] <= memory


class Attending(nn.Module):
    """What it computes grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head((h @ h.mT).softmax(-1) @ h)  # type: ignore[no-any-return]


class Convolving(nn.Module):
    """A few channels become many."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])  # type: ignore[no-any-return]


CALLS: dict[str, tuple[type[nn.Module], list[Tensor]]] = {
    "attending": (Attending, [torch.zeros(4, 32, dtype=torch.long), torch.zeros(5, 31, dtype=torch.long)]),
    "attending longer": (Attending, [torch.zeros(2, 32, dtype=torch.long), torch.zeros(3, 256, dtype=torch.long)]),
    "convolving": (Convolving, [torch.zeros(4, 3, 32, 32)]),
    "recurrent": (Recurrent, [torch.zeros(2, 16, 64), torch.zeros(3, 15, 64)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused_has_not_run_and_fits_in_what_the_refusal_names(name: str) -> None:
    """Each budget is the figure that the last refusal named, in a model that knows of no call yet."""
    make, given = CALLS[name]
    plain, memory = make().eval(), 50_000
    with torch.no_grad():
        expected = [plain(x) for x in given]
    while True:
        model, refused = mtcompile.compile(copy.deepcopy(plain), memory=memory, device="cpu"), 0
        with torch.no_grad():
            for x, output in zip(given, expected, strict=True):
                try:
                    assert torch.equal(model(x), output)
                except mtcompile.BudgetError as error:
                    assert "has run" not in str(error)
                    assert error.minimum_bytes > memory
                    refused = refused or error.minimum_bytes
        assert model.memory_report()["peak_device_bytes"] <= memory
        if not refused:
            break
        memory = refused


@pytest.mark.slow
def test_a_first_call_is_refused_before_it_runs_by_what_a_training_step_took() -> None:
    x = torch.randn(256, stacks.WIDTH)
    model = mtcompile.compile(stacks.Residual(layers=2), memory="1MiB", device="cpu")
    model(x[:4]).backward()
    with torch.no_grad(), pytest.raises(mtcompile.BudgetError, match="no plan fits memory="):
        model(x.repeat(64, 1))
    assert model.memory_report()["peak_device_bytes"] <= 1 << 20


def test_an_error_of_the_forward_leaves_the_model_as_it_was() -> None:
    model = plain("attending").eval()
    compiled, before = mtcompile.compile(model, memory="1MiB"), [id(m._parameters) for m in model.modules()]
    with torch.no_grad(), pytest.raises(RuntimeError, match="embed_dim"):
        compiled(torch.zeros(2, 3, WIDTH + 1))
    assert before == [id(m._parameters) for m in model.modules()]
    with torch.no_grad():
        assert torch.equal(compiled(floats(2, 3)), copy.deepcopy(compiled)(floats(2, 3)))


def lent_by(model: nn.Module, room: int, calls: int, x: Tensor) -> list[Lending]:
    every, order = [], [id(p) for p in model.parameters()]
    for _ in range(calls):
        every.append(Lending(list(model.parameters()), order, CpuFetcher(None), room))
        with torch.no_grad():
            call_lending(functools.partial(model, x), model, every[-1], [])
        order = every[-1].reads
    return every


WAYS = (
    "returned",
    "a view is returned",
    "held",
    "a view is held",
    "copied",
    "transformed",
    "on meta",
    "shared",
    "in threads",
    "wide",
)


@pytest.mark.parametrize("memory", [1 << 30, 70_000])
@pytest.mark.parametrize("way", WAYS)
def test_unusual_forwards_are_those_of_a_plain_run(way: str, memory: int) -> None:
    def new() -> Any:
        torch.manual_seed(0)
        return Odd(way)

    model, compiled = new(), mtcompile.compile(new(), memory=memory)
    for each in (model, compiled):
        with torch.no_grad():
            each.outputs = [each(floats(2)) for _ in range(3)]
            if "returned" in way:
                each.outputs[-1].add_(1)
                each.outputs.append(each(floats(2)))
    assert all(map(torch.equal, model.outputs, compiled.outputs))
    assert all(map(torch.equal, model.state_dict().values(), compiled.state_dict().values()))
    assert all(type(p) is nn.Parameter for p in compiled.parameters())
    assert way != "returned" or compiled.outputs[0] is compiled.weight


INTERRUPTED = """
import copy, signal, torch, mtcompile
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(30)))
compiled, x, interrupts = mtcompile.compile(copy.deepcopy(model), memory=3 << 20, device="cpu"), torch.randn(8, 256), 0

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
with torch.no_grad():
    expected = model(x)
    for round_ in range(60):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-3 + round_ * 3e-4)
            compiled(x)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (KeyboardInterrupt, RuntimeError):  # Python's own locks may make an error of an interrupt
            interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert torch.equal(compiled(x), expected)
assert interrupts
assert all(map(torch.equal, model.state_dict().values(), compiled.state_dict().values()))
assert all(type(module._parameters) is dict for module in compiled.modules())
assert all(type(parameter) is nn.Parameter for parameter in compiled.parameters())
"""


@pytest.mark.slow
def test_interrupts_leave_the_model_whole() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "MT_CACHE": "0"}
    subprocess.run([sys.executable, "-c", INTERRUPTED], env=environment, check=True, timeout=300)


def test_parameters_are_fetched_once_and_never_more_than_fit() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    weights = sum(p.nbytes for p in model.parameters())
    room = 2 * (WIDTH * WIDTH + WIDTH) * 4
    for lent in lent_by(model, room, 3, floats(2)):
        assert lent.fetched_nbytes == weights
        assert lent.most_nbytes <= room
    (whole,) = lent_by(model, weights, 1, floats(2))
    assert whole.most_nbytes == whole.fetched_nbytes == weights


def test_what_a_call_takes_is_known_for_smaller_ones_and_estimated_for_slightly_larger_ones() -> None:
    def size(*shapes: tuple[int, ...], training: bool = True) -> CallSize:
        return CallSize((training,), shapes)

    known = KnownCalls()
    known.note(size((4, 100)), 1000)
    assert known.nbytes(size((4, 100))) == known.nbytes(size((1, 7))) == 1000
    assert known.nbytes(size((4, 110))) == 1331
    assert known.nbytes(size((4, 126))) is None
    assert known.most(size((4, 200))) == 8000
    assert known.nbytes(size((5, 60))) == 1954
    assert known.nbytes(size((1, 1), training=False)) is None
    assert known.most(size((4, 100))) == known.most(size((4, 99))) == 1000
    assert known.most(size((8, 150))) == 27000
    assert known.most(size((8, 150), training=False)) is None
    known.note(size((8, 200)), 3000, 500)
    assert known.most(size((8, 150))) == 2500
    assert known.nbytes(size((5, 60))) == 1954
    assert known.nbytes(size((8, 60))) == 3000
    known.note(size((10, 10), (10,), (5,), training=False), 100)
    assert known.nbytes(size((11, 10), (11,), (5,), training=False)) == 134  # one size, of two tensors
    assert known.nbytes(size((11, 11), (10,), (5,), training=False)) == 178
    assert known.nbytes(size((11, 10), (10,), (6,), training=False)) == 232
