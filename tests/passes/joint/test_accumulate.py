"""accumulate=k: the bits of k ordinary backwards, weighted by the tokens that count, with each parameter moved once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.errors import BudgetError, CaptureError
from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape
from tests.helpers.decoder import adamw, same, state
from tests.helpers.decoder import small_decoder as made

pytestmark = pytest.mark.slow  # it compiles many models

SMALL = "1MiB"
TEXT = (__doc__ or "").encode() * 40


def batch(seed: int, rows: int, ignored: bool = True) -> dict[str, Tensor]:
    """Rows of bytes; of each, another number of tokens counts."""
    text = torch.tensor(list(TEXT))
    at = torch.randint(0, len(text) - 17, (rows,), generator=torch.Generator().manual_seed(seed))
    taken = torch.stack([text[i : i + 17] for i in at])
    targets = taken[:, 1:].clone()
    for row in range(rows if ignored else 0):
        targets[row, : (5 * row + seed) % 16] = -100
    return {"tokens": taken[:, :-1], "targets": targets}


def parts_of(whole: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [dict(zip(whole, rows, strict=True)) for rows in zip(*(t.chunk(count) for t in whole.values()), strict=True)]


def by_hand(model: Any, whole: dict[str, Tensor], count: int) -> Tensor:
    """The reference: one backward after the other, each weighted by its share of the tokens that count."""
    parts = parts_of(whole, count)
    counted = [(part["targets"] != -100).sum().float() for part in parts]
    total = None
    for part, tokens in zip(parts, counted, strict=True):
        loss = model(**part) * (tokens / sum(counted[1:], counted[0]))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def compiled(model: nn.Module, count: int | str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = adamw(model.parameters())
    options = {"memory": SMALL, "device": "cpu", "accumulate": count} | options
    return mtcompile.compile(model, optimizer=optimizer, **options), optimizer


@pytest.mark.parametrize(
    ("count", "update"),
    [
        (3, "backward"),
        *(pytest.param(n, "step", marks=pytest.mark.long) for n in (1, 2)),
        *(pytest.param(n, update, marks=pytest.mark.long) for n in (4, 5, 6, 7, 8) for update in ("step", "backward")),
    ],
)
def test_uneven_tokens_and_clipping_are_the_reference(count: int, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if count in (2, 3):
        monkeypatch.setenv("MT_CHECK", "1")
    reference = made()
    plain = adamw(reference.parameters())
    model, optimizer = compiled(made(), count, update=update, max_grad_norm=0.7 if update == "backward" else None)
    for step in range(2):
        whole = batch(step, 2 * count)
        if count == 1:
            wanted = reference(**whole)
            wanted.backward()
        else:
            wanted = by_hand(reference, whole, count)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.7)
        loss = model(**whole)
        loss.backward()
        assert torch.equal(loss, wanted)
        if update == "step":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            pairs = zip(reference.parameters(), model.parameters(), strict=True)
            assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    assert same(state(reference, plain), state(model, optimizer))


def h2d_nbytes(count: int) -> int:
    torch.manual_seed(0)
    shape = Shape(64, 160, 1, 2, 1, 256, head_dim=32, dtype=torch.float32)
    model, _ = compiled(Decoder(shape).train(), count, memory="2MiB", policy="megatrain")
    model(**batch(0, 2 * count)).backward()
    buffers = model.schedule.buffers
    copies = [i for i in model.schedule.instructions if i.queue == "h2d"]
    return sum(buffers[name].nbytes for i in copies for name in i.reads if buffers[name].role == "param")


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_parameters_come_in_once_for_all_micro_batches(count: int) -> None:
    alone = h2d_nbytes(1)
    assert alone > 0
    assert h2d_nbytes(count) / count == alone / count


@pytest.mark.parametrize("update", [pytest.param("step", marks=pytest.mark.long), "backward"])
def test_masters_add_up_in_fp32_as_the_ordinary_loop_does(update: str) -> None:
    whole, count = batch(0, 4), 2
    ordinary, bound = compiled(made(), 1, precision="bf16-master32")
    model, optimizer = compiled(made(), count, precision="bf16-master32", update=update)
    assert "in fp32" in str(_planned(model, whole))
    for step in range(2):
        whole = batch(step, 4)
        wanted = by_hand(ordinary, whole, count)
        loss = model(**whole)
        loss.backward()
        assert loss.dtype == torch.bfloat16 or torch.equal(loss, wanted)
        for each in (bound, optimizer):
            each.step()
            each.zero_grad()
    assert same(mtcompile.master_parameters(ordinary), mtcompile.master_parameters(model))
    assert same(state(ordinary, bound), state(model, optimizer))


def _planned(model: Any, whole: dict[str, Tensor]) -> Any:
    loss = model(**whole)
    plan = model.plan
    del loss
    return plan


class Normed(nn.Module):
    """Buffers that change, outputs of several kinds, a loss without a cross-entropy."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.last(self.norm(self.first(x * scale)).relu())
        if self.reduction == "squares":
            loss = (z - y).square().mean()
        else:
            loss = F.cross_entropy(z, y.argmax(1), reduction=self.reduction)
        return loss, z, (z.argmax(1) == y.argmax(1)).sum()


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
@pytest.mark.parametrize("reduction", ["squares", "sum"])
def test_buffers_outputs_and_gradients_of_inputs(reduction: str, dtype: torch.dtype) -> None:
    count, scale = 3, torch.full((1, 8), 1.5, dtype=dtype)
    x, y = torch.randn(12, 8, dtype=dtype), torch.randn(12, 4, dtype=dtype)
    reference, model = (seeded(lambda: Normed(reduction).to(dtype)) for _ in range(2))
    mtcompile.compile(model, memory=SMALL, device="cpu", accumulate=count)
    given, taken = x.clone().requires_grad_(), x.clone().requires_grad_()
    total: Any = 0.0
    outputs, correct = [], 0
    for part, label in zip(given.chunk(count), y.chunk(count), strict=True):
        loss, z, right = reference(part, label, scale)
        weighted = loss if reduction == "sum" else loss / count
        (weighted + 0.1 * z.square().sum()).backward()
        total = weighted.detach() + total
        outputs.append(z.detach())
        correct += int(right)
    loss, z, right = model(taken, y, scale)
    (loss + 0.1 * z.square().sum()).backward()
    assert torch.equal(z, torch.cat(outputs)) and int(right) == correct
    assert torch.allclose(loss, total, rtol=4 * torch.finfo(dtype).eps)  # the sum of three in another order
    assert torch.equal(given.grad, taken.grad)  # type: ignore[arg-type]
    for (name, wanted), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(wanted.grad, found.grad), name
    for wanted, found in zip(reference.buffers(), model.buffers(), strict=True):
        assert torch.equal(wanted, found)


def test_a_micro_batch_without_tokens_that_count_weighs_nothing() -> None:
    whole = batch(0, 4, ignored=False)
    whole["targets"][:2] = -100
    model, _ = compiled(made(), 2)
    loss = model(**whole)
    loss.backward()
    reference = made()
    wanted = reference(**parts_of(whole, 2)[1])
    wanted.backward()
    assert torch.equal(loss, wanted)
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).relu(), 0.1) + x
        return x.square().mean()


def test_random_numbers_are_the_same_at_every_budget() -> None:
    x = torch.randn(16, 32)
    found = []
    for memory in ("64MiB", "40KiB"):
        model, _ = compiled(seeded(Dropped), 2, memory=memory)
        torch.manual_seed(7)
        loss = model(x)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()], torch.rand(1)))
    (one, grads, after), (other, again, then) = found
    assert torch.equal(one, other) and torch.equal(after, then) and all(map(torch.equal, grads, again))


def test_evaluation_takes_the_batch_whole_and_a_chunked_head_stays_chunked() -> None:
    whole = batch(0, 4)
    model, _ = compiled(made(), 2, loss_chunks=4)
    model(**whole).backward()
    assert "2 micro-batches" in model.plan.numerics and "in 4 chunks" in model.plan.numerics
    reference, _ = compiled(made(), 1, loss_chunks=4)
    by_hand(reference, whole, 2)
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]
    odd = batch(1, 3)  # not to be cut
    with torch.no_grad():
        assert torch.equal(model(**odd), reference(**odd))


class Late(nn.Module):
    """A buffer that the first layer reads is changed by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.mean
        for layer in self.layers:
            x = layer(x).tanh()
        self.mean.copy_(x.detach().mean(0))
        return x.square().mean()


def test_what_cannot_be_cut_is_refused() -> None:
    for count in (0, 1.5, True):
        with pytest.raises(ValueError, match="whole number"):
            compiled(made(), count)  # type: ignore[arg-type]
    model, _ = compiled(made(), 3)
    with pytest.raises(ValueError, match="found 4; try 3 or 6"):
        model(**batch(0, 4))
    with pytest.raises(ValueError, match="one batch size in front, found 3, 6"):
        model(tokens=batch(0, 6)["tokens"], targets=batch(0, 3)["targets"])
    alone, _ = compiled(seeded(Late), 1)
    plain, x = seeded(Late), torch.randn(4, 16)
    assert torch.equal(alone(x), plain(x)) and torch.equal(alone.mean, plain.mean)
    late, _ = compiled(seeded(Late), 2)
    with pytest.raises(CaptureError, match="changed in a later layer"):
        late(torch.randn(4, 16))


def test_auto_runs_as_many_micro_batches_as_are_fastest() -> None:
    """With little memory, those of the fastest plan that fits; with much, the whole batch. The bits are those of the number."""
    rows = torch.randn(124, 16, generator=torch.Generator().manual_seed(0))

    def trained(memory: str, count: int | str) -> tuple[float, Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2)), MeanSquare())
        model, optimizer = compiled(plain, count, memory=memory)
        loss = model(rows)
        loss.backward()
        optimizer.step()
        return model.plan.total_us, loss.detach(), state(model, optimizer)

    for memory, fits in (("110KiB", (2, 4)), ("4MiB", (1,))):
        step_us, loss, after = trained(memory, "auto")
        fixed = [trained(memory, count) for count in fits]
        fastest = min(fixed, key=lambda each: each[0])
        assert step_us == fastest[0]
        assert torch.equal(loss, fastest[1])
        assert same(after, fastest[2])
    with pytest.raises(BudgetError):
        trained("110KiB", 1)


class MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
