"""``mtcompile train``: its losses are a plain loop's, a resumed training goes on with the same bits, Ctrl-C ends it cleanly."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mtcompile import checkpoint
from mtcompile.cli.app import app
from mtcompile.data.windows import Windows, read_tokens
from mtcompile.errors import CheckpointError
from mtcompile.models.loading import language_model
from mtcompile.models.placing import Room
from mtcompile.trainer.recipe import Recipe, check, learning_rate
from mtcompile.trainer.trainer import Evaluation, Row, train

pytestmark = pytest.mark.slow  # it compiles many models

ROOT = Path(__file__).resolve().parents[2]
LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}


def config(folder: Path, hidden: int, layers: int) -> str:
    path = folder / "config.json"
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    path.write_text(json.dumps({**LLAMA, **sizes}))
    return str(path)


def recipe(folder: Path, hidden: int = 32, layers: int = 1, **options: Any) -> Recipe:
    text = folder / "text.md"
    text.write_text((ROOT / "LICENSE").read_text())  # a text that does not change
    given = {"batch": 4, "seq": 16, "steps": 4, "warmup": 2, "evaluate_every": 0, "device": "cpu", "data": (text,)}
    return Recipe(config(folder, hidden, layers), **{**given, **options})


def losses(wanted: Recipe) -> list[float]:
    rows: list[Row] = []
    train(wanted, lambda row, model: rows.append(row) if isinstance(row, Row) else None)
    return [row.loss for row in rows]


def plain_losses(wanted: Recipe) -> list[float]:
    """An ordinary loop over the same batches, micro-batches with one backward each."""
    stream, _ = read_tokens(wanted.data, None)
    windows = Windows.cut(stream, wanted.length, wanted.batch)
    torch.manual_seed(wanted.seed)
    model, _ = language_model(wanted.model, Room(None, None))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": wanted.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=wanted.rate, betas=(0.9, 0.95))
    found = []
    for step in range(1, (wanted.steps or 0) + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(wanted, wanted.steps or 0, step)
        arguments = windows.batch(step, wanted.batch, wanted.seed).arguments
        parts = [t.chunk(wanted.accumulate) for t in arguments.values()]
        total = torch.zeros(())
        for inputs, targets in zip(*parts, strict=True):
            loss = model(inputs, targets) * (1 / wanted.accumulate)
            loss.backward()
            total = total + loss.detach()
        if wanted.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), wanted.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(total))
    return found


def test_random_weights_on_disk_train_with_the_bits_of_those_in_memory(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16-master32", "update": "backward", "hidden": 64, "layers": 2}
    in_memory = losses(recipe(tmp_path, **options, memory="1MB"))
    assert losses(recipe(tmp_path, **options, memory="1MB", host="1MB", disk=f"{tmp_path}/disk:32MB")) == in_memory


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"hidden": 240, "layers": 2, "memory": "9MiB", "seq": 48, "batch": 2, "evaluate_every": 2}, marks=pytest.mark.long
        ),
        {"memory": "512KiB", "update": "backward", "run_ahead": True, "accumulate": 2},
    ],
    ids=["step", "backward, run ahead, accumulate"],
)
def test_losses_are_those_of_a_plain_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = recipe(tmp_path, **options)
    rows: list[Row | Evaluation] = []
    made = train(wanted, lambda row, model: rows.append(row))
    assert 0 < made.peak_device_bytes <= made.budget_device_bytes
    assert "hidden" not in options or (1e6 < made.parameters < 2e6 and 16 * made.parameters > 2 * made.budget_device_bytes)
    steps = [row for row in rows if isinstance(row, Row)]
    assert [row.loss for row in steps] == plain_losses(wanted)
    evaluated = [row for row in rows if isinstance(row, Evaluation)]
    assert [row.step for row in evaluated] == ([2, 4] if wanted.evaluate_every else [])
    assert all(row.eval_loss < math.log(256) + 1 and row.eval_tokens > 0 for row in evaluated)
    assert all(row.grad_norm is None if wanted.run_ahead else (row.grad_norm or 0) > 0 for row in steps)
    assert made.eval_loss == (evaluated[-1].eval_loss if evaluated else None) and steps[-1].loss < steps[0].loss


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"update": "backward", "clip": 0.0}])
def test_twenty_million_parameters_in_a_quarter_of_their_state(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = recipe(tmp_path, hidden=512, layers=6, steps=6, seq=64, memory="72MiB", **options)
    rows: list[Row] = []
    made = train(wanted, lambda row, model: rows.append(row) if isinstance(row, Row) else None)
    assert 19e6 < made.parameters < 24e6 and 16 * made.parameters > 4 * made.budget_device_bytes >= 4 * made.peak_device_bytes
    assert [row.loss for row in rows] == plain_losses(wanted)


def test_a_resumed_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted = recipe(tmp_path, precision="bf16-master32", update="backward", save=tmp_path / "run")
    whole = losses(replace(wanted, save=None))
    rows: list[Row | Evaluation] = []
    made = train(wanted, lambda row, model: rows.append(row), stop=lambda: len(rows) == 2)
    assert made.interrupted and made.steps == 2 and made.saved == str(tmp_path / "run" / "step-00000002")
    assert losses(replace(wanted, resume=tmp_path / "run")) == whole[2:]
    assert checkpoint.inspect(tmp_path / "run").step == 4 and len(list((tmp_path / "run").glob("*"))) == 3
    for change, said in (({"seed": 1}, "expected seed 0"), ({"steps": 4}, "expected more steps than the 4")):
        with pytest.raises(ValueError, match=said):
            train(replace(wanted, resume=tmp_path / "run", **change))  # type: ignore[arg-type]
    for options, said in (
        ({"batch": 2}, r"found --batch 2 \(4 there\)"),
        ({"lr": 0.5, "weight_decay": 0.0}, r"--allow-change lr --allow-change weight-decay"),
        ({"steps": 6, "allow_change": ("lr",)}, r"found --steps 6 \(4 there\)"),
        ({"allow_change": ("bach",)}, "expected --allow-change to name one of .*found --bach"),
    ):
        with pytest.raises(ValueError, match=said):
            train(replace(wanted, resume=tmp_path / "run" / "step-00000002", **options))  # type: ignore[arg-type]
    longer = replace(wanted, steps=5, allow_change=("steps",), save=None)
    assert train(replace(longer, resume=tmp_path / "run" / "step-00000002")).steps == 5
    with pytest.raises(ValueError, match="with --resume, found no --resume"):
        train(longer)
    with pytest.raises(CheckpointError, match="expected a folder without checkpoints, or to resume from it"):
        check(wanted)
    with pytest.raises(ValueError, match="expected --save with --save-every 2"):
        train(replace(wanted, save=None, save_every=2))
    with pytest.raises(ValueError, match="expected --save with --keep 3"):
        train(replace(wanted, save=None, keep=3))
    often = replace(wanted, save=tmp_path / "often", save_every=1, keep=3)
    train(often)
    assert sorted(path.name for path in (tmp_path / "often").glob("step-*")) == [f"step-0000000{n}" for n in (2, 3, 4)]
    assert losses(replace(wanted, save=None, resume=tmp_path / "often" / "step-00000003")) == whole[3:]
    (tmp_path / "run" / "step-00000004" / "manifest.json").write_bytes(b"no checkpoint")
    assert checkpoint.inspect(tmp_path / "run").step == 2
    with pytest.raises(CheckpointError, match="no manifest of a checkpoint"):
        train(replace(wanted, resume=tmp_path / "run" / "step-00000004"))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    yield from started(tmp_path, "--steps", "100000")


def started(
    tmp_path: Path, *more: str, program: tuple[str, ...] = ("-m", "mtcompile")
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yields a training that goes on, and the file of its metrics."""
    wanted = recipe(tmp_path)
    metrics = tmp_path / "run.jsonl"
    arguments = ["--data", str(wanted.data[0]), "--batch", "4", "--seq", "16", "--device", "cpu"]
    arguments += ["--metrics", str(metrics), "--save", str(tmp_path / "run"), *more]
    command = [sys.executable, *program, "train", wanted.model, *arguments]
    env = {**os.environ, "MT_CACHE": "0", "OMP_NUM_THREADS": "1"}
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, children would ignore it too
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGHUP, before)
    yield process, metrics
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param((signal.SIGINT,), id="once"),
        pytest.param((signal.SIGINT, signal.SIGTERM, signal.SIGINT), id="forwarded", marks=pytest.mark.long),
        pytest.param((signal.SIGHUP,), id="terminal closed", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_it_after_a_step_with_everything_written(
    running: tuple[subprocess.Popen[str], Path], sent: tuple[signal.Signals, ...]
) -> None:
    process, metrics = running
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    for number in sent:
        process.send_signal(number)
        time.sleep(0.003)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out + err and err.count("stopping after this step") == 1
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert set(rows[0]) == {
        "step", "loss", "lr", "grad_norm", "tokens_per_s", "peak_device_bytes", "peak_host_bytes",
    }  # fmt: skip
    assert (
        checkpoint.inspect(metrics.parent / "run").step == len(rows) == rows[-1]["step"]
        and f"interrupted after {len(rows)} of 100000 steps" in out
    )


_SLOW_DISK = """
import os, runpy, sys, time
sync, metrics = os.fsync, sys.argv[sys.argv.index("--metrics") + 1]
def slow(file):
    if os.path.exists(metrics) and open(metrics).read().count("\\n") >= 3:
        print("saving", flush=True)
        time.sleep(2)
    sync(file)
os.fsync = slow
runpy.run_module("mtcompile", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long  # signals at moments of the clock: a busy machine may miss them
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_later_signal_stops_the_last_save_and_says_so(number: signal.Signals, tmp_path: Path) -> None:
    """Signals that come within a sync are one once it has ended; one that comes while Python ends is Python's."""
    for process, _ in started(tmp_path, "--steps", "3", "--save-every", "2", program=("-c", _SLOW_DISK)):
        assert process.stdout is not None
        assert any(line == "saving\n" for line in process.stdout), process.communicate()
        for _ in range(5):
            process.send_signal(number)
            time.sleep(1.2)
        out, err = process.communicate(timeout=60)
    path = tmp_path / "run" / "step-00000002"
    said = f"mtcompile train: interrupted: not saved: what was trained after step 2; the last checkpoint: {path}"
    assert process.returncode in (130, -number) and err.splitlines()[-1] == said, (out, err)
    assert checkpoint.latest(tmp_path / "run") == path


def test_the_command_trains_on_tokens_and_says_what_it_did(tmp_path: Path) -> None:
    wanted = recipe(tmp_path)
    np.random.default_rng(0).integers(0, 200, 5000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    arguments = ["train", wanted.model, "--data", f"{tmp_path}/tokens.bin", "--vocab", "200", "--steps", "3", "--seq", "16"]
    made = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json", "--evaluate-every", "3"])
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found["steps"] == 3 and found["eval_loss"] > 0 and found["limiting_resource"] and found["saved"] is None
    assert "step 3/3  loss " in made.stderr and "held out: loss" in made.stderr and "tokens/s" in made.stderr


def test_the_learning_rate_rises_and_falls() -> None:
    wanted = Recipe("gpt-11m", steps=100, warmup=10, lr=1.0)
    rates = [learning_rate(wanted, 100, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_ranks_take_equal_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"multiple of accumulate=1 times 3 ranks, found 8, of which each of 3 ranks takes"):
        check(Recipe("gpt-11m", memory="64MiB"))
