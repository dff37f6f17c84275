"""The rows of a tensor that indices name: which they are, as stretches of neighbours, and their places among each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def named_rows(indices: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Returns the rows that ``indices`` name, each once, in order: int64 on the host. Numbers that are no row of ``count`` are
    left out; the kernel that reads such a row raises its own error."""
    named: torch.Tensor = torch.cat([index.flatten().long().cpu() for index in indices]).unique()  # sorted
    return named[(named >= 0) & (named < count)]


def stretches_of(indices: Sequence[torch.Tensor], count: int) -> list[tuple[int, int]]:
    """Returns the first row and the end of each stretch of named rows, in order."""
    named = named_rows(indices, count)
    if not len(named):
        return []
    gaps = (named.diff() != 1).nonzero().flatten() + 1
    starts, ends = torch.cat([gaps.new_zeros(1), gaps]), torch.cat([gaps, gaps.new_tensor([len(named)])])
    return list(zip(named[starts].tolist(), (named[ends - 1] + 1).tolist(), strict=True))


def places_of(index: torch.Tensor, named: torch.Tensor, without: int = -1, spare: int = -1) -> torch.Tensor:
    """Returns the place of each number of ``index`` among the ``named`` rows, on the host, strided as ``index`` is: ``spare``
    for the number ``without``, and -1 for what is not among them, which no kernel takes for a row."""
    numbers = index.detach().cpu()
    places = torch.searchsorted(named, numbers.long())
    known = (torch.cat([named, named.new_tensor([-1])])[places] == numbers) & (numbers >= 0)
    places = torch.where(known, places, -1)
    if without >= 0:
        places = torch.where(numbers == without, spare, places)
    return torch.empty_strided(index.shape, index.stride(), dtype=index.dtype).copy_(places)
