"""The room in host memory, asked for before it is taken: the kernel ends a process that takes more, without a message.

Room is what the system says is available, and what is left in the process's control groups and of its ulimits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mtcompile.machine import device
from mtcompile.references import with_hooks
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Schedule

_UNASKED = 64 << 20  # bytes that are taken without a look at the system's files, which takes a millisecond
_EVERY_S = 5.0  # between looks for what each step takes


def check_room(nbytes: int, what: str, way: str) -> None:
    """Raises BudgetError if the host has no room for ``nbytes`` more. ``what``: they are for; ``way``: the smallest thing to
    do. Looks only for what is large."""
    if nbytes > _UNASKED:
        device.check_room(nbytes, what, way)


def host_arena(on: Device, nbytes: int, what: str, way: str) -> torch.Tensor:
    """Allocates host memory for the copies of a device. Raises BudgetError, before it does, if there is no room."""
    check_room(nbytes, what, way)
    arena: torch.Tensor = on.arena("host", nbytes)
    return arena


def check_plan(schedule: Schedule, state_nbytes: Mapping[str, int], emulated: bool) -> int:
    """Returns the bytes that a model's first plan takes beside its weights and state, of which all but gradients are there.
    Raises BudgetError if there is no room for them. ``emulated``: its device is host memory too."""
    held_nbytes = sum(nbytes for name, nbytes in state_nbytes.items() if name != "gradients")
    total = schedule.peak_nbytes.get("host", 0) + (schedule.peak_nbytes.get("device", 0) if emulated else 0)
    ways = 'pass update="backward" (no gradients are held), disk="/path:SIZE"' + (" or a smaller memory=" if emulated else "")
    check_room(total - held_nbytes, "gradients, optimizer state and what else this plan adds", ways)
    return total - held_nbytes


class Watchdog:
    """Looks now and then whether what every step takes anew still has room."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def before_step(self, nbytes: int) -> None:
        """Raises BudgetError if a step cannot take ``nbytes`` of host memory now."""
        if nbytes > _UNASKED and (now := time.monotonic()) >= self._next_s:
            check_room(nbytes, "what a step computes", "pass a smaller batch or memory=")
            self._next_s = now + _EVERY_S


def checked_before_first_step(optimizer: torch.optim.Optimizer, missing_nbytes: Callable[[], int]) -> None:
    """Lets the first ``optimizer.step()`` raise BudgetError, before it changes anything, if there is no room for the state that
    it makes: ``missing_nbytes``."""
    has_room = False

    def check(*_: Any) -> None:
        nonlocal has_room
        if not has_room and not torch.compiler.is_compiling():
            check_room(
                missing_nbytes() or 0, "the optimizer's state", 'train with fewer parameters, or on a disk (update="backward")'
            )
            has_room = True

    with_hooks(optimizer).register_step_pre_hook(check)
