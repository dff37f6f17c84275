"""States of random generators, saved and replayed so that what is computed again draws the same numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def generator_state(device: str) -> torch.Tensor:
    """The state of a device's default generator: bytes, in host memory."""
    return torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: str, state: torch.Tensor) -> None:
    """Puts a device's default generator in a state that ``generator_state`` gave."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def generator_nbytes(device: str) -> int:
    """The bytes of a device's generator state, also on a machine without that device."""
    return 16 if device.startswith("cuda") else generator_state(device).numel()


def save_rng(device: str) -> torch.Tensor:
    """The state of the device's default generator, to be replayed by ``replay``."""
    return generator_state(device)


def replay(state: torch.Tensor, device: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a random operation from a saved generator state and leaves the generator's stream where it was."""
    with rng_preserved(device):
        set_generator_state(device, state)
        return target(*args, **kwargs)


@contextlib.contextmanager
def rng_preserved(device: str) -> Iterator[None]:
    """Leaves the device's default generator as it was found."""
    state = generator_state(device)
    try:
        yield
    finally:
        set_generator_state(device, state)


@contextlib.contextmanager
def python_rng_preserved() -> Iterator[None]:
    """Leaves Python's and numpy's generators as they were found. Modules that are imported inside may draw from them, as rich
    does: a resumed training, which imports them at another step, would have other random numbers."""
    numpy = sys.modules.get("numpy")
    state, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpys)
