"""A linear layer whose weight comes over the link: where the kernel that reads fragments as they arrive is faster, on a GPU.

    python -m benchmarks.arriving --json out.json     # without a GPU it says so

Three ways of x @ W.t() in bf16, W in pinned host memory, in turn; medians of ``TURNS`` after ``WARMUPS``, by the GPU's clock
from before the first copy to the end of the last kernel:

``whole``      one copy, then torch's product
``regions``    a copy for each fragment, torch's product behind each, and a concatenation, as ``fragments=`` runs
``arriving``   a copy and a flag for each fragment, and one kernel beside them (``mtcompile/kernels/arriving.py``)

``wins``: whether ``arriving`` took at most ``GAIN`` times as long as the faster of the two others. ``error``: its largest
difference from ``whole``, as a part of the largest result. *Not yet measured.*
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.run import about
from mtcompile.kernels.arriving import Arriving, linear, send

WARMUPS, TURNS, GAIN = 3, 15, 0.97
# out, in: the layers and the head of qwen2.5-7b
WEIGHTS = {"attention": (3584, 3584), "up": (18944, 3584), "down": (3584, 18944), "head": (152064, 3584)}
TOKENS, FRAGMENTS = (1, 64, 1024, 8192), (4, 16)


class Ways:
    """The three ways for one weight. ``step``: the number of the last one that arrived by flags."""

    def __init__(self, source: Tensor, count: int, copies: Any) -> None:
        self.source, self.copies, self.step = source, copies, 0
        self.rows = -(-len(source) // count)
        self.slot = torch.empty_like(source, device="cuda")
        self.flags = torch.zeros(-(-len(source) // self.rows), dtype=torch.int32, device="cuda")

    def whole(self, x: Tensor) -> Tensor:
        return self._after_copy(x, 0, len(self.source))

    def regions(self, x: Tensor) -> Tensor:
        starts = range(0, len(self.source), self.rows)
        arrived = [self._copy(start, start + self.rows) for start in starts]
        parts = []
        for start, event in zip(starts, arrived, strict=True):
            torch.cuda.current_stream().wait_event(event)
            parts.append(F.linear(x, self.slot[start : start + self.rows]))
        return torch.cat(parts, -1)

    def arriving(self, x: Tensor) -> Tensor:
        self.step += 1
        slot = Arriving(self.slot, self.rows, self.flags, self.step)
        send(slot, self.source, self.copies)
        return linear(x, slot)

    def _after_copy(self, x: Tensor, start: int, end: int) -> Tensor:
        torch.cuda.current_stream().wait_event(self._copy(start, end))
        return F.linear(x, self.slot[start:end])

    def _copy(self, start: int, end: int) -> Any:
        with torch.cuda.stream(self.copies):
            self.slot[start:end].copy_(self.source[start:end], non_blocking=True)
            return self.copies.record_event()


def timed_ms(way: Callable[[Tensor], Tensor], x: Tensor, copies: Any) -> tuple[float, Tensor]:
    """Runs a way once; returns the milliseconds that it took, and its result."""
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record(copies)
    result = way(x)
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended), result


def measure(name: str, source: Tensor, tokens: int, count: int) -> dict[str, Any]:
    """One row: the times of all ways in ms, and whether the kernel wins. ``source``: the pinned weight."""
    x = torch.randn(tokens, source.shape[1], dtype=torch.bfloat16, device="cuda")
    copies = torch.cuda.Stream()
    ways = Ways(source, count, copies)
    times: dict[str, list[float]] = {"whole": [], "regions": [], "arriving": []}
    results = dict[str, Tensor]()
    for turn in range(WARMUPS + TURNS):
        for way, measured in times.items():
            ways.slot.fill_(torch.nan)  # what an earlier way has copied does not count
            ms, results[way] = timed_ms(getattr(ways, way), x, copies)
            if turn >= WARMUPS:
                measured.append(ms)
    medians = {way: statistics.median(measured) for way, measured in times.items()}
    whole, kernel = results["whole"].float(), results["arriving"].float()
    return {
        "weight": name,
        "shape": WEIGHTS[name],
        "tokens": tokens,
        "fragments": count,
        **{f"{way}_ms": ms for way, ms in medians.items()},
        "error": float((whole - kernel).abs().max() / whole.abs().max()),
        "wins": medians["arriving"] <= GAIN * min(medians["whole"], medians["regions"]),
    }


def line(row: dict[str, Any]) -> str:
    """Formats a row for people."""
    times = ", ".join(f"{way} {row[f'{way}_ms']:.3f}" for way in ("whole", "regions", "arriving"))
    told = "wins" if row["wins"] else "does not win"
    return f"{row['weight']} x {row['tokens']} in {row['fragments']}: {times} ms, error {row['error']:.1e}; the kernel {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the raw results go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: nothing was run")
        return 0
    rows = []
    for name, shape in WEIGHTS.items():
        source = torch.randn(shape, dtype=torch.bfloat16).mul_(0.02).pin_memory()
        for tokens, count in itertools.product(TOKENS, FRAGMENTS):
            rows.append(measure(name, source, tokens, count))
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**about(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["error"] < 0.02 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
