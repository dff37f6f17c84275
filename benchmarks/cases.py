"""The command line of benchmarks that measure named cases on the emulated device, held to the speeds of a slow machine."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import about
from mtcompile.passes.analysis.cost import Machine

Row = dict[str, Any]


def measure_cases(
    description: str | None,
    cases: Collection[str],
    measure: Callable[[str], Row],
    line: Callable[[Row], str],
    slow: Machine,
    closing: Callable[[list[Row]], str] | None = None,
) -> None:
    """Measures the cases that are asked for, prints a ``line`` of each and the ``closing`` one, and writes the raw results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=cases, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="where the raw results go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, rows = [os.getloadavg()[0]], []
    with tempfile.TemporaryDirectory() as folder:  # nothing remembered counts, and nothing is left behind
        os.environ["MT_CACHE"] = folder
        for case in options.case or cases:
            rows.append(measure(case))
            print(line(rows[-1]), flush=True)
    load.append(os.getloadavg()[0])
    if closing is not None:
        print(closing(rows))
    if options.json:
        whole = {**about(), "torch": torch.__version__, "threads": 1, "load": load, "slow": str(slow), "rows": rows}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
