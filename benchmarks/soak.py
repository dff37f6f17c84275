"""Trains for a long time, also with drawn faults, and looks whether anything differs or grows: memory of the process,
descriptors, threads.

    python -m benchmarks.soak --json out.json          # make soak. --steps 1000 --models 10 --minutes 1 for less
    python -m benchmarks.soak --steps 0 --models 0 --minutes 60 --seed 7      # faults alone

Three models train in turns for 10,000 steps, with evaluation, changing lengths, updates in the backward that run ahead, and
saves in the background. Then 100 models are compiled, trained for a step and deleted. Figures are taken after a tenth of each
and at its end. Then come ``--minutes`` of trainings with faults, as ``benchmarks.faults`` draws them, each compared with one
without.

Exits with 1 if a bit differs, or if one of these has grown since: the process's memory by more than ``--slack`` MiB; what is in
use of it, as the allocators tell, by more than a quarter of that; the number of descriptors or threads at all. Memory grows
without a leak, and stops: between pieces that are in use lie pages that cannot go back to the system, in an arena for each
thread; and what is kept of the newest fills up, such as the measures of Dynamo's last 64 captures (3 MB), our joint graphs
(64 MiB at most, some 30 kB each) and measured kernels. What is in use shows a leak long before the memory does. The times of
all captures, which Dynamo keeps for its reports and nothing bounds, are dropped before each look.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch._dynamo import utils as dynamo_utils

import mtcompile
from benchmarks import faults
from benchmarks.models import Language
from benchmarks.run import about
from mtcompile import checkpoint

LENGTHS = range(3, 40)


class _Mallinfo(ctypes.Structure):
    """What glibc tells of its arenas, in bytes. ``uordblks``: in use; ``hblkhd``: in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    ]


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds. ``rss``: bytes of its memory that are in RAM. ``in_use``: bytes that the allocators of C and of
    Python have given out. ``descriptors``: what each open one stands for."""

    rss: int
    in_use: int
    descriptors: list[str]
    threads: int

    def grown(self, before: Held, slack: int) -> list[str]:
        """Says what is more than before."""
        words = [f"{self.rss - before.rss} bytes of memory"] if self.rss > before.rss + slack else []
        words += [f"{self.in_use - before.in_use} bytes in use"] if self.in_use > before.in_use + slack // 4 else []
        new = list((Counter(self.descriptors) - Counter(before.descriptors)).elements())
        count = len(self.descriptors) - len(before.descriptors)
        words += [f"{count} descriptors, new: {', '.join(new)}"] if count > 0 else []
        return words + ([f"{self.threads - before.threads} threads"] if self.threads > before.threads else [])


def _python_nbytes() -> int:
    """Returns the bytes of Python's small objects that are in use, which CPython only prints."""
    with tempfile.TemporaryFile("w+") as file:
        errors = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            sys._debugmallocstats()
        finally:
            os.dup2(errors, 2)
            os.close(errors)
        file.seek(0)
        (found,) = re.findall(r"^# bytes in allocated blocks +=\s+([\d,]+)", file.read(), re.MULTILINE)
    return int(found.replace(",", ""))


def held() -> Held:
    dynamo_utils.compilation_time_metrics.clear()
    gc.collect()
    in_use = _python_nbytes()
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(0)  # what glibc keeps for later is nobody's
        library.mallinfo2.restype = _Mallinfo
        figures = library.mallinfo2()
        in_use += figures.uordblks + figures.hblkhd
    return Held(psutil.Process().memory_info().rss, in_use, descriptors(), threading.active_count())


def descriptors() -> list[str]:
    """Returns what the open descriptors of this process stand for, as the system names it."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(FileNotFoundError):  # that by which they were listed
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def trainings(folder: Path) -> list[Callable[[int], None]]:
    """Functions that do the step of that number: of a resident model at changing lengths, of a streamed one, and of one whose
    updates run ahead."""
    random.seed(0)
    options: list[dict[str, Any]] = [
        {"memory": "256MiB"},
        {"memory": "700KiB"},
        {"memory": "700KiB", "update": "backward", "run_ahead": True},
    ]
    return [_training(folder / str(index), each) for index, each in enumerate(options)]


def _training(folder: Path, options: dict[str, Any]) -> Callable[[int], None]:
    model: Any = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mtcompile.compile(model, optimizer=optimizer, device="cpu", **options)
    changes = options["memory"] == "256MiB"

    def step(number: int) -> None:
        length = random.choice(LENGTHS) if changes else 16
        model(torch.randint(0, 256, (2, length))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0:
            model.eval()
            with torch.no_grad():
                model(torch.randint(0, 256, (1 + number % 3, random.choice(LENGTHS))))
            model.train()
        if number % 500 == 0:
            checkpoint.save_in_background(folder, model, optimizer, step=number, keep=1)

    return step


def short_life(number: int) -> None:
    """Compiles a model, trains it for a step, and drops it."""
    torch.manual_seed(number)
    model: Any = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    memory = "11MiB" if number % 2 else "64MiB"
    mtcompile.compile(model, memory=memory, optimizer=optimizer, device="cpu", policy="checkpoint-all")
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    if number % 5 == 0:  # a compiled model is part of a cycle
        gc.collect()


def in_turns(steps: list[Callable[[int], None]]) -> Callable[[int], None]:
    return lambda number: steps[number % len(steps)](number // len(steps))


def watched(name: str, count: int, step: Callable[[int], None]) -> dict[str, Any]:
    """Figures after a tenth of ``count`` steps and at the end."""
    early = max(1, count // 10)
    for number in range(early):
        step(number)
    before = held()
    for number in range(early, count):
        step(number)
    after = held()
    return {"name": name, "steps": count, "before": asdict(before), "after": asdict(after)}


def faulty(minutes: float, seed: int) -> dict[str, Any]:
    """Rounds with faults, each printed, for so long and until each way of training has been drawn. Figures are taken after a
    tenth of the time."""
    began, number, counts, differing = time.monotonic(), 0, Counter[str](), list[str]()
    before = None
    while number < len(faults.WAYS) or time.monotonic() - began < minutes * 60:
        with tempfile.TemporaryDirectory() as folder:
            way, counted, differs = faults.one_round(number, seed, Path(folder))
        drawn = ", ".join(f"{count} {what or 'without a fault'}" for what, count in sorted(counted.items()))
        print(f"round {number}, {way}: {drawn}: {'DIFFERS: ' + differs if differs else 'equal'}", flush=True)
        counts.update(counted)
        differing += [f"round {number} of seed {seed}, {way}: {differs}"] * bool(differs)
        number += 1
        if before is None and number >= len(faults.WAYS) and time.monotonic() - began >= minutes * 6:
            before = held()
    after = held()
    counts["without a fault"] = counts.pop("", 0)
    grew = {"before": asdict(before or after), "after": asdict(after)}
    found = {"rounds": number, "counts": dict(sorted(counts.items())), "differing": differing}
    return {"name": "faults", "seed": seed, "minutes": round((time.monotonic() - began) / 60, 1), **found, **grew}


def summary(row: dict[str, Any], grown: list[str]) -> str:
    met = sum(row["counts"].get(kind, 0) for kind in (*faults.EVERYWHERE, *faults.ON_DISK))
    found = f"{len(row['differing'])} differ" if row["differing"] else "nothing differs"
    return f"{row['rounds']} rounds, {met} faults in {row['minutes']} minutes: {found}, {', '.join(grown) or 'nothing grows'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10, help="of trainings with faults; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="what all faults are drawn from")
    parser.add_argument("--slack", type=int, default=32, help="MiB that the memory may grow by: the allocator keeps pieces")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MT_PROGRESS", "0")
    rows = []
    if args.steps:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(watched("training", args.steps, in_turns(trainings(Path(folder)))))
    if args.models:
        rows.append(watched("short-lived models", args.models, short_life))
    if args.minutes:
        rows.append(faulty(args.minutes, args.seed))
    grown = []
    for row in rows:
        grown += [f"{row['name']}: {what}" for what in Held(**row["after"]).grown(Held(**row["before"]), args.slack << 20)]
    figures = {"about": about(), "rows": rows, "grown": grown}
    print(json.dumps(figures, indent=1))
    for row in rows:
        if "rounds" in row:
            print(summary(row, grown))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if grown or any(row.get("differing") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
