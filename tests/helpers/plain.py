"""Compare one backward of a plain model with its compiled copy's, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import mtcompile


def assert_plain(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    """The loss, every gradient, and the generator afterwards are the plain run's. Returns the compiled model."""
    torch.compiler.reset()
    compiled = mtcompile.compile(copy.deepcopy(model), **{"memory": "1GiB", "policy": "resident", **options})
    plain, other = results(model, inputs), results(compiled, inputs)
    assert plain.keys() == other.keys()
    differing = {name: (plain[name] - other[name]).abs().max().item() for name in plain if not equal(plain[name], other[name])}
    assert not differing, f"largest difference of each: {differing}"
    return compiled


def results(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The loss and gradients by name, the generator's state, and the buffers."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(7)
    loss = model(*leaves)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()} | {str(i): x.grad for i, x in enumerate(leaves)}
    assert any(gradient is not None for gradient in gradients.values())
    others = {"loss": loss.detach(), "generator": torch.get_rng_state(), **dict(model.named_buffers())}
    return others | {f"grad of {name}": gradient for name, gradient in gradients.items() if gradient is not None}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.stride() == other.stride() and torch.equal(one, other)
