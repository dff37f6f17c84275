"""``autosave``: a training that is saved every few steps or minutes, on SIGTERM, at its end, and when an error ends it."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.capture.refusals import first_line
from mtcompile.checkpoint.content import (
    Moment,
    any_rank,
    content_of,
    expected_nbytes,
    folder_of_rank,
    module_states,
    moment,
    own_checkpoints,
    rank_of,
    saves_together,
    saving_together,
    steps_in_backward,
    updates_in_backward,
)
from mtcompile.checkpoint.files import folder_named, refuse_others
from mtcompile.checkpoint.locks import held
from mtcompile.checkpoint.saving import begin, finish_saving, note
from mtcompile.checkpoint.signatures import private_key
from mtcompile.checkpoint.writing import check_room, write
from mtcompile.reading import HeldInterrupts, signals_noted
from mtcompile.references import with_hooks
from mtcompile.torch_private import DataWrites

_SMALL_NBYTES = 1 << 20


@contextlib.contextmanager
def autosave(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int = 0,
    minutes: float = 0.0,
    others: Mapping[str, Any] | None = None,
    keep: int = 2,
    files: Mapping[str, bytes] | None = None,
    signing_key: str | os.PathLike[str] | None = None,
    background: bool = False,
    on_sigterm: bool = True,
) -> Iterator[Autosave]:
    """Saves checkpoints of the training inside. Call ``after(step)`` where a step has ended, after ``zero_grad()``.

    every, minutes   save after so many steps, or when so many minutes have passed; 0: not for that reason
    background       write while the training goes on, as ``save_in_background`` does
    on_sigterm       at SIGTERM, save after the current step; ``after`` then returns False. At Ctrl-C, save then too; ``after``
                     then raises KeyboardInterrupt. A signal that comes over a second later
                     acts at once

    The others are as for ``save``. The last step is saved when the training ends. If an error ends it, such as a loss that is
    not finite, the last step that ``after`` was told of is saved as it was then, and so are buffers, generators, the scheduler
    and options of the optimizer, such as its learning rate. If the parameters may have changed since, nothing is saved.
    A resumed training has the same bits. Raises as ``save`` does, and CheckpointError if the last checkpoint in ``folder`` is
    of another training: load it first, or save elsewhere. Until its end, no other process saves into the folder. It is tested
    before the first step: a file is written, synced and renamed there, and one checkpoint must have room.
    """
    key = None if signing_key is None else private_key(signing_key)
    folder = folder_named(folder)
    own_folder = folder_of_rank(folder, rank_of(model))
    check_room(own_folder, expected_nbytes(model, optimizer))
    saver = Autosave(folder, model, optimizer, others or {}, keep, files or {}, key, background, every, minutes * 60)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(own_folder))
        refuse_others(own_folder, own_checkpoints(model, folder))
        if optimizer is not None:
            stack.callback(with_hooks(optimizer).register_step_pre_hook(saver._stepping).remove)
        if on_sigterm and threading.current_thread() is threading.main_thread():
            text = "\nmtcompile: saving after this step; Ctrl-C again stops now"
            handled = callable(signal.getsignal(signal.SIGINT))
            texts: dict[int, str] = {signal.SIGTERM: ""}
            if handled:
                texts[signal.SIGINT] = text
            saver.signals = stack.enter_context(signals_noted(texts))
        try:
            yield saver
        except GeneratorExit:
            raise
        except BaseException:
            saver.save_after_error()
            raise
        saver.end()


@dataclass(frozen=True, slots=True)
class _Note:
    """The last step that had ended: what is saved of it, and what tells whether it still can be. ``updated``: the optimizer has
    begun another step, and nothing is watched any more."""

    last: Moment
    buffers: Mapping[str, tuple[Tensor, int, Tensor]]  # itself, its version, a copy
    steps: int  # of backwards with updates until then
    kept: Sequence[tuple[Tensor, int]]  # large tensors of the moment and parameters, not copied, and their versions
    writes: DataWrites | None  # to the parameters through ``.data``, since the step has ended
    updated: bool = False

    def has_changed(self, model: nn.Module) -> bool:
        """Tells whether somebody has changed what belongs to the moment and is not copied, such as averages swapped in."""
        if any(tensor._version != version for tensor, version in self.kept):
            return True
        writes = self.writes
        return writes is not None and any(map(writes.change_of, nn.Module.parameters(model)))


@dataclass(slots=True)
class Autosave:
    """The saves of one training, see ``autosave``."""

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    others: Mapping[str, Any]
    keep: int
    files: Mapping[str, bytes]
    key: Any
    background: bool
    every: int
    seconds: float
    signals: Collection[int] = ()  # that have come
    _stops: bool = False  # a signal has come to any rank
    _noted: _Note | None = None  # replaced as a whole, so that an interrupt leaves one or the other
    _saved_step: int | None = None
    _saved_at: float = field(default_factory=lambda: time.monotonic())

    def after(self, step: int, extra: Mapping[str, Any] | None = None) -> bool:
        """Notes that a step has ended, and saves if it is time. Returns whether the training should go on. ``extra``: as for
        ``save``."""
        self.note(step, extra)
        due = bool(self.every) and step % self.every == 0
        late = bool(self.seconds) and time.monotonic() - self._saved_at >= self.seconds
        due, self._stops = any_rank(self.model, (due or late, self.stopping))
        if due or self._stops:
            self.save()
        if signal.SIGINT in self.signals:
            finish_saving(self.folder)
            raise KeyboardInterrupt
        return not self._stops

    @property
    def stopping(self) -> bool:
        """True if the training should end, because a signal has come."""
        return self._stops or bool(self.signals)

    def note(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Notes that a step has ended: what an error after it would save. ``after`` does so too. Ctrl-C waits for it: the step
        before can no longer be saved, and this one not yet."""
        interrupts = HeldInterrupts()
        interrupts.hold()
        try:
            self._noted = self._note_of(step, extra)
        finally:
            interrupts.release()

    def _note_of(self, step: int, extra: Mapping[str, Any] | None) -> _Note:
        now = moment(step, self.others, extra)
        small = [isinstance(tensor, Tensor) and tensor.nbytes <= _SMALL_NBYTES for tensor in now.tensors]
        tensors = tuple(t.clone() if copy_it else t for t, copy_it in zip(now.tensors, small, strict=True))  # type: ignore[union-attr]
        groups = () if self.optimizer is None else self.optimizer.param_groups
        states = {name: copy.deepcopy(state) for name, state in module_states(self.model)}
        now = replace(now, tensors=tensors, groups=tuple(map(_copied_group, groups)), module_states=states)
        watched = () if updates_in_backward(self.model) else tuple(nn.Module.parameters(self.model))
        kept = [(t, t._version) for t in (*tensors, *watched) if isinstance(t, Tensor)]
        return _Note(now, self._copied_buffers(), steps_in_backward(self.model), kept, DataWrites(watched))

    def save(self) -> None:
        """Saves the last step, unless it has been saved. Raises as ``save`` of this package does."""
        if self._noted is not None and self._noted.last.step != self._saved_step:
            self._save(self._noted.last)

    def _save(self, last: Moment) -> None:
        finish_saving(self.folder)
        with saving_together(self.model):
            content = content_of(self.folder, self.model, self.optimizer, last, self.keep, gradients=False)
            content = content.with_files(self.files, self.key)
            if self.background and not self.stopping:
                begin(self.folder, content).note_to(self.model)
            else:
                note(self.model, write(self.folder, content))
        self._saved_step, self._saved_at = last.step, time.monotonic()

    def end(self) -> None:
        """Saves the last step, and waits until it is on the disk. Raises as ``save`` of this package does."""
        self.background = False
        self.save()
        finish_saving(self.folder)

    def save_after_error(self) -> None:
        """Saves the last step as it was when it had ended, if it still can be, and says so in a warning."""
        try:
            finish_saving(self.folder)
        except Exception:  # the thread has warned of it
            self._saved_step = None
        if (noted := self._noted) is None or noted.last.step == self._saved_step:
            return
        step, outcome = noted.last.step, "was saved"
        if noted.updated or steps_in_backward(self.model) != noted.steps:  # Ctrl-C has ended a step
            outcome = "is not saved: the optimizer has begun another step"
        elif noted.has_changed(self.model):
            outcome = "is not saved: parameters, or tensors of others= or extra=, have been changed since"
        elif saves_together(self.model):  # the other ranks may not come
            outcome = "is not saved: each host has a part of the optimizer state"
        else:
            self.background = False
            try:
                self._save(replace(noted.last, buffers={name: values for name, (_, _, values) in noted.buffers.items()}))
            except Exception as error:
                outcome = f"could not be saved: {first_line(error)}"
        warnings.warn(f"an error ended the training. Step {step}, the last that had ended, {outcome}", stacklevel=4)

    def _stepping(self, *_: Any) -> None:
        if self._noted is not None:
            self._noted = replace(self._noted, updated=True, writes=None, kept=())

    def _copied_buffers(self) -> dict[str, tuple[Tensor, int, Tensor]]:
        """Returns the values that buffers have now, such as running statistics, which a forward changes. Kernels change those
        without counting their version up; a large buffer, such as a mask, is copied again only if that has counted up."""
        before = {} if self._noted is None else self._noted.buffers
        copies = {}
        for name, buffer in self.model.named_buffers():
            copied = before.get(name)
            if copied is None or copied[0] is not buffer or copied[1] != buffer._version or buffer.nbytes <= _SMALL_NBYTES:
                copied = buffer, buffer._version, buffer.detach().clone()
            copies[name] = copied
        return copies


def _copied_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group of the optimizer, as they are now."""
    return {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
