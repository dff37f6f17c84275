"""A report over several programs says which is which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mtcompile


def test_every_program_says_which_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DEBUG", "1")
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model = mtcompile.compile(plain, memory="100KiB", optimizer=optimizer, update="backward")
    assert model.memory_report()["programs"] == []
    for batch in (4, 6, 4):
        model(torch.ones(batch, 8)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = model.memory_report()["programs"]
    assert [row["program"].partition(", ")[2].partition(" ")[2] for row in rows] == ["float32 (4, 8)", "float32 (6, 8)"]
    assert all(row["program"].startswith("training, ") for row in rows)
    assert [row["last"] for row in rows] == [True, False]
    assert rows[0]["step_time_us"] == model.plan.total_us != rows[1]["step_time_us"]
    assert rows[0]["planned_peak_device_bytes"] == model.plan.peak_bytes["device"]
    assert "float32 (4, 8)" in model.schedule.title
    printed = capsys.readouterr().out
    assert printed.index("program: training") < printed.index("plan for") and "float32 (6, 8)" in printed


def test_micro_batches_are_one_program() -> None:
    model = mtcompile.compile(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), memory="100KiB", accumulate=2)
    model(torch.ones(4, 4)).mean().backward()
    (row,) = model.memory_report()["programs"]
    assert row["last"] and row["program"].count("float32 (2, 4)") == 2 and "micro-batch 2" in row["program"]
