"""The means of measuring a machine: how much is measured, the median of repetitions, and what a figure is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

MIB = 2**20
WEIGHTS_GB, PARAMETERS = 14.0, 7e9  # of the model that figures are explained with: 7 billion bf16 weights


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring. In bytes: sizes of the ``copies``, of each array of a memory ``stream``, of the ``disk`` file.
    ``parameters`` that AdamW steps, so many that no processor's cache holds their tensors; sides of the square products on the
    host and on an accelerator; ``seconds`` that the repetitions of one figure may take."""

    copies: tuple[int, ...]
    stream: int
    disk: int
    parameters: int
    host_side: int
    accelerator_side: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """The most host memory held at once: two pairs of buffers for copies, AdamW's tensors beside them, or a stream's
        arrays."""
        return max(4 * self.copies[-1] + 16 * self.parameters, 3 * self.stream)


QUICK = Effort((MIB, 16 * MIB, 64 * MIB), 64 * MIB, 32 * MIB, 64 * MIB, 768, 4096, 0.05)
FULL = Effort((MIB, 16 * MIB, 256 * MIB), 256 * MIB, 128 * MIB, 128 * MIB, 1536, 8192, 0.4)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure at several sizes, numbers of threads or kinds; ``meaning``: what it says about training."""

    what: str
    unit: str
    values: Mapping[str, float]
    meaning: str


def median_s(work: Callable[[], object], most_seconds: float, wait: Callable[[], object] = lambda: None) -> float:
    """Returns the median seconds of a call and ``wait``, after one call that touches pages and chooses kernels. Repeats the
    call while there is time, and up to three times if that takes less than four times as long."""
    work()
    wait()
    times: list[float] = []
    while not times or (len(times) < 50 and sum(times) < most_seconds * (1 if len(times) > 2 else 4)):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def waiter(where: torch.device) -> Callable[[], object]:
    """Returns a function that waits for the device's work."""
    return (lambda: None) if where.type == "cpu" else (lambda: torch.get_device_module(where).synchronize(where))
