"""Calls without gradients that take more than those before them: refused before they run, or said to have taken more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.execution.plain import calls


class Growing(nn.Module):
    """What a call takes grows with the cube of its length, with ``copies`` and with ``values``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.copies = nn.Linear(16, 16), 1

    def forward(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        h = self.linear(x).repeat(self.copies if values is None else int(values), 1)
        q = h[: len(x)].mean(-1)
        return h.mean() + (q[:, None, None] * q[None, :, None] * q[None, None, :]).mean()


def test_calls_that_take_more_than_their_first_are_refused_before_they_run_or_said_to_have_taken_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, ran, memory, x = calls.GradientFreeCalls._run, list[bool](), 1 << 20, torch.randn(16, 16)
    monkeypatch.setattr(calls.GradientFreeCalls, "_run", lambda *args: ran.append(True) or run(*args))

    def refused(model: nn.Module, *args: Tensor) -> bool:
        with pytest.raises(mtcompile.BudgetError) as refusal:
            model(*args)
        assert refusal.value.minimum_bytes > memory and bool(ran) == ("has run" in str(refusal.value))
        return not ran

    def compiled() -> Any:
        return mtcompile.compile(copy.deepcopy(plain), memory=memory, device="cpu")

    plain = Growing()
    with torch.no_grad():
        for copies in (200, 1500):  # takes more than planned for at the 3rd call, which no number of repetitions lets measure
            model, values = compiled(), torch.tensor(copies)
            for _ in range(2):
                assert torch.equal(model(x, torch.tensor(1)), plain(x, torch.tensor(1)))
            if copies == 200:  # within the budget
                assert torch.equal(model(x, values), plain(x, values))
            else:
                assert not refused(model, x, values) and model.memory_report()["peak_device_bytes"] > memory
        model = compiled()
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
        model.copies = 1500
        ran.clear()
        assert refused(model, x)
        model.copies = 1
        assert torch.equal(model(x), plain(x))
        model = compiled()
        for copies in (1, 300):  # of calls with other attributes, the largest says what one more may take
            model.copies = plain.copies = copies
            assert torch.equal(model(x[:4]), plain(x[:4]))
        model.copies, plain.copies = 6000, 1
        ran.clear()
        assert refused(model, x[:4])
        model = compiled()
        for length in (40, 48, 56):
            assert torch.equal(model(longer := torch.randn(length, 16)), plain(longer))
        for length in (66, 80):
            ran.clear()
            assert refused(model, torch.randn(length, 16))
        assert model.memory_report()["peak_device_bytes"] <= memory
