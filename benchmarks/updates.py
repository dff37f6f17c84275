"""What full precision costs: host bytes a parameter, and the time that updates add to a step.

    python -m benchmarks.updates --json out.json     # and tables in out.md; two minutes

*Bytes*: ``precision="bf16-master32"`` with AdamW, three models that differ in their number of layers, each in a process of
its own. Resident memory of the process after three steps, per parameter that the larger model has more; and what the plan
says is held, per parameter.

*Time*: on the emulated device, throttled to a machine whose host has less to do than its kernels take: a step with
``update="backward"``, without and with ``run_ahead``, against forward and backward alone. Beside it the peers' way, an update
after the backward: what the plan says it adds on that machine (``optimizer.step()`` itself is not throttled). Medians.

*Both sides*: the same on a machine whose host updates too slowly, by the host alone, and with some of its blocks updated by
the device.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import mtcompile
from benchmarks.decoder import build, text
from benchmarks.run import about
from mtcompile.models.shapes import Shape
from mtcompile.optim.state_sizes import streamed_copies
from mtcompile.passes.analysis.cost import Machine

LAYERS = (6, 8, 10)
STEPS, WARMUPS = 9, 3
SLOW_HOST = Machine(
    "slow host", flops=1e10, memory_gbps=4.0, h2d_gbps=2.0, d2h_gbps=2.0, host_gbps=8.0, update_gbps=0.3, issue_us=20.0
)
FAIR = Machine("throttled", flops=1e10, memory_gbps=4.0, h2d_gbps=2.0, d2h_gbps=2.0, host_gbps=3.0, issue_us=20.0)
WAYS: dict[str, dict[str, Any]] = {
    "as gradients arrive": {"update": "backward"},
    "as gradients arrive, running ahead": {"update": "backward", "run_ahead": True},
    "once their norm is known": {"update": "backward", "max_grad_norm": 1.0},
    "once their norm is known, running ahead": {"update": "backward", "max_grad_norm": 1.0, "run_ahead": True},
}


def shape(width: int, layers: int) -> Shape:
    return Shape(width, 4 * width, layers, width // 64, 2, 512, head_dim=64, dtype=torch.bfloat16)


def trained(layers: int, update: str) -> dict[str, Any]:
    """In this process: bytes that three steps leave."""
    model = build(shape(1024, layers), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"precision": "bf16-master32", "update": update, "device": "cpu", "memory": "250MB"}
    compiled: Any = mtcompile.compile(model, optimizer=optimizer, **options)
    tokens, targets = text(1, 32)
    for _ in range(3):
        optimizer.zero_grad()  # before a backward: with update="step" a step's gradients are there when it is measured
        compiled(tokens, targets).backward()
        optimizer.step()
    report, schedule = compiled.memory_report(), compiled.schedule
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return {
        "layers": layers,
        "update": update,
        "parameters": sum(p.numel() for p in model.parameters()),
        "process_bytes": 1024 * int(status.split("VmRSS:")[1].split()[0]),
        "held_bytes": report["peak_host_bytes"] + schedule.resident_nbytes.get("device", 0),
        "planned_bytes": report["planned_peak_host_bytes"] + schedule.resident_nbytes.get("device", 0),
    }


def in_child(layers: int, update: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.updates", "--layers", str(layers), "--update", update]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def bytes_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| update | parameters | held, B a parameter | planned | process, B an extra parameter |", "|---" * 5 + "|"]
    before: dict[str, dict[str, Any]] = {}
    for row in rows:
        each = [f"{row[key] / row['parameters']:.2f}" for key in ("held_bytes", "planned_bytes")]
        extra = ""
        if (less := before.get(row["update"])) is not None:
            extra = f"{(row['process_bytes'] - less['process_bytes']) / (row['parameters'] - less['parameters']):.2f}"
        before[row["update"]] = row
        lines.append(f"| {row['update']} | {row['parameters'] / 1e6:.1f} million | {' | '.join(each)} | {extra} |")
    return "\n".join(lines)


def timed(way: dict[str, Any], layers: int = 16, memory: str = "14MB", machine: Machine = FAIR) -> tuple[float, Any]:
    """Median ms from one step's start to the next one's, without ``optimizer.step()`` where that is what updates."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = build(shape(256, layers), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"precision": "bf16-master32", "device": "cpu", "memory": memory, "throttle": machine}
    compiled: Any = mtcompile.compile(model, optimizer=optimizer, **options, **way)
    tokens, targets = text(2, 64)
    times = []
    for _ in range(WARMUPS + STEPS):
        started = time.perf_counter()
        compiled(tokens, targets).backward()
        seconds = time.perf_counter() - started
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * seconds)
    return statistics.median(times[WARMUPS:]), compiled.plan


def compared() -> list[dict[str, Any]]:
    alone, plan = timed({})
    rows = [{"way": "forward and backward alone", "measured_ms": alone, "predicted_ms": plan.step_time_us / 1e3}]
    rows.append({"way": "after the backward (peers)", "measured_ms": None, "predicted_ms": plan.total_us / 1e3})
    for name, way in WAYS.items():
        measured, plan = timed(way)
        rows.append({"way": name, "measured_ms": measured, "predicted_ms": plan.total_us / 1e3})
    for row in rows:
        row["predicted_exposed_percent"] = 100 * (row["predicted_ms"] / rows[0]["predicted_ms"] - 1)
        measured = row["measured_ms"]
        row["measured_exposed_percent"] = None if measured is None else 100 * (measured / alone - 1)
    return rows


def time_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| update | predicted ms | exposed | measured ms | exposed |", "|---" * 5 + "|"]
    for row in rows:
        found = "" if row["measured_ms"] is None else f"{row['measured_ms']:.1f} | {row['measured_exposed_percent']:+.1f} %"
        found = found or "not throttled | "
        lines.append(f"| {row['way']} | {row['predicted_ms']:.1f} | {row['predicted_exposed_percent']:+.1f} % | {found} |")
    return "\n".join(lines)


def on_both_sides() -> list[dict[str, Any]]:
    """Steps whose host updates too slowly, in turn: it updates all that is at home there, or the device some of it."""
    rows = list[dict[str, Any]]()
    for name in ("as gradients arrive", "once their norm is known"):
        row: dict[str, Any] = {"way": name}
        for where, copies in (("host", lambda *_: 0), ("both", streamed_copies)):
            with mock.patch("mtcompile.optim.backward.update.streamed_copies", copies):
                measured, plan = timed(WAYS[name], 8, "24MB", SLOW_HOST)
            predicted = plan.total_us / 1e3
            row[where] = {"measured_ms": measured, "predicted_ms": predicted, "device_bytes": plan.peak_bytes["device"]}
        rows.append({**row, "gain": row["host"]["measured_ms"] / row["both"]["measured_ms"]})
    return rows


def sides_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| update | host alone: predicted, measured ms | both: predicted, measured ms | gain |", "|---" * 4 + "|"]
    for row in rows:
        each = [f"{row[where]['predicted_ms']:.0f}, {row[where]['measured_ms']:.0f}" for where in ("host", "both")]
        lines.append(f"| {row['way']} | {' | '.join(each)} | {row['gain']:.2f} x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results (tables beside it, .md)")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--update", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.layers:
        print(json.dumps(trained(given.layers, given.update)))
        return
    torch.set_num_threads(1)  # kernels and updates have a core each
    found = {
        "about": about(),
        "bytes": [in_child(layers, update) for update in ("backward", "step") for layers in LAYERS],
        "time": compared(),
        "both_sides": on_both_sides(),
    }
    told = f"{bytes_table(found['bytes'])}\n\n{time_table(found['time'])}\n\n{sides_table(found['both_sides'])}\n"
    print(told)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
        given.json.with_suffix(".md").write_text(told)


if __name__ == "__main__":
    main()
