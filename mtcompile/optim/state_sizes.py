"""The bytes of state that an optimizer keeps: by name for forecasts, measured for live optimizers.

torch's elementwise optimizers keep tensors as large as the parameter, which ``STATES`` names. What any other class keeps is
seen in one step of a copy of it, on tensors that take no memory or, if it looks at values, on small ones.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.errors import did_you_mean
from mtcompile.optim.precision import Precision
from mtcompile.runtime.schedule import placed
from mtcompile.torch_private import without_memory

# The names of the state tensors as large as the parameter, by torch.optim class.
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
# Optimizers that a forecast can be asked for by these names, and their number of state tensors.
FORECAST_STATES = {
    "adamw": len(STATES["AdamW"]),
    "adam": len(STATES["Adam"]),
    "sgd-momentum": len(STATES["SGD"]),
    "sgd": 0,
}
_NEEDS = {"momentum_buffer": "momentum", "grad_avg": "centered"}  # the option without which a state is not kept
_MOST_ELEMENTS = 1 << 20  # of tensors that a step on values takes as they are
_SMALL = 128, 256  # elements along each dimension of those that it takes for larger ones


def state_copies(precision: Precision, name: str) -> float:
    """The bytes beside a parameter's weight and gradient, in sizes of the weight, for an optimizer of ``FORECAST_STATES``."""
    return _copies(precision, FORECAST_STATES[name])


def _copies(precision: Precision, states: int) -> float:
    """Masters add a remainder as large as the bf16 weight, and their state is fp32, twice its size."""
    return 1.0 + 2.0 * states if precision.split else float(states)


def streamed_copies(split: bool, states: int) -> int:
    """Returns what an update on the device of a parameter at home on the host takes there, and back, in sizes of the weight: if
    it has a master (``split``), its weight, its remainder and its fp32 states. 0 where the host alone updates it: torch's own
    steps differ from one device to the other, and the kernel of an optimizer without states writes what nobody reads."""
    return 2 + 2 * states if split and states else 0


def update_workspace(split: bool, keeps_state: bool = True, compiled: bool = True) -> float:
    """Returns what an update on the device needs for itself, in sizes of the parameter. ``split``: whether it has masters.
    Torch's own steps need up to three temporaries of that size. Masters are updated in place by kernels that were ``compiled``,
    or by torch in pieces, once gradients with other strides are copied; an optimizer that keeps no state writes fp32 that
    nobody reads."""
    if not split:
        return 3.0
    return (1.0 if compiled else 2.0) + (0.0 if keeps_state else 2.0)


def optimizer_named(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Returns what makes an optimizer of a class of torch.optim, with its defaults; of the matrices alone, if the class takes
    nothing else. Raises ValueError with a similar name."""
    classes = {each.lower(): getattr(torch.optim, each) for each in dir(torch.optim) if each[0].isupper()}
    base = torch.optim.Optimizer
    classes = {each: cls for each, cls in classes.items() if cls is not base and issubclass(cls, base)}
    if name.lower() not in classes:
        raise ValueError(
            f"expected optimizer to be one of {', '.join(FORECAST_STATES)} or another class of torch.optim, found {name!r}"
            + did_you_mean(name.lower(), [*FORECAST_STATES, *classes])
        )
    cls: Callable[..., torch.optim.Optimizer] = classes[name.lower()]
    rate = {} if inspect.signature(cls).parameters["lr"].default is not inspect.Parameter.empty else {"lr": 1e-3}

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return cls(parameters, **rate)
        except ValueError:
            matrices = [parameter for parameter in parameters if parameter.dim() == 2]
            if not matrices or len(matrices) == len(parameters):
                raise
            return cls(matrices, **rate)

    return make


# ----------------------------------------------------------------------------------------------------- of live optimizers


def state_nbytes(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Returns the bytes of state that an optimizer keeps for each parameter, or will keep after its next step. None is counted
    as Adam, and so is a class whose step cannot be run by itself."""
    if optimizer is None:
        return {name: 2 * placed(p.nbytes) for name, p in parameters.items() if p.requires_grad}
    optimizer = _plain(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    ratios, sizes = _Ratios(optimizer), dict[str, int]()
    for name, parameter in parameters.items():
        if entry := optimizer.state.get(parameter):
            sizes[name] = sum(map(placed, _tensor_nbytes(entry)))
        elif parameter.requires_grad and id(parameter) in groups:
            sizes[name] = ratios.nbytes(parameter, groups[id(parameter)])
    return sizes


def master_state_nbytes(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter], with_masters: Iterable[int]
) -> dict[str, int]:
    """``state_nbytes`` of bf16 parameters of which those in ``with_masters``, by id, have fp32 masters: beside each, 16 bits
    and fp32 state."""
    sizes, masters = state_nbytes(optimizer, parameters), set(with_masters)
    for name, parameter in parameters.items():
        if id(parameter) in masters:
            states = 2 if optimizer is None else len(_states(optimizer, _group_of(optimizer, parameter)) or ())
            trained = parameter.requires_grad or bool(optimizer is not None and optimizer.state.get(parameter))
            sizes[name] = placed(parameter.nbytes) * (1 + (2 * states if trained else 0))
    return sizes


def average_copies(state: Mapping[str, int], parameters: Mapping[str, nn.Parameter]) -> float:
    """Returns state in sizes of the parameters that are trained."""
    trained = sum(placed(p.nbytes) for p in parameters.values() if p.requires_grad)
    return sum(state.values()) / trained if trained else 0.0


def _plain(optimizer: Any) -> Any:
    """Returns the optimizer inside a wrapper that shows its state as its own, as accelerate's does."""
    while isinstance(getattr(type(optimizer), "state", None), property) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _group_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    return next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), optimizer.defaults)


def _states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the names of the states as large as the parameter that a class of ``STATES`` keeps; None for any other class."""
    name = type(optimizer).__name__
    if name not in STATES or type(optimizer) is not getattr(torch.optim, name):
        return None
    states = tuple(state for state in STATES[name] if state not in _NEEDS or group.get(_NEEDS[state]))
    return (*states, "max_exp_avg_sq") if group.get("amsgrad") else states


def is_elementwise(optimizer: torch.optim.Optimizer | None) -> bool:
    """Tells whether an optimizer is of a class of ``STATES``, which treats each element of a parameter by itself."""
    return type(optimizer) in {getattr(torch.optim, name) for name in STATES}


def _tensor_nbytes(entry: Any) -> list[int]:
    """Returns the bytes of each tensor in a parameter's state; counters, of no dimension, are counted elsewhere."""
    if isinstance(entry, Tensor):
        return [entry.numel() * entry.element_size()] if entry.dim() else []
    parts = entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, (list, tuple)) else ()
    return [nbytes for part in parts for nbytes in _tensor_nbytes(part)]


class _Ratios:
    """Finds out what an optimizer will keep for parameters that it has no state for yet. Equal ones are looked at once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._known: dict[Any, int] = {}

    def nbytes(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> int:
        states = _states(self.optimizer, group)
        if states is not None:
            return len(states) * placed(parameter.nbytes)
        key = id(group), tuple(parameter.shape), parameter.dtype, parameter.stride()
        if key not in self._known:
            self._known[key] = self._after_a_step(parameter, group)
        return self._known[key]

    def _after_a_step(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> int:
        def measured(shape: Sequence[int]) -> list[int]:
            return _stepped_nbytes(self.optimizer, parameter, group, shape)

        with contextlib.suppress(Exception), _quiet(), without_memory():
            return sum(map(placed, measured(parameter.shape)))
        with contextlib.suppress(Exception):
            if parameter.numel() <= _MOST_ELEMENTS:
                return sum(map(placed, measured(parameter.shape)))
            return _extrapolated(measured, parameter.shape)
        return 2 * placed(parameter.nbytes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turns off torch's log of operations that need values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _extrapolated(measured: Callable[[Sequence[int]], list[int]], shape: Sequence[int]) -> int:
    """Returns the bytes of what ``measured`` would find for a large shape, if they are linear in each dimension, as are all
    sizes that grow with elements, rows or columns."""
    low, high = _SMALL
    total, tensors = 0.0, 0
    for corner in itertools.product(*(((high, 1.0),) if size <= high else _line(size, low, high) for size in shape)):
        sizes = measured([min(size, at) for size, (at, _) in zip(shape, corner, strict=True)])
        total += math.prod(weight for _, weight in corner) * sum(sizes)
        tensors = max(tensors, len(sizes))
    return placed(math.ceil(total)) + tensors * placed(1)  # what rounding adds at most


def _line(size: int, low: int, high: int) -> tuple[tuple[int, float], ...]:
    """Returns the weights by which the values at two points give that at a third on their line."""
    beyond = (size - low) / (high - low)
    return (low, 1.0 - beyond), (high, beyond)


def _stepped_nbytes(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any], shape: Sequence[int]
) -> list[int]:
    """Returns the bytes of each tensor of state that a copy of the optimizer keeps for a parameter like this one after a step.
    Raises whatever the step raises."""
    with torch.enable_grad():
        device = "cpu" if parameter.device.type == "meta" else parameter.device
        like = nn.Parameter(torch.ones(tuple(shape), dtype=parameter.dtype, device=device))
        like.grad = torch.ones_like(like)
        twin = _copied(optimizer, like, group)
        step = type(optimizer).step
        step = getattr(step, "__wrapped__", step)  # without the hooks of all optimizers
        history = 2 * int(group.get("history_size", 0))  # LBFGS adds two gradients a step, up to so many
        step(*((twin, lambda: like.sum()) if history else (twin,)))
    entries = [nbytes for entry in twin.state.values() for nbytes in _tensor_nbytes(entry)]
    return entries + history * [like.numel() * like.element_size()]


def _copied(optimizer: torch.optim.Optimizer, like: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Returns an optimizer of the same class and options without state, of ``like`` alone: no part of it leads to a parameter
    or the state of the original."""
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    memo: dict[int, Any] = {id(p): like for p in parameters}
    memo[id(optimizer.state)] = type(optimizer.state)(*((dict,) if hasattr(optimizer.state, "default_factory") else ()))
    only = {**{name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"}, "params": [like]}
    memo[id(optimizer.param_groups)] = [only]
    memo |= {id(each): only for each in optimizer.param_groups}
    memo |= {id(each["params"]): only["params"] for each in optimizer.param_groups}
    twin = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():  # which torch's own way of copying leaves out
        if name not in vars(twin) and not callable(getattr(type(optimizer), name, None)):
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin
