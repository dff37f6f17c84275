"""Checkpoints and copies of a model and its optimizer hold what those of a plain run hold."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import mtcompile
from tests.conformance.loops import (
    INPUTS,
    Log,
    Net,
    Prepare,
    adamw,
    assert_same_bits,
    build,
    log_state,
    smallest_budget,
    step,
)

pytestmark = pytest.mark.slow  # it compiles many models


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state: Any) -> Any:
    from safetensors.torch import load, save

    return load(save(state))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("into", ["plain", "compiled", "same"])
def test_training_goes_on_from_a_checkpoint(into: str, fused: bool) -> None:
    """A run that is saved after two steps and goes on in another pair of model and optimizer, or in the same."""

    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters(), fused=fused)
        model = prepare(model, optimizer)
        for _ in range(2):
            step(model, optimizer, log)
        saved = through_torch({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        log.append(saved)
        if into == "same":
            step(model, optimizer, [])
        else:
            model = Net()
            optimizer = adamw(model.parameters(), fused=fused)
            if into == "compiled":
                model = prepare(model, optimizer)
        log.append(str(model.load_state_dict(saved["model"])))
        optimizer.load_state_dict(saved["optimizer"])
        torch.manual_seed(9)
        for _ in range(2):
            step(model, optimizer, log)

    assert_same_bits(loop)


def test_a_plain_run_goes_on_compiled() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        for _ in range(2):
            step(model, optimizer, log)
        model(**INPUTS[Net]).backward()  # gradients that are waiting for a step
        model = prepare(model, optimizer)
        optimizer.step()
        for _ in range(2):
            step(model, optimizer, log)

    assert_same_bits(loop)


def test_weights_may_come_from_safetensors_and_be_assigned() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        step(model, optimizer, log)
        saved = through_safetensors(model.state_dict())
        log.append(dict(sorted(saved.items())))
        step(model, optimizer, log)
        model.load_state_dict(saved)
        step(model, optimizer, log)
        model.load_state_dict({name: value.clone() for name, value in saved.items()}, assign=True)
        optimizer = adamw(model.parameters())
        if hasattr(model, "bind"):
            model.bind(optimizer)
        step(model, optimizer, log)

    assert_same_bits(loop)


def test_a_saved_parameter_takes_its_own_bytes() -> None:
    """The few weights of one module are saved without their neighbours in home memory."""
    model = build(Net)
    plain = io.BytesIO()
    torch.save(model.blocks[0].norm.state_dict(), plain)
    compiled = mtcompile.compile(model, memory=smallest_budget(Net), device="cpu")
    compiled(**INPUTS[Net]).backward()
    file = io.BytesIO()
    torch.save(compiled.blocks[0].norm.state_dict(), file)
    assert len(file.getvalue()) <= len(plain.getvalue()) + 1024


def test_a_copy_of_model_and_optimizer_goes_its_own_way() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        step(model, optimizer, log)
        other, its = copy.deepcopy((model, optimizer))
        assert type(other) is Net
        state = torch.get_rng_state()
        step(other, its, log)
        torch.set_rng_state(state)
        step(model, optimizer, log)
        log_state(other, log)

    assert_same_bits(loop)


def test_a_copy_may_be_taken_between_forward_and_backward() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for _ in range(2):
            loss = model(**INPUTS[Net])
            other = copy.deepcopy(model)
            loss.backward()
            log_state(other, log)
            optimizer.step()
            log_state(model, log)
            optimizer.zero_grad()

    assert_same_bits(loop)
