"""The trainer of a library that calls a model: it makes the optimizer itself, clips gradients by hand and adds them up.

Transformers' ``Trainer`` and what is derived from it, and Lightning's, are found among the callers: their optimizer comes after
``compile``, and a backward that updates must know what they will do to gradients after it. Only public attributes are read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from mtcompile.optim.wholeness import callers
from mtcompile.references import with_hooks


@dataclass(frozen=True, slots=True)
class CallingTrainer:
    """``name``: of its class. ``optimizers``: all that it has made so far. ``max_grad_norm``: to which it clips; None: it does
    not. ``by_value``: whether it clips each number instead. ``goes_on``: whether another backward will add to the gradients of
    the next one before a step."""

    name: str
    optimizers: tuple[torch.optim.Optimizer, ...]
    max_grad_norm: float | None
    by_value: bool
    goes_on: bool


def calling_trainer() -> CallingTrainer | None:
    """Returns the innermost trainer among the callers, if there is one."""
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
    limit, goes_on = trainer.args.max_grad_norm or None, not trainer.accelerator.sync_gradients
    return CallingTrainer(type(trainer).__name__, (with_hooks(optimizer),), limit, False, goes_on)


def _of_lightning(trainer: Any) -> CallingTrainer:
    limit, by_value = trainer.gradient_clip_val or None, trainer.gradient_clip_algorithm == "value"
    optimizers = tuple(getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers)
    batches = trainer.fit_loop.epoch_loop.batch_progress
    is_last = batches.is_last_batch or batches.current.ready == trainer.num_training_batches
    goes_on = not is_last and batches.current.ready % trainer.accumulate_grad_batches != 0
    return CallingTrainer(
        "Lightning's Trainer", optimizers, None if by_value else limit, by_value and limit is not None, goes_on
    )


def accelerate_goes_on() -> bool:
    """Tells whether a loop of Accelerate's own will add the gradients of another backward to those of the next one."""
    module = sys.modules.get("accelerate.state")
    return module is not None and not module.GradientState().sync_gradients
