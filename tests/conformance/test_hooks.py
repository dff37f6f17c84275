"""Hooks on parameters, optimizers, modules and losses run as in plain PyTorch, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mtcompile
from tests.conformance.loops import INPUTS, Log, Net, Prepare, adamw, assert_same_bits, log_state, smallest_budget, step

pytestmark = pytest.mark.slow  # it compiles many models


def test_hooks_on_parameters_change_the_same_gradients() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        early = model.head.weight.register_hook(lambda g: g * 2)
        calls: list[str] = []

        def tripled(p: torch.Tensor) -> None:
            p.grad.mul_(3)

        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        step(model, optimizer, log)
        model.embed.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        model.extra.weight.register_hook(lambda g: calls.append("none returned"))
        model.extra.bias.register_post_accumulate_grad_hook(tripled)
        step(model, optimizer, log)
        early.remove()
        step(model, optimizer, log)
        log.append(calls)

    assert_same_bits(loop)


def test_optimizers_may_step_each_parameter_inside_backward() -> None:
    """PyTorch's recipe for optimizers that run as gradients arrive."""

    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizers = {p: adamw([p]) for p in model.parameters()}

        def update(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        model = prepare(model)
        for _ in range(3):
            loss = model(**INPUTS[Net])
            loss.backward()
            log.append(loss.detach())
            log_state(model, log)

    assert_same_bits(loop)


def test_hooks_on_optimizers_run_around_each_step() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        calls: list[str] = []

        def before(_: Any, args: Any, kwargs: Any) -> None:
            calls.append("before")
            for p in model.parameters():
                p.grad.add_(0.01)

        optimizer.register_step_pre_hook(before)
        model = prepare(model, optimizer)
        optimizer.register_step_post_hook(lambda *_: calls.append(f"after {float(model.head.bias.detach().sum())}"))
        for _ in range(3):
            step(model, optimizer, log)
        log.append(calls)

    assert_same_bits(loop)


@pytest.mark.long
def test_forward_hooks_and_hooks_on_the_loss_take_effect() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model.extra.register_forward_hook(lambda module, args, output: output * 2)
        model.head.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
        model.register_forward_hook(lambda module, args, output: output * 3)
        model = prepare(model, optimizer)
        step(model, optimizer, log)
        handle = model.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5)
        for _ in range(2):
            loss = model(**INPUTS[Net])
            loss.register_hook(lambda g: g * 0.5)
            loss.backward()
            log_state(model, log)
            optimizer.step()
            optimizer.zero_grad()
            handle.remove()

    assert_same_bits(loop, memory=smallest_budget(Net) + 8192)


def test_backward_hooks_of_modules_are_refused_until_they_are_gone() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        step(model, optimizer, log)
        handle = model.extra.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
        if hasattr(model, "plan"):
            with pytest.raises(mtcompile.CaptureError, match="remove the module's backward hooks"):
                model(**INPUTS[Net])
        handle.remove()
        step(model, optimizer, log)

    assert_same_bits(loop)
