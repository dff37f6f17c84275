"""Several forwards before a backward, several losses of one call, retained graphs and gradient penalties: plain bits, within
the budget."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile

pytestmark = pytest.mark.slow  # they compile many models

Log = list[torch.Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer], Log]


class Net(nn.Module):
    """Residual layers with dropout. Its first layer changes buffers."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Critic(nn.Module):
    """A critic without a bias that is read alone, as its second derivatives are of interest."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop, self.last = nn.BatchNorm1d(4 * width), nn.Dropout(0.2), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.second(self.drop(torch.tanh(self.norm(self.first(x)))))))


class TwoLosses(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y.square().mean(), y.abs().mean()


def data(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32)


def siamese(model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
    one, other = model(data()), model(data())
    loss = (one - other).square().mean()
    loss.backward()
    return [loss]


def triplet(model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
    anchor, positive, negative = (model(data()) for _ in range(3))
    loss = F.triplet_margin_loss(anchor, positive, negative, margin=9.0)
    loss.backward()
    return [loss]


def in_any_order(*order: int) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
        losses = [model(data()).square().mean() for _ in order]
        for index in order:
            losses[index].backward()
        return losses

    return loop


def two_lengths(model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
    loss = model(data(24)).square().mean() - model(data(8)).square().mean()
    loss.backward()
    return [loss]


def two_losses(first: int) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
        losses = model(data())
        losses[first].backward(retain_graph=True)  # plain PyTorch needs it, as the losses share most of their graph
        losses[1 - first].backward()
        return list(losses)

    return loop


def retained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
    output = model(data())
    loss, weight = output.square().mean(), next(model.layers.parameters())
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (loss * gradient.norm().detach()).backward()
    return [loss, gradient]


def penalty(model: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    scores = model(between)
    (gradient,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
    return (gradient.norm(2, dim=1) - 1).square().mean()


def wasserstein(model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
    real, fake = data(), data() * 0.5
    loss = model(fake).mean() - model(real).mean() + 10 * penalty(model, real, fake)
    loss.backward()
    return [loss]


def run(model: nn.Module, loop: Loop, steps: int = 2) -> Log:
    torch.manual_seed(3)
    optimizer, log = torch.optim.AdamW(model.parameters(), lr=1e-2), Log()
    for _ in range(steps):
        log += [t.detach().clone() for t in loop(model, optimizer)]
        log += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*log, *(t.detach().clone() for t in (*model.parameters(), *model.buffers())), torch.get_rng_state()]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@functools.cache
def smallest(make: Callable[[], nn.Module], loop: Loop) -> int:
    """The smallest budget that works, as the errors name it."""
    model, memory = made(make), 1
    for _ in range(8):
        try:
            run(mtcompile.compile(copy.deepcopy(model), memory=memory), loop)
            return memory
        except mtcompile.BudgetError as error:
            assert error.minimum_bytes > memory
            memory = error.minimum_bytes
    raise AssertionError(f"the errors asked for more and more, up to {memory}")


LOOPS: dict[str, tuple[type[nn.Module], Loop]] = {
    "siamese": (Net, siamese),
    "triplet": (Net, triplet),
    "first backward first": (Net, in_any_order(0, 1)),
    "any order": (Net, in_any_order(1, 2, 0)),
    "two lengths": (Net, two_lengths),
    "two losses": (TwoLosses, two_losses(0)),
    "two losses, the second first": (TwoLosses, two_losses(1)),
    "retained": (Net, retained),
    "wasserstein with a penalty": (Critic, wasserstein),
}
_LONG = (
    "wasserstein with a penalty",
    "triplet",
    "first backward first",
    "two losses, the second first",
    "two lengths",
    "two losses",
    "siamese",
    "retained",
    "any order",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in _LONG)) for n in LOOPS])
def test_bits_are_equal_at_three_budgets(name: str) -> None:
    make, loop = LOOPS[name]
    least, model = smallest(make, loop), made(make)
    expected = run(copy.deepcopy(model), loop)
    for memory in (1 << 30, 2 * least, least):
        compiled: Any = mtcompile.compile(copy.deepcopy(model), memory=memory)
        assert same(expected, run(compiled, loop)), f"at {memory} bytes, {least} of which are needed"
        report = compiled.memory_report()
        assert 0 < report["peak_device_bytes"] <= memory
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]


def test_more_forwards_than_fit_are_refused_and_nothing_is_lost() -> None:
    memory = 100_000  # enough for two or three at once
    model = made(lambda: Net(layers=1))
    inputs = [data() for _ in range(6)]
    plain = copy.deepcopy(model)
    sum(plain(x).square().mean() for x in inputs[:2]).backward()
    compiled = mtcompile.compile(copy.deepcopy(model), memory=memory)
    torch.manual_seed(0)
    waiting = []
    with pytest.raises(mtcompile.BudgetError, match=r"\d training forwards .* and \d fit") as raised:
        for x in inputs:
            before = torch.get_rng_state()
            waiting.append(compiled(x).square().mean())
    fit = len(waiting)
    assert 2 <= fit < 6 and f"{fit + 1} training forwards" in str(raised.value) and f"and {fit} fit" in str(raised.value)
    assert raised.value.minimum_bytes > memory
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    del plain
    plain = copy.deepcopy(model)
    sum(plain(x).square().mean() for x in inputs[:fit]).backward()
    sum(waiting).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), compiled.parameters(), strict=True))
    roomier = mtcompile.compile(copy.deepcopy(model), memory=raised.value.minimum_bytes)
    run(roomier, triplet, steps=1)


@pytest.mark.long
def test_a_step_that_has_learned_how_many_wait_runs_no_forward_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtcompile.execution.session import Session

    runs: list[bool] = []
    again = Session._run_again
    monkeypatch.setattr(Session, "_run_again", lambda *args: (runs.append(True), again(*args))[1])
    torch.manual_seed(0)
    alone = mtcompile.compile(Net(), memory="1GiB")
    run(alone, in_any_order(0), steps=1)
    compiled = mtcompile.compile(Net(), memory=alone.memory_report()["planned_peak_device_bytes"])
    run(compiled, triplet, steps=1)
    assert runs  # the first plan took what the others needed
    runs.clear()
    run(compiled, triplet, steps=3)
    assert not runs


def test_an_evicted_forward_notices_changed_weights() -> None:
    model = mtcompile.compile(made(Net), memory=120_000)
    one, other = model(data()), model(data())
    with torch.no_grad():
        model.layers[0][0].weight.mul_(2)
    with pytest.raises(mtcompile.StepError, match=r"layers.0.0.weight was changed in place"):
        (one - other).square().mean().backward()


@pytest.mark.parametrize("calls", ["two forwards", "two forwards together", "a retained graph", "a created graph"])
def test_updates_in_the_backward_allow_one_forward_and_one_backward(calls: str) -> None:
    model = Critic()
    compiled = mtcompile.compile(
        model, memory="1GiB", update="backward", optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    weights = [p.detach().clone() for p in model.parameters()]
    x = data().requires_grad_()
    loss = compiled(x).mean()
    with pytest.raises(mtcompile.StepError, match='with update="backward"'):
        if calls.startswith("two forwards"):
            later = compiled(data()).mean()
            (later + loss if calls.endswith("together") else loss).backward()
        elif calls == "a retained graph":
            loss.backward(retain_graph=True)
        else:
            torch.autograd.grad(loss, x, create_graph=True)
    assert same(weights, [p.detach() for p in model.parameters()])


def test_backward_runs_once_without_retain_graph() -> None:
    model = mtcompile.compile(Net(), memory="1GiB")
    loss = model(data()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises((mtcompile.StepError, RuntimeError), match=r"already run|second time"):
        loss.backward()


def test_a_penalty_that_does_not_fit_says_what_it_needs() -> None:
    model, least = made(Critic), smallest(Critic, in_any_order(0))
    with pytest.raises(mtcompile.BudgetError, match=r"create_graph=True.* plain PyTorch") as raised:
        compiled = mtcompile.compile(copy.deepcopy(model), memory=least)
        penalty(compiled, data(), data())
    compiled = mtcompile.compile(copy.deepcopy(model), memory=raised.value.minimum_bytes)
    torch.manual_seed(1)
    value = penalty(compiled, data(), data())
    value.backward()
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = penalty(plain, data(), data())
    expected.backward()
    assert torch.equal(value, expected)
    assert same(*([p.grad for p in m.parameters() if p.grad is not None] for m in (plain, compiled)))
