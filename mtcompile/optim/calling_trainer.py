"""The trainer of a library that calls a model: it makes the optimizer itself, clips gradients by hand and adds them up.

Transformers' ``Trainer`` and what is derived from it, and Lightning's, are found among the callers: their optimizer comes after
``compile``, and a backward that updates must know what they will do to gradients after it. Only public attributes are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mtcompile.optim.wholeness import callers, parameters_of
from mtcompile.references import with_hooks


@dataclass(frozen=True, slots=True)
class CallingTrainer:
    """``name``: of its class. ``optimizers``: all that it has made so far. ``max_grad_norm``: to which it clips; None: it does
    not. ``limit_name``: what its user knows that number by. ``by_value``: whether it clips each number instead. ``goes_on``:
    whether another backward will add to the gradients of the next one before a step. ``clipped``: gives all parameters that
    it clips together, by name. ``trains``: whether its training runs; else its loop is the caller's, who does not clip."""

    name: str
    optimizers: tuple[torch.optim.Optimizer, ...]
    max_grad_norm: float | None
    limit_name: str
    by_value: bool
    goes_on: bool
    clipped: Callable[[], Mapping[str, nn.Parameter]]
    trains: bool


def _of_transformers(trainer: Any, trains: bool) -> CallingTrainer | None:
    if (optimizer := getattr(trainer, "optimizer", None)) is None:  # it is being made
        return None
    name = type(trainer).__name__
    return CallingTrainer(
        name,
        (with_hooks(optimizer),),
        trainer.args.max_grad_norm or None,
        f"max_grad_norm in the arguments of {name}",
        by_value=False,
        goes_on=not trainer.accelerator.sync_gradients,
        clipped=lambda: dict(nn.Module.named_parameters(trainer.model)),
        trains=trains,
    )


def _of_lightning(trainer: Any, trains: bool) -> CallingTrainer:
    limit, by_value = trainer.gradient_clip_val or None, trainer.gradient_clip_algorithm == "value"
    optimizers = tuple(getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers)
    batches = trainer.fit_loop.epoch_loop.batch_progress
    is_last = batches.is_last_batch or batches.current.ready == trainer.num_training_batches
    name = "Lightning's Trainer"

    def clipped() -> dict[str, nn.Parameter]:
        stepped = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        return {name: p for name, p in nn.Module.named_parameters(trainer.lightning_module) if id(p) in stepped}

    return CallingTrainer(
        name,
        optimizers,
        None if by_value else limit,
        f"gradient_clip_val of {name}",
        by_value=by_value and limit is not None,
        goes_on=not is_last and batches.current.ready % trainer.accumulate_grad_batches != 0,
        clipped=clipped,
        trains=trains,
    )


# By the module of a library's ``Trainer``: its method that trains, and what reads one.
_LIBRARIES: dict[str, tuple[str, Callable[[Any, bool], CallingTrainer | None]]] = {
    "transformers.trainer": ("train", _of_transformers),
    "lightning.pytorch.trainer.trainer": ("fit", _of_lightning),
}


def calling_trainer() -> CallingTrainer | None:
    """Returns the innermost trainer among the callers, if there is one."""
    kinds = {kind: module for module in _LIBRARIES if (kind := getattr(sys.modules.get(module), "Trainer", None)) is not None}
    if not kinds:
        return None
    derived = tuple(_derived(kinds))
    trainer, module = None, None
    for frame in callers():
        # Reading what a function's variables hold lets its frame hold that as well, until it ends (before Python 3.13): a
        # model that a caller has deleted would live on. So only a trainer's own methods are read.
        code, file = frame.f_code, frame.f_globals.get("__name__")
        if not any(kind.__module__ == file and code.co_name in vars(kind) for kind in derived):
            continue
        owner = frame.f_locals.get("self")
        if trainer is None:
            module = next((kinds[kind] for kind in type(owner).__mro__ if kind in kinds), None)
            trainer = None if module is None else owner
        # The library's own method: that of a subclass may have a loop of its own, which clips as it likes.
        if module is not None and owner is trainer and code.co_name == _LIBRARIES[module][0] and file == module:
            return _LIBRARIES[module][1](trainer, True)
    return None if module is None else _LIBRARIES[module][1](trainer, False)


def _derived(kinds: Iterable[type]) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from _derived(kind.__subclasses__())


def accelerate_goes_on() -> bool:
    """Tells whether a loop of Accelerate's own will add the gradients of another backward to those of the next one."""
    module = sys.modules.get("accelerate.state")
    return module is not None and not module.GradientState().sync_gradients
