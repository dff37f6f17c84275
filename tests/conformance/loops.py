"""Training loops as people write them, run plainly and compiled: the models, and the comparison of all that a loop logs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from tests.helpers.training import minimum_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.15)  # 1 / 0.85 is not what 1 divided by it is, in float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Net(nn.Module):
    """A small transformer with dropout, statistics in buffers, and a part that is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block()])
        self.statistics, self.extra, self.head = nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 20)
        self.use_extra = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.statistics(x.flatten(0, 1))
        if self.use_extra:
            x = x + torch.tanh(self.extra(x))
        return F.cross_entropy(self.head(x), tokens.flatten())


class Mlp(nn.Module):
    """Two linear layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.first(x)))).square().mean()


def tokens(batch: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 20, (batch, 6), generator=torch.Generator().manual_seed(seed))


def floats(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(seed))


INPUTS: dict[type[nn.Module], dict[str, torch.Tensor]] = {Net: {"tokens": tokens()}, Mlp: {"x": floats()}}


def build(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().train()


@functools.cache
def smallest_budget(kind: type[nn.Module]) -> int:
    """The smallest budget that trains a model on its ``INPUTS``, in bytes."""
    with torch.random.fork_rng():
        return minimum_bytes(build(kind), INPUTS[kind])


Log = list[Any]
Prepare = Callable[..., Any]
Loop = Callable[[Any, Prepare, Log], None]


def assert_same_bits(loop: Loop, kind: type[nn.Module] = Net, memory: int | None = None) -> Any:
    """Runs ``loop`` on a plain model, and on one that is compiled where the loop calls ``prepare(model, optimizer)``.

    What it appends to ``log`` must be equal, and so must weights, gradients, buffers and the random generator at its end.
    Returns the compiled model.
    """
    memory = memory or smallest_budget(kind)

    def leave_plain(model: nn.Module, optimizer: Any = None) -> nn.Module:
        return model

    def compile_it(model: nn.Module, optimizer: Any = None) -> Any:
        return mtcompile.compile(model, memory=memory, optimizer=optimizer, device="cpu")

    def run(prepare: Prepare) -> tuple[Any, Log]:
        model, log = build(kind), []
        torch.manual_seed(7)
        loop(model, prepare, log)
        log_state(model, log)
        return model, [*log, torch.get_rng_state()]

    (_, expected), (model, log) = run(leave_plain), run(compile_it)
    assert_equal(expected, log)
    assert isinstance(model, mtcompile.api.CompiledModule)
    return model


def assert_equal(expected: Any, actual: Any, where: str = "log") -> None:
    """Compares tensors bit for bit, in nested dictionaries, lists and tuples; ``where`` names the first that differs."""
    assert type(expected) is type(actual), f"{where}: {type(expected)} and {type(actual)}"
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == actual.dtype and torch.equal(expected, actual), where
    elif isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key in expected:
            assert_equal(expected[key], actual[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual), where
        for index, (a, b) in enumerate(zip(expected, actual)):
            assert_equal(a, b, f"{where}[{index}]")
    else:
        assert expected == actual, f"{where}: {expected!r} and {actual!r}"


def log_state(model: nn.Module, log: Log) -> None:
    """Appends a copy of weights, gradients and buffers to ``log``."""
    log.append({name: p.detach().clone() for name, p in model.named_parameters()})
    log.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
    log.append({name: b.clone() for name, b in model.named_buffers()})


def step(model: Any, optimizer: Any, log: Log, **data: torch.Tensor) -> torch.Tensor:
    """Trains one step on ``data`` or the model's ``INPUTS``, and logs the loss and the state before and after the update."""
    loss = model(**(data or INPUTS[Net if isinstance(model, Net) else Mlp]))
    loss.backward()
    log.append(loss.detach().clone())
    log_state(model, log)
    optimizer.step()
    log_state(model, log)
    optimizer.zero_grad()
    return loss.detach()


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, **options})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
