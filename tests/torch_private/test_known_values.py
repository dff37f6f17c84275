"""Values that a forward takes from its inputs are captured as they are, compared before each call, captured again if others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from tests.helpers.training import assert_plain, compiled_whole

pytestmark = pytest.mark.slow  # it compiles many models

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Masked(nn.Module):
    """A model that looks at its mask and at a buffer in every way, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(4, 4), nn.Dropout(), 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(self.linear(x))
        if (mask > 0).any().item():
            h = h * 2
        padded = torch.where(mask == 1, -1, mask)
        padded[:2] += 5
        row = padded[1:]
        if (row > 4).all():
            h = h - 3
        padded.fill_(0)
        if mask.sum() < 3:
            h = h + 1
        for _ in range(int(mask.max())):
            h = h * 1.5
        if self.steps >= 2:
            h = -h
        self.steps += 1
        first, second = h.split([1, mask.tolist()[0] + 2])
        return first.sum() + second.square().sum()


MASKS = ([0, 0, 0], [0, 1, 0], [0, 0, 2], [0, 0, 0], [0, 1, 0], [0, 1, 0])


def test_each_call_takes_its_own_values() -> None:
    torch.manual_seed(0)
    plain = Masked()
    model = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    for number, mask in enumerate(MASKS):
        results = []
        for each in (plain, model):
            torch.manual_seed(number)
            loss = each(X, torch.tensor(mask))
            loss.backward()
            results.append([loss.detach(), each.linear.weight.grad, each.steps, torch.get_rng_state()])
        assert all(map(torch.equal, *results))
    assert model.calls == plain.calls


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "in a list": lambda numbers: 5 in numbers.tolist(),
    "not in a tuple": lambda numbers: 5 not in tuple(numbers.tolist()),
    "counted": lambda numbers: numbers.tolist().count(5) > 1,
    "a number": lambda numbers: numbers.sum() - 11,
    "a float": lambda numbers: numbers.float().sum() - 11,
}


class Taking(nn.Module):
    def __init__(self, way: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return self.linear(x).sum() * (2 if self.way(numbers) else 3)


@pytest.mark.parametrize("way", WAYS)
def test_lists_and_truths_of_numbers_are_those_of_the_call(way: str) -> None:
    """Dynamo itself says that a number is in no list of numbers that it does not know."""
    plain = Taking(WAYS[way])
    model = compiled_whole(copy.deepcopy(plain))
    for numbers in ([1, 5, 5], [1, 4, 6], [5, 1, 2], [1, 5, 5]):
        assert torch.equal(plain(X, torch.tensor(numbers)), model(X, torch.tensor(numbers)))


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, times = self.linear(x), 0
        while times < 3 and (mask > times).any():
            h, times = h * 1.5, times + 1
        return h.sum()


def test_a_loop_goes_on_by_values_of_the_call() -> None:
    plain = Repeating()
    model = compiled_whole(copy.deepcopy(plain))
    for mask in MASKS:
        assert torch.equal(plain(X, torch.tensor(mask)), model(X, torch.tensor(mask)))


class Looking(nn.Module):
    """Models that look at values which more than the call's inputs decide."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.norm, self.way = nn.Linear(4, 4), nn.BatchNorm1d(4), way

    def forward(self, x: Tensor) -> Tensor:
        seen = {
            "parameter": lambda: self.linear.weight > 0,
            "random": lambda: torch.rand(4) > 0.5,
            "statistics": lambda: (self.norm(x), self.norm.running_mean > 0)[1],
            "large": lambda: torch.ones(1 << 23) > 0,
        }
        return -self.linear(x).sum() if seen[self.way]().any() else self.linear(x).sum()


@pytest.mark.parametrize("way", ["parameter", "random", "statistics", "large"])
def test_values_that_more_than_the_inputs_decide_are_refused_in_one_graph(way: str) -> None:
    model, state = compiled_whole(Looking(way)), torch.get_rng_state()
    with pytest.raises(mtcompile.CaptureError, match=r"(?s)test_known_values.py.*in forward: return -self.linear"):
        model(X)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
@pytest.mark.parametrize("way", ["parameter", "random", "statistics", pytest.param("large", marks=pytest.mark.long)])
def test_values_that_more_than_the_inputs_decide_part_a_forward(way: str) -> None:
    torch.manual_seed(0)
    assert_plain(Looking(way), X)


class Changing(nn.Module):
    """Changes its inputs, and looks at what it has made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels.masked_fill_(labels == -100, 1)
        return self.linear(x).sum() * (2 if (labels == 1).any() else 3)


def test_values_of_inputs_that_the_forward_changes_are_compared_on_copies() -> None:
    plain = Changing()
    model = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    for values in ([0, -100], [0, 2], [-100, 2], [0, 2]):
        labels = torch.tensor(values), torch.tensor(values)
        assert torch.equal(plain(X, labels[0]), model(X, labels[1]))
        assert torch.equal(*labels)


MASKED = {
    "index": lambda h, x, mask: h[mask] * x[mask],
    "index beside slices": lambda h, x, mask: h[:, mask[0], None].square().sum() + h.T[:, mask[:, 0]].exp(),
    "masked_select": lambda h, x, mask: h.masked_select(mask) * torch.masked_select(x, mask),
    "masked_select, broadcast": lambda h, x, mask: h.masked_select(mask[:, :1]).tanh(),
    "nonzero": lambda h, x, mask: h[mask.nonzero(as_tuple=True)] * torch.nonzero(mask).sum(1),
    "argwhere": lambda h, x, mask: h[0, torch.argwhere(mask)[:, 1]].square(),
    "where": lambda h, x, mask: h[torch.where(mask)].exp(),
    "assigned": lambda h, x, mask: h.clone().index_put((mask,), x[mask]).square(),
    "repeat_interleave": lambda h, x, mask: h.repeat_interleave(mask.sum(1), 0).exp(),
    "repeated flat": lambda h, x, mask: torch.repeat_interleave(h, mask.flatten().long()).exp(),
    "none": lambda h, x, mask: h[mask & ~mask].sum() + h,
}


class Selecting(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return MASKED[self.way](self.linear(x), x, labels != -100).sum()


@pytest.mark.parametrize("way", MASKED)
@pytest.mark.parametrize("policy", [pytest.param("fastest", marks=pytest.mark.long), "checkpoint-all"])
def test_shapes_that_a_mask_of_the_inputs_decides(way: str, policy: str) -> None:
    plain = Selecting(way)
    model = mtcompile.compile(copy.deepcopy(plain), memory="1GiB", policy=policy)
    for seed in range(3):
        labels = torch.where(torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) > 0.5, -100, 1)
        gradients = []
        for each in (plain, model):
            each.zero_grad()
            loss = each(X, labels)
            loss.backward()
            gradients.append([loss.detach(), each.linear.weight.grad, each.linear.bias.grad])
        assert all(map(torch.equal, *gradients))


def test_shapes_that_a_mask_of_the_weights_decides_are_refused() -> None:
    class Pruned(Selecting):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.linear(x)[:, self.linear.bias > 0].sum()

    with pytest.raises(mtcompile.CaptureError, match=r"(?s)test_known_values.py.*bias > 0"):
        compiled_whole(Pruned(""))(X, X)


def _experts(experts: nn.ModuleList, h: Tensor, mask: Tensor) -> Tensor:
    out, route = torch.zeros_like(h), mask.long().cumsum(0) % 3
    for number, expert in enumerate(experts):
        own = route == number
        if own.any():
            out[own] = expert(h[own])
    return out


def _written(value: Callable[[nn.ModuleList, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def write(experts: nn.ModuleList, h: Tensor, mask: Tensor) -> Tensor:
        out = h.clone()
        out[mask] = value(experts, h, mask)
        return out

    return write


def _parts(experts: nn.ModuleList, h: Tensor, mask: Tensor) -> Tensor:
    out = h.clone()
    out[mask, 2] = experts[1](h[mask])[:, 0]
    out[~mask, :2] += h[~mask][:, 2:]
    out[mask] = out[mask] * 0.5
    return out


WRITTEN = {
    "what the mask chose": _written(lambda experts, h, mask: experts[0](h[mask])),
    "one row for all": _written(lambda experts, h, mask: experts[0](h[0])),
    "one number for all": _written(lambda experts, h, mask: experts[0](h).mean()),
    "a constant": _written(lambda experts, h, mask: torch.tensor(1)),
    "parts": _parts,
    "experts": _experts,
}


class Writing(nn.Module):
    """Writes to the places of a mask."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.experts, self.way = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), way

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.linear(x)
        return WRITTEN[self.way](self.experts, h, h[:, 0] > 0 if mask is None else mask)


@pytest.mark.parametrize("way", WRITTEN)
def test_places_of_a_mask_are_written_as_in_a_plain_run(way: str) -> None:
    torch.manual_seed(0)
    plain = Writing(way)
    model, results = mtcompile.compile(copy.deepcopy(plain), memory="1GiB"), []
    for each in (plain, model):
        for mask in ([1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]):
            output = each(X, torch.tensor(mask, dtype=torch.bool))
            output.pow(2).sum().backward()
            results.append(output.detach())
        results += [torch.zeros(0) if p.grad is None else p.grad for p in each.parameters()]
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:]))


@pytest.mark.parametrize("way", ["one row for all", "what the mask chose"])
def test_places_that_the_weights_decide_are_refused_with_their_line(way: str) -> None:
    with pytest.raises(mtcompile.CaptureError, match=r"depends on what tensors hold\n  at .*test_known_values.py"):
        mtcompile.compile(Writing(way), memory="1GiB")(X)


def test_one_value_of_another_dtype_is_refused_before_it_is_written() -> None:
    class Wide(Writing):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            h = self.linear(x)
            h[mask] = x.double().mean()
            return h

    with pytest.raises(mtcompile.CaptureError, match="depends on what tensors hold"):
        mtcompile.compile(Wide("parts"), memory="1GiB")(X, torch.tensor([True, False, True]))
