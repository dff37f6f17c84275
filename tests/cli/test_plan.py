"""``mtcompile plan`` says whether a step fits, and what would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtcompile.cli.app import app
from mtcompile.models.shapes import SHAPES
from mtcompile.passes.planning.policies import POLICIES

pytestmark = pytest.mark.slow  # it compiles many models


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_the_command_plans_shapes_factories_and_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "gpt-11m", replace(SHAPES["gpt-11m"], layers=1, vocabulary=512))
    code, text = run("gpt-11m", "--batch", "2", "--seq", "64", "--memory", "12MiB", "--json", "--policy", "all")
    printed = json.loads(text)
    assert code == 0 and printed["feasible"] and {row["policy"] for row in printed["rows"]} == set(POLICIES)
    for key in ("parameters", "state_bytes", "budget_bytes", "peak_bytes", "minimum_device_bytes", "step_time_us"):
        assert printed[key]
    assert printed["limiting_resource"] and printed["busy"]["compute"] > 0 and printed["precision"] == "model"
    fitting = [row["step_time_us"] for row in printed["rows"] if row["feasible"]]
    assert fitting and printed["step_time_us"] <= min(fitting) * 1.000001
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def make(batch, seq):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(seq, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))\n"
        "    class Loss(torch.nn.Module):\n"
        "        def __init__(self):\n            super().__init__()\n            self.model = model\n"
        "        def forward(self, x):\n            return self.model(x).square().mean()\n"
        "    return Loss(), {'x': torch.zeros(batch, seq)}\n"
    )
    code, text = run(f"{tmp_path}/own.py:make", "--batch", "4", "--seq", "16", "--memory", "1MiB")
    assert code == 0 and "own.py:make" in text
    code, text = run(f"{tmp_path}/own.py:make", "--batch", "4", "--seq", "16", "--memory", "2KiB")
    assert code == 3 and "does not fit" in text and "Ways out" in text
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "vocab_size": 100}))
    code, text = run(f"{tmp_path}/config.json", "--seq", "32")
    assert code == 0 and "fits, if the host has" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("nobody",),
        ("gpt-11m", "--memory", "12XB"),
        ("gpt-11m", "--machine", "abacus"),
        ("gpt-11m", "--policy", "hope"),
        ("/none/such.json",),
        ("gpt-11m", "--memory", ""),
        ("/none/such.py:make",),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(arguments: tuple[str, ...]) -> None:
    code, text = run(*arguments)
    assert code == 2 and text.startswith("mtcompile plan: ") and "expected" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("gpt-11n",), "gpt-11m"),
        (("llama-8b", "--memory", "24"), '"24GiB"'),
        (("llama-8b", "--host", "64"), '"64GiB"'),
        (("llama-8b", "--host", "1GiB", "--disk", "/tmp:400"), '"400GiB"'),
        (("llama-8b", "--machine", "rtx490"), "rtx4090"),
        (("llama-8b", "--machine", "{folder}/mien.json"), "{folder}/mine.json"),
        (("llama-8b", "--policy", "megatran"), "megatrain"),
        (("llama-8b", "--optimizer", "adafaktor"), "adafactor"),
        (("{folder}/mien.json",), "{folder}/mine.json"),
        (("{folder}/modle.py:make",), "{folder}/model.py"),
        (("{folder}/model.py:mkae",), "make"),
    ],
)
def test_what_was_meant_is_said_before_anything_is_captured(
    arguments: tuple[str, ...], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captures(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be captured")

    monkeypatch.setattr("mtcompile.forecast.request.trace_joint", captures)
    monkeypatch.setattr("mtcompile.forecast.request._captured_shape", captures)
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "model.py").write_text("def make(batch, seq): ...")
    code, text = run(*(argument.replace("{folder}", str(tmp_path)) for argument in arguments))
    assert code == 2 and f"did you mean {meant.replace('{folder}', str(tmp_path))}?" in text


@pytest.mark.long
def test_what_does_not_fit_is_shown_all_the_same_when_forced() -> None:
    code, text = run("gpt-11m", "--seq", "64", "--memory", "3MiB", "--force")
    assert code == 3 and "if there were room" in text and "Ways out" in text and "workspace" in text


def test_the_command_plans_fragments_of_a_layer_that_is_larger_than_the_device(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Wide(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.first = torch.nn.Linear(64, 4096)\n"
        "    def forward(self, x):\n        return self.first(x).square().mean()\n"
        "def make(batch, seq):\n    return Wide(), {'x': torch.zeros(batch, 64)}\n"
    )
    step = (f"{tmp_path}/own.py:make", "--batch", "4", "--seq", "64", "--memory", "600KiB")
    code, text = run(*step, "--json")  # by default, since it does not fit whole
    assert code == 0 and json.loads(text)["peak_bytes"]["device"] <= 600 * 1024
    assert run(*step, "--fragments", "rows")[0] == 2
