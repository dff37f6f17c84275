"""Weights in fragments on several ranks of one host: gradients and homes of the whole weight, and its bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.ranks import job

WEIGHT = 512 * 1024  # bytes


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


def compiled(memory: int, fragments: str | None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.compiler.reset()
    model = First()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"policy": "offload-all", "device": "cpu", "fragments": fragments, **options}
    return mtcompile.compile(model, memory=memory, optimizer=optimizer, **options), optimizer


def trained(rank: int, memory: int, fragments: str | None) -> tuple[Any, list[torch.Tensor]]:
    """A model after three steps, and its losses, gradients and weights in each of them."""
    ours, optimizer = compiled(memory, fragments)
    log: list[torch.Tensor] = []
    for seed in range(3):
        optimizer.zero_grad()
        loss = ours(torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * seed + rank)))
        loss.backward()
        gradients = [p.grad.clone() for p in ours.parameters()]
        optimizer.step()
        log += [loss.detach(), *gradients, *(p.detach().clone() for p in ours.parameters())]
    return ours, log


def refused() -> str:
    with pytest.raises(ValueError, match="fragments=") as error:
        compiled(WEIGHT // 2, "exact", update="backward")
    return str(error.value)


def both(rank: int, count: int, share: bool) -> dict[str, Any]:
    os.environ["MT_RANKS_SHARE"] = str(int(share))
    (ours, log), (_, whole) = trained(rank, WEIGHT // 2, "exact"), trained(rank, 8 * WEIGHT, None)
    report, door = ours.memory_report(), ours._mt_model.door
    return {
        "same": all(torch.equal(one, other) for one, other in zip(log, whole, strict=True)),
        "cut": "first.weight in" in str(ours.plan),
        "common": door.parameters.slabs[door.parameters.places["first.weight"].block].common,
        "peak": [report[f"{which}peak_{tier}_bytes"] for tier in ("device", "host") for which in ("", "planned_")],
        "refused": refused(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ranks_of_one_host_take_a_weight_in_fragments(share: bool, tmp_path: Path) -> None:
    for found in job.run(lambda rank, count: both(rank, count, share), 2, tmp_path):
        assert found["same"] and found["cut"] and found["common"] == share
        device, planned_device, host, planned_host = found["peak"]
        assert device <= planned_device <= WEIGHT // 2 and host <= planned_host
        assert 'expected one host and update="step"' in found["refused"] and 'pass update="step"' in found["refused"]
