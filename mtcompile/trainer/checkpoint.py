"""Files from which a training goes on: tensors and numbers only, which ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtcompile.passes.generators import generator_state, set_generator_state

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """What a file holds the state of, and ``seed``, which the order of the data follows from. ``where``: the device whose
    random numbers are drawn."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    where: str
    seed: int


def save(folder: Path, what: Checkpointed, step: int) -> None:
    """Whole, or not at all. Raises OSError."""
    path = folder / CHECKPOINT
    new = path.with_suffix(".new")
    state = {"model": what.model.state_dict(), "optimizer": what.optimizer.state_dict(), "step": step, "seed": what.seed}
    try:
        with new.open("wb") as file:
            torch.save(state | {"generator": generator_state(what.where)}, file)
        os.replace(new, path)
    except (OSError, RuntimeError) as error:  # torch's own where a write fails
        new.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        reason = str(error).strip().splitlines()[0]
        raise OSError(f"expected to write {path}, with {free} bytes free there, found: {reason}") from error


def resumed(folder: Path, what: Checkpointed, steps: int) -> int:
    """Load it; the steps that have been done. Raises ValueError for what is no checkpoint of this training."""
    path = folder / CHECKPOINT
    if not path.exists():
        raise ValueError(f"expected a folder to resume from that --save wrote, found no {path}")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        what.model.load_state_dict(state["model"])
        what.optimizer.load_state_dict(state["optimizer"])
        done, seed, generator = int(state["step"]), int(state["seed"]), state["generator"]
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"expected a checkpoint of this model in {path}, found what cannot be used: {reason}") from error
    if seed != what.seed:
        raise ValueError(f"expected seed {seed}, as {path} was trained with, found {what.seed}")
    if done >= steps:
        raise ValueError(f"expected more steps than the {done} that {path} has been trained for, found {steps}")
    set_generator_state(what.where, generator)
    return done
