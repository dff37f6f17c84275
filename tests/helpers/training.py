"""Train a model plainly and compiled, side by side, and say what is bit-equal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mtcompile
from mtcompile.torch_private import UsedGradient

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["loss"]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: dict[str, Any], steps: int = 3, scheduler: Any = None
) -> list[list[torch.Tensor | None]]:
    """Loss, gradients that are left, stepped weights and buffers of each step; the generator's last state. Never reseeded."""
    torch.manual_seed(7)
    log: list[list[torch.Tensor | None]] = []
    for _ in range(steps):
        loss = loss_of(model(**data))
        loss.backward()
        left = (None if isinstance(p.grad, UsedGradient) else p.grad for p in model.parameters())
        gradients = [None if gradient is None else gradient.clone() for gradient in left]
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


def minimum_bytes(model: nn.Module, data: dict[str, Any], make_optimizer: MakeOptimizer = adamw, **options: Any) -> int:
    """The smallest budget that works, as BudgetError says it."""
    copied = copy.deepcopy(model)
    compiled = mtcompile.compile(copied, memory=1, optimizer=make_optimizer(copied.parameters()), **options)
    try:
        compiled(**data)
    except mtcompile.BudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


def compiled_run(
    model: nn.Module,
    data: dict[str, Any],
    memory: int | None,
    make_optimizer: MakeOptimizer = adamw,
    steps: int = 3,
    **options: Any,
) -> tuple[list[list[torch.Tensor | None]], dict[str, Any], Any]:
    """(what ``train`` saw, the memory report, the compiled model) of a compiled copy."""
    copied = copy.deepcopy(model)
    optimizer = make_optimizer(copied.parameters())
    compiled = mtcompile.compile(copied, memory=memory, optimizer=optimizer, **options)
    log = train(compiled, optimizer, data, steps)
    return log, compiled.memory_report(), compiled


def assert_plain_at_three_budgets(model: nn.Module, data: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Loss, gradients, weights and buffers are a plain run's without a limit, at 1.3 times the smallest budget, and at that.
    Returns the memory report of the last."""
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    least = minimum_bytes(model, data, **options)
    report: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a peak above the plan
        for memory in (None, int(least * 1.3), least):
            actual, report, _ = compiled_run(model, data, memory, **options)
            assert same(expected, actual)
            assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
    return report


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


def assert_plain(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    """The loss, every gradient, and the generator afterwards are the plain run's. Returns the compiled model."""
    torch.compiler.reset()
    compiled = mtcompile.compile(copy.deepcopy(model), **{"memory": "1GiB", "policy": "resident", **options})
    plain, other = one_backward(model, inputs), one_backward(compiled, inputs)
    assert plain.keys() == other.keys()
    differing = {name: (plain[name] - other[name]).abs().max().item() for name in plain if not _equal(plain[name], other[name])}
    assert not differing, f"largest difference of each: {differing}"
    return compiled


def compiled_whole(model: nn.Module) -> nn.Module:
    """Returns the model, compiled as one graph: it is refused what it could do in parts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mtcompile.compile(model, memory="1GiB", optimizer=optimizer, update="backward")  # type: ignore[no-any-return]


def one_backward(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The loss and gradients by name, the generator's state, and the buffers."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(7)
    loss = model(*leaves)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()} | {str(i): x.grad for i, x in enumerate(leaves)}
    assert any(gradient is not None for gradient in gradients.values())
    others = {"loss": loss.detach(), "generator": torch.get_rng_state(), **dict(model.named_buffers())}
    return others | {f"grad of {name}": gradient for name, gradient in gradients.items() if gradient is not None}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.stride() == other.stride() and torch.equal(one, other)
