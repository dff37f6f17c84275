"""``optimizer.step()`` of weights that lie once per host: each rank updates a share, with the bits of weights of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.ranks import job
from tests.ranks.compiled import Wide, mapping_of, refused
from tests.ranks.reference import differing

SPLIT = "bf16-master32"


def wide(share: bool, update: str = "step") -> tuple[Any, torch.optim.Optimizer]:
    os.environ["MT_RANKS_SHARE"] = str(int(share))
    torch.manual_seed(0)
    plain = Wide()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    return mtcompile.compile(plain, memory="4MB", optimizer=optimizer, precision=SPLIT, update=update), optimizer


def step(ours: nn.Module, optimizer: torch.optim.Optimizer, rank: int, seed: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * seed + rank)
    ours(torch.randn(4, 512, generator=generator).bfloat16()).backward()
    torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
    optimizer.step()


def once(rank: int, count: int) -> dict[str, Any]:
    """A model whose homes both ranks have, beside one with homes of each rank: numbers, bytes, and what is refused."""
    (alone, of_alone), (ours, optimizer) = wide(share=False), wide(share=True)
    for seed in (1, 2):
        step(alone, of_alone, rank, seed)
        time.sleep(0.1 * ((rank + seed) % 2))
        step(ours, optimizer, rank, seed)
    compiled = ours._mt_model
    masters = [master.remainder for master in compiled.door.masters]
    state = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    homes = [tensor.detach() for tensor in (*ours.parameters(), *masters, *state)]
    for tensor in homes:  # each page is one of both ranks then, and counts half in each
        tensor.sum()
    torch.distributed.barrier()
    mappings = {m["range"]: m for m in map(mapping_of, homes)}
    torch.distributed.barrier()
    own = [mapping_of(parameter.grad)["file"] for parameter in ours.parameters()]
    found: dict[str, Any] = {
        "different": differing(ours, alone),
        "files": sorted({m["file"].split()[0] for m in mappings.values()}),
        "gradients": [file for file in own if "mtcompile" in file],
        "resident": compiled.session.last.schedule.resident_nbytes["host"] - compiled.door.ranks.exchange_nbytes,
        "physical": sum(int(m["Pss"].split()[0]) * 1024 for m in mappings.values()),
        "parameters": sum(p.numel() for p in ours.parameters()),
        "report": ours.memory_report(),
    }
    return found | {"errors": unlike(ours, optimizer, rank), "after": after(ours, optimizer, alone, of_alone, rank)}


def unlike(ours: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[str]:
    """Ranks that do not do the same before they step: all raise, nothing changes, and they go on."""
    before, errors = {name: value.clone() for name, value in ours.state_dict().items()}, []
    parameter = ours.layers[0].weight
    grad = parameter.grad
    parameter.grad = None if rank else grad
    errors.append(refused(optimizer.step))
    parameter.grad = grad * (1 + rank)
    errors.append(refused(optimizer.step))
    parameter.grad = grad
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
    errors.append(refused(optimizer.step))
    optimizer.param_groups[0]["lr"] = 1e-3
    loss = ours(torch.ones(4, 512).bfloat16())
    errors.append(refused(optimizer.step if rank else loss.backward))  # one steps where the other begins a backward
    del loss
    same = all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    return [*errors, str(same)]


def after(ours: Any, optimizer: torch.optim.Optimizer, alone: Any, of_alone: Any, rank: int) -> list[str]:
    """What differs from a rank with homes of its own after one more step."""
    step(ours, optimizer, rank, 3)
    step(alone, of_alone, rank, 3)
    return differing(ours, alone)


def test_a_host_has_weights_masters_and_state_once_and_gradients_per_rank(tmp_path: Path) -> None:
    ranks = job.run(once, 2, tmp_path)
    count = ranks[0]["parameters"]
    assert sum(rank["physical"] for rank in ranks) / count == pytest.approx(12, abs=0.25)
    for rank in ranks:
        assert rank["different"] == [] and rank["after"] == []
        assert rank["files"] == ["/memfd:mtcompile"] and rank["gradients"] == []
        assert 6 + 2 <= rank["resident"] / count < 6 + 2.25  # half of what both have, and gradients of its own
        assert rank["report"]["state_bytes"] == pytest.approx((12 + 2 * 2) * count, rel=1e-3)
        assert rank["report"]["peak_host_bytes"] <= rank["report"]["planned_peak_host_bytes"]
        sets, values, options, backward, same = rank["errors"]
        assert sets.startswith("expected gradients of the same parameters on all ranks when they call optimizer.step(), found")
        assert values.startswith("expected equal gradients on all ranks when they call optimizer.step()")
        assert options.startswith("expected the same options of the optimizer, and as many steps before, on all ranks")
        assert "optimizer.step(), and rank" in backward or "begins a phase of a step, and rank" in backward
        assert same == "True"
