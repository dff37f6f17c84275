"""Gradients that arrive at a model's outputs with strides of their own, from a loss outside that transposes or expands."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(9, 17), nn.LayerNorm(17)), (5, 7, 9)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 16, 3), nn.GELU(), nn.Conv1d(16, 12, 1)), (3, 8, 40)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 1)), (3, 3, 12, 12)),
}


def weighted(y: Tensor) -> Tensor:
    return (y.contiguous() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y.mean(),
    "transposed": lambda y: weighted(y.transpose(-1, -2)),
    "expanded": lambda y: weighted(y.mean(0, keepdim=True)),
    "channels last": lambda y: functional.cross_entropy(y.movedim(-1, 1), torch.zeros_like(y.movedim(-1, 1)[:, 0]).long()),
}


def trained(name: str, losses: list[Callable[[Tensor], Tensor]], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build()
    called: Any = mtcompile.compile(model, device="cpu", **options) if options else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for loss_of in losses:
        loss = loss_of(called(torch.randn(shape)))
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(tensor.clone() for tensor in model.state_dict().values())]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_are_those_of_the_plain_run(model: str, loss: str) -> None:
    plain = trained(model, [LOSSES[loss]] * 2)
    compiled = trained(model, [LOSSES[loss]] * 2, memory="4MiB", policy="checkpoint-all")
    assert all(map(torch.equal, plain, compiled))


def test_strides_may_change_from_step_to_step() -> None:
    losses = [LOSSES[name] for name in ("transposed", "mean", "transposed", "channels last", "mean")]
    plain = trained("conv1d", losses)
    compiled = trained("conv1d", losses, memory="4MiB")
    assert all(map(torch.equal, plain, compiled))


def test_micro_batches_see_the_strides_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 12))
    compiled: Any = mtcompile.compile(copy.deepcopy(plain), memory="4MiB", device="cpu", accumulate=2)
    rows, weights = torch.randn(4, 7, 9), torch.linspace(-1, 1, 4 * 12 * 7).view(4, 12, 7)
    for half in (slice(0, 2), slice(2, 4)):
        (plain(rows[half]).transpose(-1, -2).contiguous() * weights[half]).sum().backward()
    weighted(compiled(rows).transpose(-1, -2)).backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None and torch.equal(one.grad, other.grad)


def test_a_gradient_of_the_logits_alone_has_its_strides_beside_a_loss_that_forward_returns() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(9, 11)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.linear(x)
            return functional.cross_entropy(logits, torch.arange(12) % 11), logits

    torch.manual_seed(0)
    plain, x = Head(), torch.randn(12, 9)
    ours = mtcompile.compile(copy.deepcopy(plain), memory="4MiB", device="cpu")
    for model in (plain, ours):
        loss, logits = model(x)
        loss.backward(retain_graph=True)
        (0.1 * logits.sum()).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters(), strict=True))  # type: ignore
