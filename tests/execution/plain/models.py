"""Models whose forwards run plainly, their inputs, and what calls and steps of them give."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import mtcompile

_NARROW = 32
WIDTH = 64


class Deep(nn.Module):
    """Looks at its own values, has tied weights, and parameters that nobody calls a module for."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm, self.scale = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.tensor(1.5))
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
            if h.mean().item() > 0:
                h = h - 0.1
        return self.head(self.drop(self.norm(h)) * self.scale) + self.layers[0].weight.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Of whose parts some read the parameters of modules that they do not call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True), 2)
        self.cross = nn.MultiheadAttention(WIDTH, 4)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        return self.weighted(self.normed(self.cross(h, x, h)[0]))  # type: ignore[no-any-return]


class Writing(nn.Module):
    """Changes its parameters and its buffers in the forward, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.mul_(0.9)
        self.second.weight.data.clamp_(-0.1, 0.1)
        self.third.weight.data = nn.functional.normalize(self.third.weight.data)
        self.mean = self.mean * 0.5 + x.mean((0, 1)) * 0.5
        return self.third(self.second(self.first(x - self.mean)))  # type: ignore[no-any-return]


def floats(*size: int) -> Tensor:
    return torch.randn(*size, WIDTH, generator=torch.Generator().manual_seed(sum(size)))


def tokens(*size: int) -> Tensor:
    return torch.randint(0, 50, size, generator=torch.Generator().manual_seed(sum(size)))


MODELS: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "deep": (Deep, tokens),
    "recurrent": (Recurrent, floats),
    "attending": (Attending, floats),
    "writing": (Writing, floats),
}
SIZES = ((2, 3), (3, 5), (1, 4), (2, 3), (4, 7), (2, 6))


def plain(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def results(model: nn.Module, inputs: Callable[..., Tensor]) -> list[Any]:
    """The outputs of calls of several sizes in both modes, and what they leave."""
    torch.manual_seed(1)
    outputs = []
    for guard in (torch.no_grad, torch.inference_mode):
        for training in (True, False):
            model.train(training)
            with guard():
                outputs += [model(inputs(*size)).clone() for size in SIZES]
    return [*outputs, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]


def losses_after_sharing(tied: bool, where: torch.device) -> list[list[float]]:
    """Of a plain and of a compiled model, which are evaluated until their parameters are on the device. Then somebody takes the
    parameters' memory: another weight, or an optimizer of the user's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    expected, x = copy.deepcopy(model).to(where), floats(4).to(where)
    mtcompile.compile(model, memory="1MiB", device=where)
    rows = []
    for each in (expected, model):
        with torch.no_grad():
            for _ in range(5):
                each(x)
        if tied:
            each[2].weight.data = each[0].weight.data
        values = [p.data for p in each.parameters()]
        rows.append([])
        for _ in range(3):
            loss = each(x).square().mean()
            loss.backward()
            rows[-1].append(loss.item())
            for value, parameter in zip(values, each.parameters(), strict=True):
                assert parameter.grad is not None
                value.sub_(parameter.grad.to(value.device))
                parameter.grad = None
    return rows


class Odd(nn.Module):
    """Forwards that do unusual things with a parameter."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.part = way, nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.wide = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH), requires_grad=False)
        self.same = nn.Linear(WIDTH, WIDTH)
        if way == "shared":
            self.same.weight.data = self.part.weight.data
        self.other: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        if self.way == "returned":
            return self.weight
        if self.way == "a view is returned":
            return self.weight[1:]
        if self.way in ("held", "a view is held"):
            self.other = self.other or [self.weight if self.way == "held" else self.weight[:]]
            self.other[0].add_(1)
            return (x * self.weight).sum() + (x * self.other[0]).sum()
        if self.way == "copied":
            return copy.deepcopy(self.part)(x)
        if self.way == "transformed":
            return torch.func.grad(lambda v: self.part(v).sum())(x)
        if self.way == "on meta":
            with torch.device("meta"):
                return self.part(x)
        if self.way == "shared":
            self.part.weight.mul_(0.5)
            return self.same(x)
        if self.way == "in threads":
            with ThreadPoolExecutor(4) as pool:
                return sum(pool.map(self._alone, [self.part, self.same] * 8, [x] * 16))
        return x @ self.wide

    @staticmethod
    def _alone(part: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return part(x)  # type: ignore[no-any-return]


class Language(nn.Module):
    """A small language model with dropout, buffers and tied weights."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, _NARROW), nn.Linear(_NARROW, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_NARROW, 2, 2 * _NARROW, 0.1, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(_NARROW)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h.flatten(0, 1))
        return nn.functional.cross_entropy(self.head(h), tokens.flatten())


def new(tied: bool = True) -> Language:
    torch.manual_seed(0)
    return Language(tied)


def texts(count: int) -> list[Tensor]:
    lengths = [*range(4, 4 + 3 * count, 3)]
    random.Random(1).shuffle(lengths)
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 64, (1 + length % 3, length), generator=generator) for length in lengths]


def programs(model: nn.Module) -> int:
    return len(model._mt_model._programs)  # type: ignore[union-attr, arg-type]
