"""These tests run on the GPU where there is one (``make gpu``), else on a second device made of host memory. They are
collected apart from the others, since loading that device changes the process."""

from __future__ import annotations

import pytest
import torch

from tests.device import second

CUDA = torch.cuda.is_available()
collect_ignore_glob: list[str] = []
if not CUDA and torch.version.cuda is None:
    second.load()
elif not CUDA:  # a CUDA build of torch allows no second device
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if CUDA else second.NAME, 0)
