"""Frozen weights lie in memory once for all ranks of a host, and yet each rank may write to its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from tests.ranks import job
from tests.ranks.compiled import mapping_of
from tests.ranks.reference import adamw, batches, differing, generator_of, model, trained


def frozen_model() -> torch.nn.Module:
    plain = model()
    for parameter in plain.layers.parameters():
        parameter.requires_grad_(False)
    return plain


def frozen(rank: int, count: int) -> dict[str, Any]:
    steps, plain = batches(2, count), frozen_model()
    optimizer = adamw(plain)
    ours = mtcompile.compile(plain, memory="200KB", optimizer=optimizer, update="backward")
    torch.set_rng_state(generator_of(rank))
    for of_ranks in steps:
        ours(*of_ranks[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = ours.get_submodule("layers.1.up").weight
    before, same = mapping_of(weight), differing(ours, trained(frozen_model(), steps))
    value = weight.detach().clone()
    if rank == 1:
        with torch.no_grad():
            weight.add_(1.0)
    torch.distributed.barrier()
    return {"same": same, "mapping": before, "own": bool(torch.equal(weight, value + rank))}


@pytest.mark.long
def test_frozen_weights_lie_once_per_host_until_a_rank_writes_to_them(tmp_path: Path) -> None:
    for found in job.run(frozen, 2, tmp_path):
        assert found["same"] == [] and found["own"]
        assert "memfd:mtcompile" in found["mapping"]["file"] and found["mapping"]["flags"].endswith("p")
        assert found["mapping"]["Private_Dirty"] == "0 kB"
