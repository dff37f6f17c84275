"""The throughput of the disk tier beside a plain reader and writer of the same kind of file, past the page cache, in turns.

    python -m benchmarks.disk [folder] [MiB]

The plain one is a loop over pieces of 8 MiB from one thread. ``aligned``: memory as disks want it; otherwise the store copies.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mtcompile.runtime.disk.store import DiskStore

MIB = 2**20
PIECE, ROUNDS = 8 * MIB, 5


def main(folder: Path, mib: int) -> None:
    nbytes = mib * MIB
    store = DiskStore(folder)
    home = torch.frombuffer(store.map(nbytes), dtype=torch.uint8)
    memory = torch.frombuffer(mmap.mmap(-1, nbytes + 4096), dtype=torch.uint8)
    memory.random_()
    block = mmap.mmap(-1, PIECE)
    direct = store.file.direct

    def moved(shift: int) -> list[tuple[int, int, int, str]]:
        return [(memory.data_ptr() + shift, home.data_ptr(), nbytes, "w")]

    def plain(call: Callable[..., int]) -> None:
        for at in range(0, nbytes, PIECE):
            call(direct, [block], at)

    runs: dict[str, Callable[[], None]] = {
        "write, plain": lambda: plain(os.pwritev),
        "write, store, aligned": lambda: store.write(moved(0)),
        "write, store": lambda: store.write(moved(64)),
        "read, plain": lambda: plain(os.preadv),
        "read, store, aligned": lambda: store.read(moved(0)),
        "read, store": lambda: store.read(moved(64)),
        "read, store, verified": lambda: store.read(moved(64), verify=True),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    print(f"{mib} MiB in {folder}, {'O_DIRECT' if store.file.is_direct else 'through the page cache'}; medians of {ROUNDS}")
    for name, seconds in times.items():
        gbps = nbytes / statistics.median(seconds[1:]) / 1e9
        beside = nbytes / statistics.median(times[f"{name.split(',')[0]}, plain"][1:]) / 1e9
        print(f"  {name:24s} {gbps:5.2f} GB/s  {gbps / beside:.2f} of plain")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), int(sys.argv[2]) if len(sys.argv) > 2 else 512)
