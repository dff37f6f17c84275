"""What a step gains if only the rows of an embedding cross the link that its batch names.

    python -m benchmarks.embeddings --json out.json     # a minute

A large embedding in front of a few layers, on the emulated device at the speeds of a machine with a slow link, under a policy
that keeps every weight on the host: forward and backward with ``embeddings="all"`` and ``"used"`` in turn; medians.
``planned``: the ratio of the predicted times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mtcompile
from benchmarks.experts import SLOW_LINK
from benchmarks.run import about
from mtcompile.runtime.trace import moved_nbytes

WORDS, WIDTH = 32_000, 256
STEPS, WARMUPS = 7, 2
MEMORY = 200 << 20


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens)).square().mean()


def compiled(embeddings: str) -> Any:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Words()
    options: dict[str, Any] = {"device": "cpu", "throttle": SLOW_LINK, "policy": "megatrain"}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return mtcompile.compile(model, memory=MEMORY, optimizer=optimizer, embeddings=embeddings, **options)


def compared(tokens: int) -> dict[str, Any]:
    models = {embeddings: compiled(embeddings) for embeddings in ("all", "used")}
    times: dict[str, list[float]] = {embeddings: [] for embeddings in models}
    drawn = torch.Generator().manual_seed(1)
    for _ in range(WARMUPS + STEPS):
        batch = torch.randint(0, WORDS, (tokens // 64, 64), generator=drawn)
        for embeddings, model in models.items():
            started = time.perf_counter()
            model(batch).backward()
            times[embeddings].append(1e3 * (time.perf_counter() - started))
            for parameter in model.parameters():
                parameter.grad = None
    row: dict[str, Any] = {"tokens": tokens}
    for embeddings, model in models.items():
        row[f"{embeddings}_ms"] = statistics.median(times[embeddings][WARMUPS:])
        for queue in ("h2d", "d2h"):
            row[f"{embeddings}_{queue}_bytes"] = moved_nbytes(model.schedule, model.last_trace, queue)
            row[f"{embeddings}_planned_{queue}_bytes"] = sum(i.nbytes for i in model.schedule.instructions if i.queue == queue)
        row[f"{embeddings}_planned_ms"] = model.plan.step_time_us / 1e3
        row[f"{embeddings}_peak_device_bytes"] = model.memory_report()["peak_device_bytes"]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    titles = ("tokens", "to the device", "back", "peak, all rows", "used ones", "ms, all rows", "used ones", "ratio", "planned")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        shares = (f"{row[f'used_{queue}_bytes'] / row[f'all_{queue}_bytes']:.2%}" for queue in ("h2d", "d2h"))
        ratio, planned = row["used_ms"] / row["all_ms"], row["used_planned_ms"] / row["all_planned_ms"]
        figures = f"{row['all_ms']:.1f} | {row['used_ms']:.1f} | {ratio:.2f} | {planned:.2f}"
        peaks = (f"{row[f'{embeddings}_peak_device_bytes'] / 2**20:.1f} MiB" for embeddings in ("all", "used"))
        lines.append(f"| {row['tokens']} | {' | '.join(shares)} | {' | '.join(peaks)} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compared(tokens) for tokens in (64, 512, 4096)]
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
