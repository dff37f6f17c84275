"""How long planning takes, and how much memory: each case in a process of its own, from nothing.

python -m benchmarks.planning --json out.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "7b-h200": {"model": "qwen2.5-7b", "batch": 16, "seq": 4096, "machine": "h200-sxm", "precision": "bf16-master32"},
    "7b-24gb": {"model": "qwen2.5-7b", "batch": 4, "seq": 4096, "machine": "rtx4090", "precision": "bf16-master32"},
    "70b-h100": {"model": "llama-70b", "batch": 8, "seq": 4096, "machine": "h100-sxm", "precision": "bf16-master32"},
    "120b-h200": {
        "model": "megatrain-120b",
        "batch": 8,
        "seq": 4096,
        "machine": "h200-sxm",
        "host": "1500GB",
        "precision": "bf16-master32",
        "update": "backward",
    },
}


def measured(case: str) -> dict[str, Any]:
    """Seconds with the import of torch, resident bytes at most, and what was planned."""
    start = time.perf_counter()
    import mtcompile

    made = mtcompile.plan(**CASES[case])
    seconds = time.perf_counter() - start
    found = json.loads(made.to_json())
    keep = ["feasible", "parameters", "state_bytes", "peak_bytes", "budget_bytes"]
    keep += ["step_time_us", "update_us", "limiting_resource"]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"case": case, **CASES[case], "seconds": seconds, "rss_bytes": rss} | {key: found[key] for key in keep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="where the raw results go")
    options = parser.parse_args()
    found = []
    for case in options.case or CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measured, (case,)))
        row = found[-1]
        print(
            f"{case}: {row['parameters'] / 1e9:.1f}B parameters planned in {row['seconds']:.1f} s and "
            f"{row['rss_bytes'] / 2**30:.2f} GiB; {'fits' if row['feasible'] else 'does not fit'}, "
            f"{row['step_time_us'] / 1e6:.1f} s a step, state {row['state_bytes'] / row['parameters']:.2f} B a parameter, "
            f"limited by {row['limiting_resource']}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
