"""The states of the random generators of a process: torch's, of every device, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import torch


def generator_states() -> dict[str, Any]:
    """Returns the states by name, as tensors, numbers and text."""
    import numpy as np

    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states["numpy"] = (str(kind), [int(key) for key in keys], *(float(x) if isinstance(x, float) else int(x) for x in rest))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def check_generator_states(states: dict[str, Any]) -> None:
    """Raises ValueError for states that no generators can be put in. Changes none."""
    import numpy as np

    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        if not all(isinstance(state, torch.Tensor) and state.dtype == torch.uint8 for state in states.get("cuda", ())):
            raise TypeError("expected the states of the GPUs' generators to be bytes")
    except Exception as error:  # each library has its own
        raise ValueError(f"the states of the random generators cannot be used: {type(error).__name__}: {error}") from None


def set_generator_states(states: dict[str, Any]) -> None:
    """Puts the generators in states that ``generator_states`` gave. Raises ValueError, TypeError or RuntimeError for others."""
    import numpy as np

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
    torch.set_rng_state(states["torch"])
