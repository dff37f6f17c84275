"""Measures the optimizer's update on the host: AdamW by C with OpenMP and by torch's operations, beside this machine's copies
and torch's fused AdamW.

    python -m benchmarks.host_update --json out.json     # and a table in out.md; about two minutes
    python -m benchmarks.host_update --planned           # each kernel of the host against what a plan counts on; half a minute
    python -m benchmarks.host_update --pages             # AdamW of 64 million in memory of three kinds, in turn; a minute

``--planned`` ends with status 1 where a measured time is not within 2x of the planned one, which counts on host memory as fast
as ``mtcompile doctor`` measures it.

GB/s are of bytes that have to move: weight, remainder and state read and written, the gradient read (28 bytes a parameter in
fp32, 26 with split weights and bf16 gradients). A copy's are of both its ends; of torch's copy and of memmove on as many
threads, the faster one counts. Everything takes its turn in each round, and figures are medians over rounds. One million
parameters fit into many a processor's cache; the larger sizes are the ones that say something about training.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.run import about
from mtcompile.machine.bandwidth import adamw_gbps
from mtcompile.machine.timing import QUICK
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import NORM_COPIES
from mtcompile.runtime.devices.host_pages import huge_nbytes
from mtcompile.runtime.optim import host_kernels
from mtcompile.runtime.optim.formula import adamw
from mtcompile.runtime.optim.host_kernels import By, moved_nbytes
from mtcompile.runtime.optim.operands import LAYOUTS, Layout, Operands, split
from mtcompile.runtime.pages import pages

MILLIONS = (1, 16, 64)
ROUNDS = 9
SCALARS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
COPIES = ("copy by torch", "copy by memmove")
FUSED = "torch.optim.AdamW(fused=True)"


def updates(layout: Layout, weight: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
    """AdamW on each path, both on the same tensors."""
    moments = torch.zeros_like(weight), torch.zeros_like(weight)
    weight, remainder = (weight.clone(), None) if layout == "fp32" else split(weight)
    grad = grad.bfloat16() if layout == "split, bf16 gradient" else grad
    operands = Operands(weight, grad, moments, remainder)
    step = 0

    def once(by: By) -> None:
        nonlocal step
        step += 1
        host_kernels.apply(adamw(**SCALARS, step=step), operands, by)

    paths: tuple[By, ...] = ("torch",) if host_kernels.library() is None else ("c", "torch")
    return {f"{by}, {layout}": lambda by=by: once(by) for by in paths}  # type: ignore[misc]


def fused(weight: Tensor, grad: Tensor) -> Callable[[], object]:
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)
    return optimizer.step


def copies(count: int, pool: ThreadPoolExecutor, threads: int) -> dict[str, Callable[[], object]]:
    """Copies of as many bytes as an fp32 update reads; at least of 256 MiB, so that no cache serves."""
    nbytes = max(16 * count, 2**28)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    share = nbytes // threads

    def move(start: int) -> None:
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, share)  # does not hold the GIL

    def moved() -> None:
        wait([pool.submit(move, start * share) for start in range(threads)])

    return dict(zip(COPIES, (lambda: target.copy_(source), moved)))


def measure(millions: int, rounds: int) -> list[dict[str, Any]]:
    """Time every path, copy and torch's fused AdamW; a row for each."""
    count, threads = millions * 10**6, torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    weight, grad = torch.randn(count, generator=generator), torch.randn(count, generator=generator) * 0.01
    with ThreadPoolExecutor(threads) as pool:
        timed = copies(count, pool, threads) | {FUSED: fused(weight, grad)}
        nbytes = dict.fromkeys(COPIES, 2 * max(16 * count, 2**28)) | {FUSED: 28 * count}
        for layout in LAYOUTS:
            paths = updates(layout, weight, grad)
            timed |= paths
            nbytes |= dict.fromkeys(paths, moved_nbytes(2, layout) * count)
        times: dict[str, list[float]] = {what: [] for what in timed}
        for round_ in range(rounds + 1):
            for what, work in timed.items():
                repeats = max(1, 4 // millions)  # a short one often enough to be seen
                start = time.perf_counter()
                for _ in range(repeats):
                    work()
                if round_:  # the first touches pages
                    times[what].append((time.perf_counter() - start) / repeats)
    return judged(millions, {what: statistics.median(taken) for what, taken in times.items()}, nbytes, times)


def judged(
    millions: int, seconds: Mapping[str, float], nbytes: Mapping[str, int], times: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """The table's rows. ``of_copy``: the share of a copy's bytes a second. ``of_fused``: how many times the parameters a second
    of torch's fused AdamW."""
    copy = max(nbytes[what] / seconds[what] for what in COPIES)
    rows = []
    for what, median in seconds.items():
        row: dict[str, Any] = {"millions": millions, "what": what, "ms": median * 1e3, "gbps": nbytes[what] / median / 1e9}
        row |= {"of_copy": nbytes[what] / median / copy, "ms_each": [1e3 * one for one in times[what]]}
        if what not in COPIES:
            row |= {"ns_per_parameter": median / millions * 1e3, "of_fused": seconds[FUSED] / median}
        rows.append(row)
    return rows


def against_plan(millions: int, rounds: int) -> list[dict[str, Any]]:
    """Times each kernel of queue host beside what a plan counts on for it; a row each. ``ratio``: measured over planned."""
    machine = Machine(host_gbps=adamw_gbps(QUICK))
    count, generator = millions * 10**6, torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator)
    high, remainder = split(values)
    narrow, moments = (values * 0.01).bfloat16(), (torch.zeros_like(values), torch.zeros_like(values))
    update = adamw(**SCALARS, step=1)
    plain, masters = Operands(values, values * 0.01, moments), Operands(high, narrow, moments, remainder)
    wide = torch.empty_like(values)
    kernels: dict[str, tuple[Callable[[], object], float]] = {
        "update, fp32": (lambda: host_kernels.apply(update, plain), machine.update_us(4 * count, 0, 2.0)),
        "update, fp32, checked": (
            lambda: host_kernels.apply_all([(update, plain)], checked=True),
            machine.update_us(4 * count, 0, 2.0, checked=True),
        ),
        "update, masters": (lambda: host_kernels.apply(update, masters), machine.update_us(2 * count, 0, 5.0)),
        "update, masters, checked": (
            lambda: host_kernels.apply_all([(update, masters)], checked=True),
            machine.update_us(2 * count, 0, 5.0, checked=True),
        ),
        "norm, fp32": (lambda: torch.linalg.vector_norm(values), 4 * count / machine.host_gbps / 1e3),
        "norm, bf16 by fp32": (
            lambda: torch.linalg.vector_norm(wide.copy_(narrow)),
            NORM_COPIES * 2 * count / machine.host_gbps / 1e3,
        ),
        "conversion, bf16 to fp32": (lambda: wide.copy_(narrow), 6 * count / machine.host_gbps / 1e3),
    }
    rows = []
    for what, (work, planned_us) in kernels.items():
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e6)
        measured_us = statistics.median(times[1:])  # the first touches pages
        rows.append({"what": what, "planned_us": planned_us, "measured_us": measured_us, "ratio": measured_us / planned_us})
    return rows


def by_pages(millions: int, rounds: int) -> list[dict[str, Any]]:
    """Times AdamW in shared memory, as all pinned memory was, in torch's own, and in ours, which asks for huge pages. ``of
    shared``: how many times as fast as there, by the medians of wall time and of the processors' seconds."""
    count, update = millions * 10**6, adamw(**SCALARS, step=1)
    kinds: dict[str, Callable[[int], Tensor]] = {
        "shared": lambda nbytes: torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8),
        "torch's": lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
        "huge pages": lambda nbytes: torch.frombuffer(pages(nbytes), dtype=torch.uint8),
    }
    memories = {kind: [new(4 * count).view(torch.float32).fill_(1) for _ in range(4)] for kind, new in kinds.items()}
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_ in range(rounds + 1):
        for kind, (weight, grad, m, v) in memories.items():
            began, used = time.perf_counter(), time.process_time()
            host_kernels.apply(update, Operands(weight, grad, (m, v)))
            if round_:
                wall[kind].append(time.perf_counter() - began)
                cpu[kind].append(time.process_time() - used)
    rows = []
    for kind, memory in memories.items():
        row: dict[str, Any] = {"memory": kind}
        for name, times in (("wall", wall), ("cpu", cpu)):
            median = statistics.median(times[kind])
            row |= {f"{name}_ms": 1e3 * median, f"{name}_of_shared": statistics.median(times["shared"]) / median}
        # The system joins neighbouring mappings into one.
        rows.append({**row, "huge_nbytes": max(huge_nbytes(each.data_ptr()) or 0 for each in memory)})
    return rows


def planned_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| kernel of the host | planned ms | measured ms | ratio |", "|---|---|---|---|"]
    lines += [f"| {r['what']} | {r['planned_us'] / 1e3:.2f} | {r['measured_us'] / 1e3:.2f} | {r['ratio']:.2f} |" for r in rows]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| parameters | what | ms | GB/s | of copy bandwidth | of fused AdamW, per parameter |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = f"{row['of_fused']:.2f}" if "of_fused" in row else ""
        ms, gbps, of_copy = row["ms"], row["gbps"], row["of_copy"]
        lines.append(f"| {row['millions']} million | {row['what']} | {ms:.2f} | {gbps:.1f} | {of_copy:.2f} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("host-update.json"), help="the table is written beside it")
    parser.add_argument("--millions", type=int, nargs="+", default=MILLIONS, help="parameters")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--planned", action="store_true", help="each kernel of the host against its planned time")
    parser.add_argument("--pages", action="store_true", help="AdamW in memory of three kinds")
    args = parser.parse_args()
    if args.pages:
        rows = by_pages(args.millions[-1], args.rounds)
        args.json.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")
        print(json.dumps(rows, indent=1))
        return
    if args.planned:
        rows = against_plan(args.millions[-1], args.rounds)
        print(planned_table(rows))
        raise SystemExit(any(not 0.5 <= row["ratio"] <= 2.0 for row in rows))
    load = [os.getloadavg()[0]]
    rows = [row for millions in args.millions for row in measure(millions, args.rounds)]
    load.append(os.getloadavg()[0])
    whole = {
        **about(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "path": host_kernels.which(),
        "load": load,
    }
    text = ", ".join(f"{key} {value}" for key, value in whole.items()) + "\n\n" + table(rows)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(whole | {"rows": rows}, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
