"""Parameter groups, frozen layers and parameters without a gradient are treated as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import lr_scheduler

from tests.conformance.loops import (
    INPUTS,
    Log,
    Mlp,
    Net,
    Prepare,
    adamw,
    assert_same_bits,
    log_state,
    smallest_budget,
    step,
)

pytestmark = pytest.mark.slow  # it compiles many models


def test_groups_keep_hyper_parameters_of_their_own() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        groups = [
            {"params": model.embed.parameters(), "lr": 0.1, "weight_decay": 0.0},
            {"params": model.blocks.parameters(), "betas": (0.8, 0.9)},
            {"params": [*model.statistics.parameters(), *model.extra.parameters()], "amsgrad": True},
            {"params": model.head.parameters(), "lr": 1e-3, "maximize": True},
        ]
        optimizer = adamw(groups)
        model = prepare(model, optimizer)
        for index in range(4):
            step(model, optimizer, log)
            optimizer.param_groups[index]["lr"] *= 0.5

    assert_same_bits(loop)


def test_a_group_may_be_added_in_the_middle_of_training() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.head.parameters())
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        model = prepare(model, optimizer)
        for index in range(4):
            step(model, optimizer, log)
            model.zero_grad()  # parameters that no group has receive gradients too
            if index == 0:
                scheduler.step()
            if index == 1:
                optimizer.add_param_group({"params": model.blocks.parameters(), "lr": 0.03})

    assert_same_bits(loop)


def test_parameters_may_be_frozen_and_unfrozen() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        model.first.requires_grad_(False)
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for change in ((), (model.first,), (model.second,), (), (model.first, model.second)):
            for module in change:
                module.requires_grad_(not module.weight.requires_grad)
            step(model, optimizer, log)

    assert_same_bits(
        loop, Mlp, smallest_budget(Mlp) + 2048
    )  # what is trained later needs a little more than what was trained first


def test_a_layer_may_be_unfrozen_with_a_group_of_its_own() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        model.first.requires_grad_(False)
        optimizer = adamw(model.second.parameters())
        model = prepare(model, optimizer)
        step(model, optimizer, log)
        model.first.requires_grad_(True)
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 1e-3})
        for _ in range(2):
            step(model, optimizer, log)

    assert_same_bits(loop, Mlp, smallest_budget(Mlp) + 2048)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_may_have_no_gradient_in_some_steps(to_none: bool) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = adamw(model.parameters())
        model = prepare(model, optimizer)
        for used in (True, False, False, True):
            model.use_extra = used
            loss = model(**INPUTS[Net])
            loss.backward()
            log_state(model, log)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            log_state(model, log)

    assert_same_bits(loop)
