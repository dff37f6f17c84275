"""Planning that takes long says what it does, can be interrupted at once, and fails in a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile import progress
from mtcompile.passes.analysis.cost import Machine

ROOT = Path(__file__).parents[1]
TOY = """
import signal, sys, torch, mtcompile
from torch import nn

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(64), nn.MultiheadAttention(64, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0] + self.mlp(h)

model = nn.Sequential(*(Block() for _ in range(64)))
compiled = mtcompile.compile(model, memory="3MiB", device="cpu")
print("calling", file=sys.stderr, flush=True)
try:
    compiled(torch.randn(2, 16, 64)).square().mean().backward()
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_a_deep_model_says_soon_what_it_does_and_can_be_interrupted() -> None:
    environment = {**os.environ, "MT_CACHE": "0", "MT_PROGRESS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", TOY], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:  # it is long in planning when it says so
        lines.append(line)
        if line.startswith("mtcompile: planning"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    # Python ends so too where the interrupt, though caught, went through an exec() of text, as dataclasses call it.
    assert process.wait(60) in (0, -signal.SIGINT)
    assert any(line.startswith("mtcompile: ") for line in lines), lines
    assert "interrupted" in rest


def test_a_first_step_that_takes_long_says_once_what_other_options_gain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    monkeypatch.setenv("MT_PROGRESS", "1")
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    slow_host = replace(Machine(), flops=1e9, host_gbps=0.5)
    compiled = mtcompile.compile(model, memory="2MiB", optimizer=optimizer, device="cpu", throttle=slow_host)
    told = []
    for rows in (8, 8, 16):
        compiled(torch.randn(rows, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(capsys.readouterr().err)
    first, *later = ([line for line in text.splitlines() if " a step  " in line] for text in told)
    assert any(line.endswith('  update="backward"') for line in first), told
    assert not any(line in text for text in told[1:] for line in first) and not later[0], told


@pytest.mark.slow
def test_only_what_takes_long_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.2)
    monkeypatch.setenv("MT_PROGRESS", "1")
    with progress.doing("sleeping"):
        time.sleep(0.01)
    assert capsys.readouterr().err == ""
    with progress.doing("sleeping"), progress.doing("dreaming"):
        progress.tell("dreaming, 1 of 2")
        time.sleep(0.6)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "mtcompile: dreaming, 1 of 2 (0 s)"
    assert told[-1].startswith("mtcompile: ready after")
    with progress.doing("sleeping"):
        progress.tell("")
        time.sleep(0.4)
    assert capsys.readouterr().err == ""
    with progress.silently(), progress.doing("sleeping"):
        time.sleep(0.4)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("MT_PROGRESS", "0")
    with progress.doing("sleeping"):
        time.sleep(0.4)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_refusals_come_without_the_frames_of_mtcompile(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(error: BaseException) -> str:
        return "".join(traceback.format_exception(error))

    def refused() -> mtcompile.BudgetError:
        with pytest.raises(mtcompile.BudgetError) as error:
            mtcompile.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), memory=1)(torch.ones(4, 8))
        return error.value

    assert shown(refused()).count("mtcompile/") < 6, textwrap.indent(shown(refused()), "| ")
    monkeypatch.setenv("MT_DEBUG", "1")
    assert shown(refused()).count("mtcompile/") > 10
