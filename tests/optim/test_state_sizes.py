"""The sizes of optimizer state are those that torch's optimizers allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mtcompile.optim.precision import precision_named
from mtcompile.optim.state_sizes import STATES, state_copies, state_copies_of

MODEL, MASTERS = precision_named("model"), precision_named("bf16-master32")
OPTIONS: dict[str, Any] = {
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "SGD": {"lr": 0.01, "momentum": 0.9},
}


@pytest.mark.parametrize("name", STATES)
def test_torch_keeps_the_states_that_are_listed(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = getattr(torch.optim, name)([parameter], **OPTIONS.get(name, {}))
    parameter.grad = torch.ones(3, 4)
    optimizer.step()
    states = {key for key, value in optimizer.state[parameter].items() if value.shape == parameter.shape}
    assert states == set(STATES[name])
    assert state_copies_of(MODEL, optimizer) == len(states)
    assert state_copies_of(MASTERS, optimizer) == 1 + 2 * len(states)


def test_amsgrad_unknown_optimizers_and_none() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert state_copies_of(MODEL, torch.optim.AdamW(parameters, amsgrad=True)) == 3
    assert state_copies_of(MASTERS, torch.optim.AdamW(parameters, amsgrad=True)) == 5
    for optimizer in (None, torch.optim.Adafactor(parameters)):
        assert state_copies_of(MODEL, optimizer) == 2
        assert state_copies_of(MASTERS, optimizer) == 5


@pytest.mark.parametrize(("name", "plain", "masters"), [("adamw", 2, 5), ("adam", 2, 5), ("sgd-momentum", 1, 3), ("sgd", 0, 1)])
def test_forecasts_count_by_name(name: str, plain: float, masters: float) -> None:
    assert (state_copies(MODEL, name), state_copies(MASTERS, name)) == (plain, masters)
