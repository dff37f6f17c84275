"""``save`` and ``save_in_background``: checkpoints of a training, written at once or while it goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import nn

from mtcompile.checkpoint.content import Content, content_of, moment, saving_together
from mtcompile.checkpoint.files import folder_named
from mtcompile.checkpoint.signatures import private_key
from mtcompile.checkpoint.writing import write
from mtcompile.machine.device import check_room
from mtcompile.runtime.schedule import gib

P = ParamSpec("P")


def _noted(save: Callable[P, Path]) -> Callable[P, Path]:
    """Lets ``save`` tell a compiled model where its last checkpoint is, which it names if an error leaves it half updated."""

    @functools.wraps(save)
    def noting(*args: P.args, **kwargs: P.kwargs) -> Path:
        path = save(*args, **kwargs)
        note(args[1] if len(args) > 1 else kwargs["model"], path)
        return path

    return noting


def note(model: Any, path: Path) -> None:
    """Tells a compiled model that its last checkpoint is ``path``."""
    for module in model.modules():
        if (compiled := getattr(module, "_mt_model", None)) is not None:
            compiled.door.wholeness.saved_in = str(path)


@_noted
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    others: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    files: Mapping[str, bytes] | None = None,
    signing_key: str | os.PathLike[str] | None = None,
) -> Path:
    """Saves a checkpoint of a plain or compiled model. Returns its folder, ``folder/step-00000012``.

    step           how many steps the model has trained
    others         objects with ``state_dict()`` by name, such as a scheduler, a GradScaler or a data loader
    extra          numbers, text and tensors of your own by name, such as the position in the data
    keep           how many checkpoints of this model, saved or loaded, stay in ``folder``; older ones go last, 0 keeps all
    files          further files of the checkpoint, as bytes by name, such as a tokenizer's: .json, .jinja, .txt or .model
    signing_key    a file with a private Ed25519 key, in PEM or OpenSSH format, that signs the checkpoint

    Where several ranks train, all of them call it: the first saves the training, the others their random generators, beside
    it. Nobody waits, unless each host has a part of the optimizer state, which it sends to the first rank. The states of
    torch's, Python's and numpy's random generators are saved too. Tensors are written from where they are, in pieces of 8 MiB.
    Raises CheckpointError if another process saves into ``folder`` or what is there is no checkpoint, TypeError for state that
    is neither numbers, text nor tensors, ValueError for a key that cannot sign, and OSError if the disk refuses. The earlier
    checkpoints are then as they were.
    """
    key = None if signing_key is None else private_key(signing_key)
    folder_named(folder)
    finish_saving(folder)
    with saving_together(model):
        content = content_of(Path(folder), model, optimizer, moment(step, others, extra), keep).with_files(files or {}, key)
        return write(Path(folder), content)


def save_in_background(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    others: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    files: Mapping[str, bytes] | None = None,
    signing_key: str | os.PathLike[str] | None = None,
) -> BackgroundSave:
    """Saves a checkpoint as ``save`` does, of the values as they are now, while the training goes on.

    First copies everything in host memory; print the result to see how long that took. The next save into ``folder``, ``load``
    and the end of the program wait for this one. Raises as ``save`` does before anything is written, and BudgetError if host
    memory has no room for the copy. A later error is a warning, and is raised by ``wait`` or by the next save into ``folder``.
    """
    key = None if signing_key is None else private_key(signing_key)
    named = folder_named(folder)
    finish_saving(folder)
    with saving_together(model):
        content = content_of(Path(folder), model, optimizer, moment(step, others, extra), keep).with_files(files or {}, key)
        saving = begin(named, content)
    saving.note_to(model)
    return saving


def begin(folder: Path, content: Content) -> BackgroundSave:
    """Copies the content and begins to write it. Raises BudgetError."""
    check_room(content.nbytes, "a copy of what is saved", "call checkpoint.save, which copies nothing")
    saving = _saving[_key(folder)] = BackgroundSave(folder, content)
    return saving


class BackgroundSave:
    """A save that goes on in a thread. ``copy_s``: the seconds for which the training waited. ``nbytes``: the size of the copy,
    which is freed once it is on the disk. ``written_s``: the seconds that writing took; None until then."""

    def __init__(self, folder: Path, content: Content) -> None:
        began = time.perf_counter()
        copied = content.copied()
        self.step, self.nbytes, self.copy_s = content.step, content.nbytes, time.perf_counter() - began
        self.written_s: float | None = None
        self._folder, self._path = folder, Path()
        self._error: BaseException | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._thread = threading.Thread(target=self._write, args=([copied],), name="mtcompile saves")
        self._thread.start()

    def _write(self, contents: list[Content]) -> None:
        _step_back()
        began = time.perf_counter()
        try:
            self._path = write(self._folder, contents.pop())
            self._note()
        except BaseException as error:
            self._error = error
            warnings.warn(f"step {self.step} could not be saved in the background: {error}", stacklevel=1)
        self.written_s = time.perf_counter() - began

    def note_to(self, model: nn.Module) -> None:
        """Lets the model know where the checkpoint is, once it is on the disk."""
        self._model = weakref.ref(model)
        self._note()

    def _note(self) -> None:
        model = None if self._model is None else self._model()
        if model is not None and self._path.name:
            note(model, self._path)

    def wait(self) -> Path:
        """Waits until the checkpoint is on the disk. Returns its folder. Raises what ``save`` would have raised."""
        self.join()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._path

    def join(self) -> None:
        """Waits until it has ended, well or not."""
        self._thread.join()

    def __repr__(self) -> str:
        written = "being written" if self.written_s is None else f"written in {self.written_s:.2f} s"
        how = written if self._error is None else f"failed: {self._error}"
        return f"step {self.step} in {self._folder}: {gib(self.nbytes)} copied in {self.copy_s:.2f} s, {how}"


def _step_back() -> None:
    """Lets this thread, and those that it starts, compute where nothing else does: the training needs the processors more."""
    if sys.platform == "linux":  # where threads have priorities of their own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


_saving: dict[Path, BackgroundSave] = {}


def finish_saving(folder: str | os.PathLike[str]) -> None:
    """Waits for a save into ``folder`` that goes on in the background. Raises what it would have raised."""
    if (saving := _saving.pop(_key(folder), None)) is not None:
        saving.wait()


def wait_for_saving(folder: str | os.PathLike[str]) -> None:
    """Waits for a save into ``folder``, or of the checkpoint ``folder``, that goes on in the background. What it raised is left
    to the next save."""
    for key in (_key(folder), _key(folder).parent):
        if (saving := _saving.get(key)) is not None:
            saving.join()


def _key(folder: str | os.PathLike[str]) -> Path:
    return Path(folder).resolve()
