"""Steps of 1, 2 and 4 ranks on the emulated device: beside what their plans said, and beside FSDP2 with CPU offload.

    python -m benchmarks.ranks --json out.json     # and tables in out.md; a few minutes

*throttled*: kernels, copies, sums and updates take the times of a slow machine, whose ranks share its host memory, and plans
are for that machine. What is measured is the schedule and the waits of ranks for each other. Nothing is fitted.

*as fast as it goes*: the same model, unthrottled, beside ``fully_shard`` with ``CPUOffloadPolicy`` on gloo, which shards each
block and the rest of the model. More ranks than cores take turns on them, so only equal numbers of ranks compare.

A step is a forward, a backward and an update: median of ``STEPS`` after ``WARMUPS``, kernels on one thread a rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mtcompile
from benchmarks.models import Case, make
from benchmarks.run import about
from mtcompile.passes.analysis.cost import Machine

RANKS = (1, 2, 4)
WARMUPS, STEPS = 1, 5
CASES = (Case("gpt 4 x 128, 4 x 64 tokens", 4, 128, 4, batch=4, seq=64, vocabulary=512),)
MIB = {CASES[0].name: 6}
SLOW = Machine("slow", flops=5e8, memory_gbps=0.25, h2d_gbps=0.0125, d2h_gbps=0.0125, host_gbps=0.1, issue_us=20.0)


def ours(case: Case, throttle: Machine | None) -> tuple[Callable[[], None], Callable[[], dict[str, Any]]]:
    """A step, and what its plan said."""
    model, tokens, targets = make(case)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"memory": MIB[case.name] * 2**20, "optimizer": optimizer, "update": "backward", "device": "cpu"}
    compiled: Any = mtcompile.compile(model, throttle=throttle, **options)

    def step() -> None:
        compiled(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def planned() -> dict[str, Any]:
        report = compiled.memory_report()
        hosts = {name: report[name] for name in ("peak_host_bytes", "planned_peak_host_bytes")}
        return {"predicted_ms": compiled.plan.total_us / 1e3, **hosts}

    return step, planned


def fsdp(case: Case) -> tuple[Callable[[], None], Callable[[], dict[str, Any]]]:
    """A step of FSDP2 with parameters, gradients and optimizer state on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model, tokens, targets = make(case)
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, dict


def _rank(kind: str, case: Case, rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["MT_PROGRESS"] = "0"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    throttle = replace(SLOW, name=f"slow, {count} ranks") if kind == "throttled" else None
    step, planned = fsdp(case) if kind == "fsdp2" else ours(case, throttle)
    times = []
    for _ in range(1 + WARMUPS + STEPS):
        dist.barrier()
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e3)
    if rank == 0:
        row = {"measured_ms": statistics.median(times[-STEPS:]), "steps_ms": times[-STEPS:], **planned()}
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)


def measure(kind: str, case: Case, count: int) -> dict[str, Any]:
    """One row. Raises RuntimeError if a rank failed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(kind, case, rank, count, folder)) for rank in range(count)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"{kind}, {case.name}: a rank of {count} failed")
        return {"kind": kind, "case": case.name, "ranks": count, **json.loads(Path(folder, "row.json").read_text())}


def tables(rows: list[dict[str, Any]], machine: str) -> str:
    lines = [machine, "", "### Throttled: the speeds of a slow machine are kept to", ""]
    lines += ["| model | ranks | predicted ms | measured ms | error % |", "|---|---|---|---|---|"]
    for row in (row for row in rows if row["kind"] == "throttled"):
        error = (row["predicted_ms"] / row["measured_ms"] - 1) * 100
        figures = f"{row['predicted_ms']:.1f} | {row['measured_ms']:.1f} | {error:+.1f}"
        lines.append(f"| {row['case']} | {row['ranks']} | {figures} |")
    lines += ["", "### As fast as it goes, beside FSDP2 with CPU offload on gloo", ""]
    lines += ["| model | ranks | mtcompile ms | FSDP2 ms | times as fast |", "|---|---|---|---|---|"]
    theirs = {(row["case"], row["ranks"]): row["measured_ms"] for row in rows if row["kind"] == "fsdp2"}
    for row in (row for row in rows if row["kind"] == "ours"):
        other = theirs[row["case"], row["ranks"]]
        figures = f"{row['measured_ms']:.1f} | {other:.1f} | {other / row['measured_ms']:.2f}"
        lines.append(f"| {row['case']} | {row['ranks']} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go; tables go beside it, as .md")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in ("throttled", "fsdp2", "ours"):
        for case in CASES:
            for count in RANKS:
                rows.append(measure(kind, case, count))
                print({name: value for name, value in rows[-1].items() if name != "steps_ms"}, flush=True)
                of = {**about(), "torch": torch.__version__, "load": [round(load, 1) for load in os.getloadavg()[:2]]}
                args.json.write_text(json.dumps({"about": of, "rows": rows}, indent=1) + "\n")
                head = ", ".join(f"{key} {value}" for key, value in of.items())
                args.json.with_suffix(".md").write_text(tables(rows, head))


if __name__ == "__main__":
    main()
