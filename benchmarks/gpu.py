"""Everything that needs a GPU, for the day there is one: tests, step graphs kept as fixtures, and the benchmarks.

    python -m benchmarks.gpu                          # all of it; the same command goes on where it stopped
    python -m benchmarks.gpu tests --minutes 9        # one part, starting nothing more after so long

Raw results go to benchmarks/results/gpu-*.json, with the device and the commit. Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
PARTS = ("tests", "fixtures", "benchmark")
_PROCESSES = 4  # of tests on the one GPU
_OUTCOME = re.compile(  # of one process, and of several
    r"(?P<test>tests/device/\S+?::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)"
    r"|\[gw\d+\](?: \[ *\d+%\])? (?P<before>PASSED|FAILED|ERROR|SKIPPED) (?P<tested>tests/device/\S+?::.+\S)"
)
# One block is enough for a plan's decisions to repeat; two show what crosses from one to the next.
LAYERS = {"qwen2.5-7b": (16, 4096), "llama-8b": (1, 32 * 1024)}


def tests(minutes: float) -> bool:
    """The device tests on the GPU. Those that have passed at this commit are not run again."""
    from benchmarks.run import about

    path = RESULTS / "gpu-tests.json"
    now = about()
    known = json.loads(path.read_text()) if path.exists() else {}
    rows: dict[str, Any] = known.get("tests", {}) if all(known.get(k) == v for k, v in now.items()) else {}
    passed = [test for test, row in rows.items() if row["outcome"] == "passed"]
    rows = {test: rows[test] for test in passed}
    several = ["-n", str(_PROCESSES), "--dist", "worksteal", "-s"] if importlib.util.find_spec("xdist") else []
    options = ["-v", "-p", "benchmarks.gpu", *several, *(f"--deselect={test}" for test in passed)]
    command = [sys.executable, "-m", "pytest", "tests/device", *options]
    threads = max(1, (os.cpu_count() or 1) // (_PROCESSES if several else 1))  # else each process computes on all cores
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "MT_CACHE": "0", "PYTHONUNBUFFERED": "1"}
    piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **piped) as running:
        stop = threading.Timer(60 * minutes, running.send_signal, [signal.SIGINT])  # which shows what has failed so far
        stop.start()
        for line in running.stdout or ():
            print(line, end="", flush=True)
            if named := _OUTCOME.match(line):
                rows[named["test"] or named["tested"]] = {"outcome": (named["outcome"] or named["before"]).lower()}
        stop.cancel()
    _write(path, {**now, "tests": rows})
    failed = [test for test, row in rows.items() if row["outcome"] in ("failed", "error")]
    print(f"{len(rows)} tests, {len(failed)} failed", *failed, sep="\n  ")
    return running.returncode in (0, 5) and not failed and bool(rows)  # 5: none was left to run


def fixtures() -> bool:
    """Step graphs as a GPU's kernels make them, for machines that have none."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mtcompile.capture.tracing import trace
    from mtcompile.models.decoders import fake
    from mtcompile.models.shapes import SHAPES
    from mtcompile.passes.graph_json import graph_to_json

    FIXTURES.mkdir(exist_ok=True)
    where = torch.device("cuda", torch.cuda.current_device())
    for name, (batch, seq) in LAYERS.items():
        shape = SHAPES[name].shortened(2)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = fake(shape)
            tokens = torch.zeros((batch, seq), dtype=torch.int64, device=where)
            traced = trace(model, {"tokens": tokens, "targets": tokens}, where, loss_chunks=16)
        path = FIXTURES / f"{name}-2-layers-{batch}x{seq}-cuda.json"
        path.write_text(graph_to_json(traced.step))
        print(f"{path.name}: {path.stat().st_size} bytes")
    return True


def benchmark(minutes: float) -> bool:
    command = [sys.executable, "-m", "benchmarks.run", "--suite", "gpu", f"--minutes={minutes}"]
    return subprocess.run([*command, "--json", str(RESULTS / "gpu.json")], check=False).returncode == 0


def pytest_runtest_logreport(report: Any) -> None:
    """Shows a failure when it happens: a run that is cut short has no summary. This module is a plugin of ``tests``."""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--minutes", type=float, default=9.0, help="per part; default 9")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("no torch here: nothing was run")
        return 0
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: nothing was run")
        return 0
    run = {
        "tests": lambda: tests(args.minutes),
        "fixtures": fixtures,
        "benchmark": lambda: benchmark(args.minutes),
    }
    return 0 if all([run[part]() for part in args.part or PARTS]) else 1


if __name__ == "__main__":
    sys.exit(main())
