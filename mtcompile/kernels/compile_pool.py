"""Compiles kernels in worker processes: each fills Inductor's disk cache, from which this process then loads. Graphs go to the
workers (``compile_worker.py``) as text; only "done" comes back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.passes.graph_json import graph_to_json

_FEWEST = 3  # kernels worth the start of a process that imports torch
_MOST_WORKERS = 8
_FEWEST_CORES = 4  # below, their start costs what they save: in one process Inductor runs the C++ compiler in parallel


def record_compiled(kernel: fx.GraphModule) -> None:
    """Note beside Inductor's disk cache that it has held this kernel."""
    record = _record_of(kernel)
    with contextlib.suppress(OSError):  # a disk that refuses costs the next run its time
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def _record_of(kernel: fx.GraphModule) -> Path:
    """The file that says so, by the kernel's body and shapes, the thread count and torch's version."""
    text = f"{torch.__version__} {torch.get_num_threads()} {kernel.meta['key']}"
    return Path(torch_private.inductor_cache(), "mtcompile", hashlib.sha256(text.encode()).hexdigest())


def compile_ahead(kernels: Sequence[fx.GraphModule]) -> Iterator[None]:
    """Compile the kernels that the disk cache lacks, as many at once as there are cores; yields once per kernel as it is done.

    A worker that fails leaves its kernels to the caller, who meets the same error and can say so.
    """
    new = [kernel for kernel in kernels if not _record_of(kernel).exists()]
    if len(new) < _FEWEST or _cores() < _FEWEST_CORES:
        return
    count = min(len(new), _cores(), _MOST_WORKERS)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for kernel in sorted(new, key=lambda k: -len(k.graph.nodes)):  # the longest first, so that none is left alone at the end
        waiting.put(graph_to_json(kernel))
    progress: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threads = [threading.Thread(target=_feed, args=(waiting, progress), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    finished = 0
    while finished < count:
        if progress.get():
            yield
        else:
            finished += 1


def _feed(waiting: queue.SimpleQueue[str], progress: queue.SimpleQueue[bool]) -> None:
    """Feed one worker from this process; reports True for each kernel compiled, False at the end."""
    command = [sys.executable, "-m", "mtcompile.kernels.compile_worker", str(torch.get_num_threads())]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": torch_private.inductor_cache(), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        ) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            while not waiting.empty():
                try:
                    worker.stdin.write(waiting.get_nowait() + "\n")
                    worker.stdin.flush()
                except (queue.Empty, BrokenPipeError):
                    break
                if not worker.stdout.readline():
                    break
                progress.put(True)
            worker.stdin.close()
    finally:
        progress.put(False)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
