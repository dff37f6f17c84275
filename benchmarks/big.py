"""Trains a model that is larger than the memory it is given: three steps of 3 billion parameters, their state on disk.

    make big                                  # two budgets, the same bits
    python -m benchmarks.big --folder /mnt/nvme --limit 14GiB --json out.json

``qwen2.5-3b`` of the built-in shapes, with random weights, exact fp32 masters and AdamW: 12 bytes a parameter. Each training is
a process of its own, with an emulated device, that is killed if it holds more memory than ``--limit``: of its own, without the
pages of files that it maps, which the system takes back when it needs them. Both must have the same losses, gradient norms and
weights, bit by bit, and the losses must begin near ln(vocabulary) and fall. The folder needs 60 GB of free space.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.run import about
from mtcompile.runtime.schedule import gib
from mtcompile.sizes import parse_bytes

MODEL, VOCABULARY, STEPS, SEQ = "qwen2.5-3b", 151936, 3, 64
BUDGETS = (("3GiB", "8GiB"), ("4GiB", "6GiB"))  # device, host
COMPARED = ("losses", "norms", "weights")
_DISK = "60GB"
_LOOKS_S = 0.1


def trained(folder: Path, memory: str, host: str) -> dict[str, Any]:
    """Trains in this process. Returns what the steps gave, a digest of the weights, and predicted and measured figures."""
    import torch
    import xxhash

    from mtcompile.trainer.jobs import prepared
    from mtcompile.trainer.recipe import Recipe
    from mtcompile.trainer.trainer import run

    options: dict[str, Any] = {"precision": "bf16-master32", "update": "backward", "device": "cpu", "evaluate_every": 0}
    budgets = {"memory": memory, "host": host, "disk": f"{folder}:{_DISK}"}
    rows: list[tuple[float, Any]] = []

    def report(row: Any, model: Any) -> None:
        rows.append((time.monotonic(), row))
        print(row, file=sys.stderr, flush=True)

    job = prepared(Recipe(MODEL, batch=1, seq=SEQ, steps=STEPS, lr=1e-4, warmup=1, **options, **budgets))
    run(job, report)
    digest = xxhash.xxh3_64()
    for parameter in job.model.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy().data)
    return {
        "losses": [row.loss for _, row in rows],
        "norms": [row.grad_norm for _, row in rows],
        "weights": digest.hexdigest(),
        "step_s": [after - before for (before, _), (after, _) in itertools.pairwise(rows)],
        "predicted_step_s": job.model.plan.total_us / 1e6,
        "memory_report": job.model.memory_report(),
    }


def watched(memory: str, host: str, folder: Path, limit: int) -> dict[str, Any]:
    """Trains in a process that is killed if it holds more than ``limit`` bytes. Returns what it prints, its seconds and its
    peak."""
    began, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "benchmarks.big", "--folder", str(folder), "--alone", memory, host]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    inside = psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory_now = inside.memory_info()
            peak = max(peak, memory_now.rss - memory_now.shared)
        if peak > limit:
            process.kill()
            raise SystemExit(f"expected at most {gib(limit)} of memory, found {gib(peak)}: the training was killed")
        time.sleep(_LOOKS_S)
    if process.returncode or process.stdout is None:
        raise SystemExit(f"the training exited with {process.returncode}")
    return {**json.loads(process.stdout.read()), "seconds": time.monotonic() - began, "peak_process_bytes": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the state lies while it trains")
    parser.add_argument("--limit", default="13GiB", help="memory of a training, above which it is killed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--alone", nargs=2, metavar=("MEMORY", "HOST"), help="train once, in this process, within these")
    args = parser.parse_args()
    os.environ.setdefault("MT_DISK_SLOWDOWN", "0")  # whether it fits is asked, not whether it is fast
    if args.alone:
        print(json.dumps(trained(args.folder, *args.alone)))
        return 0
    limit = parse_bytes(args.limit, "--limit")
    assert limit is not None
    rows = []
    for memory, host in BUDGETS:
        rows.append({"memory": memory, "host": host, **watched(memory, host, args.folder, limit)})
        print(said(rows[-1], limit), flush=True)
    equal = all([row[key] for key in COMPARED] == [rows[0][key] for key in COMPARED] for row in rows)
    losses = rows[0]["losses"]
    learns = abs(losses[0] - math.log(VOCABULARY)) < 1 and losses[-1] < losses[0]
    print(f"{'the same bits' if equal else 'OTHER BITS'} under both budgets; the losses {'fall' if learns else 'DO NOT FALL'}")
    if args.json:
        args.json.write_text(json.dumps({"about": about(), "limit_bytes": limit, "rows": rows}, indent=1) + "\n")
    return 0 if equal and learns else 1


def said(row: dict[str, Any], limit: int) -> str:
    report, losses = row["memory_report"], ", ".join(f"{loss:.4f}" for loss in row["losses"])
    steps = ", ".join(f"{seconds:.0f}" for seconds in row["step_s"])
    disk, state = gib(report["peak_disk_bytes"]), gib(report["state_bytes"])
    return (
        f"{MODEL} in {row['memory']} of device and {row['host']} of host memory: {state} of state, {disk} on disk; "
        f"{gib(row['peak_process_bytes'])} in the process of at most {gib(limit)}; losses {losses}; {row['seconds']:.0f} s, of "
        f"which steps {steps} (predicted {row['predicted_step_s']:.0f})"
    )


if __name__ == "__main__":
    sys.exit(main())
