"""Another budget for the step that was planned last makes nothing again, and gets the plan that it would get alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mtcompile
from mtcompile.forecast import forms, request
from mtcompile.models.shapes import SHAPES

pytestmark = pytest.mark.long
BUDGETS = ("32MiB", "40MiB", "32MiB")


def test_further_budgets_of_a_step_get_the_plans_that_they_would_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_EFFORT", "quick")
    monkeypatch.setenv("MT_CACHE", "0")
    monkeypatch.setitem(SHAPES, "gpt-11m", replace(SHAPES["gpt-11m"], layers=2, vocabulary=512))
    captured = list[Any]()
    capture = request._captured_shape
    monkeypatch.setattr(request, "_captured_shape", lambda *taken: captured.append(taken[2:]) or capture(*taken))

    def planned(memory: str, batch: int = 2, alone: bool = False) -> str:
        if alone:
            monkeypatch.setattr(forms._latest, "step", None)
        forecast = mtcompile.plan("gpt-11m", batch=batch, seq=64, memory=memory, update="backward", advise=True)
        return forecast.to_json()

    apart = [planned(memory, alone=True) for memory in BUDGETS[:2]]
    assert apart[0] != apart[1]
    monkeypatch.setattr(forms._latest, "step", None)
    captured.clear()
    assert [planned(memory) for memory in BUDGETS] == [*apart, apart[0]] and captured == [(2, 64)]
    assert planned(BUDGETS[0], batch=1) != apart[0] and captured == [(2, 64), (1, 64)]
    monkeypatch.setitem(SHAPES, "gpt-11m", replace(SHAPES["gpt-11m"], layers=1))
    assert planned("64MiB", batch=1) and captured == [(2, 64), (1, 64), (1, 64)]
