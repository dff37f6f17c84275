"""How fast checkpoints are saved, and what a save in the background costs the training beside it.

    python -m benchmarks.checkpoints --json out.json      # a minute; --folder DIR names the disk

A model of 256 MiB is saved, and the same bytes are written into a new file and synced, in turns: the ratio of their rates is
the median. A small decoder then trains on the emulated device, compiled, at a tight budget: steps from the start of a save in
the background until it is on the disk, and as many without one, in turns. A step's slowdown is the ratio of medians; that of
a training, the ratio of 20 steps with one save, its copy included, to 20 without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mtcompile
from benchmarks.decoder import build
from benchmarks.run import about
from mtcompile import checkpoint
from mtcompile.models.shapes import Shape

ROUNDS = 7
_PIECE = 1 << 23
_STEPS = 20  # of a training that saves once in so many


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def rates(folder: Path) -> dict[str, Any]:
    """GB/s of both ways to write."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(64)))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    values = memoryview(torch.randn(nbytes // 4).numpy()).cast("B")

    def write(path: Path) -> None:
        with path.open("xb", buffering=0) as file:
            for start in range(0, nbytes, _PIECE):
                file.write(values[start : start + _PIECE])
            os.fsync(file.fileno())

    plain, saved = [], []
    for number in range(ROUNDS):
        plain.append(seconds(lambda number=number: write(folder / f"plain-{number}")))
        saved.append(seconds(lambda number=number: checkpoint.save(folder / f"run-{number}", model, step=number)))
        shutil.rmtree(folder / f"run-{number}")
        (folder / f"plain-{number}").unlink()
    ratios = [one / other for one, other in zip(plain, saved, strict=True)]
    return {
        "bytes": nbytes,
        "plain_gbps": round(nbytes / statistics.median(plain) / 1e9, 3),
        "save_gbps": round(nbytes / statistics.median(saved) / 1e9, 3),
        "ratio": round(statistics.median(ratios), 3),
    }


def slowdown(folder: Path) -> dict[str, Any]:
    """A step's time beside a save, over that without one; and what the copy takes."""
    model: Any = build(Shape(256, 1024, 4, 8, 4, 2048, head_dim=32, dtype=torch.float32), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    mtcompile.compile(model, memory="24MiB", optimizer=optimizer, device="cpu")
    tokens = torch.randint(0, 2048, (4, 129))

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    alone, beside, copies = [], [], []
    for number in range(ROUNDS):
        saving = checkpoint.save_in_background(folder / "run", model, optimizer, step=number, keep=1)
        during = []
        while saving.written_s is None:
            during.append(seconds(step))
        saving.wait()
        beside.append(statistics.median(during))
        alone.append(statistics.median(seconds(step) for _ in during))
        copies.append(saving.copy_s)
    between = [lasted(step, folder / "run", model, optimizer, saves) for _ in range(ROUNDS) for saves in (True, False)]
    return {
        "bytes": saving.nbytes,
        "copy_s": round(statistics.median(copies), 4),
        "step_s": round(statistics.median(alone), 4),
        "slowdown": round(statistics.median(b / a for a, b in zip(alone, beside, strict=True)), 3),
        f"slowdown_of_{_STEPS}_steps": round(
            statistics.median(b / a for a, b in zip(between[1::2], between[::2], strict=True)), 3
        ),
    }


def lasted(step: Callable[[], None], folder: Path, model: Any, optimizer: torch.optim.Optimizer, saves: bool) -> float:
    """The seconds of some steps; with a save in the background, its copy included, at the first."""
    began = time.perf_counter()
    saving = checkpoint.save_in_background(folder, model, optimizer, step=0, keep=1) if saves else None
    for _ in range(_STEPS):
        step()
    took = time.perf_counter() - began
    if saving is not None:
        saving.wait()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder of temporary files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = {"about": about(), "save": rates(Path(folder)), "background": slowdown(Path(folder))}
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
