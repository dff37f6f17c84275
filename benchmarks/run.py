"""Measure mtcompile beside what one would use otherwise, in one run on one machine.

    python -m benchmarks.run --suite cpu --json out.json     # and a table in out.md

Each case runs in a process of its own. There all peers train the same model; their steps are taken in turn, so that
whatever else the machine does falls on all of them. Figures: median step time, the allocator's own peak over forward
and backward (beside parameters), and how far each loss is from the plain one. A case with a budget holds every peer to
it: one that needs more is left out of the comparison and its peak is shown (the two that save everything are not run).
On the emulated device the host's memory and the device's are the same chips; peers without offload are therefore
measured beside mtcompile without it as well.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WARMUPS, ROUNDS = 1, 7


def measure(name: str, share: float | None) -> dict[str, Any]:
    import gc

    import torch

    from benchmarks.models import CPU, flops_per_step, make
    from benchmarks.peers import PEERS, RESIDENT, WITHIN
    from mtcompile.backend import reports
    from mtcompile.internals import AllocatorPeak

    case = next(case for case in CPU if case.name == name)
    model, tokens, targets = make(case)
    gradients = sum(p.nbytes for p in model.parameters())

    def step(call: Any, own: Any) -> float:
        for p in own.parameters():
            p.grad = None
        started = time.perf_counter()
        loss = call(tokens, targets)
        loss.backward()
        step.loss = loss.item()  # type: ignore[attr-defined]
        return time.perf_counter() - started

    def peak_of(call: Any, own: Any) -> int:
        for p in own.parameters():
            p.grad = None
        gc.collect()
        with AllocatorPeak() as peak:
            loss = call(tokens, targets)
            loss.backward()
        del loss
        arenas = sum(report["arena_device_bytes"] for report in reports())  # allocated by the first step, and kept
        return (peak.nbytes or 0) + arenas

    budget, rows = None, []
    if share is not None:
        own = copy.deepcopy(model)
        step(own, own)
        resident = peak_of(own, own)
        budget = int(gradients + share * (resident - gradients))
    peers = []
    for peer, build in PEERS.items():
        if peer not in (RESIDENT if share is None else WITHIN):
            continue
        torch.compiler.reset()
        own = copy.deepcopy(model)
        row: dict[str, Any] = {"peer": peer}
        rows.append(row)
        try:
            started = time.perf_counter()
            call = build(own, budget)
            step(call, own)
            row["first_step_s"] = time.perf_counter() - started
            row["peak_bytes"] = peak_of(call, own)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        row["fits"] = budget is None or row["peak_bytes"] <= budget
        if row["fits"]:
            peers.append((row, call, own))
    times: dict[str, list[float]] = {row["peer"]: [] for row, _, _ in peers}
    for turn in range(WARMUPS + ROUNDS):  # the first also compiles again what later peers' resets have dropped
        for row, call, own in peers:
            seconds = step(call, own)
            if turn >= WARMUPS:
                times[row["peer"]].append(seconds)
            row["loss"] = step.loss  # type: ignore[attr-defined]
    for row, _, _ in peers:
        row["step_s"] = statistics.median(times[row["peer"]])
        row["steps_s"] = times[row["peer"]]
        row["tokens_per_s"] = tokens.numel() / row["step_s"]
        row["gflops"] = flops_per_step(case) / row["step_s"] / 1e9
    return {
        "case": name,
        "share": share,
        "budget_bytes": budget,
        "gradient_bytes": gradients,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "peers": rows,
    }


def about() -> dict[str, Any]:
    """What a result file says of where it was made."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = names[0].split(":")[1].strip() if names else platform.machine()
    return {"machine": f"{machine}, {os.cpu_count()} cores", "commit": commit}


def table(results: list[dict[str, Any]]) -> str:
    lines = ["Time and peak of a forward and backward; ratios are of median step times in the same run.", ""]
    for result in results:
        if "error" in result:
            lines += [f"### {result['case']}: {result['error']}", ""]
            continue
        limit = (
            f"{result['budget_bytes'] / 2**20:.1f} MiB ({result['share']:.0%} of plain, beside gradients)"
            if result["share"]
            else "none"
        )
        lines += [f"### {result['case']}, budget {limit}", ""]
        lines += ["| peer | step ms | tokens/s | peak MiB | first step s | loss |", "|---|---|---|---|---|---|"]
        for row in sorted(result["peers"], key=lambda r: r.get("step_s", 1e9)):
            if "error" in row:
                lines.append(f"| {row['peer']} | {row['error'][:80]} | | | | |")
                continue
            ms = f"{row['step_s'] * 1e3:.1f}" if row["fits"] else "over budget"
            speed = f"{row['tokens_per_s']:,.0f}" if row["fits"] else ""
            loss = f"{row['loss']:.6f}" if row["fits"] else ""
            peak = f"{row['peak_bytes'] / 2**20:.1f}"
            lines.append(f"| {row['peer']} | {ms} | {speed} | {peak} | {row['first_step_s']:.1f} | {loss} |")
        lines += ["", verdict(result), ""]
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    """mtcompile against the fastest peer with the same kind of kernels that fits."""
    done = {row["peer"]: row["step_s"] for row in result["peers"] if "step_s" in row}
    said = []
    eager, compiled = ("plain", "checkpoint"), ("torch.compile",)
    for own, others in (
        ("mtcompile eager", eager),
        ("mtcompile eager, no offload", eager),
        ("mtcompile inductor", compiled),
        ("mtcompile inductor, no offload", compiled),
    ):
        rivals = {peer: s for peer, s in done.items() if peer.startswith(others)}
        if own in done and rivals:
            best = min(rivals, key=lambda peer: rivals[peer])
            said.append(f"{own}: {done[own] / rivals[best]:.3f}x the step time of {best}")
        elif own in done:
            said.append(f"{own}: no peer with such kernels fits")
    return "; ".join(said) or "nothing to compare"


def main() -> int:
    from benchmarks.models import CPU

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", choices=["cpu"], default="cpu")
    parser.add_argument("--case", choices=[case.name for case in CPU], action="append", help="only these (default: all)")
    parser.add_argument("--json", type=Path, default=Path("benchmark.json"), help="the table is written beside it")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # case/share, in a process of its own
    args = parser.parse_args()
    if args.one:
        name, share = args.one.split("/")
        print(json.dumps(measure(name, None if share == "None" else float(share))))
        return 0
    results = []
    for case in CPU:
        for share in case.shares if args.case is None or case.name in args.case else ():
            print(f"{case.name}, budget {share or 'none'} ...", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.run", "--one", f"{case.name}/{share}"]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                results.append({"case": case.name, "share": share, "error": made.stderr.strip().splitlines()[-1]})
            else:
                results.append(json.loads(made.stdout.splitlines()[-1]))
            args.json.write_text(json.dumps({**about(), "results": results}, indent=1))
            args.json.with_suffix(".md").write_text(table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
