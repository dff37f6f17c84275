"""Checkpoints, from which a training continues: tensors and numbers only, which ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtcompile.capture.refusals import first_line
from mtcompile.passes.generators import generator_state, set_generator_state

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The objects whose state a checkpoint holds. ``where``: the device whose random numbers are drawn; ``seed``: decides the
    order of the data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    where: str
    seed: int


def save(folder: Path, training: TrainingState, step: int) -> None:
    """Writes a whole checkpoint or none. Raises OSError."""
    path = folder / CHECKPOINT
    new = path.with_suffix(".new")
    state: dict[str, Any] = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    state |= {"step": step, "seed": training.seed, "generator": generator_state(training.where)}
    try:
        with new.open("wb") as file:
            torch.save(state, file)
        os.replace(new, path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if a write fails
        new.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        raise OSError(f"expected to write {path}, with {free} bytes free there, found: {first_line(error)}") from error


def load(folder: Path, training: TrainingState, steps: int) -> int:
    """Loads a checkpoint into the training. Returns its step. Raises ValueError if it is no checkpoint of this training, or if
    it has been trained for ``steps`` or more."""
    path = folder / CHECKPOINT
    if not path.exists():
        raise ValueError(f"expected a folder to resume from that --save wrote, found no {path}")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        step, seed, generator = int(state["step"]), int(state["seed"]), state["generator"]
    except Exception as error:
        reason = first_line(error)
        raise ValueError(f"expected a checkpoint of this model in {path}, found what cannot be used: {reason}") from error
    if seed != training.seed:
        raise ValueError(f"expected seed {seed}, as {path} was trained with, found {training.seed}")
    if step >= steps:
        raise ValueError(f"expected more steps than the {step} that {path} has been trained for, found {steps}")
    set_generator_state(training.where, generator)
    return step
