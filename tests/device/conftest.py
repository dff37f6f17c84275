"""These tests run on the GPU where there is one (``make gpu``), else on a second device made of host memory. They are
collected apart from the others, since loading that device changes the process."""

from __future__ import annotations

import pytest
import torch

from mtcompile import knobs
from mtcompile.runtime.devices.cuda_driver import Api, drivers
from tests.device import second
from tests.device.second import LateCopies

CUDA = torch.cuda.is_available()
collect_ignore_glob: list[str] = []
if CUDA:  # kernels whose sums have one order, for both sides; torch only warns of attention's unless it is strict
    knobs.products_in_one_order()
    torch.use_deterministic_algorithms(True)
elif torch.version.cuda is None:
    second.load()
else:  # a CUDA build of torch allows no second device
    collect_ignore_glob += ["test_*.py", "*/test_*.py"]


class PausedCopies(Api):
    """Copies of a GPU, each after a pause."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        torch.cuda._sleep(1_000_000)
        super().copy(target, source)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if CUDA else second.NAME, 0)


@pytest.fixture
def late(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """Copies as late as their events allow; on a GPU, each after a pause. Yields the drivers of the second
    device."""
    made: list[LateCopies] = []
    if device.type != "cuda":
        monkeypatch.setenv("MT_NVTX", "1")  # drivers are told what is about to run

    def driver(where: torch.device) -> LateCopies:
        made.append(LateCopies(len(made), eager=0.0))
        return made[-1]

    monkeypatch.setitem(drivers, device.type, PausedCopies if device.type == "cuda" else driver)
    return made
