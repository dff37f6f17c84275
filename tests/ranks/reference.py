"""A plain job: what ranks compute together, in one process and in the order that is promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
VOCABULARY, WIDTH = 61, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A model with tied weights, a frozen weight, an unused one, a scalar, and dropout."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.embedding, self.unused = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(3, 3)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].up.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.scale * self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


class Small(nn.Module):
    """A model for tests that are to be short."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 80), nn.Dropout(0.1), nn.Linear(80, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(self.drop(torch.tanh(self.up(x)))), x)


class Deeper(nn.Module):
    """Uses a layer that it did not use before once it is ``deep``, in the same block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later, self.deep = nn.Linear(16, 16), nn.Linear(16, 16), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return F.mse_loss(torch.tanh(self.later(y) if self.deep else y), x)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def batches_of(number: int, count: int) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    return [(torch.randn(3, 16, generator=generator),) for _ in range(count)]


def adamw(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in of.parameters() if p.requires_grad], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
}


def batches(steps: int, count: int, rows: int = 2) -> list[list[Batch]]:
    """Batches by step and rank."""
    generator = torch.Generator().manual_seed(7)
    draw = [torch.randint(0, VOCABULARY, (steps, count, rows, 8), generator=generator) for _ in range(2)]
    return [[(draw[0][step, rank], draw[1][step, rank]) for rank in range(count)] for step in range(steps)]


def generator_of(rank: int) -> torch.Tensor:
    """The state of a rank's generator before its first step."""
    return torch.Generator().manual_seed(100 + rank).get_state()


def trained(
    plain: nn.Module,
    steps: Sequence[Sequence[Any]],
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    clip: float | None = None,
    hosts: int = 1,
    states: list[torch.Tensor] | None = None,
) -> nn.Module:
    """Trains ``plain`` as all ranks together do: their gradients, each divided by their number, are added up in the order of
    the ranks of a host, and then of the hosts. ``states``: of their generators before and, in place, after it."""
    optimizer, count = make(plain), len(steps[0])
    states = [generator_of(rank) for rank in range(count)] if states is None else states
    for of_ranks in steps:
        on_hosts: list[dict[str, torch.Tensor]] = []
        for rank, batch in enumerate(of_ranks):
            if rank % (count // hosts) == 0:
                on_hosts.append({})
            torch.set_rng_state(states[rank])
            plain.zero_grad()
            plain(*batch).backward()
            states[rank] = torch.get_rng_state()
            _add(on_hosts[-1], {n: p.grad * (1.0 / count) for n, p in plain.named_parameters() if p.grad is not None})
        total: dict[str, torch.Tensor] = {}
        for gradients in on_hosts:
            _add(total, gradients)
        plain.zero_grad()
        for name, parameter in plain.named_parameters():
            parameter.grad = total.get(name)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
    return plain


def _add(total: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of the parameters and buffers that are not equal."""
    others = other.state_dict()
    return [name for name, tensor in one.state_dict().items() if not torch.equal(tensor, others[name])]
