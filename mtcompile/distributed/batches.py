"""Batches of different sizes on different ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def weight_of_batch(tokens: int, process_group: Any = None) -> float:
    """Returns the factor of this rank's loss that makes the mean over ranks the mean over all their tokens: ``tokens``, those
    that count in this rank's loss, by the average over the ranks. All ranks call it before each backward; a rank without a
    batch left passes 0, and runs a backward on any batch. Returns 1.0 where there is one rank.

    Raises ValueError if no rank has a token.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 1.0
    group = dist.group.WORLD if process_group is None else process_group
    total = torch.tensor([tokens], dtype=torch.int64, device=device_taken(dist.get_backend_config(group)))
    dist.all_reduce(total, group=group)
    if not int(total):
        raise ValueError("expected tokens that count in the loss on some rank, found none on any")
    return tokens * dist.get_world_size(group) / int(total)


def device_taken(backends: str) -> str:
    """Returns the device whose tensors the collectives of a group take: the host's where it has a backend for these.
    ``backends``: by device, as ``torch.distributed.get_backend_config`` gives them (``cpu:gloo,cuda:nccl``)."""
    devices = [each.partition(":")[0] for each in backends.split(",")]
    return "cpu" if "cpu" in devices else devices[0]
