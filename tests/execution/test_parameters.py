"""Parameters whose memory other tensors share: whoever holds it sees what plain PyTorch would show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models

POLICIES = ["resident", "megatrain"]
Trained = tuple[list[Tensor], list[Tensor]]  # losses; parameters, and whatever else must agree


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).pow(2).mean()


class WithViews(Net):
    """Reads a buffer and an attribute that are views of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("transposed", self.first.weight.data.t(), persistent=False)
        self.bias = self.second.bias.detach()[:4]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.transposed).pow(2).mean() + self.bias.sum()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> list[Tensor]:
    losses = []
    for _ in range(count):
        loss = model(torch.randn(4, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def averaged(net: nn.Module, compiled: Callable[..., nn.Module]) -> Trained:
    """The common snippet: weights are swapped for their average, evaluated, and swapped back."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(4):
        losses += steps(model, optimizer, 1)
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
        backup = {}
        for name, p in model.named_parameters():
            backup[name] = p.data
            p.data = shadow[name]
        with torch.no_grad():
            losses.append(model(torch.randn(4, 8)))
        for name, p in model.named_parameters():
            p.data = backup[name]
    return losses, [*model.parameters(), *shadow.values()]


def trained_while_swapped(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    """Whoever holds the tensor that replaced ``p.data`` sees it trained, and the backup stays as it was."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    backup, other = net.first.weight.data, torch.randn(8, 8)
    net.first.weight.data = other
    losses += steps(model, optimizer)
    return losses, [*model.parameters(), backup, other]


def tied(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    net.second.weight.data = net.first.weight.data
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    assert net.second.weight.data_ptr() == net.first.weight.data_ptr()
    return losses, [*model.parameters()]


def flat(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    """All parameters are views of one buffer, which the loop changes."""
    buffer = torch.cat([p.data.flatten() for p in net.parameters()])
    start = 0
    for p in net.parameters():
        p.data = buffer[start : start + p.numel()].view(p.shape)
        start += p.numel()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    buffer.mul_(0.5)
    losses += steps(model, optimizer)
    return losses, [*model.parameters(), buffer]


def held_before(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    held = {name: p.detach() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    held["first.weight"].zero_()
    losses += steps(model, optimizer)
    return losses, [*model.parameters(), *held.values()]


def held_after(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    held = model.state_dict()
    losses += steps(model, optimizer)
    held["second.weight"].mul_(2)
    losses += steps(model, optimizer)
    return losses, [*model.parameters(), *held.values()]


def replaced(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    """A Parameter is replaced whose memory somebody holds; then its shape changes."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    old = net.first.weight
    held = old.data
    net.first.weight = nn.Parameter(torch.randn(8, 8))
    losses += steps(model, torch.optim.SGD(net.parameters(), lr=0.1))
    net.first.weight, net.first.bias = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.zeros(6))
    net.second.weight = nn.Parameter(torch.randn(8, 6))
    losses += steps(model, torch.optim.SGD(net.parameters(), lr=0.1))
    return losses, [*model.parameters(), old, held]


def tied_later(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    """A weight is tied to one that has a home, and then that one is replaced: the first keeps what they shared."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    net.second.weight.data = net.first.weight.data
    losses += steps(model, optimizer)
    net.first.weight.data = torch.randn(8, 8)
    losses += steps(model, optimizer)
    return losses, [*model.parameters()]


def restrided(net: Net, compiled: Callable[..., nn.Module]) -> Trained:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = compiled(net, optimizer)
    losses = steps(model, optimizer)
    net.first.weight.data = net.first.weight.data.t().contiguous().t()
    losses += steps(model, optimizer)
    return losses, [*model.parameters()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "case",
    [averaged, trained_while_swapped, tied, flat, held_before, held_after, replaced, tied_later, restrided],
    ids=lambda case: case.__name__,
)
def test_holders_see_what_plain_pytorch_shows(case: Callable[..., Trained], policy: str) -> None:
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)

        def compiled(net: nn.Module, optimizer: Any, compiles: bool = compiles) -> nn.Module:
            return mtcompile.compile(net, memory="1GiB", optimizer=optimizer, policy=policy) if compiles else net

        results.append(case(Net(), compiled))
    for plain, found in zip(*results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_views_of_parameters_follow_them(policy: str) -> None:
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: nn.Module = WithViews()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiles:
            model = mtcompile.compile(model, memory="1GiB", optimizer=optimizer, policy=policy)
        results.append(steps(model, optimizer))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("make", [WithViews, Net])
def test_updates_in_the_backward_refuse_memory_that_is_read_elsewhere(make: type[Net]) -> None:
    model = make()
    if make is Net:
        model.second.weight.data = model.first.weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    compiled = mtcompile.compile(model, memory="1GiB", optimizer=optimizer, update="backward")
    with pytest.raises(mtcompile.StepError, match=r"first\.weight and \S+ share memory|\S+ and first\.weight share memory"):
        compiled(torch.randn(4, 8))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_block_is_at_home_on_the_host_if_its_memory_is_shared() -> None:
    model = Net()
    held = model.first.weight.data
    compiled = mtcompile.compile(model, memory="1GiB")
    compiled(torch.randn(4, 8)).backward()
    parameters = compiled._mt_model.door.parameters
    place = parameters.places["first.weight"]
    assert parameters.tiers[place.block] == "host" and place.home is None
    assert held.data_ptr() == model.first.weight.data_ptr()


def test_an_unshared_replacement_moves_home() -> None:
    model = mtcompile.compile(Net(), memory="1GiB")
    model(torch.randn(4, 8)).backward()
    home, values = model.first.weight.data_ptr(), torch.randn(8, 8)
    model.first.weight.data = values.clone()
    model(torch.randn(4, 8)).backward()
    assert model.first.weight.data_ptr() == home
    assert torch.equal(model.first.weight, values)
