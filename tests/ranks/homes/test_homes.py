"""Weights, masters and optimizer state of a host lie there once, and its ranks update them in shares."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.ranks import job
from tests.ranks.compiled import mappings_of, refused, step, train, wide
from tests.ranks.reference import OPTIMIZERS, adamw, batches, differing, generator_of, model, trained


def once(rank: int, count: int) -> dict[str, Any]:
    alone, _ = wide(rank, share=False)
    ours, optimizer = wide(rank, share=True)
    compiled, mappings = ours._mt_model, mappings_of(ours, optimizer)
    resident = compiled.session.last.schedule.resident_nbytes["host"] - compiled.door.ranks.exchange_nbytes
    found: dict[str, Any] = {
        "different": differing(ours, alone),
        "files": sorted({m["file"].split()[0] for m in mappings.values()}),
        "resident": resident,
        "physical": sum(int(m["Pss"].split()[0]) * 1024 for m in mappings.values()),
        "parameters": sum(p.numel() for p in ours.parameters()),
        "report": ours.memory_report(),
        "errors": [],
    }
    saved = {name: value.clone() for name, value in ours.state_dict().items()}, optimizer.state_dict()
    torch.distributed.barrier()
    if rank == 1:
        with torch.no_grad():
            next(ours.parameters()).mul_(2.0)
    torch.distributed.barrier()
    found["errors"].append(refused(lambda: step(ours, optimizer, rank, 3)))
    ours.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(ours, optimizer, rank, 3)
    step(alone, alone._mt_model.door.optimizer, rank, 3)
    found["loaded"] = differing(ours, alone)
    ours.layers[0].weight.data = ours.layers[0].weight.data.clone()
    found["errors"].append(refused(lambda: step(ours, optimizer, rank, 4)))
    return found


@pytest.mark.slow
def test_a_host_has_weights_masters_and_state_once(tmp_path: Path) -> None:
    ranks = job.run(once, 2, tmp_path)
    count = ranks[0]["parameters"]
    assert sum(rank["physical"] for rank in ranks) / count == pytest.approx(12, abs=0.25)
    for rank in ranks:
        assert rank["different"] == [] and rank["loaded"] == []
        assert rank["files"] == ["/memfd:mtcompile"]
        assert 12 <= 2 * rank["resident"] / count < 12.5
        assert rank["report"]["state_bytes"] == pytest.approx(12 * count, rel=1e-3)
        assert rank["report"]["peak_host_bytes"] <= rank["report"]["planned_peak_host_bytes"]
        assert rank["errors"][1].startswith("layers.0.weight was replaced by another tensor, and lies once for all ranks")
    assert ranks[1]["errors"][0].startswith("layers.0.weight was written to between two steps, and lies once for all ranks")
    assert ranks[0]["errors"][0].startswith("weights that lie once for all ranks of the host have changed")


def optimizers(update: str, rank: int, count: int) -> dict[str, list[str]]:
    """By optimizer, what differs from a plain job."""
    steps, found = batches(3, count), dict[str, list[str]]()
    for name, make in OPTIMIZERS.items():

        def trainable(of: nn.Module, make: Any = make) -> torch.optim.Optimizer:
            return make([p for p in of.parameters() if p.requires_grad])  # type: ignore[no-any-return]

        ours = train(rank, steps, make=trainable, update=update)
        assert ours._mt_model.door.shares is not None
        found[name] = differing(ours, trained(model(), steps, trainable))
    os.environ["MT_CHECK"] = "1"  # random delays, poison and checksums
    clipping: dict[str, Any] = {"clip": 0.5} if update == "step" else {"max_grad_norm": 0.5}
    masters = train(rank, steps, update=update, precision="bf16-master32", **clipping)
    os.environ["MT_RANKS_SHARE"] = "0"
    own = train(rank, steps, update=update, precision="bf16-master32", **clipping)
    found["masters"] = differing(masters, own)
    return found


@pytest.mark.long
@pytest.mark.parametrize("update", ["step", "backward"])
def test_shares_have_the_bits_of_whole_updates(update: str, tmp_path: Path) -> None:
    for found in job.run(functools.partial(optimizers, update), 3, tmp_path):
        assert found == {name: [] for name in (*OPTIMIZERS, "masters")}


def not_elementwise(update: str, rank: int, count: int) -> dict[str, Any]:
    steps = batches(2, count)

    def factored(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([p for p in of.parameters() if p.requires_grad], lr=1e-2)

    ours = train(rank, steps, make=factored, update=update)
    return {"different": differing(ours, trained(model(), steps, factored)), "shares": ours._mt_model.door.shares is not None}


@pytest.mark.long
@pytest.mark.parametrize("update", ["step", "backward"])
def test_an_optimizer_that_looks_at_whole_parameters_has_weights_of_each_rank(update: str, tmp_path: Path) -> None:
    for found in job.run(functools.partial(not_elementwise, update), 2, tmp_path):
        assert found == {"different": [], "shares": False}


def evaluated_and_closed(update: str, rank: int, count: int) -> dict[str, Any]:
    """Evaluates on some ranks before and between steps, closes, and holds a weight of another model on one rank."""
    steps, found = batches(3, count), dict[str, Any](different=[])
    for evaluating in (range(count), (0,)):
        plain = model(seed=rank)
        optimizer = adamw(plain)
        ours = mtcompile.compile(plain, memory="200KB", optimizer=optimizer, update=update)
        states = [generator_of(rank)]
        for of_ranks in steps:
            if rank in evaluating:
                with torch.no_grad():
                    ours.eval()(*of_ranks[rank])
            torch.set_rng_state(states.pop())
            ours.train()(*of_ranks[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(torch.get_rng_state())
        assert ours._mt_model.door.shares is not None
        ours.close()
        torch.distributed.barrier()
        expected = trained(model(), steps)
        found["different"] += differing(ours, expected)
        next(ours.parameters()).data.zero_() if rank == 0 else None
        torch.distributed.barrier()
        found["different"] += differing(ours, expected) if rank else []
    plain = model()
    ours = mtcompile.compile(plain, memory="200KB", optimizer=adamw(plain), update=update)
    held = next(ours.parameters()).data if rank == 1 else None
    with pytest.raises(mtcompile.MtcompileError) as error:
        ours(*steps[0][rank]).backward()
    return {**found, "error": str(error.value), "held": held is not None}


@pytest.mark.long
@pytest.mark.parametrize("update", ["step", "backward"])
def test_ranks_may_evaluate_alone_and_have_weights_of_their_own_after_close(update: str, tmp_path: Path) -> None:
    for found in job.run(functools.partial(evaluated_and_closed, update), 2, tmp_path):
        assert found["different"] == []
        assert found["error"].startswith("expected the ranks of a host to share the same weights, found that rank 1 and rank 0")
