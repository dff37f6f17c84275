"""What a step gains if only the experts are fetched that its tokens chose.

    python -m benchmarks.experts --json out.json     # a minute

Two layers of 64 experts, 4 for each token, on the emulated device at the speeds of a machine with a slow link. Forward and
backward in the smallest budget, with ``experts="all"`` and ``"used"`` in turn; medians. Experts that train send the gradients
of all of them home, as plain PyTorch makes them; frozen ones, as under adapters, have none.
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
from torch.nn import functional as F

import mtcompile
from benchmarks.run import about
from mtcompile.passes.analysis.cost import Machine

WIDTH, EXPERTS, ACTIVE = 128, 64, 4
STEPS, WARMUPS = 7, 2
SLOW_LINK = Machine("slow link", flops=2e10, memory_gbps=8.0, h2d_gbps=1.0, d2h_gbps=1.0, host_gbps=4.0, issue_us=20.0)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / 10)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        scores, experts = self.router(tokens).float().softmax(-1).topk(ACTIVE, -1)
        chosen, order = experts.flatten().sort(stable=True)
        ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        rows = F.silu(F.grouped_mm(tokens[order // ACTIVE], self.up.transpose(-2, -1), offs=ends))
        rows = F.grouped_mm(rows, self.down.transpose(-2, -1), offs=ends) * scores.flatten()[order, None].to(x.dtype)
        return x + torch.zeros_like(tokens).index_add(0, order // ACTIVE, rows)


class Mixture(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Experts() for _ in range(2))
        for layer in self.layers if frozen else ():
            layer.up.requires_grad_(False)
            layer.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def compiled(frozen: bool, experts: str, memory: int) -> Any:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Mixture(frozen).bfloat16()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    options: dict[str, Any] = {"device": "cpu", "throttle": SLOW_LINK, "experts": experts}
    return mtcompile.compile(model, memory=memory, optimizer=optimizer, **options)


def smallest_budget(frozen: bool, x: Tensor) -> int:
    try:
        compiled(frozen, "used", 1)(x)
    except mtcompile.BudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


def compared(frozen: bool, tokens: int) -> dict[str, Any]:
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    memory = smallest_budget(frozen, x)
    models = {experts: compiled(frozen, experts, memory) for experts in ("all", "used")}
    times: dict[str, list[float]] = {experts: [] for experts in models}
    for _ in range(WARMUPS + STEPS):
        for experts, model in models.items():
            started = time.perf_counter()
            model(x).backward()
            times[experts].append(1e3 * (time.perf_counter() - started))
            for parameter in model.parameters():
                parameter.grad = None
    row: dict[str, Any] = {"experts": "frozen" if frozen else "trained", "tokens": tokens, "memory": memory}
    for experts, model in models.items():
        row[f"{experts}_ms"] = statistics.median(times[experts][WARMUPS:])
        row[f"{experts}_fetched_bytes"] = model.memory_report()["fetched_bytes"]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| experts | tokens | fetched of all | ms, all fetched | ms, used ones | ratio |", "|---" * 6 + "|"]
    for row in rows:
        share, ratio = row["used_fetched_bytes"] / row["all_fetched_bytes"], row["used_ms"] / row["all_ms"]
        figures = f"{share:.0%} | {row['all_ms']:.1f} | {row['used_ms']:.1f} | {ratio:.2f}"
        lines.append(f"| {row['experts']} | {row['tokens']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results (a table beside it, .md)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compared(frozen, tokens) for frozen in (False, True) for tokens in (1, 8, 64)]
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")
        given.json.with_suffix(".md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
