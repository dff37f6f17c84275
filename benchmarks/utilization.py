"""Predicted TFLOPS of one large step, by 6N (six FLOPs a parameter and token), and where the rest of a card's speed goes.

    python -m benchmarks.utilization --json out.json     # and a table in out.md; one to five minutes; no GPU

The step is that of MegaTrain's paper (arXiv 2604.05091): 7B, 158 sequences of 1,024 tokens on an H200. Paper arithmetic: a
card that sustains so many FLOP/s runs 6N of them with nothing recomputed and about 8N with everything. What a plan loses beyond
that is what it recomputes, and what waits for copies and updates. All figures are predictions; nothing was run on a GPU.
``--least`` ends with status 1 if the planner's choice is below so many TFLOPS.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mtcompile
from benchmarks.run import about
from mtcompile.forecast.result import Forecast
from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.cost import kernel_cost
from mtcompile.passes.step_graph import kernel_of, regions

STEP: dict[str, Any] = {"batch": 158, "seq": 1024, "machine": "h200-sxm", "update": "backward", "precision": "bf16-master32"}
POLICIES = ("megatrain", "checkpoint-all", "offload-all")
LEAST = 500.0


def rows(forecast: Forecast) -> list[dict[str, Any]]:
    """The rows of the table: arithmetic, fixed strategies, the planner's. ``tflops``: by 6N; ``of_flops``: FLOPs run, in those
    of a step without recomputation."""
    assert forecast.problem is not None and forecast.planned is not None
    step, machine = forecast.problem.step, forecast.problem.machine
    needed = sum(kernel_cost(kernel_of(step, region)).flops for region in regions(step))
    by_6n = 6 * forecast.parameters * forecast.tokens
    bodies: dict[str, Any] = dict(forecast.planned.step.named_children())
    ran = sum(kernel_cost(bodies[i.kernel]).flops for i in forecast.planned.schedule.instructions if i.kernel in bodies)
    forward = sum(kernel_cost(kernel_of(step, r)).flops for r in regions(step) if r.meta["phase"] == "forward")

    def row(what: str, seconds: float, **more: Any) -> dict[str, Any]:
        return {"what": what, "seconds": seconds, "tflops": by_6n / seconds / 1e12, **more}

    listed = [
        row("arithmetic: nothing recomputed, nothing waits", needed / machine.flops, of_flops=1.0),
        row("arithmetic: all of the forward again", (needed + forward) / machine.flops, of_flops=1 + forward / needed),
    ]
    for policy in forecast.rows:
        fits = "" if policy.feasible else f"{policy.short_bytes / 2**30:.1f} GiB short of {policy.tier}"
        device, host = (policy.peak_bytes.get(tier, 0) / 2**30 for tier in ("device", "host"))
        listed.append(row(f"policy {policy.policy}", policy.step_time_us / 1e6, device_gib=device, host_gib=host, fits=fits))
    chosen = row("the planner's choice", forecast.step_time_us / 1e6, of_flops=ran / needed, fits="")
    chosen |= {f"{tier}_gib": forecast.peak_bytes.get(tier, 0) / 2**30 for tier in ("device", "host")}
    chosen["busy"] = dict(forecast.busy or {})
    chosen["exposed_s"] = {queue: us / 1e6 for queue, us in (forecast.exposed_us or {}).items()}
    return [*listed, chosen]


def table(listed: list[dict[str, Any]]) -> str:
    lines = ["| step | s | TFLOPS by 6N | FLOPs, of those needed | device GiB | host GiB | |", "|---|---|---|---|---|---|---|"]
    for row in listed:
        share = f"{row['of_flops']:.2f}" if "of_flops" in row else ""
        device, host = (f"{row[key]:.1f}" if key in row else "" for key in ("device_gib", "host_gib"))
        fits = row.get("fits", "")
        lines.append(f"| {row['what']} | {row['seconds']:.2f} | {row['tflops']:.0f} | {share} | {device} | {host} | {fits} |")
    return "\n".join(lines) + "\n"


def why(chosen: dict[str, Any], arithmetic: dict[str, Any]) -> str:
    """Where the planner's choice loses time against the card's sustained speed."""
    lost = chosen["seconds"] - arithmetic["seconds"]
    recomputed = (chosen["of_flops"] - 1) * arithmetic["seconds"]
    idle = (1 - chosen["busy"]["compute"]) * chosen["seconds"]
    waits = ", ".join(f"{queue} {1e3 * seconds:.0f} ms" for queue, seconds in chosen["exposed_s"].items() if seconds > 1e-3)
    return (
        f"Of the {lost:.2f} s beyond arithmetic, {recomputed:.2f} s are FLOPs that are run again, {idle:.2f} s the card waits "
        f"(exposed: {waits}), and the rest are kernels that its memory bounds.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("utilization.json"), help="the table is written beside it")
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--least", type=float, default=LEAST, help="TFLOPS")
    args = parser.parse_args()
    forecast = mtcompile.plan(args.model, policies=POLICIES, **STEP)
    listed, machine = rows(forecast), PRESETS[STEP["machine"]]
    head = (
        f"{args.model}, {STEP['batch']} x {STEP['seq']:,} tokens, {machine.name} ({machine.flops / 1e12:.0f} TFLOP/s sustained)"
    )
    text = f"{head}: predicted\n\n{table(listed)}\n{why(listed[-1], listed[0])}"
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**about(), "step": head, "rows": listed}, indent=1) + "\n")
    args.json.with_suffix(".md").write_text("python -m benchmarks.utilization\n\n" + text)
    print(text)
    raise SystemExit(listed[-1]["tflops"] < args.least)


if __name__ == "__main__":
    main()
