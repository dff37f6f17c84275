"""Averages of weights, evaluation, autocast and batches of another size between training steps."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.optim import swa_utils

from tests.conformance.loops import (
    INPUTS,
    Log,
    Net,
    Prepare,
    adamw,
    assert_same_bits,
    log_state,
    smallest_budget,
    step,
    tokens,
)

pytestmark = pytest.mark.slow  # it compiles many models


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_of_weights_are_the_same(attached: str, use_buffers: bool) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        def averaged() -> Any:
            rule = swa_utils.get_ema_multi_avg_fn(0.7)
            return swa_utils.AveragedModel(model, multi_avg_fn=rule, use_buffers=use_buffers)

        optimizer = adamw(model.parameters())
        average = averaged() if attached == "before" else None
        model = prepare(model, optimizer)
        average = average or averaged()
        for _ in range(3):
            step(model, optimizer, log)
            average.update_parameters(model)
            log_state(average, log)
        swa_utils.update_bn([INPUTS[Net]["tokens"]], average)
        average.eval()
        with torch.no_grad():
            log.append(average(**INPUTS[Net]))
        log_state(average, log)
        model.load_state_dict(average.module.state_dict())
        step(model, optimizer, log)

    assert_same_bits(loop)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_gives_the_same_results(guard: Any) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for index in range(3):
            step(model, optimizer, log)
            model.eval()
            with guard():
                log.append(model(tokens(3, seed=index)).clone())
            log_state(model, log)
            model.train()
        model.eval()
        with guard():
            log.append(model(tokens(3)).clone())

    assert_same_bits(loop)


@pytest.mark.long
def test_evaluation_under_inference_mode_may_come_first() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        with torch.inference_mode():
            log.append(model(**INPUTS[Net]).clone())
        for _ in range(2):
            step(model, optimizer, log)

    assert_same_bits(loop)


@pytest.mark.long
def test_a_model_may_train_with_all_or_parts_of_it_in_evaluation_mode() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for change in (model.eval, model.train, model.statistics.eval, model.train):
            change()
            step(model, optimizer, log)

    assert_same_bits(loop)


@pytest.mark.long
def test_autocast_around_the_forward_rounds_the_same() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for index in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16) if index != 2 else contextlib.nullcontext():
                loss = model(**INPUTS[Net])
            loss.backward()
            log.append(loss.detach())
            log_state(model, log)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_bits(loop, memory=smallest_budget(Net) + 16384)


@pytest.mark.long
def test_batches_may_change_their_size() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for size in (4, 2, 1, 4):
            step(model, optimizer, log, tokens=tokens(size, seed=size))

    assert_same_bits(loop)
