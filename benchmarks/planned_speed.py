"""Whether searched plans are faster in fact, by about as much as predicted: six small models on the emulated device.

    python -m benchmarks.planned_speed --json out.json     # a minute and a half
    python -m benchmarks.planned_speed --case unet

Kernels and copies keep to the speeds of a slow machine, several times slower than this one, and plans are for that machine.
For each model and a budget between what ``megatrain`` needs and what keeps everything, the searched plan and megatrain's run in
alternation: forward and backward, medians of ``STEPS`` after ``WARMUPS``. A ratio is megatrain's time over the searched plan's.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mtcompile
from benchmarks.cases import measure_cases
from benchmarks.decoder import build, text
from benchmarks.models import Case, make
from benchmarks.plan_quality_models import Moe, Unet, Vit
from mtcompile.models.shapes import Shape
from mtcompile.passes.analysis.cost import Machine

POLICY, SEARCHED = "megatrain", "fastest"
WARMUPS, STEPS = 2, 7  # after one step that compiles
SHARE = 0.3  # of the way from megatrain's peak, and a tenth more, to that of keeping everything
SLOW = Machine("slow", flops=5e9, memory_gbps=2.0, h2d_gbps=0.1, d2h_gbps=0.1, issue_us=20.0)
Example = tuple[nn.Module, dict[str, Any]]


def _gpt() -> Example:
    model, tokens, targets = make(Case("", 6, 128, 4, batch=4, seq=64, vocabulary=512))
    return model, {"tokens": tokens, "targets": targets}


def _decoder(width: int, layers: int, batch: int, seq: int) -> Example:
    shape = Shape(width, 4 * width, layers, width // 64, 2, 4 * width, head_dim=64, dtype=torch.float32)
    tokens, targets = text(batch, seq)
    return build(shape, torch.device("cpu")), {"tokens": tokens, "targets": targets}


def _moe() -> Example:
    model = Moe(Shape(128, 256, 4, 2, 2, 512), 4, 2)
    for parameter in model.parameters():  # the experts' are zeros
        nn.init.normal_(parameter, std=0.02)
    tokens, targets = text(2, 64)
    return model, {"tokens": tokens, "targets": targets}


def _unet() -> Example:
    return Unet((32, 64, 64), 2), {"latents": torch.randn(2, 4, 16, 16), "noise": torch.randn(2, 4, 16, 16)}


def _vit() -> Example:
    return Vit(128, 4, 4), {"images": torch.randn(1, 3, 224, 224), "labels": torch.zeros(1, dtype=torch.int64)}


CASES: dict[str, Callable[[], Example]] = {
    "gpt": _gpt,
    "decoder": lambda: _decoder(128, 4, 4, 64),
    "wide decoder": lambda: _decoder(256, 3, 2, 64),
    "moe": _moe,
    "unet": _unet,
    "vit": _vit,
}


def measure(name: str, machine: Machine = SLOW, steps: int = STEPS) -> dict[str, Any]:
    """One row: predicted and measured times in ms, and their ratios."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, data = CASES[name]()
    forecast = mtcompile.plan(model, data, machine=machine, memory=2**40, policies=(POLICY, "resident"))
    least, most = (row.peak_bytes["device"] for row in forecast.rows)
    memory = int(1.1 * least + SHARE * max(0, most - 1.1 * least))
    compiled: dict[str, Any] = {}
    for policy in (SEARCHED, POLICY):
        own = copy.deepcopy(model)
        adamw = torch.optim.AdamW(own.parameters())
        compiled[policy] = mtcompile.compile(own, memory=memory, optimizer=adamw, device="cpu", policy=policy, throttle=machine)
        compiled[policy](**data).backward()
    times: dict[str, list[float]] = {policy: [] for policy in compiled}
    for turn in range(WARMUPS + steps):
        for policy, each in compiled.items():
            started = time.perf_counter()
            each(**data).backward()
            if turn >= WARMUPS:
                times[policy].append((time.perf_counter() - started) * 1e3)
    predicted = {policy: each.plan.step_time_us / 1e3 for policy, each in compiled.items()}
    measured = {policy: statistics.median(values) for policy, values in times.items()}
    return {
        "case": name,
        "memory_bytes": memory,
        "predicted_ms": predicted,
        "measured_ms": measured,
        "steps_ms": times,
        "predicted_ratio": predicted[POLICY] / predicted[SEARCHED],
        "measured_ratio": measured[POLICY] / measured[SEARCHED],
    }


def line(row: dict[str, Any]) -> str:
    """Formats a row for people."""
    times = ", ".join(
        f"{policy} {row['measured_ms'][policy]:.0f} ms (predicted {row['predicted_ms'][policy]:.0f})"
        for policy in (SEARCHED, POLICY)
    )
    ratios = f"x {row['measured_ratio']:.3f} measured, x {row['predicted_ratio']:.3f} predicted"
    return f"{row['case']:13s} {row['memory_bytes'] / 2**20:6.1f} MiB: {ratios}; {times}"


def off_in_ratio(rows: list[dict[str, Any]]) -> str:
    """Says how far the measured ratios are from the predicted ones."""
    differences = [abs(row["measured_ratio"] / row["predicted_ratio"] - 1) for row in rows]
    median = statistics.median(differences)
    return f"measured over predicted ratio: {median:.1%} off in the median, {max(differences):.1%} at most"


def main() -> None:
    measure_cases(__doc__, CASES, measure, line, SLOW, off_in_ratio)


if __name__ == "__main__":
    main()
