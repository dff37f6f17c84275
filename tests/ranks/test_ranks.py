"""Several ranks train one model: with the bits of DistributedDataParallel, and of a plain job in the promised order."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mtcompile
from mtcompile.distributed.batches import device_taken
from mtcompile.errors import StepError
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us
from tests.ranks import job
from tests.ranks.compiled import compiled, train
from tests.ranks.reference import adamw, batches, differing, generator_of, model, trained


def distributed_data_parallel(rank: int, steps: Any, clip: float | None = None) -> nn.Module:
    plain = model()
    theirs, optimizer = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True), adamw(plain)
    torch.set_rng_state(generator_of(rank))
    for of_ranks in steps:
        optimizer.zero_grad()
        theirs(*of_ranks[rank]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
    return plain


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(self.norm(self.first(x)).relu()), y)


def two_ranks(rank: int, count: int) -> dict[str, Any]:
    """What two ranks do one after the other; by name, what they found."""
    steps, found = batches(3, count), dict[str, Any]()
    ours = train(rank, steps)
    found["ddp"] = differing(ours, distributed_data_parallel(rank, steps))
    found["step"] = differing(ours, trained(model(), steps))
    schedule = ours.schedule
    network = [i for i in schedule.instructions if i.queue == "network" and i.op == "run"]
    found["network"] = sorted({(i.work, i.phase) for i in network})
    found["simulated"] = busy_us(simulate(ours._mt_model.session.last.schedule))["network"] > 0
    report = ours.memory_report()
    found["host"] = report["peak_host_bytes"], report["planned_peak_host_bytes"]
    found["device"] = report["peak_device_bytes"], report["planned_peak_device_bytes"]

    clipped = train(rank, steps, update="backward", run_ahead=True, max_grad_norm=0.3)
    found["backward"] = differing(clipped, trained(model(), steps, clip=0.3))
    found["weight"] = mtcompile.weight_of_batch(10 if rank == 0 else 30)
    found["agreement"] = agreement(rank, clipped, steps)

    torch.manual_seed(3)
    plain, inputs = Normed(), [[(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(count)] for _ in range(2)]
    torch.manual_seed(3)
    normed = Normed()
    optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)
    normed = mtcompile.compile(normed, memory="100KB", optimizer=optimizer)
    for of_ranks in inputs:
        optimizer.zero_grad()
        normed(*of_ranks[rank]).backward()
        optimizer.step()
    found["buffers"] = [name for name in differing(normed, trained_with_buffers(plain, inputs))]
    return found


def trained_with_buffers(plain: nn.Module, inputs: Any) -> nn.Module:
    """Trains as DistributedDataParallel does: the statistics of a batch norm are those of rank 0."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for of_ranks in inputs:
        gradients: list[torch.Tensor] = []
        after = None
        before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        for batch in of_ranks:
            for name, buffer in plain.named_buffers():
                buffer.copy_(before[name])
            plain.zero_grad()
            plain(*batch).backward()
            own = [p.grad / len(of_ranks) for p in plain.parameters() if p.grad is not None]
            gradients = [a + b for a, b in zip(gradients, own, strict=True)] if gradients else own
            after = after or {name: buffer.clone() for name, buffer in plain.named_buffers()}
        for name, buffer in plain.named_buffers():
            buffer.copy_((after or {})[name])
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return plain


def agreement(rank: int, ours: Any, steps: Any) -> list[str]:
    """Errors of one rank, which all ranks raise before anything changes; then they go on."""
    ids, labels = steps[0][rank]
    ours.zero_grad()
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    errors = []
    loss = ours(ids, labels)
    if rank == 1:
        first = next(ours.parameters())
        first.grad = torch.zeros_like(first)
    try:
        loss.backward()
        errors.append("none")
    except StepError as error:
        errors.append(str(error))
    for parameter in ours.parameters() if rank == 1 else ():
        parameter.grad = None
    errors.append(str([name for name, value in ours.state_dict().items() if not torch.equal(value, before[name])]))
    return errors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return job.run(two_ranks, 2, tmp_path_factory.mktemp("two"))


def test_two_ranks_have_the_bits_of_distributed_data_parallel(found: list[dict[str, Any]]) -> None:
    assert [rank["ddp"] for rank in found] == [[], []]
    assert [rank["step"] for rank in found] == [[], []]


def test_updates_in_the_backward_clip_by_the_norm_of_all_ranks(found: list[dict[str, Any]]) -> None:
    assert [rank["backward"] for rank in found] == [[], []]


def test_buffers_are_those_of_the_first_rank(found: list[dict[str, Any]]) -> None:
    assert [rank["buffers"] for rank in found] == [[], []]


def test_collectives_are_instructions_of_the_schedule(found: list[dict[str, Any]]) -> None:
    assert [rank["network"] for rank in found] == [[["collective", "backward"]]] * 2
    assert all(rank["simulated"] for rank in found)


def test_measured_bytes_are_within_those_planned(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for tier in ("host", "device"):
            measured, planned = rank[tier]
            assert 0 < measured <= planned


def test_an_error_of_one_rank_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    assert "has a gradient already" in found[1]["agreement"][0]
    assert found[0]["agreement"][0].startswith("rank 1 stopped before this step, and nothing was changed: ")
    assert [rank["agreement"][1] for rank in found] == ["[]", "[]"]


def test_a_batch_weighs_by_its_tokens(found: list[dict[str, Any]]) -> None:
    assert [rank["weight"] for rank in found] == [0.5, 1.5]


def other_steps(rank: int, count: int) -> dict[str, list[str]]:
    """Steps of other kinds, each beside what it must be equal to."""
    steps = batches(2, count, rows=4)
    ragged = [[(ids[:, : 8 - 2 * r], labels[:, : 8 - 2 * r]) for r, (ids, labels) in enumerate(each)] for each in steps]
    masters = train(rank, steps, update="backward", precision="bf16-master32")
    return {
        "ragged": differing(train(rank, ragged), trained(model(), ragged)),
        "shared": differing(train(rank, ragged, update="backward"), trained(model(), ragged)),
        "masters": differing(masters, train(rank, steps, precision="bf16-master32")),
        "accumulated": elsewhere(train(rank, steps, update="backward", accumulate=2)),
        "tiles": differing(train(rank, steps, update="backward", tiles=2), train(rank, steps, tiles=2)),
    }


def elsewhere(ours: nn.Module) -> list[str]:
    """The names of the tensors that another rank has otherwise."""
    names = []
    for name, tensor in ours.state_dict().items():
        first = tensor.clone()
        dist.broadcast(first, 0)
        differs = torch.tensor(int(not torch.equal(first, tensor)))
        dist.all_reduce(differs)
        names += [name] if int(differs) else []
    return names


def uneven(update: str, rank: int, count: int) -> list[str]:
    """Ranks have batches of other sizes, the larger one now on one of them, now on another."""
    steps = batches(4, count, rows=9)
    sizes = [[1 + 8 * ((number + rank) % 2) for rank in range(count)] for number in range(4)]
    cut = [[tuple(t[:n] for t in one) for one, n in zip(*row, strict=True)] for row in zip(steps, sizes, strict=True)]
    return differing(train(rank, cut, update=update, memory="300KB"), trained(model(), cut, hosts=len({*os.environ["HOSTS"]})))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "hosts"),
    [("step", "aa"), *(pytest.param(*way, marks=pytest.mark.long) for way in (("backward", "aa"), ("backward", "aabb")))],
)
def test_ranks_may_have_batches_of_other_sizes(
    update: str, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTS", hosts)
    count = len(hosts)
    assert job.run(functools.partial(uneven, update), count, tmp_path, tuple(hosts)) == [[]] * count


@pytest.mark.long
def test_ragged_batches_masters_micro_batches_and_tiles(tmp_path: Path) -> None:
    nothing: dict[str, list[str]] = {"ragged": [], "shared": [], "masters": [], "accumulated": [], "tiles": []}
    assert job.run(other_steps, 2, tmp_path) == [nothing, nothing]


def drifting(rank: int, count: int) -> str:
    os.environ["MT_RANKS_SHARE"] = "0"
    steps, (ours, optimizer) = batches(1, count), compiled(rank)
    for step in range(20):
        try:
            ours(*steps[0][rank]).backward()
        except StepError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and rank == 1:
            with torch.no_grad():
                ours.embedding.weight.add_(1e-3)
    return "nothing"


@pytest.mark.long
def test_weights_that_drift_apart_are_noticed(tmp_path: Path) -> None:
    errors = job.run(drifting, 2, tmp_path)
    assert all(
        error.startswith("expected equal weights on all ranks before each update, found others on rank 1") for error in errors
    )


def in_order(rank: int, count: int) -> list[str]:
    steps = batches(2, count)
    hosts = 2 if count == 4 else 1
    return differing(train(rank, steps, update="backward"), trained(model(), steps, hosts=hosts))


@pytest.mark.long
@pytest.mark.parametrize(("count", "hosts"), [(3, ()), (4, ("a", "a", "b", "b"))])
def test_more_ranks_add_up_in_their_order_and_then_that_of_hosts(count: int, hosts: tuple[str, ...], tmp_path: Path) -> None:
    assert job.run(in_order, count, tmp_path, hosts) == [[]] * count


def refusals(rank: int, count: int) -> list[str]:
    errors = []
    for wrapped in (
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2)),
        sharded(nn.Linear(2, 2), count),
        nn.Linear(2, 2 + rank),
    ):
        with pytest.raises(mtcompile.MtcompileError) as error:
            mtcompile.compile(wrapped, memory="1MB")
        errors.append(str(error.value))
    with pytest.raises(ValueError) as refused:
        mtcompile.compile(nn.Linear(2, 2), memory="1MB", host="1MB", disk="/tmp:1MB")
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wrapped = nn.parallel.DistributedDataParallel(
        mtcompile.compile(plain, memory="1MB", optimizer=optimizer, update="backward")
    )
    with pytest.raises(StepError) as late:
        wrapped(torch.ones(1, 2)).sum().backward()
    return [*errors, str(refused.value), str(late.value)]


def sharded(plain: nn.Module, count: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (count,))
    for name, parameter in list(plain.named_parameters()):
        plain.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
    return plain


def test_what_is_distributed_already_and_what_differs_is_refused(tmp_path: Path) -> None:
    for wrapped, dtensor, other, disk, late in job.run(refusals, 2, tmp_path):
        assert "wrapped in DistributedDataParallel; expected the plain module" in wrapped
        assert "weight is a DTensor" in dtensor
        assert "rank 1 has other names, shapes" in other
        assert "expected no disk=" in disk
        assert late.startswith("the model was called by DistributedDataParallel, to which")


def of_another_backend(rank: int, count: int) -> dict[str, Any]:
    """Trains with a group that has no backend for tensors of the host, as one of NCCL alone."""

    def gloo(store: Any, rank: int, count: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, count, timeout)

    dist.Backend.register_backend("of_gpus", gloo, devices=["cuda"])
    group = dist.new_group(backend="of_gpus")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)
    steps = batches(2, count)
    ours = train(rank, steps, update="backward", process_group=group)
    return {"different": differing(ours, trained(model(), steps)), "taken": device_taken(dist.get_backend_config(group))}


@pytest.mark.long
def test_a_group_without_a_backend_for_the_host_trains_through_one_of_gloo(tmp_path: Path) -> None:
    assert job.run(of_another_backend, 2, tmp_path) == [{"different": [], "taken": "cuda"}] * 2


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("xpu:xccl", "xpu")],
)
def test_sums_over_a_group_are_of_tensors_that_it_takes(backends: str, device: str) -> None:
    assert device_taken(backends) == device
