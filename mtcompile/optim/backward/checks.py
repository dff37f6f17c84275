"""Checks for ``update="backward"``: anything that would silently give other numbers than the ordinary loop raises an error."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile import torch_private
from mtcompile.errors import StepError
from mtcompile.optim.backward.kernels import Backward
from mtcompile.runtime.devices.arena import span_nbytes

# Their update of a parameter reads nothing of another one.
_BY_PARAMETER = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)


def updates_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether an optimizer's update of a parameter reads nothing of another one."""
    return any(type(optimizer) is getattr(torch.optim, name, None) for name in _BY_PARAMETER)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for a class that looks at several parameters at once, or that is not torch's."""
    kind = type(optimizer)
    if not updates_by_parameter(optimizer):
        raise TypeError(
            f'expected one of torch.optim.{", ".join(_BY_PARAMETER)} with update="backward", found '
            f'{kind.__module__}.{kind.__name__}: its update may need all gradients at once. Use update="step"'
        )


def check_memory(inputs: Mapping[str, Tensor], updated: Set[str]) -> None:
    """Raise StepError if another input of the forward shares memory with a parameter that the backward updates: it may be read
    while it changes."""
    order = {name: place for place, name in enumerate(inputs)}
    shared: list[list[str]] = []
    before: list[tuple[int, str]] = []  # where those end that begin before, with their names
    stored = ((name, tensor) for name, tensor in inputs.items() if not torch_private.is_wrapped(tensor))
    spans = ((tensor.device.type, tensor.data_ptr(), span_nbytes(tensor), name) for name, tensor in stored)
    for _, on_device in itertools.groupby(sorted(span for span in spans if span[2]), operator.itemgetter(0)):
        before.clear()
        for _, start, nbytes, name in on_device:
            before = [each for each in before if each[0] > start]
            shared += [sorted((name, other), key=order.__getitem__) for _, other in before if {name, other} & updated]
            before.append((start + nbytes, name))
    for name, other in sorted(shared, key=lambda pair: order[pair[0]])[:1]:
        if inputs[name] is inputs[other]:
            raise StepError(
                f'{name} and {other} have become one Parameter; with update="backward", tie weights before mtcompile.compile, '
                'or use update="step"'
            )
        raise StepError(
            f'{name} and {other} share memory; with update="backward" one may be read while the other is updated. '
            'Use one Parameter for both, or update="step"'
        )


def check_parameters(parameters: Mapping[str, nn.Parameter], adds_up: bool) -> None:
    """Raise StepError for parameters that do not require gradients any more, for gradients from elsewhere unless this backward
    ``adds_up``, and for hooks that would not be called."""
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise StepError(f"{name} was frozen between this forward and its backward; freeze it before the forward")
        if not adds_up and parameter.grad is not None and not isinstance(parameter.grad, torch_private.UsedGradient):
            raise StepError(f'{name} has a gradient already; with update="backward" there are none. Set it to None first')
        if parameter._backward_hooks or torch_private.accumulation_hooks(parameter):
            raise StepError(f'{name} has a gradient hook, which update="backward" would not call; remove it')


def check_step(backward: Backward, optimizer: torch.optim.Optimizer) -> None:
    """Raise StepError unless the options of the step that ``backward`` has taken are those of ``optimizer`` now."""
    for group in optimizer.param_groups:
        used = next((backward.groups[id(p)][1] for p in group["params"] if id(p) in backward.groups), {})
        if changed := [key for key, value in used.items() if key in group and not _equal(value, group[key])]:
            values = ", ".join(f"{key}={used[key]}" for key in changed)
            raise StepError(
                f'{", ".join(changed)} of the optimizer changed between backward() and step(); with update="backward" '
                f"this step was made with {values}. Set it back now; change it before backward() or after step()"
            )


def _equal(one: Any, other: Any) -> bool:
    """Compares two values of an option; tensors among them, alone or in a tuple, by their values."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other))) if isinstance(one, Tensor) else bool(one == other)
