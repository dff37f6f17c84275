"""Draws random training programs until stopped, compares each with plain PyTorch, and prints a small program for each defect.

python -m benchmarks.loops                          # make fuzz-loops; until Ctrl-C, or for --minutes or --programs
python -m benchmarks.loops --seed 17 --programs 1   # one program again; --show prints it
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.loops.draw import drawn
from benchmarks.loops.judge import BOTH_RAISE, DEFECTS, DIFFERENT, EQUAL, INTERNAL, INVALID, REFUSED, judge
from benchmarks.loops.program import script
from benchmarks.loops.shrink import can_be_left_out, features, shrunk, without


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; it grows by one with each")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--programs", type=int, help="stop after so many programs")
    parser.add_argument("--json", type=Path, help="a file that gets a line for each program; defects in it are known")
    parser.add_argument("--keep", type=Path, help="a folder for the small programs that show defects")
    parser.add_argument("--show", action="store_true", help="print each program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what imports made
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # errors are in the verdicts
    began, rows, known = time.monotonic(), list[dict[str, Any]](), list[frozenset[str]]()
    if args.json and args.json.exists():
        known += [frozenset(row["new"]) for row in map(json.loads, args.json.read_text().splitlines()) if "new" in row]
    try:
        for seed in itertools.count(args.seed):
            minutes = (time.monotonic() - began) / 60
            if len(rows) == args.programs or (args.minutes is not None and minutes >= args.minutes):
                break
            rows.append(one(seed, known, args))
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    except KeyboardInterrupt:
        print("stopped")
    print(summary(rows, time.monotonic() - began))
    return 1 if any(row["kind"] in DEFECTS for row in rows) else 0


def one(seed: int, known: list[frozenset[str]], args: argparse.Namespace) -> dict[str, Any]:
    """Judges the program of a seed. Where it fails, and not only for reasons that are ``known``, makes it small, and adds the
    features that are left to the known reasons."""
    began, program = time.monotonic(), drawn(seed)
    if args.show:
        print(script(program, program.memory, f"seed {seed}"))
    verdict = judge(program)
    row = {"seed": seed, **asdict(verdict), "features": sorted(features(program))}
    if verdict.kind in DEFECTS:
        reasons = [reason for reason in known if reason <= features(program)]
        rest = without(program, frozenset().union(*reasons))
        if not reasons or (again := judge(rest)).kind in DEFECTS:
            small, verdict = shrunk(rest, again) if reasons else shrunk(program, verdict)
            reasons = [features(small)]
            if can_be_left_out(reasons[0]):
                known.append(reasons[0])
                row["new"] = sorted(reasons[0])
            says = (
                f"seed {seed}, {verdict.kind}: {verdict.says}\n\nof: {', '.join(sorted(features(small))) or 'the plain loop'}\n"
            )
            row["script"] = text = script(small, verdict.memory, says.replace("\\", "/"))
            print(f"\n# {'=' * 100}\n{text}", flush=True)
            if args.keep:
                args.keep.mkdir(parents=True, exist_ok=True)
                (args.keep / f"{verdict.kind}-{seed}.py").write_text(text)
        row["reasons"] = [", ".join(sorted(reason)) for reason in reasons]
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def summary(rows: list[dict[str, Any]], seconds: float) -> str:
    """The counts, and what was refused, most frequent first."""
    kinds = Counter(row["kind"] for row in rows)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (EQUAL, REFUSED, BOTH_RAISE, DIFFERENT, INTERNAL, INVALID))
    lines = [f"{len(rows)} programs in {seconds / 60:.1f} minutes: {counts}"]
    for kind in (DIFFERENT, INTERNAL):
        reasons = Counter(reason for row in rows if row["kind"] == kind for reason in row["reasons"])
        lines += [f"{kind}, by what the smallest program has:"] if reasons else []
        lines += [f"  {count:5}  {reason or 'the plain loop'}" for reason, count in reasons.most_common()]
    for kind in (REFUSED, BOTH_RAISE):
        causes = Counter(row["cause"] or row["says"] for row in rows if row["kind"] == kind)
        lines += [f"{kind}:", *(f"  {count:5}  {cause[:200]}" for cause, count in causes.most_common())] if causes else []
    warned = Counter(line for row in rows for line in row["warned"])
    lines += ["warned:", *(f"  {count:5}  {line[:200]}" for line, count in warned.most_common(20))] if warned else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
