"""What fits on your card: plans training steps of well-known model sizes for three machines. Nothing is run or measured.

    nice python -m benchmarks.fits     # writes benchmarks/results/fits.md and fits.json

Each cell is the plan of a whole step with AdamW on fp32 masters (bf16 weights), updates in the backward that run ahead into
the next forward, sequences of 4,096 tokens, and the largest batch among 16, 8, 4, 2 and 1 that fits. For the first card also
with an NVMe disk, and of LoRA adapters of rank 16 on frozen bf16 weights. Speeds are predicted from the machine's preset. The
host budget is the machine's RAM less 4 GB for the system; the device budget is what ``mtcompile.plan`` takes by default. Plans
are cached, so that a second run is short.
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
MODELS = ("qwen3-4b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
SYSTEM_GB = 4
STATE_BYTES = 12  # per parameter: bf16 weight, 16-bit remainder of its fp32 master, two fp32 moments
WEIGHT_BYTES = 2  # of these, what a frozen one takes
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Column:
    """A machine: its preset, the RAM of its host, and the NVMe disk to take. ``lora``: trains adapters of that rank."""

    machine: str
    ram_gb: int
    disk_gb: int = 0
    lora: int = 0

    def __str__(self) -> str:
        disk = f" + {self.disk_gb:,} GB of NVMe" if self.disk_gb else ""
        return f"{self.machine}, {self.ram_gb:,} GB of RAM{disk}" + (f", LoRA of rank {self.lora}" if self.lora else "")


COLUMNS = (
    Column("rtx4090", 64),
    Column("rtx4090", 64, disk_gb=2000),
    Column("rtx4090", 64, lora=16),
    Column("h100-sxm", 200),
    Column("h200-sxm", 1500),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """The plan of one model on one machine. ``batch``: the largest that fits, 0 if none does. ``ram_bytes``, ``device_bytes``:
    what the step takes, or if it does not fit, the smallest RAM or device memory that would do (0: there is enough).
    ``disk_bytes``: what it takes of the disk. ``refusal``: why the disk makes no sense."""

    model: str
    parameters: int
    column: Column
    batch: int
    predicted_tokens_per_s: float
    limited_by: str
    ram_bytes: int
    device_bytes: int
    disk_bytes: int = 0
    refusal: str = ""

    def __str__(self) -> str:
        if self.batch:
            return f"{self.predicted_tokens_per_s:,.0f} tokens/s, batch {self.batch}"
        if self.refusal:
            return "the disk is too slow"
        short = {"RAM": self.ram_bytes, "device memory": self.device_bytes}
        return " and ".join(f"needs {-(-nbytes // 10**9)} GB of {what}" for what, nbytes in short.items() if nbytes)


def fitting(model: str, column: Column) -> Cell:
    """Plans the largest batch that fits, or says what is short at batch 1."""
    state = parameter_counts(SHAPES[model])[0] * (WEIGHT_BYTES if column.lora else STATE_BYTES)
    state_fits = state <= host_bytes(column.ram_gb) + column.disk_gb * 10**9
    for batch in BATCHES if state_fits else BATCHES[-1:]:
        forecast = planned(model, column, batch)
        if forecast.feasible:
            break
    return cell(forecast, model, column, batch)


def planned(model: str, column: Column, batch: int) -> Forecast:
    return plan(
        model,
        batch=batch,
        seq=SEQ,
        machine=column.machine,
        host=host_bytes(column.ram_gb),
        disk=column.disk_gb * 10**9 or None,
        lora=column.lora,
        precision="bf16-master32",
        update="backward",
        run_ahead=True,
    )


def host_bytes(ram_gb: int) -> int:
    return (ram_gb - SYSTEM_GB) * 10**9


def cell(forecast: Forecast, model: str, column: Column, batch: int) -> Cell:
    if forecast.feasible:
        ram_bytes = forecast.peak_bytes["host"] + SYSTEM_GB * 10**9
        device_bytes = forecast.peak_bytes["device"]
    else:  # a plan that does not fit says how much the host is short of, or the smallest device memory that works
        device_bytes = forecast.minimum_device_bytes
        ram_bytes = 0 if device_bytes or forecast.refusal else column.ram_gb * 10**9 + forecast.short_bytes
    return Cell(
        model=model,
        parameters=forecast.parameters,
        column=column,
        batch=batch if forecast.feasible else 0,
        predicted_tokens_per_s=forecast.tokens_per_s,
        limited_by=forecast.limiting_resource,
        ram_bytes=ram_bytes,
        device_bytes=device_bytes,
        disk_bytes=forecast.peak_bytes.get("disk", 0),
        refusal=forecast.refusal,
    )


def table(cells: list[Cell], commit: str) -> str:
    """Markdown: a row per model."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    by_name = {(cell.model, cell.column): cell for cell in cells}
    lines = [
        f"Predicted, not measured: whole training steps with exact fp32 masters and AdamW, sequences of {SEQ:,} tokens, the "
        f"largest batch of at most {BATCHES[0]} that fits. Commit {commit[:9]}.",
        "",
        "| model | " + " | ".join(map(str, columns)) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for model in dict.fromkeys(cell.model for cell in cells):
        row = [by_name[model, column] for column in columns]
        lines.append(f"| {model}, {row[0].parameters / 1e9:.1f}B | " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    context, cells = about(), []
    for model in MODELS:
        for column in COLUMNS:
            cells.append(fitting(model, column))
            print(f"{model} on {column}: {cells[-1]} (predicted)", flush=True)
    text = table(cells, context["commit"])
    print(f"\n{text}")
    (RESULTS / "fits.json").write_text(
        json.dumps({**context, "seq": SEQ, "cells": [asdict(c) for c in cells]}, indent=1) + "\n"
    )
    (RESULTS / "fits.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
