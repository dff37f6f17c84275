"""``optimizer.step()`` of weights that lie once per host: each rank updates a share, with the bits of weights of its own."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.ranks import job
from tests.ranks.compiled import Wide, mapping_of, mappings_of, refused
from tests.ranks.reference import Deeper, adamw, batches, batches_of, differing, generator_of, model

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
    compiled, mappings = ours._mt_model, mappings_of(ours, optimizer)
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
    found |= {"errors": unlike(ours, optimizer, rank), "after": after(ours, optimizer, alone, of_alone, rank)}
    torch.distributed.barrier()
    if rank:  # one alone: what both write at once, either may have the last word on
        ours.layers[1].bias.data.mul_(2)  # which no version counter tells
    torch.distributed.barrier()
    return found | {"written": refused(lambda: step(ours, optimizer, rank, 4))}


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


@pytest.mark.slow
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
        assert rank["written"].startswith("weights that lie once for all ranks of the host have changed between two steps")


Setting = tuple[Any, torch.optim.Optimizer, list[Any]]  # a compiled model, its optimizer, and this rank's batches


def build(rank: int, count: int, make: Any = adamw, **options: Any) -> Setting:
    plain = model(seed=rank)
    optimizer = make(plain)
    ours = mtcompile.compile(plain, memory="200KB", optimizer=optimizer, **options)
    torch.set_rng_state(generator_of(rank))
    return ours, optimizer, [of_ranks[rank] for of_ranks in batches(6, count)]


def in_groups(of: nn.Module) -> torch.optim.Optimizer:
    matrices, others = ([p for p in of.parameters() if p.requires_grad and (p.dim() > 1) == wide] for wide in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}])


def scheduled(rank: int, count: int) -> Setting:
    """Groups with a schedule, gradients that are zeroed in place and clipped by hand, several backwards before each step."""
    ours, optimizer, own = build(rank, count, in_groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-3], total_steps=4)
    for first in (0, 2, 4):
        for batch in own[first : first + 2]:
            (ours(*batch) / 2).backward()
            time.sleep(0.02 * (rank + first) % 0.05)
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
    return ours, optimizer, own


def with_closures(rank: int, count: int) -> Setting:
    ours, optimizer, own = build(rank, count)

    def closure(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ours(*batch)
        loss.backward()
        return loss.detach()

    for number, batch in enumerate(own[:4]):
        if number % 2:
            assert optimizer.step(lambda batch=batch: closure(batch)) is not None  # type: ignore[misc]
        else:
            assert optimizer.step(closure=lambda batch=batch: closure(batch)) is not None  # type: ignore[misc]
    return ours, optimizer, own


def scaled(rank: int, count: int, fused: bool = False, **options: Any) -> Setting:
    """A GradScaler that skips a step on all ranks."""

    def make(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in of.parameters() if p.requires_grad], lr=1e-2, fused=fused)

    ours, optimizer, own = build(rank, count, make, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    for number, batch in enumerate(own[:4]):
        optimizer.zero_grad()
        scaler.scale(ours(*batch) * (float("inf") if number == 1 and rank == 1 else 1.0)).backward()
        if number == 3:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 128.0
    return ours, optimizer, own


def grown(rank: int, count: int) -> Setting:
    """Parameters that are frozen, and added to the optimizer, between steps; an evaluation on one rank."""

    def some(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for name, p in of.named_parameters() if p.requires_grad and "layers.1" not in name])

    ours, optimizer, own = build(rank, count, some)
    for number, batch in enumerate(own):
        if number == 2:
            later = [p for name, p in ours.named_parameters() if p.requires_grad and "layers.1" in name]
            optimizer.add_param_group({"params": later, "lr": 5e-3})
        if number == 3:
            ours.layers[0].down.weight.requires_grad_(False)
        if number == 4:
            ours.layers[0].up.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [ours.layers[0].up.weight]})
        if number == 5:
            ours.layers[0].down.weight.requires_grad_(True)
        generator = torch.get_rng_state()
        if number % 2 == rank:
            with torch.no_grad():
                ours.eval()(*batch)
        torch.set_rng_state(generator)
        ours.train()(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours, optimizer, own


def loaded(rank: int, count: int, **options: Any) -> Setting:
    """Weights and state that are loaded in the middle, and optimizers that are bound one after the other."""
    ours, optimizer, own = build(rank, count, **options)
    saved: Any = None
    for number, batch in enumerate(own):
        optimizer.zero_grad()
        ours(*batch).backward()
        optimizer.step()
        if number == 1:
            saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
        if number == 3:
            ours.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if number == 4:
            optimizer = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
            ours.bind(optimizer)
    return ours, optimizer, own


def deeper(rank: int, count: int) -> Setting:
    """A layer that no earlier step has used, forwards that wait together, and a step without gradients."""
    torch.manual_seed(0)
    plain = Deeper()
    optimizer = adamw(plain)
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=optimizer)
    for number in range(4):
        ours.deep = number > 1
        one, other = (ours(*batches_of(number + more, count)[rank]) for more in (0, 10))
        optimizer.step()
        other.backward()
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours, optimizer, []


def accumulated(rank: int, count: int) -> Setting:
    ours, optimizer, _ = build(rank, count, accumulate=2, precision=SPLIT)
    for of_ranks in batches(3, count, rows=4):
        optimizer.zero_grad()
        ours(*of_ranks[rank]).backward()
        optimizer.step()
    return ours, optimizer, []


def wrapped(rank: int, count: int) -> Setting:
    """A model in DistributedDataParallel, which averages gradients once more, and a step in torch.compile, outside of which
    shares are updated. In it, weights of each rank get other bits, as torch traces another formula."""
    ours, optimizer, own = build(rank, count)
    outer = nn.parallel.DistributedDataParallel(ours, find_unused_parameters=True)
    traced = torch.compile(optimizer.step, backend="eager")
    for number, batch in enumerate(own[:4]):
        outer(*batch).backward()
        (traced if number % 2 and ours._mt_model.door.shares else optimizer.step)()
        optimizer.zero_grad()
    return ours, optimizer, own


PROGRAMS: dict[str, Callable[[int, int], Setting]] = {
    "scheduled": scheduled,
    "closures": with_closures,
    "scaled": scaled,
    "scaled, fused": functools.partial(scaled, fused=True),
    "scaled, masters": functools.partial(scaled, precision=SPLIT),
    "grown": grown,
    "loaded": loaded,
    "loaded, masters": functools.partial(loaded, precision=SPLIT),
    "deeper": deeper,
    "accumulated": accumulated,
    "wrapped": wrapped,
}


def programs(rank: int, count: int) -> dict[str, list[str]]:
    """By program, what differs from the same with homes of each rank."""
    differences = dict[str, list[str]]()
    for name, program in PROGRAMS.items():
        ends = []
        for share in ("0", "1"):
            os.environ["MT_RANKS_SHARE"] = share
            ours, optimizer, _ = program(rank, count)
            assert (ours._mt_model.door.shares is not None) == (share == "1")
            entries = optimizer.state_dict()["state"]
            state = {f"{index} {key}": value for index, entry in entries.items() for key, value in entry.items()}
            ends.append({**ours.state_dict(), **{key: torch.as_tensor(value) for key, value in state.items()}})
        own, shared = ends
        assert own.keys() == shared.keys() and len(own) > 3
        differences[name] = [key for key in own if not torch.equal(own[key], shared[key])]
    return differences


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["aa", "aaaa", "aabb"])
def test_programs_have_the_bits_of_homes_of_each_rank(hosts: str, tmp_path: Path) -> None:
    for differences in job.run(programs, len(hosts), tmp_path, tuple(hosts)):
        assert differences == {name: [] for name in PROGRAMS}
