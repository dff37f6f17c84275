"""What fits on your card: plans training steps of well-known model sizes for three machines. Nothing is run or measured.

    nice python -m benchmarks.fits     # writes benchmarks/results/fits.md and fits.json

Each cell is the plan of a whole step with AdamW on fp32 masters (bf16 weights), updates in the backward that run ahead into
the next forward, sequences of 4,096 tokens, and the largest batch among 16, 8, 4, 2 and 1 that fits. Speeds are predicted from
the machine's preset. The host budget is the machine's RAM less 4 GB for the system; the device budget is what
``mtcompile.plan`` takes by default. Plans are cached, so that a second run is short.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.run import about
from mtcompile.forecast.result import Forecast
from mtcompile.forecast.solve import plan
from mtcompile.models.decoders import parameter_counts
from mtcompile.models.shapes import SHAPES

SEQ, BATCHES = 4096, (16, 8, 4, 2, 1)
MODELS = ("qwen3-4b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "llama-70b")
RAM_GB = {"rtx4090": 64, "h100-sxm": 200, "h200-sxm": 1500}  # machine preset -> RAM of the host
SYSTEM_GB = 4
STATE_BYTES = 12  # per parameter: bf16 weight, 16-bit remainder of its fp32 master, two fp32 moments
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Cell:
    """The plan of one model on one machine. ``batch``: the largest that fits, 0 if none does. ``ram_bytes``, ``device_bytes``:
    what the step takes, or if it does not fit, the smallest RAM or device memory that would do (0: there is enough)."""

    model: str
    parameters: int
    machine: str
    ram_gb: int
    batch: int
    predicted_tokens_per_s: float
    limited_by: str
    ram_bytes: int
    device_bytes: int

    def __str__(self) -> str:
        if self.batch:
            return f"{self.predicted_tokens_per_s:,.0f} tokens/s, batch {self.batch}"
        short = {"RAM": self.ram_bytes, "device memory": self.device_bytes}
        return " and ".join(f"needs {-(-nbytes // 10**9)} GB of {what}" for what, nbytes in short.items() if nbytes)


def fitting(model: str, machine: str) -> Cell:
    """Plans the largest batch that fits, or says what is short at batch 1."""
    ram_gb, parameters = RAM_GB[machine], parameter_counts(SHAPES[model])[0]
    state_fits = STATE_BYTES * parameters <= host_bytes(ram_gb)
    for batch in BATCHES if state_fits else BATCHES[-1:]:
        forecast = planned(model, machine, batch)
        if forecast.feasible:
            break
    return cell(forecast, model, machine, batch)


def planned(model: str, machine: str, batch: int) -> Forecast:
    return plan(
        model,
        batch=batch,
        seq=SEQ,
        machine=machine,
        host=host_bytes(RAM_GB[machine]),
        precision="bf16-master32",
        update="backward",
        run_ahead=True,
    )


def host_bytes(ram_gb: int) -> int:
    return (ram_gb - SYSTEM_GB) * 10**9


def cell(forecast: Forecast, model: str, machine: str, batch: int) -> Cell:
    ram_gb = RAM_GB[machine]
    if forecast.feasible:
        ram_bytes = forecast.peak_bytes["host"] + SYSTEM_GB * 10**9
        device_bytes = forecast.peak_bytes["device"]
    else:  # a plan that does not fit says how much the host is short of, or the smallest device memory that works
        device_bytes = forecast.minimum_device_bytes
        ram_bytes = 0 if device_bytes else ram_gb * 10**9 + forecast.short_bytes
    return Cell(
        model=model,
        parameters=forecast.parameters,
        machine=machine,
        ram_gb=ram_gb,
        batch=batch if forecast.feasible else 0,
        predicted_tokens_per_s=forecast.tokens_per_s,
        limited_by=forecast.limiting_resource,
        ram_bytes=ram_bytes,
        device_bytes=device_bytes,
    )


def table(cells: list[Cell], commit: str) -> str:
    """Markdown: a row per model, a column per machine."""
    machines = list(dict.fromkeys(cell.machine for cell in cells))
    by_name = {(cell.model, cell.machine): cell for cell in cells}
    lines = [
        f"Predicted, not measured: whole training steps with exact fp32 masters and AdamW, sequences of {SEQ:,} tokens, the "
        f"largest batch of at most {BATCHES[0]} that fits. Commit {commit[:9]}.",
        "",
        "| model | " + " | ".join(f"{name}, {RAM_GB[name]} GB of RAM" for name in machines) + " |",
        "|---|" + "---|" * len(machines),
    ]
    for model in dict.fromkeys(cell.model for cell in cells):
        row = [by_name[model, machine] for machine in machines]
        lines.append(f"| {model}, {row[0].parameters / 1e9:.1f}B | " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    context, cells = about(), []
    for model in MODELS:
        for machine in RAM_GB:
            cells.append(fitting(model, machine))
            print(f"{model} on {machine}: {cells[-1]} (predicted)", flush=True)
    text = table(cells, context["commit"])
    print(f"\n{text}")
    (RESULTS / "fits.json").write_text(
        json.dumps({**context, "seq": SEQ, "cells": [asdict(c) for c in cells]}, indent=1) + "\n"
    )
    (RESULTS / "fits.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
