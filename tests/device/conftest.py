"""These tests run on the GPU where there is one (``make gpu``), else on a second device made of host memory."""

from __future__ import annotations

import pytest
import torch

from tests.device import second

if not torch.cuda.is_available():
    second.load()
    # Deterministic kernels are asked for by name; nothing else of a GPU is emulated.


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device(second.NAME, 0)
