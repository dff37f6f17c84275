"""A compiled model on one of several ranks, and where its tensors lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mtcompile
from tests.ranks.reference import adamw, generator_of, model

BUDGET = "200KB"  # too little for all weights and activations


def compiled(rank: int, make: Any = adamw, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The model of a rank, built with other weights than those of rank 0, whose are taken."""
    plain = model(seed=rank)
    optimizer = make(plain)
    return mtcompile.compile(plain, memory=BUDGET, optimizer=optimizer, **options), optimizer


def train(rank: int, steps: Any, clip: float | None = None, **options: Any) -> Any:
    ours, optimizer = compiled(rank, **options)
    torch.set_rng_state(generator_of(rank))
    for of_ranks in steps:
        optimizer.zero_grad()
        ours(*of_ranks[rank]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(ours.parameters(), clip)
        optimizer.step()
    ours.synchronize()
    return ours


def mapping_of(tensor: torch.Tensor) -> dict[str, str]:
    """What the kernel says of the mapping that a tensor lies in."""
    lines, found = Path("/proc/self/smaps").read_text().splitlines(), dict[str, str]()
    inside = False
    for line in lines:
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            start, end = (int(part, 16) for part in head[0].split("-"))
            inside = start <= tensor.data_ptr() < end
            found |= {"range": head[0], "file": " ".join(head[5:]), "flags": head[1]} if inside else {}
        elif inside:
            found[head[0].rstrip(":")] = " ".join(head[1:])
    return found
