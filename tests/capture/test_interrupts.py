"""Ctrl-C amid tracing: torch's dispatcher would end the process where it has called Python from C++."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile


@pytest.mark.parametrize("at", [1, 5, 40, 130])  # in Dynamo's tracing, then in that of the backward
def test_ctrl_c_where_the_dispatcher_calls_python_is_an_interrupt(at: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8 + at), nn.ReLU())  # no two of one shape, whose trace would be kept
    model: Any = mtcompile.compile(plain, memory="1MiB", device="cpu")
    x, asked = torch.randn(2, 8), 0

    def ctrl_c_at_the_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal asked
        if event == "call" and frame.f_code.co_name == "find_torch_dispatch_rule":
            asked += 1
            if asked == at:
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests may ignore it
    try:
        sys.setprofile(ctrl_c_at_the_call)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGINT) == before
    model(x).sum().backward()
    weight = plain[0].weight.detach().clone().requires_grad_()
    torch.relu(nn.functional.linear(x, weight, plain[0].bias)).sum().backward()
    assert plain[0].weight.grad is not None and weight.grad is not None
    assert torch.equal(plain[0].weight.grad, weight.grad)
