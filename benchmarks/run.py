"""Measure mtcompile beside what one would use otherwise, in one run on one machine.

    python -m benchmarks.run --suite cpu --json out.json     # and a table in out.md
    python -m benchmarks.run --suite gpu --json out.json     # goes on where an earlier run of the same commit stopped

Whole training steps (``training.py``) of each case and peer run in a process of their own, one after the other.

The CPU suite has cases of forward and backward alone as well, each in a process of its own. There all peers train the
same model; their steps are taken in turn, so that whatever else the machine does falls on all of them. Figures: median
step time, the allocator's own peak over forward and backward (beside parameters), and how far each loss is from the
plain one. A case with a budget holds every peer to it: one that needs more is left out of the comparison and its peak is
shown (the two that save everything are not run). On the emulated device the host's memory and the device's are the same
chips; peers without offload are therefore measured beside mtcompile without it as well.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import training
from benchmarks.training import Training
from mtcompile.models.decoders import FORMULA
from mtcompile.models.shapes import SHAPES

WARMUPS, ROUNDS = 1, 5  # after two steps that compile and measure the peak
_FEWEST_S = 60  # left, to start another
_FIRST_S = 300  # after which the table so far is shown, once
_LONGEST_S = 480  # one peer of one case; on a GPU a whole call may take ten minutes


def measure(name: str, share: float | None) -> dict[str, Any]:
    import gc

    import torch

    from benchmarks.models import CPU, flops_per_step, make
    from benchmarks.peers import PEERS, RESIDENT, WITHIN
    from mtcompile.backend import reports
    from mtcompile.torch_private import cpu_allocator_peak

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
        with cpu_allocator_peak() as peak:
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
    commit = _git("rev-parse", "HEAD")
    if changed := _git("diff", "HEAD", "--", "mtcompile", "passes", "runtime", "benchmarks", "tests/device"):
        commit += f"+{hashlib.sha256(changed.encode()).hexdigest()[:8]}"
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = names[0].split(":")[1].strip() if names else platform.machine()
    return {"machine": f"{machine}, {os.cpu_count()} cores", "commit": commit, **_gpu()}


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _gpu() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {}


def table(results: list[dict[str, Any]]) -> str:
    """Of the cases of forward and backward."""
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


_COLUMNS: tuple[tuple[str, str, str], ...] = (  # heading, field, format; a field that a peer has not is left empty
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("step ms", "step_ms", "{:,.1f}"),
    ("of it update", "update_ms", "{:,.1f}"),
    ("model TFLOPS", "model_tflops", "{:,.3g}"),
    ("hardware TFLOPS", "hardware_tflops", "{:,.3g}"),
    ("compute busy", "compute_busy", "{:.1%}"),
    ("exposed transfers ms", "exposed_transfer_ms", "{:,.1f}"),
    ("peak MiB", "peak_mib", "{:,.0f}"),
    ("planned MiB", "planned_mib", "{:,.0f}"),
    ("reserved MiB", "reserved_mib", "{:,.0f}"),
    ("host bytes/parameter", "host_bytes_per_parameter", "{:.1f}"),
    ("start s", "start_s", "{:.1f}"),
    ("predicted/measured", "predicted_over_measured", "{:.2f}"),
    ("loss", "loss", "{:.6f}"),
    ("attention", "attention", "{}"),
)


def training_table(cases: Iterable[Training], rows: list[dict[str, Any]]) -> str:
    """Of the cases of whole steps, measured or not."""
    lines = [
        f"Whole training steps: median of {training.STEPS} after {training.WARMUPS}. Model TFLOPS by {FORMULA}. Hardware "
        "TFLOPS by the schedule's operations, recomputation included, over forward and backward. Weights, gradients and "
        "AdamW's state in the shape's dtype, with fp32 masters and state for peers with masters and for DeepSpeed, and as "
        "MegaTrain has them; fused AdamW where the parameters are at home. Compute busy and "
        "exposed transfers by the device's clock, over one more step.",
        "",
    ]
    for case in cases:
        share = f"{case.share:.0%} of the plain step" if case.share else "all there is"
        budget = f"{case.memory / 2**30:.0f} GiB" if case.memory else share
        dtype = str(SHAPES[case.shape].dtype).removeprefix("torch.")
        lines += [f"### {case.name}: {case.shape} in {dtype}, {case.batch} x {case.seq} tokens, device memory {budget}", ""]
        lines += ["| peer | " + " | ".join(heading for heading, _, _ in _COLUMNS) + " |", "|---" * (len(_COLUMNS) + 1) + "|"]
        for peer in case.peers:
            row = next((r for r in rows if (r["case"], r["peer"]) == (case.name, peer)), None)
            if row is None or "error" in row:
                said = "*not yet measured*" if row is None else row["error"][:100].replace("|", "/")
                lines.append(f"| {peer} | {said} |" + " |" * (len(_COLUMNS) - 1))
                continue
            shown = {**row, "step_ms": row["step_s"] * 1e3, "peak_mib": row["peak_bytes"] / 2**20}
            shown["compute_busy"] = row.get("busy", {}).get("compute")
            shown["planned_mib"] = row["planned_peak_bytes"] / 2**20 if "planned_peak_bytes" in row else None
            shown["reserved_mib"] = row["peak_reserved_bytes"] / 2**20 if "peak_reserved_bytes" in row else None
            cells = ["" if shown.get(field) is None else form.format(shown[field]) for _, field, form in _COLUMNS]
            lines.append(f"| {peer} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def in_child(arguments: list[str], limit_s: float | None = None) -> dict[str, Any]:
    """What a process of its own measured, or the last line of why it did not."""
    command = [sys.executable, "-m", "benchmarks.run", *arguments]
    try:
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # for every peer
        made = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit_s or _LONGEST_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s or _LONGEST_S:.0f} s"}
    if made.returncode:
        return {"error": (made.stderr.strip().splitlines() or [f"ended with {made.returncode}"])[-1]}
    row: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return row


class Results:
    """The result file: read where an earlier run of the same commit and machine stopped, written after every case."""

    def __init__(self, path: Path, suite: str) -> None:
        self.path, self.suite = path, suite
        self.about: dict[str, Any] = {**about(), "suite": suite}
        self.rows: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        if path.exists():
            before = json.loads(path.read_text())
            if self.about["commit"] and all(before.get(key) == value for key, value in self.about.items()):
                self.rows = [row for row in before.get("rows", []) if "error" not in row]  # those are tried again
                self.results = before.get("results", [])

    def write(self) -> str:
        whole = {**self.about, "rows": self.rows, "results": self.results}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(whole, indent=1) + "\n")
        text = ", ".join(f"{key} {value}" for key, value in self.about.items()) + "\n\n"
        text += training_table(training.GPU if self.suite == "gpu" else training.CPU, self.rows)
        text += "\n" + table(self.results) if self.results else ""
        self.path.with_suffix(".md").write_text(text)
        return text


def main() -> int:
    from benchmarks.models import CPU

    names = [case.name for case in (*CPU, *training.GPU, *training.CPU)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--case", choices=names, action="append", help="only these (default: all of the suite)")
    parser.add_argument("--peer", choices=sorted(training.PEERS), action="append", help="only these, of whole steps")
    parser.add_argument("--json", type=Path, default=Path("benchmark.json"), help="the table is written beside it")
    parser.add_argument("--minutes", type=float, help="start nothing more after so long; the same command goes on from there")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # case/share, or case/peer/bytes: in a process of its own
    args = parser.parse_args()
    if args.one:
        name, *rest = args.one.split("/")
        if len(rest) == 2:
            found = training.measure(name, rest[0], None if rest[1] == "None" else int(rest[1]))
        else:
            found = measure(name, None if rest[0] == "None" else float(rest[0]))
        print(json.dumps(found))
        return 0
    if args.suite == "gpu" and not _gpu():
        print("no GPU that torch sees: nothing was run")
        return 0
    results, started = Results(args.json, args.suite), time.monotonic()

    def left() -> float | None:
        return None if args.minutes is None else 60 * args.minutes - (time.monotonic() - started)

    def late() -> bool:
        seconds = left()
        return seconds is not None and seconds < _FEWEST_S

    shown = False
    for case in training.GPU if args.suite == "gpu" else training.CPU:
        for peer in case.peers if args.case is None or case.name in args.case else ():
            known = any((row["case"], row["peer"]) == (case.name, peer) for row in results.rows)
            if known or late() or (args.peer is not None and peer not in args.peer):
                continue
            print(f"{case.name}, {peer} ...", file=sys.stderr, flush=True)
            alike = {other.name for other in training.CPU if (other.shape, other.batch) == (case.shape, case.batch)}
            plain = next((r for r in results.rows if r["peer"] == "plain" and r["case"] in alike and "peak_bytes" in r), None)
            memory = int(case.share * plain["peak_bytes"]) if case.share and plain else None
            if case.share and not plain:
                row: dict[str, Any] = {"error": "the plain step, whose peak this is a share of, was not measured"}
            else:
                row = in_child(["--one", f"{case.name}/{peer}/{memory}"], left())
            results.rows.append({"case": case.name, "peer": peer, **row})
            results.write()
            if not shown and time.monotonic() - started > _FIRST_S:
                measured = {row["case"] for row in results.rows}
                print(training_table([c for c in training.CASES.values() if c.name in measured], results.rows), flush=True)
                shown = True
    for own in CPU if args.suite == "cpu" else ():
        for share in own.shares if args.case is None or own.name in args.case else ():
            known = any((r["case"], r.get("share")) == (own.name, share) for r in results.results)
            if known or late() or args.peer is not None:
                continue
            print(f"{own.name}, budget {share or 'none'} ...", file=sys.stderr, flush=True)
            results.results.append({"case": own.name, "share": share, **in_child(["--one", f"{own.name}/{share}"])})
            results.write()
    print(results.write())
    return 0


if __name__ == "__main__":
    sys.exit(main())
