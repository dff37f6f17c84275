"""The one table of how much state each optimizer keeps, for forecasts and for live optimizers."""

from __future__ import annotations

import torch

from mtcompile.optim.precision import Precision

# The names of the state tensors as large as the parameter, by torch.optim class; for any class that is missing, Adam's.
STATES = {
    "Adagrad": ("sum",),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),  # the last two only with momentum and centered
    "SGD": ("momentum_buffer",),  # only with momentum
}
# Optimizers that a forecast can be asked for, and their number of state tensors.
FORECAST_STATES = {
    "adamw": len(STATES["AdamW"]),
    "adam": len(STATES["Adam"]),
    "sgd-momentum": len(STATES["SGD"]),
    "sgd": 0,
}


def state_copies(precision: Precision, name: str) -> float:
    """The bytes beside a parameter's weight and gradient, in sizes of the weight, for an optimizer of ``FORECAST_STATES``."""
    return _copies(precision, FORECAST_STATES[name])


def state_copies_of(precision: Precision, optimizer: torch.optim.Optimizer | None) -> float:
    """``state_copies`` for a live optimizer; one that is not known yet, or of an unknown class, counts as Adam."""
    states = len(STATES.get(type(optimizer).__name__, STATES["Adam"]))
    if optimizer is not None and not precision.split:  # masters refuse amsgrad
        states += any(group.get("amsgrad") for group in optimizer.param_groups)
    return _copies(precision, states)


def _copies(precision: Precision, states: int) -> float:
    """Masters add a remainder as large as the bf16 weight, and their state is fp32, twice its size."""
    return 1.0 + 2.0 * states if precision.split else float(states)
