"""``mtcompile train --config``: a YAML file says what flags say, and what is wrong in it is said with its line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtcompile.cli.app import app
from mtcompile.trainer.recipe import Recipe

pytest.importorskip("yaml")


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Recipe]:
    """The recipes of commands, which end there; the files that these name are there."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "folder/config.json",
        "folder/tokenizer.json",
        "other/config.json",
        "other/tokenizer.json",
        "a.jsonl",
        "b",
        "c",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    seen: list[Recipe] = []

    def stop(recipe: Recipe) -> Any:
        seen.append(recipe)
        raise ValueError("seen")

    monkeypatch.setattr("mtcompile.trainer.jobs.prepared", stop)
    return seen


def train(*arguments: object) -> str:
    output = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert output.exit_code == 2 and "Traceback" not in output.output, output.output
    return output.stderr


def test_a_file_and_flags_are_the_same_recipe_and_flags_come_first(tmp_path: Path, recipes: list[Recipe]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: folder  # of weights\nlr: 1e-4\nseq: 2048\npacking: no\nrun-ahead: true\nupdate: backward\nepochs: 1.5\n"
        "data:\n  - a.jsonl\n  - b\nsave: run\nmemory:\ntoo_long: drop\nwarmup: 0\n"
    )
    flags = [
        "--lr",
        "1e-4",
        "--seq",
        2048,
        "--no-packing",
        "--run-ahead",
        "--update",
        "backward",
        "--epochs",
        1.5,
        "--data",
        "a.jsonl",
    ]
    flags += ["--data", "b", "--save", "run", "--too-long", "drop", "--warmup", 0]
    train("--config", file)
    train("folder", *flags)
    assert recipes[0] == recipes[1] and recipes[0].lr == 1e-4 and recipes[0].data == (Path("a.jsonl"), Path("b"))
    assert recipes[0].memory is None and recipes[0].batch == 8
    train("other", "--config", file, "--lr", "2", "--packing", "--data", "c")
    assert (recipes[2].model, recipes[2].lr, recipes[2].packing, recipes[2].data) == ("other", 2.0, True, (Path("c"),))
    assert recipes[2].seq == 2048
    file.write_text("data: a.jsonl\n")
    train("folder", "--config", file)
    assert recipes[3] == Recipe("folder", (Path("a.jsonl"),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\nsteps: many\n", "line 2: steps: expected a whole number of 1 or more, found 'many'"),
        ("steps: 0\n", "line 1: steps: expected a whole number of 1 or more, found '0'"),
        ("lr: fast\n", "line 1: lr: expected a number of 0 or more, found 'fast'"),
        ("packing: 3\n", "line 1: packing: expected true or false, found '3'"),
        ("update: forward\n", "line 1: update: expected one of step, backward, found 'forward'"),
        ("seq: [1, 2]\n", "line 1: seq: expected a whole number of 1 or more, found a list"),
        ("\nlearning_rate: 1\n", "line 2: expected an option of mtcompile train, found 'learning_rate': known are accumulate,"),
        ("evaluate_evry: 1\n", "found 'evaluate_evry': did you mean evaluate_every?"),
        ("weight-decy: 1\n", "found 'weight-decy': did you mean weight_decay?"),
        ("lr: 1\nlr: 2\n", "line 2: expected lr once, found it again"),
        ("data: {a: b}\n", "line 1: data: expected a value or a list of values, found a mapping"),
        ("[lr]: 1\n", "line 1: expected the name of an option, found a list or a mapping"),
        ("- lr\n", "line 1: expected one 'key: value' a line, found something else"),
        ("lr: 1\n  seq: : 2\n", "line 2: expected YAML, found something else (mapping values are not allowed here)"),
        ("lr: !!python/object/apply:os.getcwd []\n", "line 1: lr: expected a number of 0 or more, found a list"),
        ("lr: \x00\n", "expected YAML, found something else"),
        ("", "Missing argument 'model'"),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    message = train("--config", file)
    assert said in message and (not text or str(file) in message)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "No such file" in train("--config", tmp_path / "none.yaml")
    assert "expected a file, found a folder" in train("--config", tmp_path)
