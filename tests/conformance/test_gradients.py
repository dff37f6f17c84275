"""Gradients may be clipped, scaled, accumulated, read and set between backward and step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.loops import INPUTS, Log, Net, Prepare, adamw, assert_same_bits, log_state, tokens

pytestmark = pytest.mark.slow  # it compiles many models


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_clipping_by_norm_gives_the_same_norms_and_gradients(order: float, foreach: bool | None) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for _ in range(3):
            model(**INPUTS[Net]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order, foreach=foreach)
            log.append(norm)
            log_state(model, log)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_bits(loop)


def test_clipping_by_value_sees_the_same_total_norm() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for _ in range(3):
            model(**INPUTS[Net]).backward()
            log.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            log_state(model, log)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_bits(loop)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_a_step_that_overflowed(fused: bool) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters(), fused=fused)
        model = prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for index in range(5):
            before = model.head.weight.detach().clone()
            loss = model(**INPUTS[Net]) * (float("inf") if index == 1 else 1.0)
            scaler.scale(loss).backward()
            if index % 2:
                scaler.unscale_(optimizer)
                log.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).nan_to_num())
            scaler.step(optimizer)
            scaler.update()
            log.append(scaler.get_scale())
            assert torch.equal(before, model.head.weight) == (index == 1)
            optimizer.zero_grad()
            log_state(model, log)
        assert len({entry for entry in log if isinstance(entry, float)}) > 1

    assert_same_bits(loop)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate_over_micro_batches(to_none: bool) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for index in range(3):
            for part in range(4):
                (model(tokens=tokens(seed=10 * index + part)) / 4).backward()
                log_state(model, log)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    assert_same_bits(loop)


def test_gradients_may_be_kept_read_and_set_by_hand() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        gradients = []
        for index in range(4):
            weight = model.head.weight
            if index == 1:  # before the backward, which adds to it
                weight.grad = torch.ones_like(weight)
            model(**INPUTS[Net]).backward()
            gradients.append([p.grad for p in model.parameters()])
            if index == 2:
                weight.grad = weight.grad.sign() * 0.1
                model.extra.weight.grad = None
                model.extra.bias.grad.mul_(-1.0)
            log_state(model, log)
            optimizer.step()
            optimizer.zero_grad()
        log.extend(gradients)

    assert_same_bits(loop)


def test_an_optimizer_steps_from_gradients_that_autograd_returned() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for _ in range(3):
            chosen = [*model.blocks.parameters(), model.head.weight]
            gradients = torch.autograd.grad(model(**INPUTS[Net]), chosen)
            log.append(list(gradients))
            for p, g in zip(chosen, gradients, strict=True):
                p.grad = g * 0.5
            optimizer.step()
            optimizer.zero_grad()
            log_state(model, log)

    assert_same_bits(loop)
