"""The throughput of the disk tier beside plain readers and writers of the same kind of file, past the page cache, in turns.

    python -m benchmarks.disk [folder] [MiB] [results.json]

Plain ones are a loop over pieces of 8 MiB from one thread, and as many threads as the store has, in pieces of 1 MiB. Each moves
what the store moves, from and to the same memory: as large as the file, or one of 8 MiB over and over ("slot"), as a block's
weights arrive in a step. Throughput is relative to the fastest plain one of the same memory. ``shifted``: memory that is not
aligned as disks want it, which the store copies; relative to the plain ones with aligned memory. Runs take turns, in another
order each round.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks.run import about
from mtcompile.runtime.disk.store import DEPTH, DiskStore
from mtcompile.runtime.pages import pages

MIB = 2**20
PIECE, ROUNDS = 8 * MIB, 60


def main(folder: Path, mib: int, results: Path | None) -> None:
    nbytes = mib * MIB
    store, summed = DiskStore(folder, summed=False), DiskStore(folder)
    homes = {each: torch.frombuffer(each.map(nbytes), dtype=torch.uint8).data_ptr() for each in (store, summed)}
    memory = torch.frombuffer(pages(nbytes + 4096), dtype=torch.uint8)
    memory.random_()
    slot = torch.frombuffer(pages(PIECE), dtype=torch.uint8)
    slot.random_()
    direct, pool = store.file.direct, ThreadPoolExecutor(DEPTH)
    pieces, in_slot = memoryview(memory.numpy()), memoryview(slot.numpy())

    def whole(verb: str, shift: int = 0, to: DiskStore = store) -> None:
        moves = [(memory.data_ptr() + shift, homes[to], nbytes, "w")]
        to.write(moves) if verb == "write" else to.read(moves, verify=to is summed)

    def by_slots(verb: str) -> None:
        for at in range(0, nbytes, PIECE):
            moves = [(slot.data_ptr(), homes[store] + at, PIECE, "w")]
            store.write(moves) if verb == "write" else store.read(moves)

    def plain(call: Callable[..., int], one_slot: bool) -> None:
        for at in range(0, nbytes, PIECE):
            call(direct, [in_slot if one_slot else pieces[at : at + PIECE]], at)

    def in_flight(call: Callable[..., int], one_slot: bool) -> None:
        def share(index: int) -> None:
            for at in range(index * MIB, nbytes, DEPTH * MIB):
                start = at % PIECE
                call(direct, [in_slot[start : start + MIB] if one_slot else pieces[at : at + MIB]], at)

        list(pool.map(share, range(DEPTH)))

    runs: dict[tuple[str, str], Callable[[], None]] = {}
    for verb, call in (("write", os.pwritev), ("read", os.preadv)):
        for kind, one_slot in ((verb, False), (f"{verb}, slot", True)):
            runs[kind, "plain"] = partial(plain, call, one_slot)
            runs[kind, "plain, in flight"] = partial(in_flight, call, one_slot)
            runs[kind, "store"] = partial(by_slots, verb) if one_slot else partial(whole, verb)
        runs[verb, "store, shifted"] = partial(whole, verb, 64)
        runs[verb, "store, checked"] = partial(whole, verb, 0, summed)
    times: dict[tuple[str, str], list[float]] = {each: [] for each in runs}
    order, shuffled = list(runs), random.Random(1)
    for _ in range(ROUNDS + 1):
        shuffled.shuffle(order)
        for each in order:
            start = time.perf_counter()
            runs[each]()
            times[each].append(time.perf_counter() - start)
    print(f"{mib} MiB in {folder}, {'O_DIRECT' if store.file.is_direct else 'through the page cache'}; medians of {ROUNDS}")
    gbps = {each: nbytes / statistics.median(seconds[1:]) / 1e9 for each, seconds in times.items()}
    rows = {}
    for (kind, who), each in gbps.items():
        share = each / max(gbps[kind, "plain"], gbps[kind, "plain, in flight"])
        rows[f"{kind}: {who}"] = {"gbps": each, "of_plain": share}
        print(f"  {kind + ': ' + who:30s} {each:5.2f} GB/s  {share:.2f} of plain")
    if results is not None:
        load = os.getloadavg()[0]
        about_run = {"about": about(), "MiB": mib, "direct": store.file.is_direct, "load": load, "rows": rows}
        results.write_text(json.dumps(about_run, indent=1) + "\n")


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(Path(given.get(1, ".")), int(given.get(2, 64)), Path(given[3]) if 3 in given else None)
