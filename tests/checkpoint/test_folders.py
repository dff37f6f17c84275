"""The folder that a training saves into is tried before its first step."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.checkpoint.verifying import verified
from mtcompile.trainer.recipe import Recipe, check


def failing(number: int) -> Any:
    def fail(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def entered(folder: Path) -> None:
    model = nn.Linear(4, 4)
    with checkpoint.autosave(folder, model, torch.optim.AdamW(model.parameters())):
        pytest.fail("a step would have been trained")


@pytest.mark.parametrize(("place", "name"), [(Path, "mkdir"), (os, "fsync"), (Path, "rename")])
def test_a_folder_that_takes_no_files_is_refused_before_the_first_step(
    place: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "text.txt").write_text("the cat sat")
    monkeypatch.setattr(place, name, failing(errno.EROFS))
    with pytest.raises(OSError, match=r"expected a folder that checkpoints can be written into, found .*run: Read-only file"):
        entered(tmp_path / "run")
    with pytest.raises(OSError, match="Read-only file system"):
        check(Recipe("gpt-11m", (tmp_path / "text.txt",), memory="64MiB", save=tmp_path / "run"))
    monkeypatch.undo()
    check(Recipe("gpt-11m", (tmp_path / "text.txt",), memory="64MiB", save=tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2048  # bytes of weights and two moments, which count in blocks: 1,104
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed // 2))
    with pytest.raises(OSError, match=r"expected room for a checkpoint of .* free there: free some, or save on another disk"):
        entered(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    with pytest.raises(pytest.fail.Exception):
        entered(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EACCES])
def test_a_lock_that_fails_is_not_another_process(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    for save in (entered, lambda folder: checkpoint.save(folder, nn.Linear(2, 2), step=1)):
        with pytest.raises(OSError, match=f"expected to lock .*lock, found: {os.strerror(number)}. No other process is known"):
            save(tmp_path)


def test_a_lock_that_is_held_is_another_process(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(mtcompile.CheckpointError, match="another process saves checkpoints into"):
            entered(tmp_path)


def saved_by_another_process(folder: Path, how: str) -> str:
    """Saves into a folder from a new process. Returns what that said."""
    code = (
        "import sys, torch; from mtcompile import checkpoint; folder, model = sys.argv[1], torch.nn.Linear(4, 4)\n"
        "try:\n"
        "    if sys.argv[2] == 'save': checkpoint.save(folder, model, step=9)\n"
        "    else:\n"
        "        with checkpoint.autosave(folder, model) as saver: saver.after(9)\n"
        "    print('saved')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(folder), how], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("how", [pytest.param("save", marks=pytest.mark.long), "autosave"])
def test_a_training_holds_its_folder_until_its_end(how: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    refused = f"CheckpointError another process, {os.getpid()}, saves checkpoints into .*; wait for its end"
    with checkpoint.autosave(tmp_path, model, background=True) as saver:
        assert re.match(refused, saved_by_another_process(tmp_path, how))
        saver.after(1)
        saver.save()
        checkpoint.save(tmp_path, model, step=2)  # of this training's process
        assert re.match(refused, saved_by_another_process(tmp_path, how))
        with pytest.raises(mtcompile.CheckpointError, match="this process already saves checkpoints into"):
            entered(tmp_path)
        shutil.rmtree(tmp_path)
        saver.after(3)
        saver.save()
        saver.end()
        assert re.match(refused, saved_by_another_process(tmp_path, how))
    assert checkpoint.inspect(tmp_path).step == 3
    checkpoint.save(tmp_path, model, step=4)


def test_a_forked_child_neither_holds_nor_frees_the_folder(tmp_path: Path) -> None:
    """Such as a worker that reads data, and that lives on where the training is killed."""
    parent, child = multiprocessing.get_context("fork").Pipe()

    def train() -> None:
        with checkpoint.autosave(tmp_path, nn.Linear(4, 4)):
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            child.send(worker.pid)
            time.sleep(60)

    training = multiprocessing.get_context("fork").Process(target=train)
    training.start()
    worker = parent.recv()
    try:
        with pytest.raises(mtcompile.CheckpointError, match=f"another process, {training.pid}, saves checkpoints into"):
            entered(tmp_path)
        training.kill()
        training.join()
        os.kill(worker, 0)  # it lives
        checkpoint.save(tmp_path, nn.Linear(4, 4), step=1)
    finally:
        os.kill(worker, signal.SIGKILL)


def trained(folder: Path, first: int, last: int, resumes: bool, compiled: bool = False) -> None:
    model: Any = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    if resumes:
        assert checkpoint.load(folder, model, optimizer).step == first - 1
    if compiled:
        model = mtcompile.compile(model, memory="1MiB", optimizer=optimizer)
    with checkpoint.autosave(folder, model, optimizer, every=1) as saver:
        for step in range(first, last + 1):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saver.after(step)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("step-*")}


def test_a_training_that_does_not_resume_deletes_no_other(tmp_path: Path) -> None:
    trained(tmp_path, 1, 3, resumes=False)
    before = names(tmp_path)
    with pytest.raises(mtcompile.CheckpointError, match=r"without checkpoints, or to resume from it, found .*step-00000003 of"):
        trained(tmp_path, 1, 3, resumes=False)
    assert names(tmp_path) == before == {"step-00000002", "step-00000003"}
    trained(tmp_path, 4, 5, resumes=True, compiled=True)
    assert names(tmp_path) == {"step-00000004", "step-00000005"}


def test_save_deletes_only_what_its_model_was_saved_in_or_loaded_from(tmp_path: Path) -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    checkpoint.save(tmp_path, one, step=1)
    for step in (2, 3):
        checkpoint.save(tmp_path, other, step=step, keep=1)
    assert names(tmp_path) == {"step-00000001", "step-00000003"}
    checkpoint.load(tmp_path / "step-00000001", other)
    checkpoint.save(tmp_path, other, step=4, keep=1)
    assert names(tmp_path) == {"step-00000004"}


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with checkpoint.autosave("run", model) as saver:
        monkeypatch.chdir("elsewhere")
        saver.after(1)
    assert names(tmp_path / "run") == {"step-00000001"} and not list((tmp_path / "elsewhere").iterdir())


def test_folders_that_are_none(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    for save in (entered, lambda folder: checkpoint.save(folder, model, step=1)):
        with pytest.raises(ValueError, match="expected the name of a folder to save into, found an empty one"):
            save("")
        for link, end in (("dangling", "nowhere"), ("loop", "loop")):
            (tmp_path / link).unlink(missing_ok=True)
            (tmp_path / link).symlink_to(end)
            with pytest.raises(OSError, match=f"found .*{link}, a link to {end}, which leads nowhere"):
                save(tmp_path / link / "run")
    for read in (verified, lambda folder: checkpoint.load(folder, model)):
        with pytest.raises(mtcompile.CheckpointError, match="found that it does not exist"):
            read(tmp_path / "missing")
    with pytest.raises(TypeError, match=r"expected files= to have bytes, found str for .x.json.: encode text"):
        checkpoint.save(tmp_path, model, step=1, files={"x.json": "text"})  # type: ignore[dict-item]
