"""How far the time and the peak of a step are from what its plan said.

    python -m benchmarks.predictions --json out.json     # and tables in out.md; three minutes

Two kinds of runs on the emulated device, each over configurations (model, batch, budget, link) of which a few calibrate and
are no part of the errors:

*throttled*: kernels and copies keep to the speeds of a slow machine, several times slower than this one, and plans are for
that machine. What is measured is the schedule: order, waits, overlap, what an instruction costs beside its work. The
configurations that calibrate fit one factor for all the others.

*measured kernels*: nothing is slowed down. ``model.calibrate()`` keeps what kernels and copies took in the configurations
that calibrate; the others are planned by that, and nothing is fitted beside it.

A step is a forward and a backward: median of ``STEPS`` after ``WARMUPS``, kernels on one thread, so that copies have a core
of their own. A peak is training state and arenas as they are held, and what the allocator's events say beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mtcompile
from benchmarks.decoder import build, text
from benchmarks.models import Case, make
from benchmarks.run import about
from mtcompile.models.shapes import Shape
from mtcompile.passes.analysis.cost import Machine

WARMUPS, STEPS = 2, 5  # after one step that compiles and measures the peak
_LARGE = 50 * 10**6  # bytes; above, a predicted peak should be within a tenth of the measured one
_SHORT_MS = 100.0  # of steps below, much is spent beside kernels and copies, which plans leave out
SLOW = Machine("slow", flops=1e10, memory_gbps=4.0, issue_us=20.0)


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: one of MODELS. ``mib``: device memory. ``link_gbps``: each way, of a throttled run. ``calibrates``: measured
    for the others' sake."""

    model: str
    mib: int
    link_gbps: float = 0.0
    calibrates: bool = False


def _decoder(width: int, layers: int, batch: int, seq: int) -> tuple[nn.Module, Tensor, Tensor]:
    shape = Shape(width, 4 * width, layers, width // 64, 2, 4 * width, head_dim=64, dtype=torch.float32)
    return build(shape, torch.device("cpu")), *text(batch, seq)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "gpt 4 x 128, 4 x 64 tokens": lambda: make(Case("", 4, 128, 4, batch=4, seq=64, vocabulary=512)),
    "gpt 12 x 96, 2 x 64 tokens": lambda: make(Case("", 12, 96, 4, batch=2, seq=64, vocabulary=512)),
    "gpt 4 x 256, 2 x 128 tokens": lambda: make(Case("", 4, 256, 8, batch=2, seq=128, vocabulary=1024)),
    "gpt 2 x 384, 2 x 128 tokens": lambda: make(Case("", 2, 384, 6, batch=2, seq=128, vocabulary=1024)),
    "decoder 4 x 128, 4 x 64 tokens": lambda: _decoder(128, 4, 4, 64),
    "decoder 4 x 256, 2 x 128 tokens": lambda: _decoder(256, 4, 2, 128),
    "gpt 4 x 256, 8 x 128 tokens": lambda: make(Case("", 4, 256, 8, batch=8, seq=128, vocabulary=1024)),
    "gpt 2 x 384, 8 x 128 tokens": lambda: make(Case("", 2, 384, 6, batch=8, seq=128, vocabulary=1024)),
    "decoder 4 x 256, 8 x 128 tokens": lambda: _decoder(256, 4, 8, 128),
}
SMALL, DEEP, MIDDLE, WIDE, DECODER, LARGER, MIDDLE_8, WIDE_8, LARGER_8 = MODELS
THROTTLED = (
    Config(SMALL, 8, 0.2, calibrates=True),
    Config(MIDDLE, 48, 0.1, calibrates=True),
    Config(DECODER, 12, 0.2, calibrates=True),
    Config(SMALL, 4, 0.05),
    Config(SMALL, 16, 0.1),
    Config(DEEP, 3, 0.1),
    Config(DEEP, 16, 0.05),
    Config(MIDDLE, 10, 0.1),
    Config(MIDDLE, 64, 0.05),
    Config(MIDDLE, 96, 0.2),
    Config(WIDE, 16, 0.2),
    Config(WIDE, 72, 0.05),
    Config(DECODER, 6, 0.1),
    Config(LARGER, 24, 0.2),
    Config(LARGER, 80, 0.1),
)
MEASURED = (
    Config(MIDDLE_8, 160, calibrates=True),
    Config(MIDDLE_8, 24, calibrates=True),
    Config(LARGER_8, 64, calibrates=True),
    Config(MIDDLE_8, 48),
    Config(MIDDLE_8, 96),
    Config(WIDE_8, 40),
    Config(WIDE_8, 96),
    Config(WIDE_8, 160),
    Config(LARGER_8, 40),
    Config(LARGER_8, 120),
    Config(LARGER_8, 240),
    # Shorter than a tenth of a second: there, what a step costs beside its kernels and copies counts too.
    Config(DEEP, 3),
    Config(MIDDLE, 64),
    Config(DECODER, 6),
)


def measure(config: Config, steps: int = STEPS, warmups: int = WARMUPS) -> dict[str, Any]:
    """One row: times in ms, peaks in bytes. Without a link speed, a configuration that calibrates keeps what it measured."""
    torch.compiler.reset()
    model, tokens, targets = MODELS[config.model]()
    optimizer = torch.optim.AdamW(model.parameters())
    gbps = config.link_gbps
    throttle = replace(SLOW, h2d_gbps=gbps, d2h_gbps=gbps) if gbps else None
    compiled: Any = mtcompile.compile(model, memory=config.mib * 2**20, optimizer=optimizer, device="cpu", throttle=throttle)

    def step() -> float:
        started = time.perf_counter()
        compiled(tokens, targets).backward()
        seconds = time.perf_counter() - started
        optimizer.step()
        optimizer.zero_grad()
        return seconds * 1e3

    for _ in range(1 + warmups):
        step()
    times = [step() for _ in range(steps)]
    report, schedule = compiled.memory_report(), compiled.schedule
    row: dict[str, Any] = {
        "model": config.model,
        "memory_mib": config.mib,
        "link_gbps": gbps or None,
        "calibrates": config.calibrates,
        "planned_for": compiled.plan.machine,
        "predicted_ms": compiled.plan.step_time_us / 1e3,
        "measured_ms": statistics.median(times),
        "steps_ms": times,
        "predicted_peak_bytes": report["planned_peak_device_bytes"],
        "measured_peak_bytes": report["peak_device_bytes"],
        "instructions": len(schedule),
        "copied_bytes": sum(i.nbytes for i in schedule.instructions if i.op == "copy"),
        "limiting_resource": compiled.plan.limiting_resource,
    }
    if config.calibrates and throttle is None:
        row["calibration"] = str(compiled.calibrate())
    return row


def judge(rows: list[dict[str, Any]], factor: float = 1.0) -> dict[str, Any]:
    """Errors of what did not calibrate, in percent of what was measured. ``factor``: of every prediction."""
    for row in rows:
        row["error_percent"] = 100 * (factor * row["predicted_ms"] / row["measured_ms"] - 1)
        row["peak_ratio"] = row["predicted_peak_bytes"] / row["measured_peak_bytes"]
    judged = [row for row in rows if not row["calibrates"]]
    errors = [abs(row["error_percent"]) for row in judged]
    large = [row["peak_ratio"] for row in rows if row["measured_peak_bytes"] > _LARGE]
    return {
        "factor": factor,
        "configurations": len(errors),
        "worst_percent": max(errors, default=None),
        "worst_percent_of_longer_steps": max(
            (abs(row["error_percent"]) for row in judged if row["measured_ms"] > _SHORT_MS), default=None
        ),
        "median_percent": statistics.median(errors) if errors else None,
        "least_peak_ratio": min(row["peak_ratio"] for row in rows),
        "greatest_peak_ratio_above_50_mb": max(large, default=None),
        "rows": rows,
    }


def overhead(rows: Iterable[dict[str, Any]]) -> float:
    """Measured over predicted of the rows that calibrate, the geometric mean."""
    return math.exp(statistics.fmean(math.log(r["measured_ms"] / r["predicted_ms"]) for r in rows if r["calibrates"]))


def table(title: str, judged: dict[str, Any]) -> str:
    lines = [f"### {title}", ""]
    if judged["worst_percent"] is not None:
        longer = judged["worst_percent_of_longer_steps"]
        told = "" if longer is None else f" ({longer:.1f} % of steps above {_SHORT_MS:.0f} ms)"
        lines += [
            f"{judged['configurations']} configurations not used to calibrate: "
            f"worst error {judged['worst_percent']:.1f} %{told}, "
            f"median {judged['median_percent']:.1f} %. Predictions times {judged['factor']:.3f}.",
            "",
        ]
    lines += ["| model | memory MiB | link GB/s | predicted ms | measured ms | error % | peak predicted MiB | measured |"]
    lines += ["|---" * 8 + "|"]
    for row in judged["rows"]:
        error = "calibrates" if row["calibrates"] else f"{row['error_percent']:+.1f}"
        peaks = " | ".join(f"{row[f'{which}_peak_bytes'] / 2**20:.2f}" for which in ("predicted", "measured"))
        times = f"{judged['factor'] * row['predicted_ms']:.1f} | {row['measured_ms']:.1f}"
        lines.append(f"| {row['model']} | {row['memory_mib']} | {row['link_gbps'] or ''} | {times} | {error} | {peaks} |")
    return "\n".join([*lines, ""])


def run(configs: Iterable[Config]) -> list[dict[str, Any]]:
    rows = []
    for config in configs:
        print(f"{config.model}, {config.mib} MiB, {config.link_gbps or 'own'} speeds ...", file=sys.stderr, flush=True)
        rows.append(measure(config))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("predictions.json"), help="the tables are written beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:  # nothing remembered counts, and nothing is left behind
        os.environ["MT_CACHE"] = folder
        throttled, measured = run(THROTTLED), run(MEASURED)
    load.append(os.getloadavg()[0])
    whole: dict[str, Any] = {**about(), "torch": torch.__version__, "threads": 1, "load": load}
    text = ", ".join(f"{key} {value}" for key, value in whole.items()) + "\n\n"
    whole["throttled"] = judge(throttled, overhead(throttled))
    whole["measured_kernels"] = judge(measured)
    text += table("Throttled: the speeds of a slow machine are kept to", whole["throttled"])
    text += "\n" + table("Measured kernels: own speeds, times from other configurations", whole["measured_kernels"])
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(whole, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
