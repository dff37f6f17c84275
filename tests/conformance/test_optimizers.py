"""Every optimizer of torch steps a compiled model to the same bits, closures included."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mtcompile
from tests.conformance.loops import INPUTS, Log, Mlp, Net, Prepare, adamw, assert_same_bits, log_state, step, tokens

pytestmark = pytest.mark.slow  # it compiles many models

# What each class needs to make a visible step on these models.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.05},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Muon": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}
NO_OPTIMIZERS = {
    "Optimizer": "the base class of the others",
    "SparseAdam": "it takes sparse gradients only, which compiled steps do not make: test_sparse_gradients_are_refused",
}


def test_every_optimizer_of_torch_is_tested_or_excepted() -> None:
    classes = {n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    assert classes == OPTIMIZERS.keys() | NO_OPTIMIZERS.keys()


def _variants(name: str) -> list[dict[str, Any]]:
    """Default, one parameter at a time, many at once, fused: what the class has."""
    accepted = inspect.signature(getattr(torch.optim, name)).parameters
    return [{}, *({key: value} for key, value in (("foreach", False), ("foreach", True), ("fused", True)) if key in accepted)]


VARIANTS = [(name, variant) for name in OPTIMIZERS for variant in _variants(name)]


@pytest.mark.parametrize("name, variant", VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "default")
def test_every_optimizer_steps_to_the_same_bits(name: str, variant: dict[str, Any]) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        parameters = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]  # Muon is for matrices
        optimizer = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name], **variant)
        model = prepare(model, optimizer)

        def closure() -> torch.Tensor:
            model.zero_grad()
            loss = model(**INPUTS[Mlp])
            loss.backward()
            return loss

        for _ in range(2):
            before = [p.detach().clone() for p in parameters]
            if name == "LBFGS":
                log.append(optimizer.step(closure).detach())
            else:
                step(model, optimizer, log)
            assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
            model.zero_grad()
        log.append([dict(state) for state in optimizer.state.values()])

    assert_same_bits(loop, Mlp)


def test_a_learning_rate_may_be_a_tensor() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters(), lr=torch.tensor(0.01), foreach=False)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        model = prepare(model, optimizer)
        for _ in range(3):
            step(model, optimizer, log)
            scheduler.step()
            log.append(optimizer.param_groups[0]["lr"].clone())

    assert_same_bits(loop, Mlp)


def test_lbfgs_may_search_along_a_line() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        model = prepare(model, optimizer)
        model.eval()  # a line search asks for one function, without dropout

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**INPUTS[Mlp])
            loss.backward()
            return loss

        for _ in range(3):
            log.append(optimizer.step(closure).detach())
            log_state(model, log)

    assert_same_bits(loop, Mlp)


def test_a_closure_may_run_the_model_inside_a_step() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**INPUTS[Net])
            loss.backward()
            return loss

        for _ in range(3):
            log.append(optimizer.step(closure).detach())
            log_state(model, log)

    assert_same_bits(loop)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.embed(words).square().mean()


def test_sparse_gradients_are_refused() -> None:
    model = mtcompile.compile(Bag(), memory="1MiB", device="cpu")
    with pytest.raises(mtcompile.CaptureError, match="sparse"):
        model(tokens())
