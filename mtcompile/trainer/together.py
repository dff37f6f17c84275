"""The ranks of ``mtcompile train`` under torchrun: which rows of a batch each of them takes, and what they add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mtcompile import knobs
from mtcompile.data.batch import Batch, Source
from mtcompile.distributed.batches import weight_of_batch


@dataclass(frozen=True, slots=True)
class Together:
    """This process's ``rank`` among ``count`` that train one model."""

    rank: int = 0
    count: int = 1

    def weight(self, targets: int) -> float:
        """Returns the factor of this rank's loss that makes the mean over ranks that over all their targets."""
        return 1.0 if self.count == 1 else weight_of_batch(targets)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns the sums of numbers over all ranks, in float64."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()


ALONE = Together()


def join() -> Together:
    """Joins the processes that torchrun has started; all of them call it. Copies and sums go through host memory, and gloo."""
    if knobs.processes() == 1:
        return ALONE
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Together(dist.get_rank(), dist.get_world_size())


def device_of_rank(asked: str | None) -> str | None:
    """Returns the device of this process: the one that was asked for, else a GPU of its own where there are any."""
    if asked is not None or knobs.processes() == 1 or not torch.cuda.is_available():
        return asked
    return f"cuda:{knobs.process_here()}"


@dataclass(frozen=True, slots=True)
class RowsOfRank:
    """The rows that one rank takes of each batch: the ranks' parts follow each other. ``whole``: the data of all."""

    whole: Source
    together: Together

    def batch(self, step: int, batch: int, seed: int) -> Batch:
        """Returns this rank's rows of the batch of a step. ``batch``: how many rows all ranks take."""
        rank, count = self.together.rank, self.together.count
        return self.whole.batch((step - 1) * count + rank + 1, batch // count, seed)

    def evaluation(self, batch: int, most: int) -> Iterator[Batch]:
        """Yields this rank's share of at most ``most`` batches of held-out rows, in order."""
        batches = enumerate(self.whole.evaluation(batch, most))
        yield from (each for number, each in batches if number % self.together.count == self.together.rank)
