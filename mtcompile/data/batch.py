"""Batches of training data by the number of their step, and held-out ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

HELD_OUT = 0.05  # share of the data, at its end
MOST_EVALUATED = 8  # batches per evaluation


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the model. ``arguments``: of the call, by name; ``tokens``: how many there are without padding; ``targets``:
    how many of them the loss is averaged over."""

    arguments: dict[str, Any]
    tokens: int
    targets: int


class Source(Protocol):
    """Data cut into rows of one length, which each epoch takes in an order of its own."""

    def batch(self, step: int, batch: int, seed: int) -> Batch:
        """Returns the batch of a step, counted from 1. The same arguments always give the same batch."""

    def evaluation(self, batch: int, most: int) -> Iterator[Batch]:
        """Yields at most ``most`` batches of held-out rows, in order."""


@dataclass(slots=True)
class Order:
    """The order of ``count`` rows in each epoch. ``last``: the epoch that was asked for last, and its order."""

    count: int
    last: tuple[int, torch.Tensor] | None = None

    def rows(self, step: int, batch: int, seed: int) -> list[int]:
        """Returns the rows of a step, counted from 1."""
        chosen = []
        for sample in range((step - 1) * batch, step * batch):
            epoch, index = divmod(sample, self.count)
            if self.last is None or self.last[0] != epoch:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
                self.last = epoch, torch.randperm(self.count, generator=generator)
            chosen.append(int(self.last[1][index]))
        return chosen


def in_batches(count: int, batch: int, most: int) -> Iterator[range]:
    """Yields at most ``most`` ranges of ``batch`` held-out rows each; if there are fewer rows, one range of them all."""
    starts = range(0, count - batch + 1 if count >= batch else min(count, 1), batch)
    yield from (range(start, min(start + batch, count)) for start in starts[:most])
