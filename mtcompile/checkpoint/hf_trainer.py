"""``autosave_trainer``: the checkpoints of a Transformers ``Trainer``, by a callback."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtcompile.checkpoint.autosave import Autosave, autosave
from mtcompile.checkpoint.files import folder_named, may_be_added
from mtcompile.checkpoint.generators import set_generator_states
from mtcompile.checkpoint.reading import latest, load, saved_generators

_STATE = "trainer_state.json"


@contextlib.contextmanager
def autosave_trainer(
    trainer: Any,
    folder: str | os.PathLike[str],
    *,
    every: int = 0,
    minutes: float = 0.0,
    keep: int = 2,
    background: bool = False,
) -> Iterator[str | None]:
    """Saves checkpoints of a Transformers Trainer, or one of TRL's, whose ``train`` is called inside, as ``autosave`` does.

    Yields the checkpoint to go on from, or None: pass it to ``train``. Set ``save_strategy="no"`` in the arguments, or the
    Trainer saves its own files too.

        with checkpoint.autosave_trainer(trainer, "run", every=500) as before:
            trainer.train(resume_from_checkpoint=before)
    """
    folder = folder_named(folder)
    options: dict[str, Any] = {"every": every, "minutes": minutes, "keep": keep, "background": background}
    with saves(trainer, folder, before := latest(folder), **options):
        yield None if before is None else str(before)


@contextlib.contextmanager
def saves(
    trainer: Any,
    folder: Path | None,
    before: Path | None,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    **options: Any,
) -> Iterator[None]:
    """Has a Trainer, whose ``train`` is called inside, go on from the checkpoint ``before`` and save into a folder, if there is
    one, with the files of its tokenizer or those given. ``extra``: as for ``save``; the others are options of ``autosave``."""
    from transformers import TrainerCallback

    class Saves(TrainerCallback):
        """Loads and saves what the Trainer does not, as it has a step begin and end."""

        def __init__(self) -> None:
            self.stack = contextlib.ExitStack()
            self.saver: Autosave | None = None
            self.generators: dict[str, Any] | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.stack.close()  # of a train before
            optimizer, others = _parts(trainer)
            if state.global_step and before is not None:
                load(before, trainer.model, optimizer, others=others, generators=False)
                self.generators = saved_generators(before)
            if folder is not None:
                self.saver = self.stack.enter_context(autosave(folder, trainer.model, optimizer, others=others, **options))

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.generators is not None:
                set_generator_states(self.generators)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.generators is not None and state.epoch != int(state.epoch or 0):  # batches have been skipped
                set_generator_states(self.generators)
            self.generators = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if self.saver is not None:
                self.saver.files = {**beside, _STATE: _json_of(state)}
                if not self.saver.after(state.global_step, extra):
                    control.should_training_stop = True
            return control

    beside, callback = _tokenizer_files(trainer) if files is None else files, Saves()
    trainer.add_callback(callback)
    try:
        with callback.stack:
            yield
    finally:
        trainer.remove_callback(callback)


def _parts(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the optimizer itself, without Accelerate's wrapper, and what else has a state."""
    others = {"scheduler": trainer.lr_scheduler}
    if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
        others["scaler"] = scaler
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer), others


def _json_of(state: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        state.save_to_json(os.path.join(folder, _STATE))
        return Path(folder, _STATE).read_bytes()


def _tokenizer_files(trainer: Any) -> dict[str, bytes]:
    """Returns the files of the Trainer's tokenizer, if it has one."""
    processing: Any = getattr(trainer, "processing_class", None)
    if not hasattr(processing, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        processing.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if may_be_added(path.name)}
