"""A training goes on with the same bits from a checkpoint, under as many ranks as there are then."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile import checkpoint
from tests.ranks import job
from tests.ranks.reference import adamw, batches, batches_of, differing, generator_of, model, small, trained

ONE_HOST = ("aa", "aaaa", "aaaa", "aa", "a", "aaaa")  # the host of each rank, one step each
FEWER_AND_MORE = ("aabb", "a", "aa")  # of a small model, whose hosts have parts of the weights
SEVERAL = ("ab", "aabb", "abcd", "aa", "a", "ab")  # of which each has a part


def stage(folder: Path, number: int, update: str, rank: int, count: int) -> dict[str, Any]:
    """Goes on from the checkpoint of the stage before, for one step."""
    plain = model(seed=rank + number)
    optimizer = adamw(plain)
    ours = mtcompile.compile(plain, memory="200KB", optimizer=optimizer, update=update)
    torch.set_rng_state(generator_of(rank))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if number:
            assert checkpoint.load(folder, ours, optimizer).step == number
    ours(*batches(len(ONE_HOST), 4)[number][rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(folder, ours, optimizer, step=number + 1)
    return {"warned": any("has saved no random generators" in str(each.message) for each in warned)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("stages", "shard", "update"),
    [
        (ONE_HOST, "state", "backward"),
        (SEVERAL, "state", "backward"),
        (SEVERAL, "weights", "backward"),
        (ONE_HOST, "state", "step"),
        (SEVERAL, "state", "step"),
    ],
)
def test_a_training_resumes_under_more_and_fewer_ranks_and_hosts(
    stages: tuple[str, ...], shard: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_RANKS_SHARD", shard)
    folder, plain = tmp_path / "run", model()
    optimizer, states = adamw(plain), [generator_of(rank) for rank in range(4)]
    for number, hosts in enumerate(stages):
        count = len(hosts)
        (at := tmp_path / str(number)).mkdir()
        found = job.run(functools.partial(stage, folder, number, update), count, at, tuple(hosts))
        before = len(stages[number - 1]) if number else count
        assert [each["warned"] for each in found] == [rank >= before for rank in range(count)]
        for rank in range(before, count):  # these have new generators
            states[rank] = generator_of(rank)
        trained(plain, [batches(len(ONE_HOST), 4)[number][:count]], lambda of: optimizer, hosts=len({*hosts}), states=states)
        loaded = model(seed=9)
        state = adamw(loaded)
        assert checkpoint.load(folder, loaded, state).step == number + 1
        assert differing(loaded, plain) == []
        expected = optimizer.state_dict()["state"]
        for index, entry in state.state_dict()["state"].items():
            assert all(torch.equal(value, expected[index][key]) for key, value in entry.items())
    assert sorted(path.name for path in folder.glob("rank-*")) == ["rank-0001", "rank-0002", "rank-0003"]


def small_stage(folder: Path, number: int, rank: int, count: int) -> dict[str, Any]:
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


@pytest.mark.slow
def test_a_training_goes_on_under_fewer_and_more_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_RANKS_SHARD", "weights")
    folder, plain = tmp_path / "run", small()
    optimizer = adamw(plain)
    for number, hosts in enumerate(FEWER_AND_MORE):
        (at := tmp_path / str(number)).mkdir()
        found = job.run(functools.partial(small_stage, folder, number), len(hosts), at, tuple(hosts))
        assert found == [{"parts": 4 if "b" in hosts else 0}] * len(hosts)
        trained(plain, [batches_of(number, len(hosts))], lambda of: optimizer, hosts=len({*hosts}))
        loaded = small(seed=9)
        state = adamw(loaded)
        assert checkpoint.load(folder, loaded, state).step == number + 1
        assert differing(loaded, plain) == []
        for index, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state.state_dict()["state"][index][key]) for key, value in entry.items())
