"""The trainer of a library that calls a model: it makes the optimizer itself, clips gradients by hand and adds them up.

Transformers' ``Trainer`` and what is derived from it, and Lightning's, are found among the callers: their optimizer comes after
``compile``, and a backward that updates must know what they will do to gradients after it. Only public attributes are read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from mtcompile.errors import StepError
from mtcompile.optim.wholeness import callers
from mtcompile.references import with_hooks


@dataclass(frozen=True, slots=True)
class CallingTrainer:
    """``name``: of its class. ``optimizers``: all that it has made so far. ``max_grad_norm``: to which it clips; None: it does
    not. ``accumulates``: how many backwards it adds up before a step."""

    name: str
    optimizers: tuple[torch.optim.Optimizer, ...]
    max_grad_norm: float | None
    accumulates: int


def calling_trainer() -> CallingTrainer | None:
    """Returns the innermost trainer among the callers, if there is one. Raises StepError for one that clips by value."""
    classes = {
        getattr(sys.modules.get(module), "Trainer", None): read
        for module, read in (("transformers.trainer", _of_transformers), ("lightning.pytorch.trainer.trainer", _of_lightning))
    }
    classes.pop(None, None)
    if not classes:
        return None
    for frame in callers():
        owner = frame.f_locals.get("self")
        for kind in type(owner).__mro__:
            if kind in classes:
                return classes[kind](owner)
    return None


def _of_transformers(trainer: Any) -> CallingTrainer | None:
    if (optimizer := getattr(trainer, "optimizer", None)) is None:  # it is being made
        return None
    limit, accumulates = trainer.args.max_grad_norm, trainer.args.gradient_accumulation_steps
    return CallingTrainer(type(trainer).__name__, (with_hooks(optimizer),), limit or None, accumulates)


def _of_lightning(trainer: Any) -> CallingTrainer:
    if (limit := trainer.gradient_clip_val or None) and trainer.gradient_clip_algorithm == "value":
        raise StepError(
            'gradient_clip_algorithm="value" clips each gradient after the backward, which with update="backward" has used it; '
            'expected "norm", or update="step"'
        )
    optimizers = tuple(getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers)
    return CallingTrainer("Lightning's Trainer", optimizers, limit, trainer.accumulate_grad_batches)
