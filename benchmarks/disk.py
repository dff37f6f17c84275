"""The throughput of the disk tier beside a plain reader and writer of the same kind of file, past the page cache, in turns.

    python -m benchmarks.disk [folder] [MiB] [results.json]

The plain ones are a loop over pieces of 8 MiB from one thread, always through the same buffer, and as many threads as the store
has, from and to the same memory as the store, in pieces of its size. ``aligned``: memory as disks want it; otherwise the store
copies. Throughput is relative to the faster plain one.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.run import about
from mtcompile.runtime.disk.store import DEPTH, DiskStore

MIB = 2**20
PIECE, ROUNDS = 8 * MIB, 9


def main(folder: Path, mib: int, results: Path | None) -> None:
    nbytes = mib * MIB
    store, summed = DiskStore(folder, summed=False), DiskStore(folder)
    home = torch.frombuffer(store.map(nbytes), dtype=torch.uint8)
    summed_home = torch.frombuffer(summed.map(nbytes), dtype=torch.uint8)
    memory = torch.frombuffer(mmap.mmap(-1, nbytes + 4096), dtype=torch.uint8)
    memory.random_()
    block = mmap.mmap(-1, PIECE)
    direct = store.file.direct

    def moved(shift: int, to: torch.Tensor = home) -> list[tuple[int, int, int, str]]:
        return [(memory.data_ptr() + shift, to.data_ptr(), nbytes, "w")]

    def plain(call: Callable[..., int]) -> None:
        for at in range(0, nbytes, PIECE):
            call(direct, [block], at)

    pool = ThreadPoolExecutor(DEPTH)
    pieces = memoryview(memory.numpy())

    def in_flight(call: Callable[..., int]) -> None:
        def share(index: int) -> None:
            for at in range(index * MIB, nbytes, DEPTH * MIB):
                call(direct, [pieces[at : at + MIB]], at)

        list(pool.map(share, range(DEPTH)))

    runs: dict[str, Callable[[], None]] = {
        "write, plain": lambda: plain(os.pwritev),
        "write, plain, in flight": lambda: in_flight(os.pwritev),
        "write, store, aligned": lambda: store.write(moved(0)),
        "write, store": lambda: store.write(moved(64)),
        "write, store, summed": lambda: summed.write(moved(64, summed_home)),
        "read, plain": lambda: plain(os.preadv),
        "read, plain, in flight": lambda: in_flight(os.preadv),
        "read, store, aligned": lambda: store.read(moved(0)),
        "read, store": lambda: store.read(moved(64)),
        "read, store, verified": lambda: summed.read(moved(64, summed_home), verify=True),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    print(f"{mib} MiB in {folder}, {'O_DIRECT' if store.file.is_direct else 'through the page cache'}; medians of {ROUNDS}")
    gbps = {name: nbytes / statistics.median(seconds[1:]) / 1e9 for name, seconds in times.items()}
    shares = {
        name: each / max(gbps[f"{name.split(',')[0]}, plain{kind}"] for kind in ("", ", in flight"))
        for name, each in gbps.items()
    }
    for name, each in gbps.items():
        print(f"  {name:24s} {each:5.2f} GB/s  {shares[name]:.2f} of plain")
    if results is not None:
        about_run = {"about": about(), "MiB": mib, "direct": store.file.is_direct, "gbps": gbps, "of_plain": shares}
        results.write_text(json.dumps(about_run, indent=1) + "\n")


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(Path(given.get(1, ".")), int(given.get(2, 512)), Path(given[3]) if 3 in given else None)
