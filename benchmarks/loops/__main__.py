"""Draws training programs without end, and compares each with plain PyTorch; prints a small program for each defect.

    python -m benchmarks.loops                          # make fuzz-loops; until Ctrl-C, or for --minutes or --programs
    python -m benchmarks.loops --seed 17 --programs 1   # one program again; --show prints it
"""

from __future__ import annotations

import argparse
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
from benchmarks.loops.shrink import shrunk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first; each next program has the next")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--programs", type=int, help="stop after so many")
    parser.add_argument("--json", type=Path, help="write each verdict here, a line each, and the counts")
    parser.add_argument("--keep", type=Path, help="a folder for the small programs")
    parser.add_argument("--show", action="store_true", help="print each program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # errors are in the verdicts
    began, seed, found = time.monotonic(), args.seed, []
    causes: Counter[tuple[str, str]] = Counter()
    try:
        while (args.programs is None or seed < args.seed + args.programs) and (
            args.minutes is None or time.monotonic() - began < args.minutes * 60
        ):
            found.append(row := one(seed, causes, args))
            causes[row["kind"], row["cause"]] += 1
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            seed += 1
    except KeyboardInterrupt:
        print("stopped")
    print(summary(found, time.monotonic() - began))
    return 1 if any(row["kind"] in DEFECTS for row in found) else 0


def one(seed: int, causes: Counter[tuple[str, str]], args: argparse.Namespace) -> dict[str, Any]:
    """Judges the program of a seed; makes it small where it is the first that fails so."""
    began, program = time.monotonic(), drawn(seed)
    if args.show:
        print(script(program, program.memory, f"seed {seed}"))
    verdict = judge(program)
    row = {"seed": seed, **asdict(verdict), "events": sorted({event.kind for event in program.events})}
    if verdict.kind in DEFECTS and not causes[verdict.kind, verdict.cause]:
        small, verdict = shrunk(program, verdict)
        text = script(small, verdict.memory, f"seed {seed}, {verdict.kind}: {verdict.says}".replace("\\", "/"))
        row["script"] = text
        print(f"\n# {'=' * 100}\n{text}", flush=True)
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            (args.keep / f"{verdict.kind}-{seed}.py").write_text(text)
    elif verdict.kind in DEFECTS:
        print(f"seed {seed}, {verdict.kind} again: {verdict.says}", flush=True)
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def summary(rows: list[dict[str, Any]], seconds: float) -> str:
    """The counts, and what was refused, most frequent first."""
    kinds = Counter(row["kind"] for row in rows)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (EQUAL, REFUSED, BOTH_RAISE, DIFFERENT, INTERNAL, INVALID))
    lines = [f"{len(rows)} programs in {seconds / 60:.1f} minutes: {counts}"]
    for kind in (DIFFERENT, INTERNAL, REFUSED, BOTH_RAISE):
        causes = Counter(row["cause"] or row["says"] for row in rows if row["kind"] == kind)
        lines += [f"{kind}:", *(f"  {count:5}  {cause[:200]}" for cause, count in causes.most_common())] if causes else []
    warned = Counter(line for row in rows for line in row["warned"])
    lines += ["warned:", *(f"  {count:5}  {line[:200]}" for line, count in warned.most_common(20))] if warned else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
