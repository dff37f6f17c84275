"""Updates of masters on the second device, which Triton has no code for: the host's kernels, one launch for equal updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtcompile.runtime.optim import host_kernels
from mtcompile.runtime.optim.formula import Update
from mtcompile.runtime.optim.operands import Operands

NAME = "second_device_updates::apply"
_UPDATES: list[Update] = []  # by their numbers in launches


def _apply(weights: Any, states: Any, remainders: Any, grads: Any, found: Tensor | None, number: int) -> None:
    update = _UPDATES[number]
    count = len(update.state_names)
    for place, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        if found is None or not found:
            rest = remainders[place] if remainders else None
            host_kernels.apply(update, Operands(weight, grad, tuple(states[place * count : (place + 1) * count]), rest))


torch.library.define(
    NAME, "(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!)[] rests, Tensor[] grads, Tensor? found, int number) -> ()"
)
torch.library.impl(NAME, "CPU", _apply)


def apply_all(tasks: Sequence[tuple[Update, Operands]], found: Tensor | None = None) -> None:
    """Takes the place of ``device_kernels.apply_all``."""
    launches: dict[Any, list[Operands]] = {}
    for update, operands in tasks:
        launches.setdefault((update, operands.layout), []).append(operands)
    for (update, _), alike in launches.items():
        _UPDATES.append(update)
        states = [state.detach() for operands in alike for state in operands.states]
        rests = [operands.remainder for operands in alike if operands.remainder is not None]
        weights, grads = [operands.weight.detach() for operands in alike], [operands.grad for operands in alike]
        torch.ops.second_device_updates.apply(weights, states, rests, grads, found, len(_UPDATES) - 1)
    for _, operands in tasks:
        operands.count_writes()
