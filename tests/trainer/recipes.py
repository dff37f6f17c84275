"""Recipes of small folders, what they train, and what the command says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from mtcompile import checkpoint
from mtcompile.cli.app import app
from mtcompile.data.boundaries import document_mask
from mtcompile.data.encoding import encode, load_tokenizer
from mtcompile.data.packing import Rows
from mtcompile.data.records import read_records
from mtcompile.trainer.recipe import Recipe
from mtcompile.trainer.trainer import Row, train
from tests.data.folders import chats, folder_of

ROOT = Path(__file__).resolve().parents[2]
FITS = "64MiB"  # the whole step: it runs without a plan


def recipe_of(path: Path, **options: Any) -> Recipe:
    folder = folder_of(path / "model", config=options.pop("config", None), dtype=options.pop("dtype", torch.float32))
    given = {"batch": 2, "seq": 96, "steps": 3, "warmup": 2, "lr": 1e-2, "evaluate_every": 0, "device": "cpu"}
    return Recipe(str(folder), (chats(path / "chats.jsonl"),), **{**given, "memory": FITS, **options})


def rows_of(recipe: Recipe) -> list[Row]:
    rows: list[Row] = []
    train(recipe, lambda row, model: rows.append(row) if isinstance(row, Row) else None)
    return rows


def rows_for(recipe: Recipe, model: Any) -> Rows:
    samples = encode(read_records(recipe.data), load_tokenizer(Path(recipe.model)), recipe.length)
    rows = Rows.cut(samples, recipe.length, recipe.batch, packed=recipe.packing, held_out=recipe.evaluate_every > 0)
    return replace(rows, mask=lambda documents: document_mask(model.config, documents, model.dtype))


def refused(folder: Path, *arguments: str) -> str:
    output = CliRunner().invoke(app, ["train", str(folder), *arguments, "--device", "cpu"])
    assert output.exit_code == 2 and "Traceback" not in output.output, output.output
    return output.stderr


def rows_in(metrics: Path) -> list[float]:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def killed(*arguments: str, run: Path, metrics: Path) -> int:
    """Kills a training of the command amid its steps, and returns the step that is saved last."""
    command = [sys.executable, "-m", "mtcompile", "train", *arguments, "--save", str(run), "--save-every", "1"]
    environment = {**os.environ, "MT_CACHE": "0", "OMP_NUM_THREADS": "1"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--metrics", str(metrics)], cwd=ROOT, env=environment, **quiet)
    until = time.monotonic() + 120
    while (checkpoint.latest(run) is None or len(rows_in(metrics)) < 5) and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return int(checkpoint.inspect(run).step)
