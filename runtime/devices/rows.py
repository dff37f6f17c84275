"""The rows of a tensor that indices name, as stretches of neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stretches_of(indices: Sequence[torch.Tensor], count: int) -> list[tuple[int, int]]:
    """Returns the first row and the end of each stretch of named rows, in order. ``indices``: integers on the host; those that
    are no row of ``count`` are left out, and the kernel that reads such a row raises its own error."""
    named = torch.cat([index.flatten().long() for index in indices]).unique()  # sorted
    named = named[(named >= 0) & (named < count)]
    if not len(named):
        return []
    gaps = (named.diff() != 1).nonzero().flatten() + 1
    starts, ends = torch.cat([gaps.new_zeros(1), gaps]), torch.cat([gaps, gaps.new_tensor([len(named)])])
    return list(zip(named[starts].tolist(), (named[ends - 1] + 1).tolist(), strict=True))
