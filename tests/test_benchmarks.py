"""The benchmarks' own arithmetic, and what they say where nothing was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import run, training
from benchmarks.decoder import build, text
from mtcompile.shapes import SHAPES, Decoder, counted, model_flops


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted_as_they_are(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(SHAPES[name])
    assert counted(SHAPES[name])[0] == sum(p.numel() for p in model.parameters())
    assert model_flops(SHAPES[name], 2, 8) > 6 * 16 * counted(SHAPES[name])[1]


def test_tied_weights_are_built_tied() -> None:
    shape = replace(SHAPES["gpt-11m"], tied=True, layers=1)
    model = build(shape, torch.device("cpu"))
    assert model.head.weight is model.embed.weight
    assert counted(shape)[0] == sum(p.numel() for p in model.parameters())


def test_every_case_names_a_shape_and_peers_that_exist() -> None:
    for case in training.CASES.values():
        assert case.shape in SHAPES and set(case.peers) <= set(training.PEERS)
    assert len(training.CASES) == len(training.CPU) + len(training.GPU)


def test_text_is_shifted_by_one() -> None:
    tokens, targets = text(3, 50)
    assert torch.equal(tokens.flatten()[1:], targets.flatten()[:-1]) and int(tokens.max()) < 256


def test_a_table_of_what_was_and_was_not_measured() -> None:
    case = training.GPU[0]
    rows = [
        {"case": case.name, "peer": "plain", "step_s": 0.5, "tokens_per_s": 1234.5, "peak_bytes": 0, "busy": {"compute": 0.5}},
        {"case": case.name, "peer": "torch.compile", "error": "OutOfMemoryError: no room"},
    ]
    table = run.training_table([case], rows)
    assert "| plain | 1,234 | 500.0 |" in table and "50.0%" in table
    assert "OutOfMemoryError: no room" in table and "| mtcompile eager | *not yet measured* |" in table


def test_a_run_goes_on_where_one_of_the_same_commit_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    first = run.Results(path, "cpu")
    done: dict[str, Any] = {"case": "step-11m", "peer": "plain", "step_s": 1.0, "peak_bytes": 1}
    first.rows += [done, {"case": "step-11m", "peer": "checkpoint", "error": "stopped"}]
    first.write()
    assert run.Results(path, "cpu").rows == [done]  # what failed is tried again
    assert run.Results(path, "gpu").rows == []
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "another"}))
    assert run.Results(path, "cpu").rows == []


def test_an_error_of_a_child_is_its_last_line() -> None:
    assert "step-11m/nobody" not in run.in_child(["--one", "step-11m/nobody/None"])["error"]
    assert "nobody" in run.in_child(["--one", "step-11m/nobody/None"])["error"]


def test_without_a_gpu_nothing_is_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for command in (["benchmarks.gpu"], ["benchmarks.run", "--suite", "gpu"]):
        made = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        assert made.returncode == 0 and "nothing was run" in made.stdout
