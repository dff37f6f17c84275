"""The simulator against the world: what the fixed policies should reach on known machines, beside what others published.

    python -m benchmarks.published --json out.json

TFLOPS by ``models.decoders.FORMULA``, or tokens a second, over the predicted step, the update after the backward. One factor
for each system on a machine scales the rates of its kernels, so that the row marked ``calibrates`` comes out as published; all
its other rows are predicted with it. All sequences have 1,024 tokens: of MegaTrain's that is assumed, as is the number of
them. Its source says neither, but that its serial update takes a sixth of a step, which at the preset's host bandwidth comes
to 22 of them on the GH200; fewer on smaller devices.

Figures: MegaTrain, arXiv 2604.05091; llm.q in bf16 and LLaMA-Factory (DeepSpeed ZeRO-3 with offload), from the logs of llm.q's
repository (IST-DASLab/llmq, benchmarks/4090x1.md and H100x1.md of 7f895bdb; its rows of the RTX 5090 are rounded and from the
README of db0b17f1). llm.q adds up gradients over several forwards and backwards before an update, and decides nothing that a
policy here does not, but for 14B on the H100, where it recomputes feed-forwards alone, and for residuals that it offloads.
The policies are what those systems decide, run without what their code costs besides (copies per parameter, three forwards,
hooks and synchronisation): the factor takes up most of that.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


class Published(NamedTuple):
    """A row that a system published: ``speed`` in TFLOPS, or in tokens a second (``unit``). ``forwards``: before an update."""

    system: str
    machine: str
    policy: str
    shape: str
    batch: int
    speed: float
    forwards: int = 1
    unit: str = "tokens/s"
    at_least: bool = False


_MEGATRAIN = (
    ("gh200", "megatrain", "qwen2.5-7b", 22, 284.0, False),
    ("gh200", "megatrain", "qwen2.5-14b", 22, 264.0, False),
    ("gh200", "megatrain", "qwen2.5-32b", 22, 250.0, True),
    ("gh200", "zero3-offload", "qwen2.5-14b", 22, 143.6, False),
    ("h100-sxm", "megatrain", "qwen2.5-7b", 22, 272.0, False),
    ("h100-sxm", "megatrain", "qwen2.5-32b", 22, 259.0, False),
    ("a6000", "megatrain", "qwen2.5-7b", 16, 55.7, False),
    ("a6000", "megatrain", "qwen2.5-3b", 16, 49.7, False),
    ("a6000", "megatrain", "qwen2.5-14b", 16, 56.8, False),
    ("rtx3090", "megatrain", "qwen2.5-7b", 8, 35.1, False),
    ("rtx3090", "megatrain", "qwen2.5-3b", 8, 33.2, False),
    ("rtx3090", "megatrain", "qwen2.5-14b", 8, 30.2, False),
)
PUBLISHED = (  # the first row of a system on a machine calibrates it there
    *(
        Published("MegaTrain", machine, policy, shape, batch, tflops, unit="TFLOPS", at_least=at_least)
        for machine, policy, shape, batch, tflops, at_least in _MEGATRAIN
    ),
    Published("llm.q", "h100-sxm", "resident", "qwen2.5-7b", 4, 13_850, forwards=128),
    Published("llm.q", "h100-sxm", "resident", "qwen2.5-1.5b", 32, 59_100, forwards=16),
    Published("llm.q", "h100-sxm", "resident", "qwen2.5-3b", 16, 30_915, forwards=32),
    Published("llm.q", "h100-sxm", "checkpoint-all", "qwen2.5-14b", 8, 6_320, forwards=64),
    Published("llm.q", "rtx4090", "megatrain", "qwen2.5-7b", 16, 2_777, forwards=32),
    Published("llm.q", "rtx4090", "resident", "qwen2.5-1.5b", 4, 14_070, forwards=128),
    Published("llm.q", "rtx4090", "resident", "qwen2.5-3b", 4, 7_005, forwards=128),
    Published("llm.q", "rtx4090", "megatrain", "qwen2.5-14b", 32, 1_348, forwards=16),
    Published("llm.q", "rtx5090", "checkpoint-all", "qwen2.5-3b", 8, 8_600, forwards=8),
    Published("llm.q", "rtx5090", "checkpoint-all", "qwen2.5-1.5b", 8, 17_000, forwards=8),
    Published("llm.q", "rtx5090", "checkpoint-all", "qwen2.5-3b", 4, 8_200, forwards=8),
    Published("llm.q", "rtx5090", "megatrain", "qwen2.5-7b", 8, 3_100, forwards=8),
    Published("llm.q", "rtx5090", "megatrain", "qwen2.5-7b", 4, 2_500, forwards=8),
    Published("LLaMA-Factory", "rtx4090", "zero3-offload", "qwen2.5-7b", 32, 2_523, forwards=16),
    Published("LLaMA-Factory", "rtx4090", "zero3-offload", "qwen2.5-14b", 20, 1_135, forwards=26),
)


@dataclass(frozen=True, slots=True)
class Row:
    """``factor``: of the preset's FLOP/s and memory bandwidth. ``error``: predicted over published, less one."""

    published: Published
    calibrates: bool
    factor: float
    predicted: float
    error: float


@cache
def traced(shape: str, batch: int) -> Traced:
    torch.compiler.reset()
    with without_memory():
        tokens = torch.zeros((batch, SEQ), dtype=torch.int64)
        return trace(fake(SHAPES[shape]), {"tokens": tokens, "targets": tokens}, loss_chunks=32)


def speed(row: Published, machine: Machine) -> float:
    """Returns the row's speed on a machine, in its unit."""
    problem = PlanningProblem(traced(row.shape, row.batch).step, machine, Budgets())
    plan = Candidates(problem).by_policy(row.policy, problem.budgets).plan
    seconds = (row.forwards * plan.step_time_us + plan.total_us - plan.step_time_us) / 1e6
    step: float = row.batch * SEQ if row.unit == "tokens/s" else model_flops(SHAPES[row.shape], row.batch, SEQ) / 1e12
    return float(row.forwards * step / seconds)


def scaled(machine: Machine, factor: float) -> Machine:
    return replace(machine, flops=machine.flops * factor, memory_gbps=machine.memory_gbps * factor, fuses=True)


def calibrated(row: Published) -> float:
    """Returns the factor with which the preset gives the published speed; by bisection, since more is never slower."""
    low, high = 0.05, 4.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if speed(row, scaled(PRESETS[row.machine], middle)) < row.speed else (low, middle)
    return (low * high) ** 0.5


def rows() -> list[Row]:
    factors: dict[tuple[str, str], float] = {}
    found = []
    for row in PUBLISHED:
        calibrates = (about := (row.system, row.machine)) not in factors
        if calibrates:
            factors[about] = calibrated(row)
        made = speed(row, scaled(PRESETS[row.machine], factors[about]))
        found.append(Row(row, calibrates, factors[about], made, made / row.speed - 1))
        print(table(found[-1:]).splitlines()[-1], flush=True)
    return found


def table(found: list[Row]) -> str:
    lines = [
        f"Sequences of {SEQ} tokens; TFLOPS by {FORMULA}; one factor for each system on a machine, from its first row.",
        "",
        "| system | machine | policy | shape | batch | published | predicted | error | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        system, machine, policy, shape, batch, speed, _, unit, at_least = row.published
        how = f"calibrates ({row.factor:.2f} of the preset)" if row.calibrates else "predicted"
        made = f"{'> ' * at_least}{speed:,g} {unit} | {row.predicted:,.{0 if speed > 1000 else 1}f} | {row.error:+.0%} | {how}"
        lines.append(f"| {system} | {machine} | {policy} | {shape} | {batch} | {made} |")
    return "\n".join(lines)


def told(row: Row) -> dict[str, object]:
    made = {"calibrates": row.calibrates, "factor": row.factor, "predicted": row.predicted, "error": row.error}
    return row.published._asdict() | made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the raw results go; a Markdown table beside it")
    options = parser.parse_args()
    found = rows()
    if options.json:
        options.json.write_text(json.dumps([told(row) for row in found], indent=1))
        options.json.with_suffix(".md").write_text(table(found) + "\n")


if __name__ == "__main__":
    main()
