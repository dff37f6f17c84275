"""accumulate=k: a loss and its gradients are those of the whole batch, or the model is refused, and the error says where."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.errors import CaptureError
from mtcompile.execution.model import CompiledModel

pytestmark = pytest.mark.slow  # it compiles several models

CLASSES, WIDTH = 6, 12
Loss = Callable[["Classifier", Tensor, Tensor, Tensor], Tensor]


class Classifier(nn.Module):
    """``loss`` is made of the model, hidden values, inputs and labels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.head, self.loss = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES), loss
        self.norm, self.scale = nn.BatchNorm1d(16), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.first(x).tanh(), x, labels)


def entropies(m: Classifier, h: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h), labels, reduction="none")


def ignoring(m: Classifier, h: Tensor, labels: Tensor, below: int = 2) -> Tensor:
    return F.cross_entropy(m.head(h), torch.where(labels < below, -100, labels))


def balance(m: Classifier, h: Tensor) -> Tensor:
    shares = m.head(h).softmax(-1)
    return CLASSES * (F.one_hot(shares.argmax(-1), CLASSES).float().mean(0) * shares.mean(0)).sum()


AS_THE_WHOLE: dict[str, Loss] = {
    "different means": lambda m, h, x, y: ignoring(m, h, y) + h.square().mean(),
    "different labels": lambda m, h, x, y: ignoring(m, h, y) + 0.3 * ignoring(m, h, y, 4),
    "masked means": lambda m, h, x, y: (
        (entropies(m, h, y) * (y > 1)).sum() / (y > 1).sum() + (entropies(m, h, y) * (y < 3)).sum() / (y < 3).sum()
    ),
    "at least some": lambda m, h, x, y: (entropies(m, h, y) * (y > 3)).sum() / (y > 3).sum().clamp(min=5),
    "a sum and a mean": lambda m, h, x, y: entropies(m, h, y).sum() + h.mean(),
    "a sum and weights": lambda m, h, x, y: entropies(m, h, y).sum() + m.first.weight.square().sum(),
    "load balance": lambda m, h, x, y: ignoring(m, h, y) + 0.5 * balance(m, h),
    "learned scale": lambda m, h, x, y: torch.exp(-m.scale) * ignoring(m, h, y) + m.scale + h.square().mean(),
    "squares over a size": lambda m, h, x, y: (h.sum(1) - y).pow(2).sum() / len(x) + (h**4).sum() / x.shape[0],
    "root": lambda m, h, x, y: (h.sum(1) - y).square().mean().sqrt(),
    "overlap": lambda m, h, x, y: 1 - 2 * (h.sigmoid() * (x[:, :1] > 0)).sum() / (h.sigmoid().sum() + (x[:, :1] > 0).sum()),
    "products of columns": lambda m, h, x, y: (h.t() @ h).square().mean(),
    "less": lambda m, h, x, y: 1 - h.cos().mean(),
    "class weights": lambda m, h, x, y: F.cross_entropy(m.head(h), y, weight=torch.arange(1.0, CLASSES + 1)),
    "by rows": lambda m, h, x, y: entropies(m, h, y).sum() / len(y),
    "by a tensor": lambda m, h, x, y: entropies(m, h, y).sum() / torch.tensor(len(y)),
    "times rows": lambda m, h, x, y: h.square().mean() * len(y),
    "by ones": lambda m, h, x, y: entropies(m, h, y).sum() / torch.ones(len(y)).sum(),
    "labels of rows": lambda m, h, x, y: -m.head(h).log_softmax(-1)[torch.arange(len(y)), y].mean(),
    "zeros": lambda m, h, x, y: torch.cat([h, x.new_zeros(len(x), 2)], 1).square().mean(),
}


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(5)
    return torch.randn(rows, WIDTH, generator=seeded), torch.randint(CLASSES, (rows,), generator=seeded)


def trained(model: Any, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    """A loss, every gradient and every weight after one step."""
    loss = model(*data)
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return [loss.detach(), *grads, *(p.detach().clone() for p in model.parameters())]


def assert_same_gradients(plain: nn.Module, model: nn.Module) -> None:
    """Asserts that gradients agree, where the plain model has any."""
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", AS_THE_WHOLE)
def test_losses_and_gradients_are_those_of_the_whole_batch(name: str, count: int) -> None:
    torch.manual_seed(0)
    plain = Classifier(AS_THE_WHOLE[name])
    model = deepcopy(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=count, optimizer=optimizers[1])
    expected, found = (trained(*each, batch()) for each in zip((plain, model), optimizers, strict=True))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-5, atol=1e-6)


def test_a_sum_is_divided_by_any_number_of_rows() -> None:
    """1 / 49 x 49 is less than 1."""
    plain = Classifier(lambda m, h, x, y: entropies(m, h, y).sum() / len(x))
    model = mtcompile.compile(deepcopy(plain), memory="1MiB", device="cpu", accumulate=49)
    torch.testing.assert_close(model(*batch(49)), plain(*batch(49)))


REFUSED: dict[str, Loss] = {
    "pairs of rows": lambda m, h, x, y: F.cross_entropy(h @ h.t(), torch.arange(len(y))),
    "same labels": lambda m, h, x, y: ((h @ h.t()).log_softmax(-1) * (y[:, None] == y).float()).sum(1).mean(),
    "less the mean": lambda m, h, x, y: ignoring(m, h - h.mean(0), y),
    "less the first": lambda m, h, x, y: ignoring(m, h - h[:1], y),
    "other rows": lambda m, h, x, y: ignoring(m, 0.7 * h + 0.3 * h.flip(0), y),
    "sorted rows": lambda m, h, x, y: ignoring(m, h[y.argsort()], y),
    "halves": lambda m, h, x, y: F.mse_loss(*h.chunk(2, 0)),
    "first rows": lambda m, h, x, y: ignoring(m, h[: len(y) // 2], y[: len(y) // 2]),
    "numbers of rows": lambda m, h, x, y: ignoring(m, h + torch.arange(len(y))[:, None], y),
    "by rows before": lambda m, h, x, y: ignoring(m, h / len(y), y),
    "filled with rows": lambda m, h, x, y: (h * torch.full(h.shape, 1 / len(y))).sum(),
    "by the sum of all": lambda m, h, x, y: (entropies(m, h, y) * (y / y.sum())).sum(),
    "deviation": lambda m, h, x, y: ignoring(m, h, y) + (1 - h.std(0)).relu().mean(),
    "largest": lambda m, h, x, y: entropies(m, h, y).max(),
}


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_other_rows_is_refused_with_its_line(name: str, count: int) -> None:
    model = mtcompile.compile(Classifier(REFUSED[name]), memory="1MiB", device="cpu", accumulate=count)
    with pytest.raises(CaptureError, match=r"at .*test_whole_batch\.py:"):
        model(*batch())


def test_numerics_name_the_batch_norms_of_each_micro_batch() -> None:
    model = mtcompile.compile(
        Classifier(lambda m, h, x, y: ignoring(m, m.norm(h), y)), memory="1MiB", device="cpu", accumulate=2
    )
    model(*batch()).backward()
    assert "the batch statistics of each by itself (norm)" in model.plan.numerics


def test_a_chunked_head_beside_another_mean_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    plain = Classifier(AS_THE_WHOLE["different means"])
    model = deepcopy(plain)
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=2, loss_chunks=2)
    losses = [each(*batch()) for each in (plain, model)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    assert_same_gradients(plain, model)
    assert "in 2 chunks" in model.plan.numerics


class Branching(nn.Module):
    """It takes ways by what a mask of its rows holds, a few times, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.calls = nn.Linear(WIDTH, 4), 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        if not mask.all():
            h = h * mask.unsqueeze(-1)
        if mask[:, 0].any():
            h = h.tanh()
        return h.square().sum() if mask.sum() > 20 else h.sum()


def test_micro_batches_branch_as_the_whole_batch_does() -> None:
    """Also where their own rows say something else, and where batches in turn say something else."""
    torch.manual_seed(0)
    plain = Branching().double()  # sums of micro-batches round otherwise, and steps make more of it
    model = deepcopy(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=4, optimizer=optimizers[1])
    masks = torch.ones(5, 8, 3, dtype=torch.bool)
    masks[0, 3, 1:] = masks[2] = masks[3, 5] = masks[4, :, 0] = False  # in one micro-batch of four, nowhere, everywhere, ...
    for mask in masks:
        data = torch.randn(8, 3, WIDTH, dtype=torch.float64), mask
        expected, found = (trained(*each, data) for each in zip((plain, model), optimizers, strict=True))
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
    assert plain.calls == model.calls == len(masks)


class Counting(nn.Module):
    """It takes another way where more than four columns are in use."""

    def __init__(self, width: int = WIDTH, count: Callable[[Tensor], Any] = lambda used: used.sum().item()) -> None:
        super().__init__()
        self.first, self.count = nn.Sequential(*(nn.Linear(width, width) for _ in range(3))), count

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        return (h.tanh() if self.count(mask.any(0)) > 4 else h).square().sum()


def test_a_number_that_is_another_for_the_whole_batch_is_refused_whatever_was_compared_before() -> None:
    """Each program was compared before, but with another one: micro-batches with three columns in use, batches with six."""
    model = mtcompile.compile(Counting(), memory="1MiB", device="cpu", accumulate=4)
    three, six, parted = torch.zeros(3, 8, 6, dtype=torch.bool)
    three[:, :3] = six[:] = parted[:4, :3] = parted[4:, 3:] = True
    x = torch.randn(8, WIDTH)
    for mask in (three, six):
        torch.testing.assert_close(model(x, mask), model.forward(x, mask).detach())
    with pytest.raises(CaptureError, match="runs other operations for the whole batch"):
        model(x, parted)


def test_auto_takes_one_micro_batch_where_several_would_differ() -> None:
    torch.manual_seed(0)
    plain = Counting(128)
    model = deepcopy(plain)
    mtcompile.compile(model, memory=300_000, device="cpu", accumulate="auto")
    mask = torch.ones(8, 6, dtype=torch.bool)
    mask[:4, :3] = False
    mask[7] = False
    x = torch.randn(8, 128)
    torch.testing.assert_close(model(x, mask), plain(x, mask))


def test_equal_micro_batches_of_other_batches_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledModel, "_count", lambda model, args, kwargs: len(args[0]) // 2)
    torch.manual_seed(0)
    plain = Branching()
    model = deepcopy(plain)
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate="auto")
    for rows in (8, 4, 12):
        data = torch.randn(rows, 3, WIDTH), torch.ones(rows, 3, dtype=torch.bool)
        torch.testing.assert_close(model(*data), plain(*data))


def test_a_padding_mask_may_be_full_in_some_micro_batches() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 61}
    plain = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
    model = deepcopy(plain)
    mtcompile.compile(model, memory="2MiB", device="cpu", accumulate=2)
    ids = torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(0))
    for length in (8, 5, 8):
        mask = torch.ones_like(ids)
        mask[3, length:] = 0
        losses = [each(input_ids=ids, attention_mask=mask, labels=ids).loss for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        assert_same_gradients(plain, model)
