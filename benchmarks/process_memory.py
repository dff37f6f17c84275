"""The RAM that a training process holds beside the figure that its report has for it, each case in a process of its own.

    python -m benchmarks.process_memory [--json out.json]     # two minutes

Stacks of linear layers on the emulated device, with and without a disk: after ``STEPS`` steps, and the most at the end of any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mtcompile
from benchmarks.run import about

STEPS = 4
# width, layers, memory=, host=, GiB of a disk, update=, precision=
CASES: tuple[tuple[int, int, str, str | None, int, str, str], ...] = (
    (1408, 40, "160MiB", None, 0, "step", "model"),
    (1408, 40, "200MiB", None, 0, "backward", "model"),
    (2048, 24, "300MiB", None, 0, "backward", "bf16-master32"),
    (1408, 40, "200MiB", "400MiB", 4, "backward", "model"),
    (2048, 24, "300MiB", "500MiB", 4, "backward", "bf16-master32"),
)


def held(case: int) -> dict[str, Any]:
    width, layers, memory, host, disk, update, precision = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if precision != "model":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"memory": memory, "host": host, "update": update, "precision": precision}
        options |= {"disk": f"{folder}:{disk}GiB"} if disk else {}
        compiled = mtcompile.compile(model, optimizer=optimizer, **options)
        most = 0
        for _ in range(STEPS):
            compiled(torch.randn(16, width, dtype=next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            most = max(most, compiled.memory_report()["process_bytes"])
        report = compiled.memory_report()
        compiled.close()
    planned, after = report["planned_process_bytes"], report["process_bytes"]
    return {"planned": planned, "held": after, "most": most, "error": planned / after - 1, "host": report["peak_host_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, help="only this one, in this process")
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(held(options.case)))
        return
    rows = []
    for case, about_it in enumerate(CASES):
        command = [sys.executable, "-m", "benchmarks.process_memory", "--case", str(case)]
        made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append({"case": about_it, **json.loads(made.stdout.splitlines()[-1])})
        planned, now, most = (rows[-1][key] / 2**20 for key in ("planned", "held", "most"))
        print(f"{about_it}: planned {planned:,.0f} MiB, held {now:,.0f}, at most {most:,.0f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
