"""Saves in the background, and loads that fail: as if they had not begun, or all of it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mtcompile import checkpoint
from mtcompile.checkpoint import shard_writer
from mtcompile.errors import BudgetError, CheckpointError
from mtcompile.machine import device
from tests.checkpoint.runs import WAYS, Run, seeded

pytestmark = pytest.mark.slow  # it compiles models


def in_background(run: Run, folder: Path, step: int = 2) -> checkpoint.BackgroundSave:
    return checkpoint.save_in_background(folder, run.model, run.optimizer, step=step, others={"scheduler": run.scheduler})


@pytest.mark.parametrize("way", ["plain", "backward"])
def test_it_saves_one_step_whatever_comes_after(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are written when three more steps have been trained."""
    seeded()
    run = Run(WAYS[way])
    for _ in range(2):
        run.step()
    plain = shard_writer.write_shard
    saved: list[checkpoint.BackgroundSave] = []
    trained: list[Any] = []

    def late(*args: Any) -> Any:
        while len(trained) < 3:
            pass
        return plain(*args)

    monkeypatch.setattr("mtcompile.checkpoint.writing.write_shard", late)
    saved.append(in_background(run, tmp_path))
    assert "being written" in repr(saved[0]) and not list(tmp_path.glob("step-*"))
    trained += [run.step() for _ in range(3)]
    path = saved[0].wait()
    assert path == checkpoint.latest(tmp_path) and "written in" in repr(saved[0])
    other = Run()
    other.load(tmp_path)
    assert all(map(torch.equal, trained, [other.step() for _ in range(3)]))


def test_what_goes_wrong_is_raised_by_wait_and_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match="bytes free there"), pytest.warns(UserWarning, match="step 2 could not be saved"):
            in_background(run, tmp_path).wait()
        with pytest.warns(UserWarning, match="step 2 could not be saved"):
            in_background(run, tmp_path / "other").join()
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.save(tmp_path / "other", run.model, step=3)
    checkpoint.save(tmp_path / "other", run.model, step=3)
    assert not list(tmp_path.glob(".step-*"))


def test_what_is_loaded_is_what_was_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shard_writer.write_shard
    monkeypatch.setattr("mtcompile.checkpoint.writing.write_shard", lambda *args: time.sleep(0.1) or plain(*args))
    run = Run()
    run.save(tmp_path, step=1)
    for step in (2, 3):
        in_background(run, tmp_path, step=step)
        assert run.load(tmp_path).step == step
    in_background(run, tmp_path, step=4)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000004"


def failing(*_: Any) -> int:
    raise OSError(5, "Input/output error")


def test_a_copy_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_rooms", lambda root: {"available": 100})
    with pytest.raises(BudgetError, match=r"copy of what is saved, found 95 B \(available"):
        checkpoint.save_in_background(tmp_path, nn.Linear(10, 10), step=1)
    assert not list(tmp_path.iterdir())


def test_the_end_of_a_program_waits(tmp_path: Path) -> None:
    code = """if True:
        import sys, torch
        from mtcompile import checkpoint
        for step in (1, 2):
            model = torch.nn.Linear(100, 100)
            checkpoint.save_in_background(sys.argv[1], model, step=step)
        assert "torch._dynamo" not in sys.modules  # which takes as long to load as all else
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert checkpoint.load(tmp_path, nn.Linear(100, 100)).step == 2


class Refusing:
    """Takes no other state than its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("not this one")


def test_a_load_that_fails_has_changed_nothing(tmp_path: Path) -> None:
    run = Run()
    run.step()
    others = {"scheduler": run.scheduler, "refusing": Refusing()}
    checkpoint.save(tmp_path, run.model, run.optimizer, step=1, others=others)
    other = Run()
    before, state = other.state(), copy.deepcopy(other.scheduler.state_dict())
    with pytest.raises(RuntimeError, match="not this one"):
        checkpoint.load(tmp_path, other.model, other.optimizer, others={"scheduler": other.scheduler, "refusing": Refusing()})
    assert all(map(torch.equal, before, other.state())) and other.scheduler.state_dict() == state and not other.optimizer.state
    other.model.norm.running_mean = torch.zeros(1).expand(24)
    with pytest.raises(CheckpointError, match=r"norm.running_mean.* was expanded"):
        other.load(tmp_path)
    assert all(map(torch.equal, before[:3], other.state()[:3])) and other.scheduler.state_dict() == state


def test_a_hook_that_fails_is_told_with_what_was_loaded(tmp_path: Path) -> None:
    run = Run()
    run.step()
    run.save(tmp_path)

    def refuse(*_: Any) -> None:
        raise RuntimeError("not this optimizer")

    hooked: Callable[..., Any] = run.optimizer.register_load_state_dict_pre_hook
    hooked(refuse)
    with pytest.raises(CheckpointError, match=r"not this optimizer.*Loaded so far: the model, and not the optimizer"):
        run.load(tmp_path)


def test_a_model_inside_another_is_not_saved_between_backward_and_step(tmp_path: Path) -> None:
    run = Run(WAYS["backward"])
    outer = nn.Sequential(run.model)
    tokens = torch.arange(8)
    run.model(tokens, tokens).backward()
    for save in (checkpoint.save, checkpoint.save_in_background):
        with pytest.raises(CheckpointError, match="has not ended the step; save after it"):
            save(tmp_path, outer, run.optimizer, step=1)
