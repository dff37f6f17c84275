"""Jobs of several ranks: processes that are forked from the test's, and what each of them found."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[int, int], Any]  # rank, how many there are -> what JSON can hold
_LONGEST_S = 300


def start(work: Work, count: int, folder: Path, hosts: Sequence[str] = (), timeout_s: float = 60) -> list[Any]:
    """Starts a job and returns its processes. ``hosts``: the name of each rank's host."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(work, rank, count, folder, hosts, timeout_s)) for rank in range(count)]
    for process in processes:
        process.start()
    return processes


def ended(processes: Sequence[Any], folder: Path) -> list[Any]:
    """Waits for a job, and returns what each rank has found: a dict with its error for one that failed, None for one that was
    killed. Fails where ranks hang: they print their stacks and are killed, for a test process that ends waits for them."""
    deadline = time.monotonic() + _LONGEST_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    if hanging := [rank for rank, process in enumerate(processes) if process.exitcode is None]:
        for sent in (signal.SIGUSR1, signal.SIGKILL):
            for rank in hanging:
                os.kill(processes[rank].pid, sent)
            time.sleep(1)
        stacks = "\n".join((folder / f"{rank}.stacks").read_text() for rank in hanging if (folder / f"{rank}.stacks").exists())
        raise AssertionError(f"ranks {hanging} hang after {_LONGEST_S} s:\n{stacks}")
    paths = [folder / f"{rank}.json" for rank in range(len(processes))]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def run(work: Work, count: int, folder: Path, hosts: Sequence[str] = (), timeout_s: float = 60) -> list[Any]:
    """Runs a job, and returns what each rank found. Fails with the traceback of the first that failed."""
    found = ended(start(work, count, folder, hosts, timeout_s), folder)
    for rank, result in enumerate(found):
        assert result is not None, f"rank {rank} was killed"
        assert not isinstance(result, dict) or "traceback" not in result, f"rank {rank}:\n{result['traceback']}"
    return found


def _rank(work: Work, rank: int, count: int, folder: Path, hosts: Sequence[str], timeout_s: float) -> None:
    faulthandler.register(signal.SIGUSR1, (folder / f"{rank}.stacks").open("w"))
    torch.set_num_threads(1)
    os.environ.update(MT_RANKS_TIMEOUT=str(timeout_s), MT_PROGRESS="0", MT_EFFORT="quick")
    if hosts:
        os.environ["MT_RANKS_HOST"] = hosts[rank]
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
        result = work(rank, count)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    (folder / f"{rank}.tmp").write_text(json.dumps(result))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.json")
    sys.stdout.flush()
    os._exit(0)
