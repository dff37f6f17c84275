"""How long the first step takes with compiled kernels, from a cold and from a warm disk cache, and how many kernels a deep
model needs; beside plain torch.compile.

    python -m benchmarks.start --layers 24

Each start is a process of its own, with the same cache directory. Imports are not counted, ``compile`` is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.run import about

PEERS = ("mtcompile", "torch.compile")


def first_step(peer: str, layers: int, share: float) -> dict[str, Any]:
    import torch

    import mtcompile.api
    from benchmarks.models import Case, make

    model, tokens, targets = make(Case("start", layers, 128, 4, 4, 64))
    started = time.perf_counter()
    if peer == "torch.compile":
        torch.compile(model, fullgraph=True)(tokens, targets).backward()
        return {"first_step_s": time.perf_counter() - started, "threads": torch.get_num_threads()}
    # Below what everything resident needs, so that there is a kernel per distinct region, not one per phase.
    state = sum(p.nbytes for p in model.parameters()) * 4
    compiled = mtcompile.compile(model, memory=int(state * share), kernels="inductor")
    compiled(tokens, targets).backward()
    seconds = time.perf_counter() - started
    schedule: Any = compiled.schedule
    runs = [i.kernel for i in schedule.instructions if i.op == "run"]
    return {"first_step_s": seconds, "regions": len(runs), "kernels": len(set(runs)), "threads": torch.get_num_threads()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.5, help="device budget as a share of the training state")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(first_step(args.child, args.layers, args.share)))
        return 0
    rows = []
    for peer in PEERS:
        with tempfile.TemporaryDirectory() as cache:
            starts = []
            for name in ("cold", "warm", "warm"):
                command = [sys.executable, "-m", "benchmarks.start", f"--layers={args.layers}", f"--share={args.share}"]
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "MT_CACHE": cache}
                made = subprocess.run([*command, "--child", peer], capture_output=True, text=True, check=True, env=env)
                starts.append({"peer": peer, "cache": name, **json.loads(made.stdout.splitlines()[-1])})
                print(starts[-1])
            ratio = starts[0]["first_step_s"] / min(row["first_step_s"] for row in starts[1:])
            print(f"{peer}: first step, cold over warm: {ratio:.1f}x")
            rows += starts
    if args.json:
        args.json.write_text(json.dumps({**about(), "results": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
