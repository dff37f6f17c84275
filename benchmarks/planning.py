"""How long planning takes, and how much memory: each case in a process of its own, from nothing.

    python -m benchmarks.planning --json out.json
    python -m benchmarks.planning --growth --json out.json    # against blocks, experts and layers of a block
    python -m benchmarks.planning --growth experts            # against those alone
    python -m benchmarks.planning --budgets --json out.json   # more budgets in a process that planned the model before

Seconds are of the processor, of all threads, with the import of torch: other work on the machine changes them less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.run import about

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
FURTHER: dict[str, Any] = {
    **{"model": "qwen2.5-7b", "batch": 8, "machine": "h100-sxm", "precision": "bf16-master32"},
    **{"update": "backward", "run_ahead": True},
}
FIRST = "40GiB"
BUDGETS = ("33GiB", "55GiB", "70GiB", None, "60GiB", "45GiB", "36GiB", "50GiB", "30GiB", "38GiB", "28GiB", "20GiB")
WIDTH = 2048
GROWTH = {"blocks": (8, 16, 32, 64, 128), "experts": (8, 16, 32, 64, 128), "layers of a block": (4, 8, 16, 32)}


class Experts(nn.Module):
    """A block of which each expert, a module with parameters of its own, computes an equal share of the tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x).chunk(len(self.experts))
        return x + torch.cat([F.silu(expert(part)) for expert, part in zip(self.experts, parts, strict=True)])


class Layers(nn.Module):
    """A block of ``count`` layers, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        for layer in self.layers:
            h = F.silu(layer(h))
        return x + h


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack_of(what: str, count: int) -> Stack:
    """Builds a model with ``count`` of what is counted, and eight blocks where those are not what is counted."""
    if what == "blocks":
        return Stack([Layers(4) for _ in range(count)])
    return Stack([(Experts if what == "experts" else Layers)(count) for _ in range(8)])


def measured(case: str) -> dict[str, Any]:
    """Processor seconds with the import of torch, resident bytes at most, and what was planned."""
    import mtcompile

    row = _planned(mtcompile.plan, **CASES[case])
    return {"case": case, **CASES[case], **row}


def measured_growth(what: str, count: int) -> dict[str, Any]:
    """As ``measured``, of a made-up model in half of the memory that it needs to keep everything."""
    import mtcompile

    def model() -> tuple[nn.Module, dict[str, Tensor]]:
        return stack_of(what, count), {"x": torch.zeros(4096, WIDTH)}

    row = _planned(mtcompile.plan, model=model, machine="rtx4090", memory=_half(count, what), update="backward")
    return {"what": what, "count": count, **row}


def measured_budgets() -> list[dict[str, Any]]:
    """Processor seconds of the first budget, with the import of torch, and of each further one, from an empty cache."""
    import mtcompile

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MT_CACHE"] = folder
        for budget in (FIRST, *BUDGETS):
            before = time.process_time() if rows else 0.0
            forecast = mtcompile.plan(**FURTHER, memory=budget)
            seconds = time.process_time() - before
            assert forecast.certificate is not None
            times = {"step_time_us": forecast.step_time_us, "bound_us": forecast.certificate.bound_us}
            rows.append({"budget": budget or "all", "further": bool(rows), "processor_s": seconds, **times})
    return rows


def _half(count: int, what: str) -> int:
    """Half of the bytes of the weights, gradients and AdamW's state, and 2 GB."""
    layers = 4 * count if what == "blocks" else 8 * count
    return layers * WIDTH * WIDTH * 16 // 2 + 2 * 10**9


def _planned(plan: Any, **arguments: Any) -> dict[str, Any]:
    """Plans from nothing. Returns processor seconds, and how many had passed when the search began."""
    before: list[float] = []

    def progress(text: str, done: int, total: int) -> None:
        if text == "planning" and not before:
            before.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MT_CACHE"] = folder
        forecast = plan(**arguments, progress=progress)
        seconds = time.process_time()
    planned = json.loads(forecast.to_json())
    columns = ["feasible", "parameters", "state_bytes", "peak_bytes", "budget_bytes"]
    columns += ["step_time_us", "update_us", "limiting_resource"]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times = {"processor_s": seconds, "searched_after_s": before[0] if before else None}
    return {**times, "rss_bytes": rss} | {key: planned[key] for key in columns}


def line(row: dict[str, Any]) -> str:
    """Formats a row for people."""
    name = row["case"] if "case" in row else f"{row['count']} {row['what']}"
    before = "" if row["searched_after_s"] is None else f" ({row['searched_after_s']:.1f} s until the search)"
    return (
        f"{name}: {row['parameters'] / 1e9:.1f}B parameters planned in {row['processor_s']:.1f} s{before} and "
        f"{row['rss_bytes'] / 2**30:.2f} GiB; {'fits' if row['feasible'] else 'does not fit'}, "
        f"{row['step_time_us'] / 1e6:.2f} s a step, limited by {row['limiting_resource']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    parser.add_argument("--growth", nargs="*", metavar="WHAT", help=f"made-up models with more and more {', '.join(GROWTH)}")
    parser.add_argument("--budgets", action="store_true", help="further budgets of one model")
    parser.add_argument("--json", type=Path, help="where the raw results go")
    options = parser.parse_args()
    if unknown := set(options.growth or ()) - set(GROWTH):
        parser.error(f"expected --growth among {', '.join(GROWTH)}, found {', '.join(unknown)}")
    if options.budgets:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows = pool.apply(measured_budgets)
        for row in rows:
            gap = row["step_time_us"] / row["bound_us"] - 1
            print(f"{row['budget']:6s} {row['processor_s']:.2f} s, {gap:.1%} above the bound")
        further = [row["processor_s"] for row in rows if row["further"]]
        print(f"further budgets: median {statistics.median(further):.2f} s, at most {max(further):.2f} s")
        save(options.json, {"case": FURTHER, "rows": rows})
        return
    if options.growth is not None:
        tasks = [(measured_growth, (what, count)) for what in options.growth or GROWTH for count in GROWTH[what]]
    else:
        tasks = [(measured, (case,)) for case in options.case or CASES]
    rows = []
    for task, arguments in tasks:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(task, arguments))
        print(line(rows[-1]), flush=True)
        save(options.json, {"rows": rows})


def save(path: Path | None, results: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps({"about": about(), **results}, indent=1))


if __name__ == "__main__":
    main()
