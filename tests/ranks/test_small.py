"""A small training on 2 x 2 hosts goes on under 2 ranks, 1, and 4 of one host; and a stopped rank ends a job."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.distributed.meeting import RanksParted
from tests.ranks import job
from tests.ranks.reference import adamw, differing, generator_of, trained

STAGES = ("aabb", "aa", "a", "aaaa")  # the host of each rank, one step each
_TIMEOUT_S = 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 80), nn.Dropout(0.1), nn.Linear(80, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(self.drop(torch.tanh(self.up(x)))), x)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def batches_of(number: int, count: int) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    return [(torch.randn(3, 16, generator=generator),) for _ in range(count)]


def stage(folder: Path, number: int, rank: int, count: int) -> dict[str, Any]:
    """Goes on from the checkpoint of the stage before, for one step."""
    plain = small(seed=rank + number)
    optimizer = adamw(plain)
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=optimizer, update="backward")
    if number:
        assert checkpoint.load(folder, ours, optimizer).step == number
    torch.set_rng_state(generator_of(rank))
    ours(*batches_of(number, count)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(folder, ours, optimizer, step=number + 1)
    return {"parts": len(ours._mt_model.door.shares.parts) if count > 1 else 0}


def test_a_training_goes_on_under_fewer_and_more_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_RANKS_SHARD", "weights")
    folder, plain = tmp_path / "run", small()
    optimizer = adamw(plain)
    for number, hosts in enumerate(STAGES):
        (at := tmp_path / str(number)).mkdir()
        found = job.run(functools.partial(stage, folder, number), len(hosts), at, tuple(hosts))
        assert found == [{"parts": 4 if "b" in hosts else 0}] * len(hosts)
        trained(plain, [batches_of(number, len(hosts))], lambda of: optimizer, hosts=len({*hosts}))
        loaded = small(seed=9)
        state = adamw(loaded)
        assert checkpoint.load(folder, loaded, state).step == number + 1
        assert differing(loaded, plain) == []
        for index, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state.state_dict()["state"][index][key]) for key, value in entry.items())


def stopped(rank: int, count: int) -> dict[str, Any]:
    plain = small()
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=adamw(plain), update="backward")
    loss = ours(*batches_of(0, count)[rank])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RanksParted) as error:
        loss.backward()
    return {"error": str(error.value), "took": time.monotonic() - began}


def test_a_stopped_rank_ends_the_job_when_its_time_is_over(tmp_path: Path) -> None:
    first, second = processes = job.start(stopped, 2, tmp_path, timeout_s=_TIMEOUT_S)
    first.join(60)
    second.kill()
    found, nothing = job.ended(processes, tmp_path)
    assert nothing is None and found["took"] < 4 * _TIMEOUT_S
    told = f"rank 1 (process {second.pid}) did not come within {_TIMEOUT_S} s (MT_RANKS_TIMEOUT)"
    assert told in found["error"] and "its process is stopped" in found["error"]
