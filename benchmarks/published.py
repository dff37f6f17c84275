"""The simulator against the world: what the fixed policies should reach on known machines, beside what others published.

    python -m benchmarks.published --json out.json

TFLOPS by ``models.decoders.FORMULA`` over the predicted step, the update after the backward. Sequences of 1,024 tokens,
as many as BATCH says: the source does not, but that its serial update takes a sixth of a step, which at the preset's host
bandwidth comes to 22 of them on the GH200; fewer on smaller devices are assumed. One factor per machine scales the rates
of its kernels, so that the row marked ``calibrates`` comes out as published; all other rows are predicted with it.

Figures: MegaTrain, arXiv 2604.05091. The policies are what those systems decide, run without what their code costs besides
(copies per parameter, three forwards, hooks and synchronisation): the factor takes up MegaTrain's share, nothing DeepSpeed's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from mtcompile.capture.tracing import Traced, trace
from mtcompile.machine.presets import PRESETS
from mtcompile.models.decoders import FORMULA, fake, model_flops
from mtcompile.models.shapes import SHAPES
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.torch_private import without_memory

SEQ = 1024
BATCH = {"gh200": 22, "h100-sxm": 22, "a6000": 16, "rtx3090": 8}
# machine, policy, shape, published TFLOPS, whether it is a lower bound; a machine's first row calibrates it
PUBLISHED = (
    ("gh200", "megatrain", "qwen2.5-7b", 284.0, False),
    ("gh200", "megatrain", "qwen2.5-14b", 264.0, False),
    ("gh200", "megatrain", "qwen2.5-32b", 250.0, True),
    ("gh200", "zero3-offload", "qwen2.5-14b", 143.6, False),
    ("h100-sxm", "megatrain", "qwen2.5-7b", 272.0, False),
    ("h100-sxm", "megatrain", "qwen2.5-32b", 259.0, False),
    ("a6000", "megatrain", "qwen2.5-7b", 55.7, False),
    ("a6000", "megatrain", "qwen2.5-3b", 49.7, False),
    ("a6000", "megatrain", "qwen2.5-14b", 56.8, False),
    ("rtx3090", "megatrain", "qwen2.5-7b", 35.1, False),
    ("rtx3090", "megatrain", "qwen2.5-3b", 33.2, False),
    ("rtx3090", "megatrain", "qwen2.5-14b", 30.2, False),
)


@dataclass(frozen=True, slots=True)
class Row:
    """``factor``: of the preset's FLOP/s and memory bandwidth. ``error``: predicted over published, less one."""

    machine: str
    policy: str
    shape: str
    batch: int
    published_tflops: float
    at_least: bool
    calibrates: bool
    factor: float
    predicted_tflops: float
    error: float


@cache
def traced(shape: str, batch: int) -> Traced:
    torch.compiler.reset()
    with without_memory():
        tokens = torch.zeros((batch, SEQ), dtype=torch.int64)
        return trace(fake(SHAPES[shape]), {"tokens": tokens, "targets": tokens}, loss_chunks=32)


def tflops(shape: str, batch: int, policy: str, machine: Machine) -> float:
    problem = PlanningProblem(traced(shape, batch).step, machine, Budgets())
    planned = Candidates(problem).by_policy(policy, problem.budgets)
    return model_flops(SHAPES[shape], batch, SEQ) / planned.plan.total_us / 1e6


def scaled(machine: Machine, factor: float) -> Machine:
    return replace(machine, flops=machine.flops * factor, memory_gbps=machine.memory_gbps * factor, fuses=True)


def calibrated(preset: Machine, shape: str, batch: int, policy: str, published: float) -> float:
    """The factor with which the preset gives the published figure; by bisection, since more is never slower."""
    low, high = 0.05, 4.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if tflops(shape, batch, policy, scaled(preset, middle)) < published else (low, middle)
    return (low * high) ** 0.5


def rows() -> list[Row]:
    factors: dict[str, float] = {}
    found = []
    for name, policy, shape, published, at_least in PUBLISHED:
        batch, calibrates = BATCH[name], name not in factors
        if calibrates:
            factors[name] = calibrated(PRESETS[name], shape, batch, policy, published)
        made = tflops(shape, batch, policy, scaled(PRESETS[name], factors[name]))
        error = made / published - 1
        found.append(Row(name, policy, shape, batch, published, at_least, calibrates, factors[name], made, error))
        print(table(found[-1:]).splitlines()[-1], flush=True)
    return found


def table(found: list[Row]) -> str:
    lines = [
        f"Sequences of {SEQ} tokens (assumed); TFLOPS by {FORMULA}; one factor per machine, from its first row.",
        "",
        "| machine | policy | shape | batch | published TFLOPS | predicted | error | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        how = f"calibrates ({row.factor:.2f} of the preset)" if row.calibrates else "predicted"
        published = f"{'> ' * row.at_least}{row.published_tflops:g}"
        made = f"{row.predicted_tflops:.1f} | {row.error:+.0%} | {how}"
        lines.append(f"| {row.machine} | {row.policy} | {row.shape} | {row.batch} | {published} | {made} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the raw results go; a Markdown table beside it")
    options = parser.parse_args()
    found = rows()
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
        options.json.with_suffix(".md").write_text(table(found) + "\n")


if __name__ == "__main__":
    main()
