"""How near a step with weights on disk comes to its busiest resource, and whether each tier holds what was planned.

    python -m benchmarks.disk_steps [folder] [--json out.json]     # five to ten minutes

Stacks of equal blocks on the emulated device, throttled: the disk or the device's kernels take most of a step, or both take as
long. ``predicted`` and ``measured``: the step over the busy time of its busiest queue, by the simulator and by the trace of the
median of ``STEPS`` steps; or of the drive, if that is longer, which reads and the updates of what is on disk share. The ledger:
planned and measured peaks of device, host and disk at six splits of the budgets.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mtcompile
from benchmarks.run import about
from mtcompile.passes.analysis.cost import Machine
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us

WIDTH, LAYERS, TOKENS = 384, 40, 64
STEPS, WARMUPS = 7, 3
MIB = 2**20
BALANCED = Machine("throttled", 1.1e10, 20.0, 1.0, 1.0, issue_us=20.0, host_gbps=4.0, disk_read_gbps=0.1, disk_write_gbps=0.1)
MACHINES = {
    "disk": replace(BALANCED, flops=4e10),
    "device": replace(BALANCED, flops=4e9),
    "disk and device alike": BALANCED,
}
SPLITS = (("8MiB", "24MiB"), ("8MiB", "32MiB"), ("8MiB", "80MiB"), ("16MiB", "24MiB"), ("32MiB", "40MiB"), ("64MiB", "96MiB"))


class Block(nn.Module):
    """Two frozen weights of 0.6 MiB each, and an adapter that trains; ``trained``: all of them train."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.requires_grad_(trained)
        self.adapter = nn.Linear(WIDTH, 8, bias=False)
        self.back = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(x))) + self.back(self.adapter(x))
        return made


class Stack(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(trained) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def compiled(folder: Path, plain: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.compiler.reset()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    options = {"memory": "8MiB", "disk": f"{folder}:1GiB", "device": "cpu", **options}
    return mtcompile.compile(model, optimizer=optimizer, **options), optimizer


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(TOKENS, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(folder: Path, bound: str, trained: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"host": "120MiB", "update": "backward"} if trained else {"host": "24MiB"}
    model, optimizer = compiled(folder, Stack(trained), throttle=MACHINES[bound], **options)
    took: list[float] = []
    busy: list[dict[str, float]] = []
    for _ in range(WARMUPS + STEPS):
        started = time.perf_counter()
        step(model, optimizer)
        took.append(1e3 * (time.perf_counter() - started))
        busy.append({str(queue): us / 1e3 for queue, us in busy_us(model.last_trace).items()})
    plan, middle = model.plan, sorted(range(WARMUPS, WARMUPS + STEPS), key=took.__getitem__)[STEPS // 2]
    planned = {str(queue): us / 1e3 for queue, us in busy_us(simulate(model.schedule)).items()}
    drive_ms = MACHINES[bound].drive_us(plan.disk_read_bytes, plan.disk_write_bytes) / 1e3
    model.close()
    return {
        "bound": bound,
        "trained": trained,
        "on_disk_bytes": plan.peak_bytes["disk"],
        "predicted_ms": plan.total_us / 1e3,
        "measured_ms": statistics.median(took[WARMUPS:]),
        "predicted_busy_ms": planned,
        "measured_busy_ms": busy[middle],
        "drive_ms": drive_ms,
    }


def ledger(folder: Path, memory: str, host: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, optimizer = compiled(folder, Stack(trained=False), memory=memory, host=host)
    for _ in range(2):
        step(model, optimizer)
    report = model.memory_report()
    model.close()
    tiers = {tier: (report[f"planned_peak_{tier}_bytes"], report[f"peak_{tier}_bytes"]) for tier in ("device", "host", "disk")}
    return {"memory": memory, "host": host, "peaks": tiers}


def tables(times: list[dict[str, Any]], splits: list[dict[str, Any]]) -> str:
    lines = [
        "| most of a step | trains | on disk | predicted | over its busiest | measured | over its busiest |",
        "|---" * 7 + "|",
    ]
    for row in times:
        busiest = {kind: max(row["drive_ms"], *row[f"{kind}_busy_ms"].values()) for kind in ("predicted", "measured")}
        ratios = [row[f"{kind}_ms"] / ms for kind, ms in busiest.items()]
        what = "all" if row["trained"] else "adapters"
        figures = (f"{row[f'{kind}_ms']:.0f} ms | {ratio:.2f}" for kind, ratio in zip(("predicted", "measured"), ratios))
        lines.append(f"| {row['bound']} | {what} | {gib(row['on_disk_bytes'])} | {' | '.join(figures)} |")
    lines += ["", "| memory | host | device: planned, measured | host | disk |", "|---" * 5 + "|"]
    for row in splits:
        peaks = (f"{gib(planned)}, {gib(measured)}" for planned, measured in row["peaks"].values())
        lines.append(f"| {row['memory']} | {row['host']} | {' | '.join(peaks)} |")
    return "\n".join(lines)


def told(cases: Sequence[Any]) -> Iterator[Any]:
    """Yields the cases, each of which takes about half a minute, and says on stderr which one is under way."""
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {case}", file=sys.stderr, flush=True)
        yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(bound, trained) for trained in (False, True) for bound in MACHINES]
    times = [timed(given.folder, *case) for case in told(cases)]
    splits = [ledger(given.folder, *split) for split in told(SPLITS)]
    print(tables(times, splits))
    if given.json:
        given.json.write_text(json.dumps({"about": about(), "times": times, "ledger": splits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
