"""How long the first step takes with compiled kernels, from a cold and from a warm disk cache, and how many kernels a deep
model needs.

    python -m benchmarks.start --layers 24

Each start is a process of its own, with the same cache directory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any


def first_step(layers: int, share: float) -> dict[str, Any]:
    import torch

    import mtcompile
    from benchmarks.models import Case, make

    model, tokens, targets = make(Case("start", layers, 128, 4, 4, 64))
    # Below what everything resident needs, so that there is a kernel per distinct region, not one per phase.
    state = sum(p.nbytes for p in model.parameters()) * 4
    compiled = mtcompile.compile(model, memory=int(state * share), kernels="inductor")
    started = time.perf_counter()
    compiled(tokens, targets).backward()
    seconds = time.perf_counter() - started
    schedule: Any = compiled.schedule
    runs = [i.kernel for i in schedule.instructions if i.op == "run"]
    return {"first_step_s": seconds, "regions": len(runs), "kernels": len(set(runs)), "threads": torch.get_num_threads()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.5, help="device budget as a share of the training state")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(first_step(args.layers, args.share)))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        rows = []
        for name in ("cold", "warm", "warm"):
            command = [sys.executable, "-m", "benchmarks.start", "--child", f"--layers={args.layers}", f"--share={args.share}"]
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            made = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            rows.append(json.loads(made.stdout.splitlines()[-1]))
            print(name, rows[-1])
        print(f"first step, cold over warm: {rows[0]['first_step_s'] / min(r['first_step_s'] for r in rows[1:]):.1f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
