"""What a forward does beside computing: it differentiates, takes locks, steps optimizers."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from tests.helpers.training import assert_plain, equal_to_plain

whole = pytest.mark.filterwarnings("error:the forward is compiled in parts")
LOCK = threading.Lock()


class Field(nn.Module):
    """Returns the loss of energies and forces, which are their gradients by the positions."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), *middle, nn.SiLU(), nn.Linear(16, 1))

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_(True)
        energy = self.net(positions).sum()
        (forces,) = torch.autograd.grad(-energy, positions, create_graph=True)
        return 0.1 * energy.square() + (forces - 1).square().mean()


@whole
@pytest.mark.parametrize("middle", [(), (nn.BatchNorm1d(16), nn.Dropout(0.2)), (nn.LayerNorm(16),)], ids=len)
@pytest.mark.parametrize("casts", [False, True])
def test_forces_are_those_of_a_plain_run(middle: tuple[nn.Module, ...], casts: bool) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", enabled=casts):
        assert equal_to_plain(Field(*copy.deepcopy(middle)), {"positions": torch.randn(10, 3)}, 1, policy="checkpoint-all")


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_a_second_derivative_of_a_function_is_refused_with_both_lines() -> None:
    model = mtcompile.compile(Field(Squared()), memory="1MiB")
    with pytest.raises(mtcompile.CaptureError, match=r"requires_grad_\(True\)(.|\n)*takes gradients(.|\n)*autograd\.grad\("):
        model(torch.randn(10, 3))


class Inner(nn.Module):
    """Steps along the gradient of its own weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        (gradient,) = torch.autograd.grad(self.linear(x).square().mean(), [weight], create_graph=True)
        return nn.functional.linear(x, weight - 0.1 * gradient).square().mean()


@whole
def test_a_hook_that_a_plain_run_would_call_is_seen() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = assert_plain(Inner(), x)
    model.linear.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(mtcompile.CaptureError, match="has a hook"):
        model(x)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.known = nn.Linear(8, 8), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        with LOCK as held:
            scale = self.known.setdefault(x.shape[0], torch.full((x.shape[0], 1), 2.0 if held else 3.0))
        return (self.linear(x) * scale).square().mean()


@whole
def test_a_lock_parts_nothing() -> None:
    torch.manual_seed(0)
    assert equal_to_plain(Locked(), {"x": torch.randn(4, 8)})
    assert not LOCK.locked()


class Stepping(nn.Module):
    """Trains a part of itself. ``backward``: by a backward of its own."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.linear, self.code, self.backward = nn.Linear(8, 8), nn.Linear(8, 8), backward
        self.inner = torch.optim.SGD(self.code.parameters(), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.backward:
            self.code(x).square().mean().backward()
        else:
            (self.code.weight.grad,) = torch.autograd.grad(self.code(x).square().mean(), [self.code.weight])
        self.inner.step()
        return self.linear(x).square().mean()


@pytest.mark.parametrize("backward", [True, False])
def test_an_optimizer_that_forward_steps_is_refused_before_anything_changed(backward: bool) -> None:
    model = Stepping(backward)
    before = copy.deepcopy(model.state_dict())
    mtcompile.compile(model, memory="1MiB")
    with pytest.raises(mtcompile.CaptureError, match=r"optimizer(.|\n)*\.py:\d+ in forward(.|\n)*outside forward"):
        model(torch.randn(4, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
