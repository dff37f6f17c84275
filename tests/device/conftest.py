"""These tests run on the GPU where there is one (``make gpu``), else on a second device made of host memory. They are
collected apart from the others, since loading that device changes the process."""

from __future__ import annotations

import pytest
import torch

from mtcompile import knobs
from tests.device import second

CUDA = torch.cuda.is_available()
collect_ignore_glob: list[str] = []
if CUDA:  # kernels whose sums have one order, for both sides; torch only warns of attention's unless it is strict
    knobs.products_in_one_order()
    torch.use_deterministic_algorithms(True)
elif torch.version.cuda is None:
    second.load()
else:  # a CUDA build of torch allows no second device
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if CUDA else second.NAME, 0)
