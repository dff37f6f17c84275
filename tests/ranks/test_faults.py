"""A rank that is killed or stopped ends the job on all ranks, within a stated time, with one sentence."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile.distributed.meeting import RanksParted
from mtcompile.errors import MtcompileError, StepError
from tests.ranks import job
from tests.ranks.compiled import compiled
from tests.ranks.reference import adamw, batches, batches_of, differing, generator_of, small, trained

_TIMEOUT_S = 4


def faulty(rank: int, count: int) -> dict[str, Any]:
    """Rank 1 of two is killed, and rank 1 of three is stopped, before its second backward."""
    steps, (ours, optimizer) = batches(3, count), compiled(rank, update="backward")
    ours(*steps[0][rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = {name: value.clone() for name, value in ours.state_dict().items()}
    loss = ours(*steps[1][rank])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if count == 2 else signal.SIGSTOP)
    began = time.monotonic()
    try:
        loss.backward()
    except RanksParted as error:
        first, took = str(error), time.monotonic() - began
    try:
        ours(*steps[2][rank]).backward()
    except RanksParted as error:
        second = str(error)
    changed = [name for name, value in ours.state_dict().items() if not value.equal(weights[name])]
    return {"first": first, "second": second, "took": took, "changed": changed}


def bad_batches(update: str, rank: int, count: int) -> dict[str, Any]:
    """Each rank has a batch that its forward cannot take, among them the first of all: all ranks hear of it, and go on."""
    os.environ["MT_RANKS_SHARE"] = str(int(update != "alone"))
    plain, errors = small(), list[str]()
    optimizer = adamw(plain)
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=optimizer, update="step" if update == "alone" else update)
    torch.set_rng_state(generator_of(rank))
    for number in range(4):
        (x,) = batches_of(number, count)[rank]
        drawn = torch.get_rng_state()
        try:
            ours(x[:, :15] if number == 2 * rank else x).backward()
            optimizer.step()
        except MtcompileError as error:
            errors.append(str(error))
            torch.set_rng_state(drawn)
        optimizer.zero_grad()
    expected = trained(small(), [batches_of(number, count) for number in (1, 3)], hosts=len({*os.environ["HOSTS"]}))
    return {"errors": errors, "different": differing(ours, expected)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "hosts"),
    [("step", "aa"), *(pytest.param(*given, marks=pytest.mark.long) for given in (("backward", "aabb"), ("alone", "ab")))],
)
def test_a_bad_batch_of_one_rank_is_told_to_all_and_they_go_on(
    update: str, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTS", hosts)
    count = len(hosts)
    for rank, found in enumerate(job.run(functools.partial(bad_batches, update), count, tmp_path, tuple(hosts))):
        assert found["different"] == []
        for failed, told in zip((0, 1), found["errors"], strict=True):
            by = "" if rank == failed else f"rank {failed} stopped before this step, and nothing was changed: "
            assert told.startswith(f"{by}the model's forward could not be captured as one graph: a and b must have same")


def interrupted(rank: int, count: int) -> dict[str, Any]:
    """Rank 1 hangs in a collective, and rank 0 is interrupted while it waits there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore interrupts of what they run in the background
    plain, found = small(), dict[str, Any]()
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=adamw(plain), update="backward")
    connection = ours._mt_model.door.ranks.connection
    combine = connection.exchange.reduce_scatter

    main = threading.get_ident()

    def interrupt() -> None:
        """Interrupts the main thread when it waits; again if that was lost, as in a callback of a weak reference."""
        while "end" not in found:
            while sys._current_frames()[main].f_code.co_filename != threading.__file__:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(3)

    def waiting(*given: Any) -> Any:
        threading.Thread(target=interrupt, daemon=True).start()
        return combine(*given)

    connection.exchange.reduce_scatter = waiting if rank == 0 else lambda *_: signal.pause()
    loss = ours(*batches_of(0, count)[rank])
    try:
        loss.backward()
    except (KeyboardInterrupt, StepError) as error:
        found["end"] = f"{type(error).__name__}: {error}"
    finally:
        os.kill(connection.meeting.processes[1], signal.SIGKILL)
    return found


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_a_rank_that_hangs(tmp_path: Path) -> None:
    first, killed = job.ended(job.start(interrupted, 2, tmp_path), tmp_path)
    assert (first, killed) == ({"end": "KeyboardInterrupt: "}, None)


def read_by_one(rank: int, count: int) -> str:
    """Rank 0 alone reads optimizer state that both hosts have parts of."""
    plain = small()
    optimizer = adamw(plain)
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=optimizer)
    ours(*batches_of(0, count)[rank]).backward()
    optimizer.step()
    with pytest.raises(StepError) as error:
        optimizer.state_dict() if rank == 0 else ours(*batches_of(1, count)[rank]).backward()
    return str(error.value)


@pytest.mark.long
def test_a_state_dict_that_one_rank_reads_is_told_to_all(tmp_path: Path) -> None:
    for told in job.run(read_by_one, 2, tmp_path, ("a", "b")):
        assert "calls optimizer.state_dict(), or reads other state" in told and "begins a phase of a step" in told
        assert told.endswith("MT_RANKS_SHARD=0 leaves all of the state on each host")


def killed_among_updates(update: str, rank: int, count: int) -> dict[str, Any]:
    steps, (ours, optimizer) = batches(2, count), compiled(rank, update=update)
    ours(*steps[0][rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        ours._mt_model.door.shares.update = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for _ in range(2):
        try:
            ours(*steps[1][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        except StepError as error:
            errors.append(str(error))
    return {"errors": errors}


@pytest.mark.long
@pytest.mark.parametrize("update", ["step", "backward"])
def test_weights_that_a_killed_rank_has_half_updated_are_refused(update: str, tmp_path: Path) -> None:
    first, killed = job.ended(job.start(functools.partial(killed_among_updates, update), 2, tmp_path), tmp_path)
    assert killed is None and "has ended while this one waited" in first["errors"][0]
    failed = {"step": "optimizer.step() ended among its updates", "backward": "step 2 failed among its updates"}[update]
    assert first["errors"][1].startswith(f"{failed}: some parameters ") and "others not" in first["errors"][1]


def out_of_step(how: str, rank: int, count: int) -> dict[str, Any]:
    """Rank 1 steps once more than rank 0, or does not step."""
    plain = small()
    optimizer = adamw(plain)
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=optimizer)
    found: dict[str, Any] = {}
    for number in range(2):
        optimizer.zero_grad()
        ours(*batches_of(number, count)[rank]).backward()
        weights = {name: value.clone() for name, value in ours.state_dict().items()}
        began = time.monotonic()
        try:
            if how == "twice" and number == 1 and rank == 1:
                optimizer.step()
                weights = {name: value.clone() for name, value in ours.state_dict().items()}
                optimizer.step()
            elif how == "never" and number == 1 and rank == 1:
                time.sleep(3 * _TIMEOUT_S)
            else:
                optimizer.step()
        except StepError as error:
            found = {"error": str(error), "took": time.monotonic() - began}
    if how == "twice" and rank == 0:
        weights = {name: value.clone() for name, value in ours.state_dict().items()}
        with pytest.raises(StepError) as late:
            ours(*batches_of(2, count)[rank]).backward()
        found = {"error": str(late.value)}
    return {**found, "same": all(torch.equal(value, weights[name]) for name, value in ours.state_dict().items())}


@pytest.mark.long
def test_a_rank_that_steps_once_more_or_never_changes_nothing(tmp_path: Path) -> None:
    for how in ("twice", "never"):
        (folder := tmp_path / how).mkdir()
        job_of = functools.partial(out_of_step, how)
        first, second = job.ended(job.start(job_of, 2, folder, timeout_s=_TIMEOUT_S), folder)
        assert first["same"] and second["same"]
        if how == "twice":
            told = "rank 0 begins a phase of a step, and rank 1 calls optimizer.step(); nothing was changed"
            assert second["error"].startswith(told)
            assert first["error"].startswith("rank 1 calls optimizer.step(), and rank 0 begins a phase of a step; nothing")
        else:
            assert "did not come within 4 s (MT_RANKS_TIMEOUT)" in first["error"] and first["took"] < 3 * _TIMEOUT_S


def faults(count: int, folder: Path) -> tuple[list[Any], list[Any]]:
    processes = job.start(faulty, count, folder, timeout_s=_TIMEOUT_S)
    survivors = [process for rank, process in enumerate(processes) if rank != 1]
    for process in survivors:
        process.join(120)
    processes[1].kill()
    return processes, job.ended(processes, folder)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_at_once(tmp_path: Path) -> None:
    processes, (survivor, killed) = faults(2, tmp_path)
    assert killed is None
    assert survivor["first"].startswith(f"rank 1 (process {processes[1].pid}) has ended while this one waited to begin a step")
    assert survivor["took"] < _TIMEOUT_S and survivor["changed"] == []
    assert survivor["second"].startswith("the ranks have parted (rank 1 ")


@pytest.mark.long
def test_a_stopped_rank_ends_the_job_when_its_time_is_over(tmp_path: Path) -> None:
    processes, (first, stopped, last) = faults(3, tmp_path)
    assert stopped is None
    told = [survivor["first"] for survivor in (first, last)]
    reason = f"rank 1 (process {processes[1].pid}) did not come within {_TIMEOUT_S} s (MT_RANKS_TIMEOUT)"
    assert all(reason in each for each in told) and any("its process is stopped" in each for each in told)
    assert all(survivor["changed"] == [] for survivor in (first, last))


def stopped_early(rank: int, count: int) -> dict[str, Any]:
    plain = small()
    ours: Any = mtcompile.compile(plain, memory="100KB", optimizer=adamw(plain), update="backward")
    loss = ours(*batches_of(0, count)[rank])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RanksParted) as error:
        loss.backward()
    return {"error": str(error.value), "took": time.monotonic() - began}


@pytest.mark.slow
def test_a_stopped_rank_ends_a_small_job_when_its_time_is_over(tmp_path: Path) -> None:
    first, second = processes = job.start(stopped_early, 2, tmp_path, timeout_s=_TIMEOUT_S)
    first.join(60)
    second.kill()
    found, nothing = job.ended(processes, tmp_path)
    assert nothing is None and found["took"] < 4 * _TIMEOUT_S
    told = f"rank 1 (process {second.pid}) did not come within {_TIMEOUT_S} s (MT_RANKS_TIMEOUT)"
    assert told in found["error"] and "its process is stopped" in found["error"]
