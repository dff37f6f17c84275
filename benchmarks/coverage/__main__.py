"""Trains other people's models plainly and compiled, and writes what was equal into docs/coverage.md.

python -m benchmarks.coverage                               # all, from where an earlier run of the same sources stopped
python -m benchmarks.coverage --budgets roomy               # a quick pass; the next one adds the other two budgets
python -m benchmarks.coverage --only 'nn.Conv*' --limit 20
python -m benchmarks.coverage --again refused INTERNAL WRONG --any-source    # only what was not equal
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.coverage import architectures, libraries, modules, results, workers
from benchmarks.coverage.compare import BUDGETS, INTERNAL, ROOMY, Subject, judge


def build(entry: str) -> Subject:
    """Builds the subject of an entry."""
    if entry.startswith("nn."):
        return modules.build(entry)
    return libraries.build(entry) if entry.split("/")[0] in libraries.LIBRARIES else architectures.build(entry)


def work(entry: str, budgets: Collection[str]) -> dict[str, Any]:
    """Judges one entry. Runs in a process of its own."""
    import warnings

    warnings.simplefilter("ignore")
    about = ""

    def built() -> Subject:
        nonlocal about
        subject = build(entry)
        about = subject.about
        return subject

    verdict = judge(built, budgets)
    return {"verdict": verdict.verdict, "reason": verdict.reason, "where": verdict.where, "about": about}


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    entries = [*modules.entries(), *architectures.entries(), *libraries.entries()]
    if arguments.only:
        entries = [entry for entry in entries if any(fnmatch.fnmatch(entry, pattern) for pattern in arguments.only)]
    part, parts = map(int, arguments.slice.split("/"))
    finished = results.read(arguments.store)

    def is_done(entry: str) -> bool:
        return results.is_done(finished.get(entry), arguments.budgets, arguments.again, arguments.any_source)

    entries = [entry for entry in entries[part::parts] if not is_done(entry)]
    entries = entries[: arguments.limit]
    print(f"{len(entries)} entries to judge", flush=True)
    if entries:
        workers.preload(lambda: work(entries[0], [ROOMY]))
    limits = workers.Limits(arguments.seconds)

    def timed(entry: str) -> dict[str, Any]:
        begun = time.monotonic()
        return {**work(entry, arguments.budgets), "seconds": round(time.monotonic() - begun, 1)}

    for entry, row in workers.rows(entries, timed, arguments.jobs, limits):
        if "crash" in row:
            row = {"verdict": INTERNAL, "reason": row["crash"], "where": "", "about": "", "seconds": 0.0}
        row = {"entry": entry, **row, "budgets": list(arguments.budgets), **results.versions()}
        results.append(arguments.store, row)
        print(f"{row['verdict']:9} {row['seconds']:6.1f} s  {entry}  {row['reason'][:160]}", flush=True)
    results.tidy(arguments.store)
    if arguments.page:
        arguments.page.write_text(results.page(results.read(arguments.store), libraries.missing()), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.coverage", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], help="patterns of entries, as of file names")
    parser.add_argument("--limit", type=int, help="at most that many entries")
    parser.add_argument("--budgets", nargs="*", default=BUDGETS, choices=BUDGETS)
    parser.add_argument("--slice", default="0/1", help="k/n: every n-th entry from the k-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=300, help="the most that one entry may take")
    parser.add_argument("--again", nargs="*", default=[], help="verdicts whose entries are judged again")
    parser.add_argument("--any-source", action="store_true", help="rows of older sources count as well")
    parser.add_argument("--store", type=Path, default=results.STORE)
    parser.add_argument("--page", type=lambda text: Path(text) if text else None, default=results.PAGE, help="'' writes none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
