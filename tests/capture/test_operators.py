"""Operations whose results, gradients or layouts are unusual have the bits of a plain run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mtcompile

REAL, COMPLEX, EMPTY = torch.randn(4, 4), torch.randn(2, 4, dtype=torch.complex64), torch.zeros(2, 0, 3, 3)
OPERATIONS: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "an inverse transform, which is conjugate only by a flag": (REAL, lambda w: torch.fft.ifft(w * 1)),
    "a conjugate": (COMPLEX, lambda w: (w * 2).conj()),
    "the imaginary part of a conjugate, which is negative only by a flag": (COMPLEX, lambda w: (w * 2).conj().imag),
    "a view of a parameter and nothing else": (COMPLEX, lambda w: w.conj()),
    "a norm without a gradient": (REAL, lambda w: w.norm(p=0)),
    "a determinant of no elements": (EMPTY, lambda w: torch.linalg.det(w * 1)),
    "equations without right sides": (EMPTY, lambda w: torch.linalg.solve(torch.eye(3).expand(2, 0, 3, 3), w * 1)),
}


class Model(nn.Module):
    def __init__(self, weight: Tensor, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.operation = nn.Parameter(weight.clone()), operation

    def forward(self) -> Tensor:
        return self.operation(self.weight)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_bits_of_the_plain_run(name: str) -> None:
    plain = Model(*OPERATIONS[name])
    compiled = mtcompile.compile(copy.deepcopy(plain))
    results = []
    for model in (plain, compiled):
        output = model()
        output.backward(torch.full_like(output.detach(), 1.5))
        grad = model.weight.grad
        results.append([part.resolve_conj().resolve_neg() for part in (output.detach(), grad) if part is not None])
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


class SmoothedLoss(nn.Module):
    """A loss of the outputs of a linear layer, over classes of different weight, some of whose targets are ignored."""

    def __init__(self, dims: tuple[int, ...], reduction: str, autocast: bool, ignored: int) -> None:
        super().__init__()
        self.linear, self.dims, self.autocast = nn.Linear(7, 11), dims, autocast
        self.loss = nn.CrossEntropyLoss(torch.rand(11), ignore_index=ignored, reduction=reduction, label_smoothing=0.1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.linear(x)
            return self.loss(logits.movedim(-1, 1) if logits.dim() > 1 else logits, targets)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims",
    [pytest.param((), marks=pytest.mark.long), pytest.param((33,), marks=pytest.mark.long), (8, 3, 5)],
    ids=["one", "several", "images"],
)
@pytest.mark.parametrize(
    ("reduction", "autocast", "ignored"), [("mean", False, -100), ("mean", True, 2), ("sum", False, 2), ("none", False, -100)]
)
def test_a_smoothed_loss_of_weighted_classes_has_the_bits_of_the_plain_run(
    dims: tuple[int, ...], reduction: str, autocast: bool, ignored: int
) -> None:
    plain = SmoothedLoss(dims, reduction, autocast, ignored)
    compiled = mtcompile.compile(copy.deepcopy(plain))
    x, targets = torch.randn(*dims, 7), torch.randint(3, 11, dims)  # where all are ignored, the mean is nan: the next test
    if dims:
        targets.view(-1)[::3] = ignored
    results = []
    for model in (plain, compiled):
        loss = model(x, targets)
        loss.sum().backward()
        results.append([loss.detach(), model.linear.weight.grad, model.linear.bias.grad])
    assert all(map(torch.equal, *results))


def test_smoothed_losses_whose_targets_are_all_ignored_or_probabilities_are_those_of_the_plain_run() -> None:
    model = nn.CrossEntropyLoss(torch.rand(5), label_smoothing=0.1)
    compiled, logits = mtcompile.compile(copy.deepcopy(model)), torch.randn(4, 5)
    assert compiled(logits, torch.full((4,), -100)).isnan()
    probabilities = F.softmax(torch.randn(4, 5), -1)
    assert torch.equal(compiled(logits, probabilities), model(logits, probabilities))
