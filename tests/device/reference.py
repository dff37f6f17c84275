"""Train a compiled model beside plain PyTorch on the same device, and compare bits at every step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.passes.generators import generator_state, set_generator_state
from tests.helpers.training import MakeOptimizer, adamw, loss_of


def on(device: torch.device, data: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in data.items()}


def compare(
    compiled: Any,
    optimizer: torch.optim.Optimizer,
    plain: nn.Module,
    data: dict[str, Any],
    device: torch.device,
    steps: int = 3,
    make_optimizer: MakeOptimizer = adamw,
) -> None:
    """Losses, gradients, stepped weights, buffers and the generator's state, with ``torch.equal``.

    ``plain`` computes on ``device``; its weights are updated where the compiled model's are at home, by the same optimizer,
    since a CPU and a GPU round an update differently.
    """
    plain = copy.deepcopy(plain).to(device)
    data = on(device, data)
    state = generator_state(str(device))
    reference: list[nn.Parameter] = []
    updates: Any = None
    for step in range(steps):
        set_generator_state(str(device), state)
        loss = loss_of(compiled(**data))
        assert loss.device == device
        loss.backward()
        after = generator_state(str(device))
        if updates is None:  # homes are known once it has run
            homes = [p.device for p in compiled.parameters()]
            weights = [w.detach().to(home).clone() for w, home in zip(plain.parameters(), homes, strict=True)]
            reference = [nn.Parameter(w) for w in weights]
            updates = make_optimizer(reference)
        set_generator_state(str(device), state)
        expected = loss_of(plain(**data))
        expected.backward()
        state = generator_state(str(device))
        assert torch.equal(loss, expected), f"loss of step {step}"
        assert torch.equal(after, state), f"generator after step {step}"
        optimizer_sees = zip(compiled.named_parameters(), plain.parameters(), reference, strict=True)
        for (name, p), q, r in optimizer_sees:
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert p.grad.device == p.device
                assert torch.equal(p.grad.to(device), q.grad), f"gradient of {name} in step {step}"
                r.grad = q.grad.to(r.device)
        optimizer.step()
        updates.step()
        for (name, p), q, r in zip(compiled.named_parameters(), plain.parameters(), reference, strict=True):
            assert p.device == r.device, name
            assert torch.equal(p, r), f"{name} after step {step}"
            q.data.copy_(r.data)
        for (name, b), c in zip(compiled.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(b.to(device), c), f"{name} after step {step}"
        optimizer.zero_grad()
        updates.zero_grad()
        plain.zero_grad()


def floor(model: nn.Module, data: dict[str, Any], device: torch.device, **options: Any) -> int:
    with pytest.raises(mtcompile.BudgetError) as error:
        compiled_at(model, 1, device, **options)[0](**on(device, data))
    return int(error.value.minimum_bytes)


def compiled_at(model: nn.Module, memory: int | None, device: torch.device, **options: Any) -> tuple[Any, Any]:
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    return mtcompile.compile(copied, memory=memory, optimizer=optimizer, device=device, **options), optimizer
