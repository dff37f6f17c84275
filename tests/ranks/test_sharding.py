"""Masters and optimizer state are sharded over hosts: gradients are reduce-scattered, and updated weights all-gathered."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.distributed.shares import HostShares
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us
from tests.ranks import job
from tests.ranks.compiled import MASTERS, mapping_of, train, wide
from tests.ranks.reference import OPTIMIZERS, batches, differing, model, trained


def sharded(rank: int, count: int) -> dict[str, Any]:
    """A model of two hosts: its numbers, its collectives, its bytes, and what is saved of it."""
    steps, found = batches(2, count), dict[str, Any]()
    ours = train(rank, steps, update="backward")
    found["different"] = differing(ours, trained(model(), steps, hosts=2))
    network = [i for i in ours.schedule.instructions if i.queue == "network" and i.op == "run"]
    found["collectives"] = sorted({i.label.partition("_")[0] for i in network})
    found["simulated"] = busy_us(simulate(ours._mt_model.session.last.schedule))["network"] > 0
    return found | bytes_of_a_host(rank, count)


def bytes_of_a_host(rank: int, count: int) -> dict[str, Any]:
    ours, optimizer = wide(rank, share=True)
    compiled = ours._mt_model
    masters = [master.remainder for master in compiled.door.masters]
    state = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    for parameter in ours.parameters():
        parameter.sum()
    for tensor in (*masters, *state):  # this rank's part alone: reading takes pages
        own_part(compiled.door.shares, tensor).sum()
    dist.barrier()
    homes = [tensor.detach() for tensor in (*ours.parameters(), *masters, *state)]
    found = [(tensor, mapping_of(tensor)) for tensor in homes]
    shared = {m["range"]: m for _, m in found if m["file"].startswith("/memfd")}
    own = sum(tensor.nbytes for tensor, m in found if not m["file"].startswith("/memfd"))  # of one rank alone on its host
    dist.barrier()
    resident = compiled.session.last.schedule.resident_nbytes["host"] - compiled.door.ranks.exchange_nbytes
    physical = own + sum(int(m["Pss"].split()[0]) * 1024 for m in shared.values())
    return {
        "physical": physical,
        "resident": resident,
        "parameters": sum(p.numel() for p in ours.parameters()),
        "report": ours.memory_report(),
    }


def own_part(shares: HostShares, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)[shares.part_of_host(tensor, shares._me // shares.here)]


def saved_state(rank: int, shard: str, closes: bool) -> list[str]:
    """Digests of a state_dict, of the masters, of a checkpoint, and of a state_dict once the model is closed or gone."""
    os.environ["MT_RANKS_SHARD"] = shard
    ours, optimizer = wide(rank, share=True)
    folder = Path(os.environ["FOLDER"]) / f"{shard}-{closes}"
    parts = [optimizer.state_dict()["state"], mtcompile.master_parameters(ours)]
    checkpoint.save(folder, ours, optimizer, step=2)
    dist.barrier()
    state, plain = wide_state(folder)
    if closes:
        ours.close()
    del ours
    os.environ["MT_RANKS_SHARD"] = "1"
    return [digest(part) for part in (*parts, state, plain, optimizer.state_dict()["state"])]


def wide_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a process alone loads of a checkpoint."""
    from safetensors.torch import load_file

    (state,) = folder.glob("step-*/state.safetensors")
    return dict(sorted(load_file(state).items())), load_file(state.parent / "model.safetensors")


def digest(values: Any) -> str:
    """A digest of the bytes of tensors, in whatever order."""

    def of(value: Any) -> Iterator[bytes]:
        if isinstance(value, dict):
            for each in value.values():
                yield from of(each)
        else:
            yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    return hashlib.blake2b(b"".join(sorted(of(values))), digest_size=8).hexdigest()


def check(ranks: list[dict[str, Any]], here: int) -> None:
    count = ranks[0]["parameters"]
    for host in (ranks[:here], ranks[here:]):
        assert sum(rank["physical"] for rank in host) / count == pytest.approx(7, abs=0.25)
    for rank in ranks:
        assert rank["different"] == [] and rank["simulated"]
        assert rank["collectives"] == ["gather", "scatter"]
        assert 7 <= here * rank["resident"] / count < 7.25
        assert rank["report"]["state_bytes"] == pytest.approx(7 * count, rel=1e-2)
        assert rank["report"]["peak_host_bytes"] <= rank["report"]["planned_peak_host_bytes"]


def test_two_hosts_have_a_part_each_of_masters_and_state(tmp_path: Path) -> None:
    check(job.run(sharded, 2, tmp_path, ("a", "b")), here=1)


@pytest.mark.long
def test_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    check(job.run(sharded, 4, tmp_path, ("a", "a", "b", "b")), here=2)


def saved(rank: int, count: int) -> list[list[str]]:
    return [saved_state(rank, *how) for how in (("1", True), ("1", False), ("0", True))]


@pytest.mark.long
@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b", "b")])
def test_state_is_whole_where_it_is_saved_and_read(
    hosts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    for digests in (ranks := job.run(saved, len(hosts), tmp_path, hosts)):
        assert digests == [ranks[0][-1]] * 3


def alike(rank: int, count: int) -> dict[str, list[str]]:
    """By what is trained, what differs from the same with all-reduces, or from a plain job."""
    steps, found = batches(3, count), dict[str, list[str]]()
    for name, make in OPTIMIZERS.items():

        def trainable(of: torch.nn.Module, make: Any = make) -> torch.optim.Optimizer:
            return make([p for p in of.parameters() if p.requires_grad])  # type: ignore[no-any-return]

        ours = train(rank, steps, make=trainable, update="backward")
        assert ours._mt_model.door.shares.elsewhere is not None
        found[name] = differing(ours, trained(model(), steps, trainable, hosts=2))
    os.environ["MT_CHECK"] = "1"  # random delays, poison and checksums
    for name, options in {"masters": {}, "clipped": {"max_grad_norm": 0.3}, "accumulated": {"accumulate": 2}}.items():
        several = batches(3, count, rows=4)
        both = []
        for shard in ("1", "0"):
            os.environ["MT_RANKS_SHARD"] = shard
            both.append(train(rank, several, **MASTERS, **options))
        os.environ["MT_RANKS_SHARD"] = "1"
        found[name] = differing(*both)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("count", "hosts"), [(2, ("a", "b")), (4, ("a", "a", "b", "b"))])
def test_parts_of_hosts_have_the_bits_of_whole_updates(count: int, hosts: tuple[str, ...], tmp_path: Path) -> None:
    for found in job.run(alike, count, tmp_path, hosts):
        assert found == {name: [] for name in (*OPTIMIZERS, "masters", "clipped", "accumulated")}


class Root(nn.Module):
    """The gradient of the last element is infinite, and the loss is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(255, -1, -1).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.sqrt() * x).sum()


def not_finite(rank: int, count: int) -> list[str]:
    """Only the last rank updates the element whose gradient is not finite: all say so, and nothing has changed."""
    errors = []
    for nonfinite in ("stop", "continue"):
        plain = Root()
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
        ours = mtcompile.compile(plain, memory="100KB", optimizer=optimizer, update="backward", nonfinite=nonfinite)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                ours(torch.ones(256)).backward()
            except mtcompile.StepError as error:
                errors.append(str(error))
        errors += [str(each.message) for each in warned if "finite" in str(each.message)]
        expected = Root()
        if nonfinite == "continue":
            expected(torch.ones(256)).backward()
            torch.optim.SGD(expected.parameters(), lr=1e-3).step()
        errors += differing(ours, expected)
    return errors


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_noticed_on_all_ranks(tmp_path: Path) -> None:
    for stopped, warned in job.run(not_finite, 2, tmp_path, ("a", "b")):
        assert stopped.startswith("the gradient of weight is not finite, the first in the backward; nothing was changed")
        assert warned.startswith("step 1: the gradient of weight is not finite; it goes on, as asked")
