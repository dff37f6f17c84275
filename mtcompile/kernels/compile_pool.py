"""Compiles kernels in worker processes. They fill Inductor's disk cache, from which this process then loads. Graphs go to the
workers (``compile_worker.py``) as text; only "done", or the name of an error, comes back."""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from mtcompile.machine.bandwidth import usable_cpus
from mtcompile.passes.graph_json import GraphFormatError, graph_to_json

_FEWEST = 3  # kernels worth the start of a process that imports torch
_MOST_WORKERS = 8
_FEWEST_CORES = 4  # with fewer, starting workers costs what they save: one process already runs C++ compilers in parallel

# Isolated (-I): neither the working directory nor PYTHONPATH decides what a worker imports. Where this package and torch come
# from is appended, since they need not be installed where an isolated interpreter looks.
_START = (
    "import json, runpy, sys; sys.path += json.loads(sys.argv.pop(1)); "
    "runpy.run_module('mtcompile.kernels.compile_worker', run_name='__main__', alter_sys=True)"
)


def record_compiled(kernel: fx.GraphModule, strict: bool = False) -> None:
    """Records, beside Inductor's disk cache, that the cache has held this kernel. ``strict``: as ``torch_private.inductor``."""
    record = _record_of(kernel, strict)
    with contextlib.suppress(OSError):  # without the record, the next run only takes longer
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def _record_of(kernel: fx.GraphModule, strict: bool) -> Path:
    """Returns the path of that record, named by the kernel's body and shapes, the thread count and torch's version."""
    text = f"{torch.__version__} {torch.get_num_threads()} {'strict ' * strict}{kernel.meta['key']}"
    return Path(torch_private.inductor_cache(), "mtcompile", hashlib.sha256(text.encode()).hexdigest())


def compile_ahead(kernels: Sequence[fx.GraphModule], strict: bool = False) -> Iterator[None]:
    """Compiles the kernels that the disk cache lacks, one per core at a time, at most eight. Yields as each one is done.

    If a worker fails, the caller compiles its kernels, meets the same error and reports it.
    """
    new = [kernel for kernel in kernels if not _record_of(kernel, strict).exists()]
    if len(new) < _FEWEST or usable_cpus() < _FEWEST_CORES:
        return
    count = min(len(new), usable_cpus(), _MOST_WORKERS)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for kernel in sorted(new, key=lambda k: -len(k.graph.nodes)):  # longest first, so that no long one runs alone at the end
        with contextlib.suppress(GraphFormatError):  # an operator of the user's own, which a worker does not know
            waiting.put(graph_to_json(kernel))
    progress: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threads = [threading.Thread(target=_feed, args=(waiting, progress, strict), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    finished = 0
    while finished < count:
        if progress.get():
            yield
        else:
            finished += 1


def _package_folders() -> list[str]:
    return [str(Path(module.__file__).resolve().parents[1]) for module in (sys.modules["mtcompile"], torch) if module.__file__]


def worker(strict: bool = False) -> subprocess.Popen[str]:
    """Starts a worker process."""
    numerics = ["strict"] if strict else []
    command = [sys.executable, "-I", "-c", _START, json.dumps(_package_folders()), str(torch.get_num_threads()), *numerics]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": torch_private.inductor_cache(), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, env=env)


def _feed(waiting: queue.SimpleQueue[str], progress: queue.SimpleQueue[bool], strict: bool) -> None:
    """Feeds one worker from this process. Reports True for each kernel that is done, and False at the end."""
    try:
        with worker(strict) as started:
            assert started.stdin is not None and started.stdout is not None
            while not waiting.empty():
                try:
                    started.stdin.write(waiting.get_nowait() + "\n")
                    started.stdin.flush()
                except (queue.Empty, BrokenPipeError):
                    break
                if not started.stdout.readline():
                    break
                progress.put(True)
            started.stdin.close()
    finally:
        progress.put(False)
