"""Train a model plainly and compiled, side by side, and say what is bit-equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mtcompile

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["loss"]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: dict[str, Any], steps: int = 3, scheduler: Any = None
) -> list[list[torch.Tensor | None]]:
    """Loss, gradients, stepped weights and buffers of every step, and the generator's final state. Never reseeded."""
    torch.manual_seed(7)
    log: list[list[torch.Tensor | None]] = []
    for _ in range(steps):
        loss = loss_of(model(**data))
        loss.backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        weights = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
        log.append([loss.detach().clone(), *gradients, *weights])
    return [*log, [torch.get_rng_state()]]


def same(one: list[list[torch.Tensor | None]], other: list[list[torch.Tensor | None]]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for row, row2 in zip(one, other, strict=True)
        for a, b in zip(row, row2, strict=True)
    )


def minimum_bytes(model: nn.Module, data: dict[str, Any], make_optimizer: MakeOptimizer = adamw) -> int:
    """The smallest budget that works, as BudgetError says it."""
    copied = copy.deepcopy(model)
    compiled = mtcompile.compile(copied, memory=1, optimizer=make_optimizer(copied.parameters()))
    try:
        compiled(**data)
    except mtcompile.BudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


def compiled_run(
    model: nn.Module, data: dict[str, Any], memory: int | None, make_optimizer: MakeOptimizer = adamw, steps: int = 3
) -> tuple[list[list[torch.Tensor | None]], dict[str, Any], Any]:
    """(what ``train`` saw, the memory report, the compiled model) of a compiled copy."""
    copied = copy.deepcopy(model)
    optimizer = make_optimizer(copied.parameters())
    compiled = mtcompile.compile(copied, memory=memory, optimizer=optimizer)
    log = train(compiled, optimizer, data, steps)
    return log, compiled.memory_report(), compiled


def equal_to_plain(model: nn.Module, data: dict[str, Any], steps: int = 2, **options: Any) -> bool:
    """True where a compiled copy trains with the bits of a plain one, the inputs' changes included."""
    logs = []
    for compiled in (False, True):
        copied, inputs = copy.deepcopy(model), copy.deepcopy(data)
        if compiled:
            copied = mtcompile.compile(copied, **{"memory": "1GiB", **options})
        log = train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), inputs, steps)
        logs.append([*log, [value for value in inputs.values() if isinstance(value, torch.Tensor)]])
    return same(*logs)
