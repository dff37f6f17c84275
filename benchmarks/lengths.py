"""What training at changing lengths costs beside plain PyTorch, where everything fits on the emulated device.

    python -m benchmarks.lengths --json out.json     # a minute; needs transformers

A small Llama sees short texts of 30 lengths in random order, plain and compiled in turns, with AdamW. Every loss and gradient
is compared. The first length is captured and planned; the figures are those of the steps after it: the median of the compiled
step's time over the plain one's, and the sum over the sum.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import mtcompile
from benchmarks.generation import llama
from benchmarks.run import about

LENGTHS = range(20, 140, 4)


def timed_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """The seconds of one step, and its loss and gradients."""
    started = time.perf_counter()
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - started
    return seconds, [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def measure() -> dict[str, Any]:
    plain = llama(256, 4).train()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-4) for each in (plain, model)]
    mtcompile.compile(model, memory="1GiB", device="cpu", optimizer=optimizers[1])
    lengths = random.Random(1).sample(LENGTHS, len(LENGTHS))
    rows = []
    for length in lengths:
        tokens = torch.randint(0, 4096, (2, length), generator=torch.Generator().manual_seed(length))
        (plain_s, expected), (compiled_s, results) = (
            timed_step(each, optimizer, tokens) for each, optimizer in zip((plain, model), optimizers, strict=True)
        )
        assert all(map(torch.equal, expected, results)), length
        rows.append((plain_s, compiled_s))
    first, *later = rows
    report = model.memory_report()
    return {
        "lengths": len(lengths),
        "first_step_s": round(first[1], 2),
        "median_ratio": round(statistics.median(compiled / plain for plain, compiled in later), 3),
        "total_ratio": round(sum(compiled for _, compiled in later) / sum(plain for plain, _ in later), 3),
        "planned_peak_bytes": report["planned_peak_device_bytes"],
        "budget_bytes": report["budget_device_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {"about": about(), **measure()}
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
