"""accumulate=k: what a model returns is put together along the dimension that has the batch, and refused if there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.errors import CaptureError

pytestmark = pytest.mark.slow  # it compiles several models

WIDTH = 4  # as many as a micro-batch has rows
Made = Callable[[nn.Module, Tensor, Tensor], Any]


class Returning(nn.Module):
    """Returns a loss and what ``made`` makes of the model, the input [batch, WIDTH] and hidden values of its shape."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.first, self.last, self.made = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), made
        self.register_buffer("of_batch", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        h = self.first(x).tanh()
        return self.last(h).square().mean(), self.made(self, x, h)


def returned(made: Made, count: int, batch: int = 8) -> tuple[Any, list[Any]]:
    """What a model returns with micro-batches, and what plain ones return for each."""
    plain, model = Returning(made), Returning(made)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1))
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=count)
    return model(x)[1], [plain(part)[1] for part in x.chunk(count)]


def assign(model: nn.Module, name: str, value: Tensor) -> Tensor:
    setattr(model, name, value.detach())
    return value.sum(1) if value.dim() > 1 else value.sum()


NOT_OF_ROWS: dict[str, Made] = {
    "less the mean": lambda m, x, h: h - h.mean(0),
    "less the first": lambda m, x, h: h - h[:1],
    "numbered": lambda m, x, h: h + torch.arange(len(x))[:, None],
    "weighed by number": lambda m, x, h: torch.linspace(0, 1, len(x)) @ h,
    "pieces": lambda m, x, h: h.chunk(2, 0)[0] * 1,
    "maximum": lambda m, x, h: h.max(dim=0).values,
    "whole number": lambda m, x, h: x.argmax(),
    "pairs of rows": lambda m, x, h: h @ h.t(),
    "pairs of rows and their bias": lambda m, x, h: h @ h.t() + h[:, :1],
    "both orders": lambda m, x, h: h + h.t(),
    "flipped": lambda m, x, h: h.flip(0),
    "rolled": lambda m, x, h: h.roll(1),
    "sorted": lambda m, x, h: h.sort(0).values,
    "sums so far": lambda m, x, h: h.cumsum(0),
    "softmax": lambda m, x, h: h.softmax(0),
    "twice": lambda m, x, h: torch.cat([h, h]),
    "repeated": lambda m, x, h: h.repeat(2, 1),
    "first rows": lambda m, x, h: h[:2] * 1,
    "picked": lambda m, x, h: h[x[:, 0].argsort()],
    "columns and rows": lambda m, x, h: h.t().reshape(-1),
    "attribute": lambda m, x, h: assign(m, "kept", h.std(0)),
    "assigned buffer": lambda m, x, h: assign(m, "of_batch", h.std(0)),
}


@pytest.mark.parametrize("name", NOT_OF_ROWS)
def test_what_has_no_part_of_each_row_is_refused(name: str) -> None:
    with pytest.raises(
        CaptureError,
        match=r"(no dimension known to have a part of each row|cannot be told how much|a forward that|could not be captured)",
    ):
        returned(NOT_OF_ROWS[name], 2)


PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda h: h.chunk(2)[0],
    "split": lambda h: h.split(1)[0],
    "tensor_split": lambda h: h.tensor_split(2)[0],
    "vsplit": lambda h: h.vsplit([1])[0],
    "unbind": lambda h: h.unbind()[0],
    "columns": lambda h: h.t().unbind(1)[0],
    "elements": lambda h: h.reshape(-1)[:WIDTH],
    "strided": lambda h: h.as_strided((1, WIDTH), (WIDTH, 1)),
    "every other": lambda h: h[::2],
    "first two": lambda h: h[:2],
    "last two": lambda h: h[-2:],
    "two by two": lambda h: h.split(2)[0],
    "first elements": lambda h: h.reshape(-1)[: 2 * WIDTH],
    "two selected": lambda h: h.index_select(0, torch.arange(2)),
    "two narrowed": lambda h: h.narrow(0, 0, min(2, len(h))),
    "diagonal": lambda h: h.diagonal(),
    "as many as a row has": lambda h: h.repeat(1, 2).diagonal(),
    "padded": lambda h: F.pad(h, (0, 0, 0, 1)),
    "moved": lambda h: F.pad(h, (0, 0, 1, -1)) * h,
    "moved columns": lambda h: F.pad(h.t(), (1, -1)) * h.t(),
    "first by number": lambda h: h * (torch.arange(len(h)) < 2)[:, None],
    "first by assignment": lambda h: h * torch.zeros(len(h), 1).index_fill(0, torch.arange(2), 1.0),
    "largest of each half": lambda h: h.view(2, -1).amax(1),
    "softmax of each half": lambda h: h.reshape(2, -1).softmax(1),
    "means over halves": lambda h: h.reshape(2, -1, WIDTH).mean(0),
    "means over pairs": lambda h: h.reshape(-1, 2, WIDTH).mean(1),
    "convolved in a row": lambda h: F.conv1d(h.view(1, 1, -1), torch.ones(1, 1, 3), padding=1),
    "turned": lambda h: torch.stack([h] * 8, 1).reshape(8, -1, WIDTH).softmax(1),
    "by columns": lambda h: h.t().reshape(-1, 2).mean(1),
    "all pairs": lambda h: h[:, :1] - h[:, 0],
    "of given rows": lambda h: h + h[(h[:, 0] > 9).long()],
    "looked up": lambda h: F.embedding((h[:, 0] > 9).long(), h) + h,
}


@pytest.mark.parametrize("name", PICKED)
@pytest.mark.parametrize("count", [4, 8])
def test_a_loss_of_some_of_the_rows_is_refused(name: str, count: int) -> None:
    """Of micro-batches of a single row, too, of which a slice may be all that there is."""
    model = Returning(lambda m, x, h: PICKED[name](h).square().mean())
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=count)
    with pytest.raises(CaptureError, match=r"(a forward that|a loss|could not be captured)"):
        model(torch.randn(8, WIDTH))[1].backward()


def everything(m: nn.Module, x: Tensor, h: Tensor) -> dict[str, Tensor]:
    rows = torch.arange(len(x))
    image = h.unsqueeze(2).expand(-1, -1, 6).reshape(len(x), 2, 2, 6)
    tokens = h.unsqueeze(1).expand(-1, 3, -1) * torch.tensor([[1.0], [2.0], [3.0]])
    front = tokens.transpose(0, 1)
    flat = F.linear(front.reshape(-1, WIDTH), h.new_ones(2, WIDTH)).view(3, len(x), 2)
    labels = x.argmax(1)
    return {
        "same": h * 2,
        "columns": h.t() * 1,
        "middle": front.contiguous(),
        "back from one row of tokens": flat,
        "attended": F.scaled_dot_product_attention(tokens, tokens, tokens),
        "convolved": F.conv2d(image, image.new_ones(3, 2, 1, 1)),
        "normed": F.group_norm(F.layer_norm(image, (6,)), 2),
        "losses": F.cross_entropy(h, labels, reduction="none"),
        "one hot": F.one_hot(labels, WIDTH),
        "picked of each": tokens[rows, labels % 3],
        "put into each": tokens.index_put((rows, labels % 3), h),
        "gathered": h.gather(1, labels[:, None]),
        "most": h.topk(2).indices,
        "joined": torch.cat([h, torch.zeros(len(x), 1)], 1),
        "stacked": torch.stack([h, h]),
        "tokens in a row": tokens.reshape(-1, WIDTH),
        "distances": torch.cdist(tokens, tokens),
        "triangles": tokens.tril(),
        "each twice": h.repeat_interleave(2, 0),
        "halves the other way round": torch.cat(h.chunk(2, -1)[::-1], -1),
        "some columns": h.split([1, 2, 1], 1)[1] * 1,
        "columns of all": h.tensor_split(2, 1)[0] + h.unbind(1)[3][:, None],
        "diagonals": image.diagonal(0, 1, 2) + image.diagonal(dim1=-3, dim2=-2),
    }


@pytest.mark.parametrize("count", [2, 8])
def test_what_has_a_part_of_each_row_is_put_together(count: int) -> None:
    found, parts = returned(everything, count)
    dims = {"columns": 1, "middle": 1, "back from one row of tokens": 1, "stacked": 1}
    for name, value in found.items():
        assert torch.equal(value, torch.cat([part[name] for part in parts], dims.get(name, 0))), name


def test_counts_are_added_up() -> None:
    found, parts = returned(counted, 4)
    for value, *of_parts in zip(found, *parts, strict=True):
        put = of_parts[0] * 0
        for part in of_parts:
            put = put + part
        whole = put if value.dtype == torch.int64 else torch.stack(of_parts).any(0)
        assert torch.equal(value, whole)


def counted(m: nn.Module, x: Tensor, h: Tensor) -> list[Tensor]:
    classes = F.one_hot(x.argmax(1), WIDTH)
    more = (x > 0).sum() - (x > 1).sum()
    return [(h > 0).sum(), (x > 2).sum() + (x < 0).sum(), (x > 1).any(), classes.sum(0), more, torch.stack([more, more])]


def test_what_all_micro_batches_share_is_not_added_up() -> None:
    seven = torch.tensor(7)
    found, parts = returned(
        lambda m, x, h: (torch.stack([(x > 0).sum(), seven]), (x > 0).any().long(), m.last.weight.norm()), 2
    )
    assert found[0].tolist() == [int(parts[0][0][0] + parts[1][0][0]), 7] and found[1].dtype == torch.int64
    assert torch.equal(found[2], parts[0][2])


def test_truth_values_and_means_of_the_batch() -> None:
    found, parts = returned(lambda m, x, h: ((x < 9).all(), (x < 1).all(), x.bool().any(0), h.mean(0), x.square().sum(0)), 2)
    assert bool(found[0]) and bool(found[1]) == all(bool(part[1]) for part in parts)
    assert torch.equal(found[2], parts[0][2] | parts[1][2])
    torch.testing.assert_close(found[3], (parts[0][3] + parts[1][3]) / 2)
    torch.testing.assert_close(found[4], parts[0][4] + parts[1][4])


def test_a_gradient_arrives_along_the_dimension_that_has_the_batch() -> None:
    plain, model = (Returning(lambda m, x, h: h.t() * 3) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=2)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    loss, columns = model(x)
    (loss + columns.square().sum()).backward()
    for part in x.chunk(2):
        loss, columns = plain(part)
        (loss / 2 + columns.square().sum()).backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad), name  # type: ignore[arg-type]


class Routed(nn.Module):
    """Sends tokens [batch, 3, WIDTH], sorted by expert, through experts; returns hidden values and the router's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = x.view(-1, WIDTH)
        logits = self.router(tokens)
        weights, chosen = logits.softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        places = order // 2
        made = torch.einsum("tn,tnm->tm", tokens[places], self.experts[chosen.flatten()[order]])
        mixed = torch.zeros_like(tokens).index_add(0, places, made * weights.flatten()[order].unsqueeze(1))
        hidden = x + mixed.view_as(x)
        return hidden.square().mean(), hidden, logits


def test_hidden_values_of_experts_and_the_logits_of_a_router() -> None:
    torch.manual_seed(0)
    plain, model = Routed(), Routed()
    model.load_state_dict(plain.state_dict())
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=2)
    x = torch.randn(8, 3, WIDTH)
    _, hidden, logits = model(x)
    parts = [plain(part) for part in x.chunk(2)]
    assert torch.equal(hidden, torch.cat([part[1] for part in parts]))
    assert torch.equal(logits, torch.cat([part[2] for part in parts]))


def test_fields_of_a_model_output() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, output_router_logits=True)
    plain, model = (transformers.MixtralForCausalLM(config).train() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(32, (6, 5))
    model(input_ids=tokens)  # it installs hooks of its own in its first call
    mtcompile.compile(model, memory="64MiB", device="cpu", accumulate=2)
    parts = [plain(input_ids=part, labels=part) for part in tokens.chunk(2)]
    found = model(input_ids=tokens, labels=tokens)
    assert torch.equal(found.logits, torch.cat([part.logits for part in parts]))
    assert torch.equal(found.router_logits[0], torch.cat([part.router_logits[0] for part in parts]))
    torch.testing.assert_close(found.aux_loss, plain(input_ids=tokens, labels=tokens).aux_loss)  # of the whole batch
    cached = [part.past_key_values.layers[0].keys for part in parts]
    assert torch.equal(found.past_key_values.layers[0].keys, torch.cat(cached))


class OfMeans(nn.Module):
    """Sums, or averages, the mean of the batch; the width is a multiple of the rows of a micro-batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Tensor:
        mean = self.layer(x).mean(0)
        return {"sum": mean.sum(), "mean": mean.mean(), "squares": mean.square().sum()}[self.kind]


@pytest.mark.parametrize("kind", ["sum", "mean", "squares"])
def test_a_loss_of_the_mean_of_a_batch_is_that_of_all(kind: str) -> None:
    plain, model = OfMeans(kind), OfMeans(kind)
    model.load_state_dict(plain.state_dict())
    mtcompile.compile(model, memory="1MiB", device="cpu", accumulate=2)
    x = torch.randn(8, WIDTH)
    torch.testing.assert_close(model(x), plain(x))
