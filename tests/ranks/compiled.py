"""A compiled model on one of several ranks, and where its tensors lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mtcompile
from mtcompile.errors import StepError
from tests.ranks.reference import adamw, generator_of, model

MASTERS: dict[str, Any] = {"update": "backward", "precision": "bf16-master32"}
BUDGET = "200KB"  # too little for all weights and activations


def compiled(rank: int, make: Any = adamw, memory: str = BUDGET, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The model of a rank, built with other weights than those of rank 0, whose are taken."""
    plain = model(seed=rank)
    optimizer = make(plain)
    return mtcompile.compile(plain, memory=memory, optimizer=optimizer, **options), optimizer


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


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, torch.ones_like(x))


def wide(rank: int, share: bool, update: str = "backward") -> tuple[Any, torch.optim.Optimizer]:
    """A model after two steps. ``share``: False: each rank has weights of its own."""
    os.environ["MT_RANKS_SHARE"] = str(int(share))
    torch.manual_seed(0)
    plain = Wide()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    ours = mtcompile.compile(plain, memory="4MB", optimizer=optimizer, **MASTERS | {"update": update})
    for seed in (1, 2):
        step(ours, optimizer, rank, seed)
    return ours, optimizer


def step(ours: nn.Module, optimizer: torch.optim.Optimizer, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    ours(torch.randn(4, 512, generator=generator).bfloat16()).backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(act: Callable[[], None]) -> str:
    """The error that says why something cannot be done."""
    with pytest.raises(StepError) as error:
        act()
    return str(error.value)


def mappings_of(ours: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
    """What the kernel says of the mappings that a model's weights, masters and AdamW state lie in, once all ranks have read
    them, by their ranges."""
    masters = [master.remainder for master in ours._mt_model.door.masters]
    state = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    homes = [tensor.detach() for tensor in (*ours.parameters(), *masters, *state)]
    for tensor in homes:  # each page is one of both ranks then, and counts half in each
        tensor.sum()
    torch.distributed.barrier()
    mappings = {m["range"]: m for m in map(mapping_of, homes)}
    torch.distributed.barrier()
    return mappings


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
