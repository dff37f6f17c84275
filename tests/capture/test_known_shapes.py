"""CTC loss has the bits of a plain run, whatever says how long its targets are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mtcompile

LABELS = [[[1, 2, 3, -100], [4, 5, -100, -100]], [[2, -100, -100, -100], [4, 4, 1, -100]], [[3, 3, 3, 3], [-100] * 4]]


def flat(log_probs: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
    """As the audio models of Transformers compute it."""
    mask = labels != -100
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(log_probs, labels.masked_select(mask), frames, mask.sum(-1), zero_infinity=True)


def padded(log_probs: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
    return F.ctc_loss(log_probs, labels.clamp(min=1), frames, (labels > 0).sum(-1), reduction="none").clamp(max=99).sum()


def by_module(log_probs: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
    return nn.CTCLoss(blank=5, reduction="sum")(log_probs, labels.clamp(min=0, max=4), (9, 9), (3, 2))


def single(log_probs: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
    return torch.ctc_loss(log_probs[:, 0], labels[0, :2].clamp(min=1), frames[0], torch.tensor(2), 0, 1, False)


class Model(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 6), loss

    def forward(self, x: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
        return self.loss(self.linear(x).log_softmax(-1), labels, frames)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [flat, padded, by_module, single])
@pytest.mark.parametrize("policy", ["fastest", "checkpoint-all"])
def test_ctc_loss_has_the_bits_of_the_plain_run(loss: Callable[..., Tensor], policy: str) -> None:
    plain = Model(loss)
    model = mtcompile.compile(copy.deepcopy(plain), memory="64MiB", policy=policy)
    x, frames = torch.randn(9, 2, 8), torch.tensor([9, 8])
    for labels in LABELS:
        results = []
        for each in (plain, model):
            each.zero_grad()
            value = each(x, torch.tensor(labels), frames)
            value.backward()
            results.append([value.detach(), each.linear.weight.grad, each.linear.bias.grad])
        assert all(map(torch.equal, *results))


def test_errors_are_those_of_the_plain_run() -> None:
    model = mtcompile.compile(Model(flat), memory="64MiB")
    with pytest.raises(RuntimeError, match="input_lengths"):
        model(torch.randn(9, 2, 8), torch.tensor(LABELS[0]), torch.tensor([9, 99]))


def test_the_peak_holds_with_long_targets() -> None:
    """The tables are far larger than anything that the loss is given."""
    model: nn.Module = mtcompile.compile(Model(padded), memory="64MiB")
    labels = torch.randint(1, 6, (2, 300))
    model(torch.randn(700, 2, 8), labels, torch.tensor([700, 700])).backward()
    report = model.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
