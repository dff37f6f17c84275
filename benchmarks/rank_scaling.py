"""How steps are predicted to scale over GPUs and hosts: forecasts, of which none has been compared with several GPUs yet.

    python -m benchmarks.rank_scaling --json out.json             # and a table in out.md
    python -m benchmarks.rank_scaling --short --json out.json     # with a shorter search for each plan
    python -m benchmarks.rank_scaling --models qwen2.5-7b --hosts 4 16 --json out.json   # these rows; others stay

Every GPU has its own batch and link. Those of a host share its memory, where weights lie once, with the masters and optimizer
state of the host's part; gradients are summed there, and between hosts over the network. ``MACHINE`` is a preset, whose figures
are in the table's head.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import mtcompile
from benchmarks.run import about
from mtcompile.machine.presets import named

MACHINE, NETWORK, BATCH, SEQ = "h200-sxm", 50.0, 8, 4096
MODELS = ("qwen2.5-7b", "qwen2.5-14b", "llama-70b")
GPUS, HOSTS = (1, 4, 8), (2, 4, 8, 16, 32, 64)


def row(model: str, gpus: int, hosts: int) -> dict[str, Any]:
    forecast = mtcompile.plan(
        model,
        batch=BATCH,
        seq=SEQ,
        machine=MACHINE,
        precision="bf16-master32",
        update="backward",
        gpus=gpus,
        hosts=hosts,
        network=NETWORK,
    )
    scaling = forecast.scaling
    return {
        "model": model,
        "commit": about()["commit"],
        "gpus": gpus,
        "hosts": hosts,
        "feasible": forecast.feasible,
        "step_ms": forecast.step_time_us / 1e3,
        "tokens_per_s": forecast.tokens_per_s,
        "times_one": 1.0 if scaling is None else scaling.speedup,
        "host_bytes": forecast.peak_bytes.get("host", 0),
        "bytes_per_parameter": forecast.peak_bytes.get("host", 0) / forecast.parameters,
        "limited_by": forecast.limiting_resource if scaling is None else scaling.limited_by,
    }


def table(rows: list[dict[str, Any]], head: str) -> str:
    lines = [
        head,
        "",
        "| model | GPUs | step ms | tokens/s | times one GPU | of linear | host GB | longest busy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        count = r["gpus"] * r["hosts"]
        where = f"{r['gpus']}" if r["hosts"] == 1 else f"{r['hosts']} x {r['gpus']}"
        figures = f"{r['step_ms']:,.0f} | {r['tokens_per_s']:,.0f} | {r['times_one']:.2f} | {r['times_one'] / count:.0%}"
        lines.append(f"| {r['model']} | {where} | {figures} | {r['host_bytes'] / 1e9:,.0f} | {r['limited_by']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go; a table goes beside it, as .md")
    parser.add_argument("--models", nargs="*", default=MODELS, help="of these alone")
    parser.add_argument("--hosts", type=int, nargs="*", default=(1, *HOSTS), help="of so many hosts alone")
    parser.add_argument("--short", action="store_true", help="search less: steps may be longer than plans can have them")
    args = parser.parse_args()
    if args.short:
        os.environ["MT_EFFORT"] = "quick"
    short = " --short" if args.short else ""
    machine = named(MACHINE)
    head = (
        f"Predicted, not measured: {MACHINE} ({machine.flops / 1e12:.0f} TFLOPS, {machine.h2d_gbps:g} GB/s each way per GPU, "
        f"{machine.host_gbps:g} GB/s of host memory for all GPUs of a host, {NETWORK:g} GB/s between hosts), {BATCH} x {SEQ} "
        "tokens per GPU, bf16 weights with fp32 masters, AdamW in the backward.\n\n"
        f"    python -m benchmarks.rank_scaling{short} --json benchmarks/results/rank-scaling.json"
    )
    rows: list[dict[str, Any]] = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    layouts = [*((gpus, 1) for gpus in GPUS), *((GPUS[-1], hosts) for hosts in HOSTS)]
    layouts = [(gpus, hosts) for gpus, hosts in layouts if hosts in args.hosts]
    for model in args.models:
        for gpus, hosts in layouts:
            new = row(model, gpus, hosts)
            rows = [*(r for r in rows if (r["model"], r["gpus"], r["hosts"]) != (model, gpus, hosts)), new]
            print(table(rows[-1:], "").splitlines()[-1], flush=True)
            rows.sort(key=lambda r: (MODELS.index(r["model"]), r["hosts"], r["gpus"]))
            args.json.write_text(json.dumps({"about": {"machine": about()["machine"]}, "rows": rows}, indent=1) + "\n")
            args.json.with_suffix(".md").write_text(table(rows, head))


if __name__ == "__main__":
    main()
