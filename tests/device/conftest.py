"""These tests run on the GPU where there is one (``make gpu``), else on a second device made of host memory. They are
collected apart from the others, since loading that device changes the process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mtcompile import knobs
from mtcompile.runtime.devices import cuda
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


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if CUDA else second.NAME, 0)


@pytest.fixture
def late(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """Copies as late as their events allow; on a GPU, each after a pause. Yields the drivers of the second
    device."""
    drivers: list[LateCopies] = []
    if device.type == "cuda":
        copy_now = cuda.Api.copy

        def pause(self: cuda.Api, target: torch.Tensor, source: torch.Tensor) -> None:
            torch.cuda._sleep(1_000_000)
            copy_now(self, target, source)

        monkeypatch.setattr(cuda.Api, "copy", pause)
        return drivers

    def driver(where: torch.device) -> LateCopies:
        drivers.append(LateCopies(len(drivers), eager=0.0))
        return drivers[-1]

    run_now = cuda.CudaMemory.run

    def run(self: cuda.CudaMemory, *args: Any) -> None:
        if threading.current_thread().name != "mtcompile-host":
            self.api.catch_up()
        run_now(self, *args)

    monkeypatch.setattr(cuda.CudaMemory, "run", run)
    monkeypatch.setattr(cuda, "Api", driver)
    return drivers
