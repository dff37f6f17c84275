"""Fuzzes the readers of files with atheris: no crash, hang or over-allocation, and no errors but those that say what is wrong.

    python -m benchmarks.fuzz --minutes 10 --json out.json      # in turns over all readers; make fuzz. --only NAME for one

Each reader runs in a process of its own, which may take ``MOST_NBYTES`` more memory than it begins with and ``MOST_S`` seconds
for one input. The first inputs are sound files, which the fuzzer changes, guided by what of the readers' code they reach. An
input that breaks a reader is kept in ``--keep``. Needs atheris (``make fuzz`` installs it).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_NBYTES = 1 << 30
MOST_S = 10
LARGEST_INPUT = 1 << 16


READ = ("mtcompile.reading", "mtcompile.checkpoint", "mtcompile.data", "mtcompile.machine.presets", "mtcompile.models.loading")
READ += ("mtcompile.runtime.schedule", "mtcompile.passes.plan.text", "mtcompile.passes.graph_json", "mtcompile.cli.config_file")
FILES = {
    "safetensors": "model.safetensors",
    "index": "model.safetensors.index.json",
    "manifest": "content.json",
    "checkpoint": "shard",
    "machine": "machine.json",
    "schedule": "schedule.json",
    "plan": "plan.json",
    "graph": "graph.json",
    "config": "config.json",
    "yaml": "run.yaml",
    "jsonl": "records.jsonl",
    "json": "records.json",
    "parquet": "records.parquet",
    "npy": "tokens.npy",
    "bin": "tokens.bin",
    "text": "text.md",
}


def write_sound_files(folder: Path) -> None:
    """Writes a file for each reader, and a checkpoint, from which the fuzzer begins."""
    import numpy as np
    import pyarrow
    import torch
    from pyarrow import parquet

    import mtcompile
    from mtcompile import checkpoint
    from mtcompile.machine.presets import named, to_json
    from mtcompile.passes.graph_json import graph_to_json

    model: Any = mtcompile.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), memory="1MiB", device="cpu")
    model(torch.randn(4, 8)).sum().backward()
    plain = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(plain.parameters())
    extra = {"seen": [1, "a", None, torch.ones(2)]}
    saved = checkpoint.save(folder / "run", plain, optimizer, step=1, extra=extra)
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    share = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    rows = [json.dumps(row) for row in (talk, share, {"instruction": "a", "output": "b"}, {"text": "a"})]
    llama = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    shard = (saved / "model.safetensors").read_bytes()
    texts = {
        "index": json.dumps({"metadata": {}, "weight_map": {"weight": "model.safetensors"}}),
        "manifest": json.loads((saved / "manifest.json").read_text())["content"],
        "machine": to_json(named("rtx4090")),
        "schedule": model.schedule.to_json(),
        "plan": model.plan.to_json(),
        "graph": graph_to_json(torch.fx.symbolic_trace(torch.nn.Identity())),
        "config": json.dumps(llama),
        "yaml": "model: a\nseq: 8\ndata: [a, b]\nsave: ~\n",
        "jsonl": "\n".join(rows),
        "json": f"[{', '.join(rows)}]",
        "text": "some text",
    }
    for name, text in texts.items():
        (folder / FILES[name]).write_text(text)
    for name in ("safetensors", "checkpoint"):
        (folder / FILES[name]).write_bytes(shard)
    (folder / FILES["bin"]).write_bytes(bytes(range(64)))
    np.save(folder / FILES["npy"], np.arange(9))
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [1, 2]}), folder / FILES["parquet"])


def reader(name: str, folder: Path) -> Callable[[Path], Any]:
    """Returns what reads a file of that kind."""
    import torch

    from mtcompile import checkpoint
    from mtcompile.checkpoint.files import FORMAT, MANIFEST, checksum_of
    from mtcompile.checkpoint.shards import stored_tensors
    from mtcompile.cli.config_file import _entries
    from mtcompile.cli.viz import dumped
    from mtcompile.data.records import read_records
    from mtcompile.data.windows import read_tokens
    from mtcompile.machine.presets import named
    from mtcompile.models.loading import configuration
    from mtcompile.passes.graph_json import graph_from_json
    from mtcompile.passes.plan import plan_from_json

    (saved,) = (folder / "run").glob("step-*")
    manifest, plain = (saved / MANIFEST).read_bytes(), torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(plain.parameters())

    def content(path: Path) -> None:  # of a manifest whose checksum is right, so that it is looked at
        text = path.read_bytes().decode("utf-8", "replace")
        whole = {"format": FORMAT, "checksum": checksum_of(text.encode()), "content": text}
        (saved / MANIFEST).write_text(json.dumps(whole))
        checkpoint.load(saved, plain, optimizer)

    def loaded(path: Path) -> None:
        (saved / MANIFEST).write_bytes(manifest)
        (saved / "model.safetensors").write_bytes(path.read_bytes())
        checkpoint.load(saved, plain, optimizer)

    def tensors(path: Path) -> None:
        for tensor in stored_tensors(path).values():
            tensor.read()

    functions: dict[str, Callable[[Path], Any]] = {
        "safetensors": tensors,
        "index": tensors,
        "manifest": content,
        "checkpoint": loaded,
        "machine": lambda path: named(str(path)),
        "schedule": lambda path: dumped(str(path)),
        "plan": lambda path: plan_from_json(path.read_text(errors="replace")),
        "graph": lambda path: graph_from_json(path.read_text(errors="replace")),
        "config": configuration,
        "yaml": lambda path: list(_entries(path)),
        "bin": lambda path: read_tokens([path], 1 << 16),
        "npy": lambda path: read_tokens([path], 256),
        "text": lambda path: read_tokens([path], None),
    }
    return functions.get(name, lambda path: list(read_records([path])))


def fuzz(name: str, seconds: int, keep: Path, folder: Path) -> None:
    """Fuzzes one reader in this process, until the time is over or an input breaks it."""
    import resource

    import atheris

    from mtcompile.errors import MtcompileError

    with atheris.instrument_imports(include=list(READ), enable_loader_override=False):
        read = reader(name, folder)
    path, corpus = folder / FILES[name], folder / "corpus"
    corpus.mkdir()
    shutil.copy(path, corpus / "sound")
    read(path)  # what it imports is imported now
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_NBYTES, resource.RLIM_INFINITY))

    def one(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(ValueError, OSError, MtcompileError):  # these say what is wrong; anything else is a defect
            read(path)

    limits = [f"-max_total_time={seconds}", f"-timeout={MOST_S}", f"-max_len={LARGEST_INPUT}", "-rss_limit_mb=0"]
    atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", f"-artifact_prefix={keep}/{name}-", str(corpus)], one)
    atheris.Fuzz()


def in_turns(names: list[str], minutes: float, keep: Path) -> list[dict[str, Any]]:
    """Fuzzes each reader in a process of its own for its share of the time. Returns a row for each."""
    rows = []
    for name in names:
        seconds = max(1, round(minutes * 60 / len(names)))
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(name, seconds, keep, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def row_of(name: str, seconds: int, keep: Path, folder: Path) -> dict[str, Any]:
    write_sound_files(folder)
    options = ["--one", name, "--seconds", str(seconds), "--keep", str(keep), "--folder", str(folder)]
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", *options], capture_output=True, text=True, errors="replace"
    )
    if result.returncode:
        print(result.stderr[-3000:], flush=True)
    stats = dict(re.findall(r"^stat::(\w+):\s*(\d+)", result.stderr, re.MULTILINE))
    return {
        "reader": name,
        "seconds": round(time.monotonic() - began, 1),
        "inputs": int(stats.get("number_of_executed_units", 0)),
        "peak_rss_mb": int(stats.get("peak_rss_mb", 0)),
        "broken": result.returncode != 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all readers together")
    parser.add_argument("--only", action="append", help="a reader; may be repeated")
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir()), help="a folder for inputs that break a reader"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        fuzz(args.one, args.seconds, args.keep, args.folder)
        return 0
    from benchmarks.run import about

    rows = in_turns(args.only or list(FILES), args.minutes, args.keep)
    figures = {"about": about(), "inputs": sum(row["inputs"] for row in rows), "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if any(row["broken"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
