"""Masters and optimizer state are sharded over hosts, and weights where that is asked for: gradients are reduce-scattered, and
weights all-gathered, behind their update or before each fetch."""

from __future__ import annotations

import copy
import functools
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
from mtcompile.distributed.homes.shares import HostShares
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us
from tests.ranks import job
from tests.ranks.compiled import MASTERS, Wide, mapping_of, refused, step, train, wide
from tests.ranks.reference import OPTIMIZERS, Deeper, adamw, batches, batches_of, differing, model, trained


def sharded(update: str, rank: int, count: int) -> dict[str, Any]:
    """A model of two hosts: its numbers, its collectives, its bytes, and what is saved of it."""
    steps, found = batches(2, count), dict[str, Any]()
    ours = train(rank, steps, update=update)
    found["different"] = differing(ours, trained(model(), steps, hosts=2))
    network = [i for i in ours.schedule.instructions if i.queue == "network" and i.op == "run"]
    found["collectives"] = sorted({i.label.partition("_")[0] for i in network})
    found["simulated"] = busy_us(simulate(ours._mt_model.session.last.schedule))["network"] > 0
    return found | bytes_of_a_host(update, rank)


def bytes_of_a_host(update: str, rank: int) -> dict[str, Any]:
    ours, optimizer = wide(rank, True, update)
    compiled = ours._mt_model
    masters = [master.remainder for master in compiled.door.masters]
    state = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    parts = compiled.door.shares.parts
    weights = [own_part(compiled.door.shares, p) if name in parts else p for name, p in ours.named_parameters()]
    # This rank's part alone: reading takes pages.
    homes = [each.detach() for each in (*weights, *[own_part(compiled.door.shares, tensor) for tensor in (*masters, *state)])]
    for tensor in homes:
        tensor.sum()
    dist.barrier()
    homes = [tensor for tensor in homes if tensor.numel()]
    found = [(tensor, mapping_of(tensor)) for tensor in homes]
    shared = {m["range"]: m for _, m in found if m["file"].startswith("/memfd")}
    own = sum(tensor.nbytes for tensor, m in found if not m["file"].startswith("/memfd"))  # of one rank alone on its host
    hidden = [name for name, p in ours.named_parameters() if bool(p.isnan().any())]
    dist.barrier()
    resident = compiled.session.last.schedule.resident_nbytes["host"] - compiled.door.ranks.exchange_nbytes
    physical = own + sum(int(m["Pss"].split()[0]) * 1024 for m in shared.values())
    return {
        "physical": physical,
        "resident": resident,
        "parameters": sum(p.numel() for p in ours.parameters()),
        "report": ours.memory_report(),
        "hidden": len(hidden),
    }


def own_part(shares: HostShares, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)[shares.part_of_host(tensor, shares._me // shares.here)]


def saved_state(rank: int, shard: str, closes: bool, update: str = "backward") -> list[str]:
    """Digests of state_dicts, of the masters, of a checkpoint, and of a state_dict once the model is closed or gone."""
    os.environ["MT_RANKS_SHARD"] = shard
    ours, optimizer = wide(rank, True, update)
    folder = Path(os.environ["FOLDER"]) / f"{shard}-{closes}-{update}"
    parts = [ours.state_dict(), ours.layers[1].state_dict(), optimizer.state_dict()["state"], mtcompile.master_parameters(ours)]
    parameters = list(ours.parameters())
    checkpoint.save(folder, ours, optimizer, step=2)
    dist.barrier()
    state, plain = wide_state(folder)
    if closes:
        ours.close()
    after = dict(enumerate(parameters)) if closes else ours.state_dict()
    del ours
    os.environ["MT_RANKS_SHARD"] = "1"
    return [digest(part) for part in (*parts, state, plain, optimizer.state_dict()["state"], after)]


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


def check(ranks: list[dict[str, Any]], here: int, nbytes: int, update: str) -> None:
    """``nbytes``: a parameter and host, of which there are two."""
    count, held = ranks[0]["parameters"], nbytes + (2 * here if update == "step" else 0)  # gradients are each rank's own
    for host in (ranks[:here], ranks[here:]):
        assert sum(rank["physical"] for rank in host) / count == pytest.approx(nbytes, abs=0.25)
    for rank in ranks:
        assert rank["different"] == [] and rank["simulated"]
        assert rank["collectives"] == (["reduce"] if update == "step" else ["gather", "scatter"])
        assert held <= here * rank["resident"] / count < held + 0.25
        assert rank["report"]["state_bytes"] == pytest.approx(held * count, rel=1e-2)
        assert rank["report"]["peak_host_bytes"] <= rank["report"]["planned_peak_host_bytes"]
        assert rank["hidden"] == (4 if nbytes == 6 else 0)


WAYS = [("state", "backward", 7), ("weights", "backward", 6), ("state", "step", 7), ("weights", "step", 7)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "update", "nbytes"),
    [pytest.param(*way, marks=[] if way[0] == "weights" else pytest.mark.long) for way in WAYS],
)
def test_two_hosts_have_a_part_each(
    shard: str, update: str, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_RANKS_SHARD", shard)
    check(job.run(functools.partial(sharded, update), 2, tmp_path, ("a", "b")), 1, nbytes, update)


@pytest.mark.long
@pytest.mark.parametrize(("shard", "update", "nbytes"), WAYS)
def test_two_hosts_of_two_ranks(shard: str, update: str, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_RANKS_SHARD", shard)
    check(job.run(functools.partial(sharded, update), 4, tmp_path, ("a", "a", "b", "b")), 2, nbytes, update)


def saved(rank: int, count: int) -> list[list[str]]:
    ways = (("state", True, "step"), ("state", True), ("state", False), ("weights", True), ("weights", False), ("0", True))
    return [saved_state(rank, *how) for how in ways]


@pytest.mark.long
@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b", "b")])
def test_state_is_whole_where_it_is_saved_and_read(
    hosts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    for digests in (ranks := job.run(saved, len(hosts), tmp_path, hosts)):
        assert digests == [ranks[0][-1]] * 6


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
        shard = os.environ["MT_RANKS_SHARD"]
        for how in (shard, "0"):
            os.environ["MT_RANKS_SHARD"] = how
            both.append(train(rank, several, **MASTERS, **options))
        os.environ["MT_RANKS_SHARD"] = shard
        found[name] = differing(*both)
    return found


@pytest.mark.long
@pytest.mark.parametrize("shard", ["state", "weights"])
@pytest.mark.parametrize(("count", "hosts"), [(2, ("a", "b")), (4, ("a", "a", "b", "b"))])
def test_parts_of_hosts_have_the_bits_of_whole_updates(
    count: int, hosts: tuple[str, ...], shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_RANKS_SHARD", shard)
    for found in job.run(alike, count, tmp_path, hosts):
        assert found == {name: [] for name in (*OPTIMIZERS, "masters", "clipped", "accumulated")}


def without_room(rank: int, count: int) -> dict[str, Any]:
    """Hosts that have room for all of the weights and a little less."""
    steps = [
        [(torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * i + r)),) for r in range(count)] for i in (1, 2)
    ]
    minimum, parts, kept, ours = 2, list[int](), list[bool](), None
    for shard, less in (("state", 1), ("1", 0), ("1", 1)):
        os.environ["MT_RANKS_SHARD"] = shard
        torch.manual_seed(0)
        plain = Wide()
        optimizer = adamw(plain)
        ours = mtcompile.compile(plain, memory="4MB", host=minimum - less, optimizer=optimizer, update="backward")
        try:
            for batches_of_ranks in steps:
                ours(*batches_of_ranks[rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
        except mtcompile.BudgetError as error:
            minimum = error.minimum_bytes
            continue
        parts.append(len(ours.plan.parts))
        report = ours.memory_report()
        kept.append(report["peak_host_bytes"] <= report["planned_peak_host_bytes"] <= minimum - less)
    torch.manual_seed(0)
    return {"parts": parts, "kept": kept, "different": differing(ours, trained(Wide(), steps, hosts=2))}


@pytest.mark.long
@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b", "b")])
def test_hosts_have_parts_of_weights_where_no_plan_with_whole_ones_fits(hosts: tuple[str, ...], tmp_path: Path) -> None:
    for found in job.run(without_room, len(hosts), tmp_path, hosts):
        assert found == {"parts": [0, 2], "kept": [True, True], "different": []}


def loaded(rank: int, count: int) -> dict[str, Any]:
    """Loads weights of which hosts have parts, evaluates, and writes to them, copies and replaces them."""
    os.environ["MT_RANKS_SHARD"] = "weights"
    found: dict[str, Any] = {}
    ours, optimizer = wide(rank, share=True)
    folder = Path(os.environ["FOLDER"])
    checkpoint.save(folder, ours, optimizer, step=2)
    dist.barrier()
    others = {name: value + 1 for name, value in ours.state_dict().items()}
    with torch.no_grad():
        before = float(ours(torch.ones(4, 512).bfloat16()))
    step(ours, optimizer, rank, 3)
    expected, after = digest(ours.state_dict()), []
    ours.load_state_dict(others)
    found["loaded"] = all(torch.equal(value, others[name]) for name, value in ours.state_dict().items())
    found["hidden"] = all(bool(p.isnan().any()) for p in ours.parameters())
    for into in (ours, wide(rank, share=True)[0]):  # of the same training, and of another
        bound = into._mt_model.door.optimizer
        checkpoint.load(folder, into, bound)
        with torch.no_grad():
            after.append(float(into(torch.ones(4, 512).bfloat16())) == before)
        step(into, bound, rank, 3)
        after.append(digest(into.state_dict()) == expected)
    with torch.no_grad(), pytest.raises(mtcompile.MtcompileError) as error:  # rank 1 cannot evaluate, and the others hear of it
        ours(torch.ones(4, 512 - rank % 2).bfloat16())
    told = str(error.value).startswith("the model's forward could not be" if rank % 2 else "rank 1 stopped before this step")
    step(ours, optimizer, rank, 5)
    errors = [refused(lambda: copy.deepcopy(ours))]
    with torch.no_grad():
        ours.layers[0].bias.mul_(2.0)
    found["errors"] = [*errors, refused(lambda: step(ours, optimizer, rank, 4))]
    return {**found, "after": after, "told": told}


@pytest.mark.long
@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b", "b")])
def test_parts_of_weights_are_loaded_and_read(hosts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    for found in job.run(loaded, len(hosts), tmp_path, hosts):
        copied, written = found.pop("errors")
        assert copied.startswith("the model was copied, and each host has a part of its weights")
        assert "was written to between two steps" in written
        assert found == {"loaded": True, "hidden": True, "after": [True] * 4, "told": True}


def at_any_budget(rank: int, count: int) -> list[list[str]]:
    steps, found = batches(3, count), list[list[str]]()
    expected = trained(model(), steps, hosts=2)
    for memory in ("100KB", "120KB", "4MB"):
        for shard in ("state", "weights"):
            os.environ["MT_RANKS_SHARD"] = shard
            found.append(differing(train(rank, steps, update="backward", memory=memory), expected))
    return found


@pytest.mark.long
@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b", "b")])
def test_bits_are_the_same_at_any_budget(hosts: tuple[str, ...], tmp_path: Path) -> None:
    assert job.run(at_any_budget, len(hosts), tmp_path, hosts) == [[[]] * 6] * len(hosts)


def deeper(rank: int, count: int) -> list[str]:
    torch.manual_seed(0)
    plain, expected = Deeper(), Deeper()
    expected.load_state_dict(plain.state_dict())
    optimizer, of_expected = adamw(plain), adamw(expected)
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=optimizer, update="backward")
    for number in range(4):
        ours.deep = expected.deep = number > 1
        ours(*batches_of(number, count)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(expected, [batches_of(number, count)], lambda of: of_expected, hosts=len({*os.environ["HOSTS"]}))
    return differing(ours, expected)


@pytest.mark.long
@pytest.mark.parametrize("shard", ["state", "weights"])
@pytest.mark.parametrize("hosts", ["ab", "aabb", "aa"])
def test_a_layer_that_is_used_later_is_each_ranks_own(
    hosts: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_RANKS_SHARD", shard)
    monkeypatch.setenv("HOSTS", hosts)
    assert job.run(deeper, len(hosts), tmp_path, tuple(hosts)) == [[]] * len(hosts)


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
